"""Result of a check: its evidence, the distance of two tensors, and a verdict on named distances.

Bitwise equality is tested first and reported; a number is the largest difference in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Status = Literal["pass", "fail", "unsupported", "no reference", "not run"]

# Sums in another order: some hundred fp32 additions of numbers near one; larger ones are rounded at their own size.
REORDERED = 1e-5


@dataclass(frozen=True)
class Evidence:
    """Result of one check of one cell.

    Attributes:
        check: name of the check.
        status: one of five words.
        detail: the compared values, or why they were not compared.
        measured: the largest difference; None if nothing is measured.
        where: the first module or tensor that differs.
    """

    check: str
    status: Status
    detail: str
    measured: float | None = None
    where: str | None = None


def gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, in float64."""
    return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().max())


def verdict(check: str, gaps: Mapping[str, float], what: str, bound: float = 0.0) -> Evidence:
    """Return the evidence for named differences, all of which must be within ``bound``."""
    worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else float("inf"), default=None)
    measured = gaps[worst] if worst is not None else 0.0
    good = bool(gaps) and all(each <= bound for each in gaps.values())
    said = "equal to the bit" if measured == 0.0 else f"largest difference {measured:.3g} in {worst}"
    return Evidence(check, "pass" if good else "fail", f"{len(gaps)} {what}, {said}", measured, None if good else worst)
