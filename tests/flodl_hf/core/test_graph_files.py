"""A graph's checkpoint becomes a Hugging Face folder: every family and head, whoever's names it has, value by value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flodl.checkpoint import save_tensors
from flodl.errors import CheckpointError, FlodlError
from flodl_hf import load
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.errors import ExportError
from flodl_hf.export.graph_file import export_graph_file, is_graph_file
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.models.encoder_model import EncoderModel

CELLS = [(f.model_type, h.name) for f in FAMILIES for h in HEADS if h.name == "base" or h.name in f.heads]
Make = Callable[..., EncoderModel]


def trained(model: EncoderModel) -> EncoderModel:
    """Move every value, so that nothing can come from the folder that configuration and tokenizer are from."""
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            parameter.add_(0.125)
    return model


def same(folder: Path, other: Path) -> None:
    found, expected = (load_file(place / "model.safetensors") for place in (folder, other))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("model_type", "head"), CELLS)
def test_every_cell_whoever_named_it(make: Make, tmp_path: Path, model_type: str, head: str) -> None:
    model = make(model_type, head)
    like = model.save_pretrained(tmp_path / "like")
    expected = trained(model).save_pretrained(tmp_path / "expected")
    model.graph.save_checkpoint(tmp_path / "run.fdl")
    # As the Rust flodl writes them: modules by Hugging Face's names, the leaf behind a slash, another structure's hash.
    stored = load_file(expected / "model.safetensors")
    theirs = {"/".join(name.rsplit(".", 1)): tensor for name, tensor in stored.items()}
    save_tensors(tmp_path / "rust.fdl.gz", theirs, structural_hash="ab" * 32)
    for name, names, checked in (("run.fdl", "ours", True), ("rust.fdl.gz", "Hugging Face", False)):
        assert is_graph_file(tmp_path / name)
        # Hugging Face's names of a model of two heads are those of a file for one of them.
        task = head if head == "pretraining" and names != "ours" else "auto"
        found = export_graph_file(tmp_path / name, tmp_path / f"{name}-out", like=like, head=task)
        assert (found.head, found.names, found.checked) == (head, names, checked)
        same(found.folder, expected)
        assert (found.folder / "config.json").read_bytes() == (like / "config.json").read_bytes()


def test_a_folder_of_sentence_transformers_says_how_texts_become_vectors(make: Make, tmp_path: Path) -> None:
    model: Any = make("bert")
    model.sentence_recipe = SentenceTransformerConfig(pooling=("max",), normalize=False)
    like = model.save_pretrained(tmp_path / "like")
    trained(model).graph.save_checkpoint(tmp_path / "run.fdl")
    found: Any = load(export_graph_file(tmp_path / "run.fdl", tmp_path / "out", like=like).folder)
    assert np.array_equal(found.encode(["a good film"]), model.encode(["a good film"]))
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_bytes() == (
        like / "1_Pooling/config.json"
    ).read_bytes()


@pytest.fixture
def run(make: Make, tmp_path: Path) -> tuple[EncoderModel, Path]:
    model = make("bert", "sequence_classification")
    model.save_pretrained(tmp_path / "like")
    return trained(model), tmp_path


def test_predictions_are_those_of_the_model(run: tuple[EncoderModel, Path]) -> None:
    model, place = run
    state = {f"network.{name}": value for name, value in model.graph.state_dict().items()}
    save_tensors(place / "snapshot.safetensors", state)
    found = export_graph_file(place / "snapshot.safetensors", place / "out", like=place / "like")
    texts = ["the cat sat", "a good film"]
    assert load(found.folder).predict(texts) == model.predict(texts)
    assert json.loads((found.folder / "checksums.json").read_text())


def test_a_sidecar_stands_for_the_folder(run: tuple[EncoderModel, Path]) -> None:
    model, place = run
    model.graph.set_source_config((place / "like" / "config.json").read_text())
    model.graph.save_checkpoint(place / "run.fdl.gz")
    model.graph.set_source_config(None)
    model.graph.save_checkpoint(place / "other.fdl")
    with pytest.raises(ExportError, match=r"other\.config\.json does not exist"):
        export_graph_file(place / "other.fdl", place / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (place / "like" / name).exists():
            (place / name).write_bytes((place / "like" / name).read_bytes())
    found = export_graph_file(place / "run.fdl.gz", place / "out")
    same(found.folder, model.save_pretrained(place / "expected"))
    assert load(found.folder).predict("the cat") == model.predict("the cat")


def test_another_head_with_its_labels(run: tuple[EncoderModel, Path], make: Make) -> None:
    model, place = run
    base = make("bert", "base").save_pretrained(place / "base")
    model.graph.save_checkpoint(place / "run.fdl")
    found = export_graph_file(
        place / "run.fdl", place / "out", like=base, head="seqcls", labels=["no", "yes", "more"][: model.num_labels]
    )  # fmt: skip
    config = json.loads((found.folder / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert list(config["id2label"].values()) == ["no", "yes", "more"][: model.num_labels]
    same(found.folder, model.save_pretrained(place / "expected"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dtype_is_kept_or_cast_to(run: tuple[EncoderModel, Path], dtype: str) -> None:
    model, place = run
    model.graph.save_checkpoint(place / "run.fdl")
    found = export_graph_file(place / "run.fdl", place / "cast", like=place / "like", dtype=dtype)
    half = load_file(found.folder / "model.safetensors")
    assert {t.dtype for t in half.values()} == {getattr(torch, dtype)}
    model.to(getattr(torch, dtype)).graph.save_checkpoint(place / "half.fdl")
    again = export_graph_file(place / "half.fdl", place / "kept", like=place / "like")
    same(again.folder, found.folder)


def damaged(place: Path, model: EncoderModel, how: str) -> dict[str, torch.Tensor]:
    state = {name: value.detach().clone() for name, value in model.graph.state_dict().items()}
    last = list(state)[-1]
    if how == "one is missing":
        del state[last]
    elif how == "one has another shape":
        state[last] = torch.zeros(7)
    elif how == "one is nobody's":
        state["encoder.layers.9.odd.weight"] = torch.zeros(2)
    elif how == "one is not finite":
        state[last] = state[last] * float("nan")
    elif how == "two dtypes":
        state[last] = state[last].double()
    return state


@pytest.mark.parametrize(
    "how",
    [
        "one is missing",
        "one has another shape",
        "one is nobody's",
        "one is not finite",
        "two dtypes",
        "another structure",
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(run: tuple[EncoderModel, Path], how: str) -> None:
    model, place = run
    save_tensors(place / "x.fdl", damaged(place, model, how), structural_hash="cd" * 32 if "structure" in how else "")
    with pytest.raises(FlodlError) as fault:
        export_graph_file(place / "x.fdl", place / "out", like=place / "like")
    assert isinstance(fault.value, (CheckpointError, ExportError))
    assert not (place / "out").exists()


@pytest.mark.parametrize("there_before", [False, True])
def test_what_is_not_the_file_never_stands_in_place(
    run: tuple[EncoderModel, Path], there_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, place = run
    model.graph.save_checkpoint(place / "run.fdl")
    if there_before:
        model.save_pretrained(place / "out")
    before = {file.name: file.read_bytes() for file in (place / "out").glob("*")}
    monkeypatch.setattr("flodl_hf.export.graph_file.same_bits", lambda one, other: False)
    with pytest.raises(ExportError, match="Nothing was written"):
        export_graph_file(place / "run.fdl", place / "out", like=place / "like", overwrite=True)
    assert (place / "out").exists() == there_before
    assert {file.name: file.read_bytes() for file in (place / "out").glob("*")} == before


def test_the_command_line(run: tuple[EncoderModel, Path]) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    model, place = run
    model.graph.save_checkpoint(place / "run.fdl")
    given = ["export", str(place / "run.fdl"), "--like", str(place / "like"), "--out", str(place / "out")]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "tensors with names of a graph, for this structure" in done.output
    assert "model.safetensors" in done.output
    assert CliRunner().invoke(app, given).exit_code == 1, "the folder is in use"
    assert CliRunner().invoke(app, [*given, "--overwrite", "--json"]).exit_code == 0
    same(place / "out", model.save_pretrained(place / "expected"))
    done = CliRunner().invoke(
        app, ["export", str(place / "like"), "--like", str(place / "like"), "--out", str(place / "o")]
    )
    assert done.exit_code == 2
    assert "graph's checkpoint" in done.output
