"""The showcase does all that it says: every verb, memory, training, files."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from flodl.checkpoint import load_tensors
from flodl.errors import CheckpointError, GraphPathError
from flodl.graph import FlowBuilder
from flodl.monitor import Monitor

FILE = Path(__file__).parents[2] / "examples" / "showcase.py"


@pytest.fixture(scope="module")
def showcase():
    if not FILE.exists():
        pytest.skip("examples are not part of an installed package")
    spec = importlib.util.spec_from_file_location("showcase", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def graph(showcase):
    torch.manual_seed(0)
    return showcase.build()


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 2), torch.randn(2, 8)


def test_every_verb_of_the_builder_is_shown():
    verbs = [name for name, value in vars(FlowBuilder).items() if callable(value) and not name.startswith("_")]
    text = FILE.read_text(encoding="utf-8")
    missing = [verb for verb in (*verbs, "from_") if f".{verb}(" not in text]
    assert len(verbs) > 15
    assert not missing
    for ending in (".for_n(", ".while_cond(", ".until_cond(", ".each(", ".over(", ".slices(", ".batched("):
        assert ending in text


def test_it_builds_and_gives_the_shape(graph, inputs):
    x, ctx = inputs
    assert graph(x, ctx=ctx).shape == graph(x, ctx).shape == (2, 2)
    assert {"input", "halves", "refined", "memory", "final_heads_0", "final_heads_1", "output"} <= set(graph.plan.tags)
    assert {n.kind for n in graph.plan.nodes} >= {
        "add",
        "merge",
        "loop",
        "gate",
        "switch",
        "map",
        "state_read",
        "input",
    }


def test_the_second_call_differs_and_a_reset_brings_the_first_back(graph, inputs):
    x, ctx = inputs
    graph.eval()
    first, second = graph(x, ctx=ctx), graph(x, ctx=ctx)
    assert not torch.equal(first, second)
    graph.reset_state()
    assert graph.counter.calls == 0
    assert torch.equal(graph(x, ctx=ctx), first)


def test_detaching_lets_the_next_step_run(graph, inputs):
    x, ctx = inputs
    graph(x, ctx=ctx).sum().backward()
    graph.detach_state()
    graph(x, ctx=ctx).sum().backward()


def test_without_detaching_the_second_backward_meets_the_first(graph, inputs):
    x, ctx = inputs
    graph(x, ctx=ctx).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        graph(x, ctx=ctx).sum().backward()


def test_gradients_reach_the_parameters(graph, inputs):
    x, ctx = inputs
    graph(x, ctx=ctx).square().sum().backward()
    without = {name for name, parameter in graph.named_parameters() if parameter.grad is None}
    # Decisions pass no gradient: the halt, the branch not taken, a side branch that nothing reads.
    allowed = ("spectral.", "switch_", "loop_", "halves.")
    assert all(name.startswith(allowed) for name in without), without
    reached = [name for name, p in graph.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert {"input.weight", "residual.weight", "output.weight"} <= set(reached)
    assert len(reached) > len(without)


def test_training_leaves_a_history_of_five_epochs(showcase, graph):
    monitor = Monitor(5, quiet=True)
    before = {name: value.clone() for name, value in graph.state_dict().items()}
    showcase.train(graph, monitor, epochs=5, steps=4)
    assert (graph.step_count(), graph.epoch_count(), len(monitor.history())) == (20, 5, 5)
    assert len(graph.trend("loss")) == len(graph.trend("lr")) == 5
    assert len(graph.trends("final_heads")) == 2
    assert all(len(trend) == 5 for trend in graph.trends("final_heads"))
    assert graph.trend("lr").values() == sorted(graph.trend("lr").values(), reverse=True)
    assert graph.trend("loss").latest() < graph.trend("loss").values()[0]
    assert any(not torch.equal(value, before[name]) for name, value in graph.state_dict().items())


@pytest.mark.parametrize("suffix", ["safetensors", "fdl", "fdl.gz"])
def test_a_checkpoint_brings_everything_back(showcase, graph, inputs, tmp_path, suffix):
    x, ctx = inputs
    path = tmp_path / f"s.{suffix}"
    graph(x, ctx=ctx)
    graph.save_checkpoint(path)
    assert load_tensors(path).structural_hash == graph.structural_hash()
    twin = showcase.build()
    report = twin.load_checkpoint(path)
    assert report.is_complete
    for one in (graph, twin):
        one.eval()
        one.reset_state()
    with torch.no_grad():
        result = twin(x, ctx=ctx)
        assert torch.equal(result, graph(x, ctx=ctx))
    assert torch.isfinite(result).all()
    other = FlowBuilder(nn.Linear(2, 2)).build()
    before = other.state_dict()["linear_1.weight"].clone()
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(path)
    assert graph.structural_hash()[:8] in str(caught.value)
    assert other.structural_hash()[:8] in str(caught.value)
    assert torch.equal(other.state_dict()["linear_1.weight"], before)


def test_a_sub_graph_trained_alone_is_loaded_into_its_place(showcase, graph, tmp_path):
    alone = showcase.block("any", nn.Linear(8, 8), nn.LayerNorm(8))
    alone.save_checkpoint(tmp_path / "left.safetensors")
    report = graph.load_subgraph_checkpoint("left", tmp_path / "left.safetensors")
    assert report.is_complete
    for name, value in graph.subgraph("left").named_parameters():
        assert torch.equal(value, dict(alone.named_parameters())[name])


def test_the_internal_tag_is_hidden_from_a_parent(graph):
    assert graph.validate_path("spectral")
    wrapped = FlowBuilder(nn.Identity()).input("ctx").through(graph).using("ctx").build()
    assert wrapped.validate_path("showcase.refined")
    with pytest.raises(GraphPathError):
        wrapped.validate_path("showcase.spectral")


def test_the_whole_script_leaves_its_files(showcase, tmp_path, capsys):
    assert showcase.main([str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    for sentence in (
        "the second call remembers the first: True",
        "after reset_state it is as the first: True",
        "frozen by path: left True, right False",
        "epoch 5/5",
        "loss over 5 epochs",
        "it answers the same: True",
    ):
        assert sentence in said
    folder = tmp_path / "new"
    with open(folder / "trends.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert all(row["loss"] and row["final_heads_0"] and row["final_heads_1"] for row in rows)
    ElementTree.parse(folder / "graph.svg")
    assert (folder / "graph.dot").read_text(encoding="utf-8").startswith("digraph {")
    for name in ("trends.html", "run.html"):
        assert (folder / name).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert len((folder / "run.csv").read_text().splitlines()) == 6
    assert len((folder / "trends.log").read_text().splitlines()) == 5
