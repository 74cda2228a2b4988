"""BERT at its published size, with every head: forward, loss and all gradients equal to transformers' to the bit."""

from __future__ import annotations

import pytest

from flodl_hf.families import bert
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.parity.cell import Cell
from flodl_hf.parity.matrix import run_cell

pytest.importorskip("transformers")
pytestmark = [pytest.mark.transformers, pytest.mark.slow]


@pytest.mark.parametrize("head", [head.name for head in HEADS if head.name == "base" or head.name in bert.HEADS])
def test_bert_base_is_equal_to_the_bit(head: str) -> None:
    result = run_cell(Cell("bert", head), size="real", checks=["strict_load", "forward", "gradients"])
    assert [(e.check, e.status) for e in result.evidence] == [
        ("strict load", "pass"), ("forward", "pass"), ("loss and gradients", "pass"),
    ], [e.detail for e in result.evidence]  # fmt: skip
    assert [e.measured for e in result.evidence[1:]] == [0.0, 0.0]
