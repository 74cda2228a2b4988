"""A finished run in a line, as JSON, and drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from flodl.train.handle import Trained
from flodl_hf.checkpoints.weights.loaded import LoadReport
from flodl_hf.training.report.charts import HIGH, MOST_POINTS, WIDE, line_chart
from flodl_hf.training.result import FinetuneResult


def run(steps: int = 50, **changed: Any) -> FinetuneResult:
    given: dict[str, Any] = {
        "_model": torch.nn.Linear(1, 1), "folder": Path("out"), "task": "sequence_classification",
        "metrics": {"accuracy": 0.9375, "loss": 0.25}, "losses": [1.0 / (step + 1) for step in range(steps)],
        "history": [{"step": 25, "epoch": 0, "accuracy": 0.5}, {"step": 50, "epoch": 1, "accuracy": 0.9375}],
        "steps": steps, "best_step": 25, "seconds": 75.0, "recipe": {"model": Path("m"), "lr": 3e-5},
    }  # fmt: skip
    return FinetuneResult(**(given | changed))


def test_a_run_says_in_a_line_what_came_of_it() -> None:
    said = repr(run())
    assert said == (
        "FinetuneResult(sequence_classification, 50 steps in 1:15, last loss 0.02, best at step 25: "
        "accuracy 0.9375, loss 0.25, in out)"
    )
    bare = repr(run(metrics={}, history=[], folder=None, losses=[], steps=0, best_step=0))
    assert bare == "FinetuneResult(sequence_classification, 0 steps in 1:15)"


def test_a_run_becomes_json() -> None:
    found = json.loads(json.dumps(run(losses=[1.0, math.nan]).to_dict(), allow_nan=False))
    assert found["losses"] == [1.0, None]
    assert found["metrics"]["accuracy"] == 0.9375
    assert (found["folder"], found["recipe"]) == ("out", {"model": "m", "lr": 3e-5})
    assert "model" not in found


def test_a_run_is_drawn_with_its_evaluations() -> None:
    page = run()._repr_html_()
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    names = [element.tag.rpartition("}")[2] for element in svg]
    assert (names.count("polyline"), names.count("line")) == (1, 2)
    assert "accuracy 0.9375" in page
    assert "<td" in page
    assert "<svg" not in run(losses=[])._repr_html_()


def curve(values: list[float], name: str = "loss") -> str:
    return line_chart({name: list(enumerate(values, 1))}, title=name, across="step", up="loss")


@pytest.mark.parametrize("steps", [1, 2, 1999, 2000, 2001, 100_000])
def test_a_curve_of_any_length_fits(steps: int) -> None:
    svg = ElementTree.fromstring(curve([math.sin(i / 50) for i in range(steps)]))
    (line,) = [element for element in svg if element.tag.endswith("polyline")]
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert 1 <= len(points) <= MOST_POINTS
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert all(0 <= x <= WIDE and 0 <= y <= HIGH for x, y in points)


def test_gaps_and_flat_curves() -> None:
    assert curve([]) == ""
    assert curve([math.nan]) == ""
    assert curve([1.0, math.inf, 1.0]).count(",") >= 2
    assert "<b>" not in curve([1.0, 2.0], "<b>")


def test_other_reports_are_short() -> None:
    report = LoadReport("a folder", "base", matched={str(i): str(i) for i in range(200)}, new=("head.weight",))
    assert repr(report) == "LoadReport(base from a folder: 200 tensors, 1 new)"
    assert repr(Trained({"a": torch.zeros(3, 4)}, {})) == "Trained(12 parameters in 1 tensors, 0 epochs)"
