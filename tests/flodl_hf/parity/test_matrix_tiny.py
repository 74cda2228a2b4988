"""Every cell of the matrix at tiny size: each check of each family with each head, against transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flodl_hf.families import FAMILIES
from flodl_hf.heads import HEADS
from flodl_hf.parity.cell import Bench, Cell
from flodl_hf.parity.checks import CHECKS, REORDERED
from flodl_hf.parity.matrix import check_names, select_cells

pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

# What is claimed to the bit; the others are bounded by the order of sums.
BITWISE = ("forward", "train_mode", "gradients", "training_steps", "reload")


@pytest.fixture(scope="module", params=select_cells(), ids=lambda cell: cell.name)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with Bench(request.param) as made:
        yield made


@pytest.mark.parametrize("check", CHECKS, ids=check_names())
def test_the_cell_passes(bench: Bench, check) -> None:
    evidence = check(bench)
    assert evidence.status == "pass", f"{evidence.detail} ({evidence.where})"
    if check.__name__ in BITWISE:
        assert evidence.measured == 0.0, evidence.detail
    elif check.__name__ in ("layouts", "predictions"):
        assert evidence.measured is not None
        assert evidence.measured <= REORDERED


def test_no_cell_is_left_out() -> None:
    cells = select_cells()
    assert {(c.family, c.head) for c in cells} == {(f.model_type, h.name) for f in FAMILIES for h in HEADS}
    assert len({(c.family, c.head) for c in cells}) == 35
    assert Cell("albert", "base", "groups") in cells
    assert Cell("deberta-v2", "masked_lm", "convolution") in cells
    assert set(BITWISE) <= set(check_names())
