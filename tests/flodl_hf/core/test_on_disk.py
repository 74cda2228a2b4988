"""Weights that stay on disk: the same answers to the bit, two layers in memory, and a clear word where it cannot be."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.errors import ConfigError
from flodl.graph import FlowBuilder
from flodl_hf.checkpoints.weights import manifest as on_disk
from flodl_hf.errors import PredictError
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import load
from flodl_hf.inference import layers_from_disk, workers
from flodl_hf.inference.layers_from_disk import _steps_of
from flodl_hf.nn.backends.cpu import has_int8, has_onednn

Saved = Callable[..., Path]

TEXTS = ["the film was good", "bad", "ada lives in paris and works for acme corp", "not very good", "is the film bad"]
HEADS = ("base", "sequence_classification", "token_classification", "masked_lm", "question_answering")
# Heads follow the layers, which families with chains of their own kind try with all of them.
WHOLE = ("bert", "albert", "deberta-v2")
CELLS = [
    pytest.param(f.model_type, head, marks=() if head == "base" or f.model_type in WHOLE else pytest.mark.slow)
    for f in FAMILIES
    for head in HEADS
    if head == "base" or head in f.heads
]
PRECISIONS: list[str | None] = [None, "exact"]
PRECISIONS += ["bf16"] if has_onednn(torch.bfloat16) else []
PRECISIONS += ["int8"] if has_int8() else []


def answers(model: Any, **run: Any) -> Any:
    if model.head == "base":
        return model.embed(TEXTS, **run).tolist()
    if model.head == "masked_lm":
        return model.fill_mask([f"{text} [MASK]" for text in TEXTS], **run)
    if model.head == "question_answering":
        return model.answer_batch([("the film", text) for text in TEXTS], **run)
    return model.predict(TEXTS, **run)


@pytest.mark.parametrize(("model_type", "head"), CELLS)
def test_answers_are_those_of_weights_in_memory_to_the_bit(model_type: str, head: str, saved: Saved) -> None:
    folder = saved(model_type, head)
    held, shown = load(folder, head=head, weights="memory"), load(folder, head=head, weights="disk")
    assert held.weights_on_disk is None
    assert shown.weights_on_disk is not None
    for run in ({"token_budget": 7}, {"batch_invariant": True}):
        assert answers(shown, **run) == answers(held, **run)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "deberta-v2"])
def test_every_precision_has_the_bits_that_it_has_in_memory(model_type: str, precision: Any, saved: Saved) -> None:
    folder = saved(model_type, "sequence_classification")
    held, shown = load(folder, weights="memory"), load(folder, weights="disk")
    for _ in range(2):
        assert answers(shown, precision=precision, token_budget=9) == answers(held, precision=precision, token_budget=9)


def test_a_layer_is_read_once_for_all_texts_and_two_are_there_at_a_time(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load(saved("bert", "token_classification", num_hidden_layers=5), weights="disk")
    weights = [model.graph.get_parameter(f"encoder.layers.{place}.attention.query.weight") for place in range(5)]
    order = [weight.data_ptr() for weight in weights]
    there: list[weakref.ref[Any]] = []
    seen: list[int] = []
    read = layers_from_disk.Layered._read

    def reading(self: Any, source: Any) -> Any:
        seen.append(order.index(source.attention.query.weight.data_ptr()))
        assert sum(one() is not None for one in there) <= 1
        found = read(self, source)
        there.append(weakref.ref(found))
        return found

    monkeypatch.setattr(layers_from_disk.Layered, "_read", reading)
    model.predict(TEXTS, token_budget=4)
    assert seen == [0, 1, 2, 3, 4]


def test_states_that_find_no_room_wait_for_another_pass_over_the_layers(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("bert", "token_classification")
    held, shown = load(folder, weights="memory"), load(folder, weights="disk")
    passes = []
    through = layers_from_disk.Layered._through
    monkeypatch.setattr(layers_from_disk.Layered, "_through", lambda *a: (passes.append(len(a[1])), through(*a)))
    monkeypatch.setattr(layers_from_disk, "LEAST_BYTES", 1)
    monkeypatch.setattr(layers_from_disk, "available_memory", lambda _: 0)
    assert answers(shown, token_budget=4) == answers(held, token_budget=4)
    assert passes == [1] * len(TEXTS)


def test_memory_that_runs_out_makes_batches_smaller(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("bert", "token_classification")
    held, shown = load(folder, weights="memory"), load(folder, weights="disk")
    forward, sizes = layers_from_disk._Between.forward, []

    def tight(self: Any, hidden: Any, **given: Any) -> Any:
        sizes.append(len(hidden))
        if len(hidden) > 16:
            raise torch.OutOfMemoryError
        return forward(self, hidden, **given)

    monkeypatch.setattr(layers_from_disk._Between, "forward", tight)
    found = answers(shown)
    assert max(sizes) > 12
    assert [[entity.word for entity in text] for text in found] == [[e.word for e in text] for text in answers(held)]


def test_what_is_written_to_a_weight_counts_and_stays(saved: Saved) -> None:
    folder = saved("bert", "sequence_classification")
    held, shown = load(folder, weights="memory"), load(folder, weights="disk")
    answers(shown)
    for model in (held, shown):
        with torch.no_grad():
            model.graph.get_parameter("encoder.layers.1.attention.value.weight").mul_(-3)
    for _ in range(2):
        assert answers(shown) == answers(held)
    assert not torch.equal(
        shown.graph.get_parameter("encoder.layers.1.attention.value.weight"),
        load(folder).graph.get_parameter("encoder.layers.1.attention.value.weight"),
    )


def test_a_model_that_moves_or_travels_holds_its_weights(saved: Saved) -> None:
    shown = load(saved("bert", "sequence_classification"), weights="disk")
    again = pickle.loads(pickle.dumps(shown))
    assert again.weights_on_disk is None
    assert answers(again) == answers(shown)
    shown.to(torch.float64)
    assert shown.weights_on_disk is None


def test_short_memory_leaves_weights_on_disk_and_says_so(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("bert", "sequence_classification")
    monkeypatch.setattr(on_disk, "available_memory", lambda _: 1000)
    with pytest.warns(UserWarning, match="read layer by layer"):
        model = load(folder)
    assert model.weights_on_disk is not None
    assert any("weights='disk'" in note for note in model.load_report.notes)  # type: ignore[union-attr]
    assert load(folder, weights="memory").weights_on_disk is None
    copied = load(folder, mapped=False)
    assert copied.weights_on_disk is None
    assert any("mapped=False" in note for note in copied.load_report.notes)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weights": "disc"}, "did you mean 'disk'"),
        ({"weights": "disk", "mapped": False}, "mapped=False"),
        ({"weights": "disk", "dtype": torch.bfloat16}, "precision="),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], says: str, saved: Saved) -> None:
    with pytest.raises(ConfigError) as fault:
        load(saved(), **given)
    assert says in str(fault.value)


def test_several_devices_are_refused_by_name(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "worth_it", lambda devices: True)
    monkeypatch.setattr(workers, "MIN_TEXTS", 1)
    model: Any = load(saved(), weights="disk")
    with pytest.raises(PredictError, match="weights='memory'"):
        model.embed(TEXTS, devices=["cpu", "cpu"])
    assert model not in workers._OF  # none, which would have the weights in memory


def test_layers_that_are_no_chain_are_told_apart() -> None:
    split = FlowBuilder(torch.nn.Linear(2, 2), name="0").fork(torch.nn.Linear(2, 2), name="1").tag("a").build()
    assert "its layer" in str(_steps_of(split)) or "more than the last" in str(_steps_of(split))
    assert "Sequential" in str(_steps_of(torch.nn.Sequential()))


def test_commands_take_where_weights_stay(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("typer.testing")
    from flodl_hf.cli.app import app
    from flodl_hf.inference.graph_model import GraphModel

    folder, source = saved("bert", "sequence_classification"), tmp_path / "texts.txt"
    source.write_text("\n".join(TEXTS))
    seen: list[bool] = []
    ready = GraphModel._ready

    def noted(self: Any, *given: Any, **how: Any) -> Any:
        seen.append(self.weights_on_disk is not None)
        return ready(self, *given, **how)

    monkeypatch.setattr(GraphModel, "_ready", noted)

    def said(*arguments: Any) -> str:
        done = testing.CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"])
        assert done.exit_code == 0, done.output
        return done.stdout

    for weights in ("memory", "disk"):
        there = ["--weights", weights]
        said("predict", folder, "--in", source, "--out", tmp_path / f"{weights}.jsonl", *there)
        said("encode", folder, "--in", source, "--out", tmp_path / f"{weights}.npy", *there)
    told = [said("predict", folder, *TEXTS, "--json", "--weights", weights) for weights in ("memory", "disk")]
    assert told[0] == told[1] != ""
    assert seen.count(True) == seen.count(False) > 2
    for suffix in ("jsonl", "npy"):
        assert (tmp_path / f"memory.{suffix}").read_bytes() == (tmp_path / f"disk.{suffix}").read_bytes()
    wrong = testing.CliRunner().invoke(app, ["predict", str(folder), "a", "--weights", "disc"])
    assert wrong.exit_code == 2
    assert "memory" in wrong.output
