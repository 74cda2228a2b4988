"""Mean squared error, Pearson and Spearman correlation of predicted numbers.

Sums have double precision and are merged by the rule of Chan, Golub and LeVeque ("Updating formulae and a pairwise
algorithm for computing sample variances", 1979), so that large means and many batches do not lose digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flodl.errors import DataError
from flodl.metrics.metric import Sums

MAX_VALUES = 5_000_000
"""Samples of a rank correlation. A correlation of a part of the samples would look like the correlation of all."""


def _columns(predictions: Tensor, labels: Tensor, metric: str) -> tuple[Tensor, Tensor]:
    x, y = predictions.detach().reshape(-1), labels.detach().reshape(-1)
    if x.numel() != y.numel():
        raise DataError(
            f"{metric}: found {x.numel()} predictions for {y.numel()} labels, expected one for each",
            predictions=x.numel(),
            labels=y.numel(),
        )
    return x.double(), y.to(x.device).double()


class SquaredError(Sums):
    """Mean squared and mean absolute error: ``mse``, ``rmse``, ``mae`` and ``count``."""

    def __init__(self) -> None:
        super().__init__(3, dtype=torch.float64, key="sums")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add a batch of numbers, any shape, as many predictions as labels."""
        x, y = _columns(predictions, labels, "SquaredError")
        d = x - y
        count = torch.full((), float(d.numel()), dtype=torch.float64, device=d.device)
        self._add(torch.stack([(d * d).sum(), d.abs().sum(), count]))

    def compute(self) -> dict[str, float]:
        """Return ``mse``, ``rmse``, ``mae`` and ``count``; NaN if nothing was counted."""
        squares, absolutes, count = self._sums.tolist()
        mse = squares / count if count else math.nan
        return {
            "mse": mse,
            "rmse": math.sqrt(mse),
            "mae": absolutes / count if count else math.nan,
            "count": count,
        }


class Pearson(Sums):
    """Linear correlation of predictions and labels: ``pearson`` and ``count``.

    It is NaN if it is not defined: fewer than two samples, or all predictions or all labels equal.
    """

    def __init__(self) -> None:
        # Count, mean of x, mean of y, and the sums of products of the distances to the means: xx, yy, xy.
        super().__init__(6, dtype=torch.float64, key="moments")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add a batch of numbers, any shape, as many predictions as labels."""
        x, y = _columns(predictions, labels, "Pearson")
        if not x.numel():
            return
        mean_x, mean_y = x.mean(), y.mean()
        dx, dy = x - mean_x, y - mean_y
        count = torch.full((), float(x.numel()), dtype=torch.float64, device=x.device)
        self._add(torch.stack([count, mean_x, mean_y, (dx * dx).sum(), (dy * dy).sum(), (dx * dy).sum()]))

    def _add(self, more: Tensor) -> None:
        mine = self._sums.to(more.device)
        n, m = mine[0], more[0]
        total = n + m
        # Two empty parts must not divide by zero. A branch would wait for the device.
        safe = total.clamp(min=1.0)
        gap = more[1:3] - mine[1:3]
        means = mine[1:3] + gap * (m / safe)
        cross = torch.stack([gap[0] * gap[0], gap[1] * gap[1], gap[0] * gap[1]]) * (n * m / safe)
        self._sums = torch.cat([total[None], means, mine[3:] + more[3:] + cross])

    def compute(self) -> dict[str, float]:
        """Return ``pearson`` and ``count``."""
        count, _, _, xx, yy, xy = self._sums.tolist()
        # The product of two tiny sums may be 0, the product of their roots is not.
        below = math.sqrt(xx) * math.sqrt(yy)
        value = max(-1.0, min(1.0, xy / below)) if below > 0 else math.nan
        return {"pearson": value, "count": count}


class Spearman:
    """Correlation of ranks: ``spearman`` and ``count``. Ties share their mean rank.

    Ranks need all values together, so two numbers for each sample, 16 bytes, are stored on the host.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all values."""
        self._x: list[Tensor] = []
        self._y: list[Tensor] = []
        self._count = 0

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add a batch of numbers, any shape, as many predictions as labels.

        Raises:
            DataError: there are more than ``MAX_VALUES`` samples.
        """
        x, y = _columns(predictions, labels, "Spearman")
        self._keep(x.cpu(), y.cpu())

    def _keep(self, x: Tensor, y: Tensor) -> None:
        count = self._count + x.numel()
        if count > MAX_VALUES:
            raise DataError(
                f"Spearman: found {count} samples, expected at most {MAX_VALUES}. Pearson stores no samples.",
            )
        self._x.append(x)
        self._y.append(y)
        self._count += x.numel()

    def merge(self, other: Spearman) -> None:
        """Add the values of another rank."""
        for x, y in list(zip(other._x, other._y, strict=True)):
            self._keep(x, y)

    def compute(self) -> dict[str, float]:
        """Return ``spearman`` and ``count``; NaN if the correlation is not defined."""
        ranks = Pearson()
        if self._count:
            ranks.update(_ranks(torch.cat(self._x)), _ranks(torch.cat(self._y)))
        return {"spearman": ranks.compute()["pearson"], "count": float(self._count)}

    def state_dict(self) -> dict[str, Any]:
        """Return the values as JSON values, two for each sample."""
        return {
            "x": torch.cat(self._x).tolist() if self._x else [],
            "y": torch.cat(self._y).tolist() if self._y else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the values."""
        self.reset()
        self._keep(torch.tensor(state["x"], dtype=torch.float64), torch.tensor(state["y"], dtype=torch.float64))


def _ranks(values: Tensor) -> Tensor:
    _, group, size = torch.unique(values, return_inverse=True, return_counts=True)
    last = size.cumsum(0).double()
    return (last - (size.double() - 1) / 2)[group]
