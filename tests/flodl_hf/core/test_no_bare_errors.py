"""Values that make no sense anywhere come back as errors of this project, with nothing half done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import FlodlError
from flodl_hf import finetune, load
from flodl_hf.checkpoints.folders import path_fault
from flodl_hf.jobs import predict_file
from flodl_hf.models.encoder_model import EncoderModel

NUMBERS = ("1e400", "-1e400", "1" + "0" * 400, "NaN", "1" * 5000)
KEYS = ("hidden_size", "layer_norm_eps", "hidden_dropout_prob", "pad_token_id", "vocab_size", "num_labels", "id2label",
        "classifier_dropout", "max_position_embeddings")  # fmt: skip
PATHS = ("a\0b", "x" * 5000, "\ud800", "/dev/null/x/y")


@pytest.fixture
def folder(saved: Callable[..., Path]) -> Path:
    return saved("bert", "sequence_classification")


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_no_machine_has(folder: Path, number: str) -> None:
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    for key in KEYS:
        text = json.dumps({**settings, key: "@"}).replace('"@"', number)
        (folder / "config.json").write_text(text)
        with pytest.raises(FlodlError, match=r"config\.json"):
            load(folder)


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_cannot_be(folder: Path, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("the cat\n")
    rows = [{"text": "a good film", "label": "good"}, {"text": "a bad film", "label": "bad"}] * 4
    before = sorted(tmp_path.rglob("*"))
    assert path_fault(path)
    for call in (
        lambda: load(path),
        lambda: load(folder).save_pretrained(path),
        lambda: predict_file(str(folder), path, tmp_path / "out.jsonl"),
        lambda: predict_file(str(folder), tmp_path / "in.txt", path + ".jsonl"),
        lambda: finetune(str(folder), train=path),
        lambda: finetune(str(folder), train=rows, out=path, max_steps=1),
    ):
        with pytest.raises(FlodlError) as caught:
            call()
        str(caught.value).encode()
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_list(folder: Path, make: Callable[..., EncoderModel]) -> None:
    model: Any = make("bert", "sequence_classification")
    for call in (
        lambda: load(folder, labels=5),  # type: ignore[arg-type]
        lambda: load(folder, labels="ab"),
        lambda: load(folder, num_labels="x"),  # type: ignore[arg-type]
        lambda: load(folder, num_labels=0),
        lambda: load(folder, ignore_config_keys=5),  # type: ignore[arg-type]
        lambda: model.predict("the cat", top_k="a"),
        lambda: model.predict("the cat", devices=5),
        lambda: model.predict("the cat", devices=[5]),
        lambda: model.predict("the cat", precision=5),
        lambda: model.predict(5),
        lambda: model.predict([None]),
        lambda: model.predict([["a", "b", "c"]]),
    ):
        with pytest.raises(FlodlError):
            call()
    import numpy

    assert load(folder, labels=numpy.array(["no", "yes"])).config.labels == ("no", "yes")  # type: ignore[arg-type]
    assert len(model.predict("the cat", top_k=numpy.int64(1))) == 1
