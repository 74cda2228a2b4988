"""Maps: one body applied to the parts of a value, row by row or slice by slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flodl.errors import GraphError
from flodl.graph.nodes import check_forward

__all__ = ["Map", "MapRows", "MapSlices", "MapWhole"]


class Map(nn.Module):
    """A body that is applied to parts; the kinds of map differ in `forward`.

    Args:
        body: receives each part, and the map's references unchanged.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return what the body would not accept."""
        return check_forward(self.body, keywords)

    def structure(self) -> str:
        """Return what a structural hash has to know beyond the parts."""
        return type(self).__name__


class MapRows(Map):
    """Applies its body to each row, kept as a batch of one."""

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return the outputs concatenated along dimension 0; an input without rows is returned as it is."""
        rows = [self.body(row, **references) for row in x.split(1)] if x.shape[0] else []
        return torch.cat(rows) if rows else x


class MapWhole(Map):
    """Applies its body once, for bodies that treat rows independently."""

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return ``body(x)``."""
        return self.body(x, **references)


class MapSlices(Map):
    """Applies its body to equal slices of the last dimension, all as rows of one batch.

    Args:
        body: takes ``(rows * count, width / count)``.
        count: number of slices.
    """

    def __init__(self, body: nn.Module, count: int) -> None:
        super().__init__(body)
        self.count = count

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return ``(..., count * out)`` for an input ``(..., width)``.

        Raises:
            GraphError: when the input has fewer than two dimensions or its last one is not divisible.
        """
        if x.dim() < 2 or x.shape[-1] % self.count:
            raise GraphError(
                f"map.slices({self.count}): the input has shape {tuple(x.shape)}; it needs at least two "
                f"dimensions and a last one divisible by {self.count}",
                shape=tuple(x.shape),
                count=self.count,
            )
        leading = x.shape[:-1]
        parts = self.body(x.reshape(-1, x.shape[-1] // self.count), **references)
        return parts.reshape(*leading, self.count * parts.shape[-1])

    def structure(self) -> str:
        """Return the kind and the number of slices."""
        return f"MapSlices({self.count})"

    def extra_repr(self) -> str:
        """Return the number of slices."""
        return f"count={self.count}"
