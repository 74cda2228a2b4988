"""What is exported of every task is proved by `verify-export`, transformers' outputs included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flodl_hf import load
from flodl_hf.export.verify import verify_export
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS

CELLS = [
    ("bert", "base"),
    *((next(f.model_type for f in FAMILIES if head.name in f.heads), head.name) for head in HEADS[1:]),
]


@pytest.mark.transformers
@pytest.mark.parametrize(("family", "head"), CELLS)
def test_an_export_of_each_task_is_proved(family: str, head: str, saved: Callable[..., Path]) -> None:
    found = verify_export(saved(family, head), receipt=False)
    states = {check.name: check.status for check in found.checks}
    assert found.passed, found.checks
    assert states["our outputs equal transformers'"] == "pass", found.checks


@pytest.mark.transformers
def test_numbers_that_are_none_are_seen(saved: Callable[..., Path]) -> None:
    folder = saved("bert", "sequence_classification")
    model = load(folder)
    with torch.no_grad():
        model.graph.get_parameter("head.classifier.bias")[0] = float("nan")
    found = verify_export(folder, model=model, receipt=False)
    (check,) = [check for check in found.checks if check.name == "the live model's outputs equal transformers'"]
    assert (check.status, check.measured) == ("fail", float("inf"))
    assert not found.passed
