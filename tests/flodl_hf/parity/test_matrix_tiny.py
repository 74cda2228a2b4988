"""Every cell of the matrix at tiny size: each check of each family with each head, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.parity.cell import Bench, Cell
from flodl_hf.parity.checks import CHECKS, REORDERED
from flodl_hf.parity.matrix import check_names, run_cell, select_cells

pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

# What is claimed to the bit; the others are bounded by the order of sums.
BITWISE = ("forward", "train_mode", "gradients", "training_steps", "reload")


# Families whose cells are run whole by `make test-slow`; quick runs take these heads of their first variant.
QUICK_HEADS = ("sequence_classification", "masked_lm")
RARE_HEADS = {
    "multiple_choice": "distilbert", "next_sentence": "bert", "pretraining": "bert", "replaced_tokens": "electra",
}  # fmt: skip
# Quick runs have these as recorded checkpoints alone.
RECORDED = ("jina_embeddings_v3",)
FIRST = ("bert", "deberta-v2")


def cells() -> list[Any]:
    """Return every cell; those that quick runs leave out are marked slow."""
    found = []
    for cell in select_cells():
        if (cell.head != "base" and cell.head not in cell.record.heads) or not cell.record.tiny:
            continue
        later = cell.variant == "base" and cell.head in QUICK_HEADS and cell.family not in RECORDED
        quick = cell.family in FIRST or later
        if cell.head in RARE_HEADS:
            quick = (cell.head, cell.family, cell.variant) in [(*quick, "base") for quick in RARE_HEADS.items()]
        found.append(pytest.param(cell, id=cell.name, marks=() if quick else pytest.mark.slow))
    return found


@pytest.fixture(scope="module", params=cells())
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with Bench(request.param) as made:
        yield made


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ != "adapters"], ids=lambda c: c.__name__)
def test_the_cell_passes(bench: Bench, check) -> None:
    evidence = check(bench)
    assert evidence.status == "pass", f"{evidence.detail} ({evidence.where})"
    if check.__name__ in BITWISE:
        assert evidence.measured == 0.0, evidence.detail
    elif check.__name__ in ("layouts", "predictions"):
        assert evidence.measured is not None
        assert evidence.measured <= REORDERED


ADAPTED = (("bert", "seqcls"), ("modernbert", "qa"), ("deberta-v2", "base"), ("albert", "tokcls"))


def adapted_cells() -> list[Any]:
    """Return every cell; those whose adapters quick runs leave out are marked slow."""
    return [
        pytest.param(
            *cell.values, id=cell.id, marks=() if tuple(str(cell.id).split("/")) in ADAPTED else pytest.mark.slow
        )
        for cell in cells()
    ]


@pytest.mark.parametrize("cell", adapted_cells())
def test_adapters_of_the_cell(cell: Cell) -> None:
    (evidence,) = run_cell(cell, checks=["adapters"]).evidence
    assert evidence.status == "pass", f"{evidence.detail} ({evidence.where})"
    assert evidence.measured is not None
    assert evidence.measured <= REORDERED


def test_no_cell_is_left_out() -> None:
    cells = select_cells()
    assert len(cells) >= 35
    assert {(c.family, c.head) for c in cells} == {(f.model_type, h.name) for f in FAMILIES for h in HEADS}
    # Those that transformers has no class for are proven in tests of their own.
    assert {f.model_type for f in FAMILIES if not f.tiny} == {"new", "jina_bert", "jina_embeddings_v3_tasks"}
    assert Cell("albert", "base", "groups") in cells
    assert Cell("deberta-v2", "masked_lm", "convolution") in cells
    assert set(BITWISE) <= set(check_names())
