"""The ten benchmark models: exact sizes, and both ways of writing them compute the same."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def load(name: str) -> ModuleType:
    if not (FOLDER / f"{name}.py").exists():
        pytest.skip("the benchmarks are not part of the wheel")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("index", range(10))
def test_parameter_counts_are_exact(index: int) -> None:
    model = load("models").MODELS[index]
    with torch.device("meta"):
        made = model.hand(), model.flow()
    assert [sum(p.numel() for p in module.parameters()) for module in made] == [model.parameters] * 2


@pytest.mark.parametrize("name", ["gru_seq", "lstm_seq", "gated_routing", "feedback_fixed", "convnet"])
def test_both_versions_compute_the_same(name: str) -> None:
    load("models")
    overhead = load("graph_overhead")
    model = next(m for m in load("models").MODELS if m.name == name)
    torch.manual_seed(0)
    hand, graph, x = model.hand(), model.flow(), model.inputs(2)
    overhead.align(hand, graph, x)
    assert torch.equal(hand(x), graph(x))
    model.loss(hand(x)).backward()
    model.loss(graph(x)).backward()
    pairs = zip(overhead.layers(hand, x), overhead.layers(graph, x), strict=True)
    for ours, theirs in pairs:
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, q.grad)


def test_the_benchmark_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    overhead = load("graph_overhead")
    file = tmp_path / "figures.json"
    try:
        assert overhead.main(["--models", "feedback_fixed", "--seconds", "0", "--batch", "1", "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    row = json.loads(file.read_text())["models"][0]
    assert row["name"] == "feedback_fixed"
    assert row["parameters"] == 790_016
    assert row["pairs"] >= 8
    assert row["ratio"] > 0
    assert "feedback_fixed" in capsys.readouterr().out
    assert overhead.scaled_mad([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(1.4826)
