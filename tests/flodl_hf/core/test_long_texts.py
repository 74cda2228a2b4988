"""``long_texts`` has the result of the older keywords of each method, and one error for other values."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flodl_hf.errors import PredictError, TokenizerError
from flodl_hf.jobs import encode_file, predict_file

Maker = Callable[..., Any]
LONG = "ada lives in paris and the cat sat on a mat " * 12
VALUES = ("windows", "truncate", "error")
WORDS = {"windows": "windows", "truncate": "truncate", "error": "strict"}
NLI = {"id2label": {"0": "contradiction", "1": "neutral", "2": "entailment"}}
# Each method: the head, what its config has, a call, the default, and the other supported values.
METHODS: dict[str, tuple[str, dict[str, Any], Callable[..., Any], str, tuple[str, ...]]] = {
    "predict classes": ("sequence_classification", NLI, lambda m, **k: m.predict([LONG, "a cat"], **k),
                        "windows", ("truncate", "error")),
    "zero_shot": ("sequence_classification", NLI, lambda m, **k: m.zero_shot(LONG, ["a", "b"], **k),
                  "windows", ("error",)),
    "rerank": ("sequence_classification", {"id2label": {"0": "fits"}}, lambda m, **k: m.rerank("who?", [LONG], **k),
               "windows", ("truncate", "error")),
    "predict entities": ("token_classification", {}, lambda m, **k: m.predict(LONG, **k), "windows", ("error",)),
    "answer": ("question_answering", {}, lambda m, **k: m.answer("who?", LONG, **k), "windows", ("error",)),
    "answer_batch": ("question_answering", {}, lambda m, **k: m.answer_batch([("who?", LONG)], **k),
                     "windows", ("error",)),
    "fill_mask": ("masked_lm", {}, lambda m, **k: m.fill_mask(LONG + " [MASK]", **k), "windows", ()),
    "choices": ("multiple_choice", {}, lambda m, **k: m.predict((LONG, ["a", "b"]), **k), "windows", ("error",)),
    "next_sentence": ("next_sentence", {}, lambda m, **k: m.predict((LONG, "a cat"), **k), "windows", ("error",)),
    "pretraining": ("pretraining", {}, lambda m, **k: m.predict((LONG, "a cat"), **k), "windows", ("error",)),
    "embed": ("base", {}, lambda m, **k: m.embed([LONG], **k), "truncate", ("windows", "error")),
    "encode": ("base", {}, lambda m, **k: m.encode([LONG], **k), "truncate", ("windows", "error")),
    "encode_query": ("base", {}, lambda m, **k: m.encode_query([LONG], **k), "truncate", ("windows", "error")),
    "similarity": ("base", {}, lambda m, **k: m.similarity([LONG], ["a cat"], **k), "truncate", ("windows", "error")),
    "embed_sparse": ("masked_lm", {}, lambda m, **k: m.embed_sparse([LONG], **k).to_tensor().to_dense(),
                     "truncate", ("windows", "error")),
    "sparse encode": ("masked_lm", {}, lambda m, **k: m.encode([LONG], convert_to_sparse_tensor=False, **k),
                      "truncate", ("windows", "error")),
}  # fmt: skip


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, (torch.Tensor, np.ndarray)):
        return np.array_equal(np.asarray(found), np.asarray(expected))
    return found == expected


@pytest.mark.filterwarnings("ignore:.*truncated")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", METHODS)
def test_a_value_has_the_answer_of_the_older_keyword(name: str, value: str, make: Maker) -> None:
    head, more, call, default, supported = METHODS[name]
    model = make("bert", head, **more)
    if value not in (default, *supported):
        with pytest.raises(PredictError) as refused:
            call(model, long_texts=value)
        assert refused.value.details["long_texts"] == value
        assert all(repr(one) in str(refused.value) for one in (default, *supported))
    elif value == "error":
        with pytest.raises(TokenizerError):
            call(model, long_texts=value)
    else:
        older = {} if value == default else {WORDS[value]: True}
        assert same(call(model, long_texts=value), call(model, **older))
        if value != default:
            assert not same(call(model, long_texts=value), call(model))


@pytest.mark.parametrize("older", ["strict", "truncate", "truncation", "max_length"])
def test_one_of_two_forms_is_given(older: str, make: Maker) -> None:
    with pytest.raises(PredictError) as refused:
        make("bert", "sequence_classification").predict(LONG, long_texts="windows", **{older: 8})
    assert refused.value.details["problems"] == ["long_texts", older]


@pytest.mark.filterwarnings("ignore:.*truncated")
def test_files_accept_both_forms_as_one_job(make: Maker, tmp_path: Path) -> None:
    source, parts = tmp_path / "texts.txt", tmp_path / "answers.jsonl"
    source.write_text("\n".join([LONG, *["a cat"] * 9]))
    model = make("bert", "sequence_classification")
    stops = iter([False, True])
    predict_file(model, source, parts, truncate=True, part_rows=2, should_stop=lambda: next(stops, True))
    assert predict_file(model, source, parts, long_texts="truncate", part_rows=2).resumed
    with pytest.warns(UserWarning, match=r"truncated 1 of 10 texts to the .* long_texts='truncate' requests"):
        predict_file(model, source, other := tmp_path / "other.jsonl", truncate=True, part_rows=2)
    assert parts.read_text() == other.read_text()
    skipped = predict_file(model, source, tmp_path / "short.jsonl", long_texts="error", on_error="skip")
    assert len(skipped.faults) == 1
    with pytest.raises(PredictError):
        predict_file(model, source, tmp_path / "none.jsonl", long_texts="error", strict=True)


def test_the_error_contains_the_name_of_the_call(make: Maker, tmp_path: Path) -> None:
    (source := tmp_path / "texts.txt").write_text(LONG)
    wrong: list[dict[str, Any]] = [{"long_texts": "none"}, {"no_such_option": 1}]
    for (call, head), options in product(((predict_file, "masked_lm"), (encode_file, "base")), wrong):
        with pytest.raises(PredictError) as refused:
            call(make("bert", head), source, tmp_path / "out.parquet", **options)
        assert str(refused.value).startswith(f"{call.__name__}: ")


def test_vectors_of_tokens_are_of_a_truncated_text(make: Maker) -> None:
    with pytest.raises(PredictError):
        make("bert", "base").encode([LONG], output_value="token_embeddings", long_texts="error")


def test_chunks_refuse_the_option_and_list_theirs(make: Maker) -> None:
    with pytest.raises(TypeError) as refused:
        make("bert", "base").embed_chunks(["a cat"], long_texts="error")
    assert all(name in str(refused.value) for name in ("long_texts", "precision", "token_budget", "progress"))


@pytest.mark.filterwarnings("ignore:.*truncated")
def test_the_command_line_has_one_option(saved: Callable[..., Path], tmp_path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from flodl_hf.cli.app import app

    def run(*arguments: Any) -> tuple[int, str]:
        done = testing.CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"])
        return done.exit_code, done.stdout

    model, encoder = saved("bert", "sequence_classification"), saved("bert", "base")
    predict = partial(run, "predict", model, LONG, "--json")
    (code, windows), (_, usual) = predict("--long-texts", "windows"), predict()
    assert code == 0
    assert windows == usual != predict("--long-texts", "truncate")[1]
    assert json.loads(predict("--long-texts", "error")[1])["error"] == "TextTooLongError"
    vectors = partial(run, "predict", encoder, LONG, "--json")
    assert vectors("--long-texts", "windows") != vectors("--long-texts", "truncate") == vectors()
    source = tmp_path / "texts.txt"
    source.write_text(LONG)
    for name, option in {"windows": ["--long-texts", "windows"], "usual": []}.items():
        assert run("encode", encoder, "--in", source, "--out", tmp_path / f"{name}.npy", *option)[0] == 0
    assert not np.array_equal(np.load(tmp_path / "windows.npy"), np.load(tmp_path / "usual.npy"))
