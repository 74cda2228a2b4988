"""Routers for gates, selectors for switches, and small modules that chains often need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flodl.errors import GraphError

__all__ = ["ArgmaxSelector", "FixedSelector", "Reshape", "SigmoidRouter", "SoftmaxRouter", "StateAdd"]


class SoftmaxRouter(nn.Module):
    """Weights that sum to one: a linear layer and a softmax.

    Args:
        in_features: width of the input.
        count: number of experts.
    """

    def __init__(self, in_features: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, count)

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        """Return weights ``(..., count)``; references are added to the input first."""
        return torch.softmax(self.linear(_added(x, references)), dim=-1)


class SigmoidRouter(nn.Module):
    """Independent weights between 0 and 1: a linear layer and a sigmoid.

    Args:
        in_features: width of the input.
        count: number of experts.
    """

    def __init__(self, in_features: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, count)

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        """Return weights ``(..., count)``, not normalised; references are added to the input first."""
        return torch.sigmoid(self.linear(_added(x, references)))


class FixedSelector(nn.Module):
    """Always the same branch.

    Args:
        index: the branch, counted from 0.

    Raises:
        GraphError: when ``index`` is negative.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        if index < 0:
            raise GraphError(f"FixedSelector: index is {index}; branches are counted from 0", index=index)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """Return the index, a tensor of one element."""
        return torch.full((1,), self.index, dtype=torch.long, device=x.device)

    def extra_repr(self) -> str:
        """Return the index."""
        return f"index={self.index}"


class ArgmaxSelector(nn.Module):
    """The branch with the largest logit, decided once for the whole batch.

    The logits are averaged over every dimension but the last, so the index always names a branch, and a
    batch of one decides as that row alone would.

    Args:
        in_features: width of the input.
        count: number of branches.
    """

    def __init__(self, in_features: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, count)

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        """Return the index, a tensor of one element; references are added to the input first."""
        logits = self.linear(_added(x, references))
        return logits.reshape(-1, logits.shape[-1]).mean(dim=0).argmax().reshape(1)


class Reshape(nn.Module):
    """Gives its input another shape.

    Args:
        shape: the whole target shape; one size may be -1.
    """

    def __init__(self, *shape: int | Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(size for part in shape for size in ([part] if isinstance(part, int) else part))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` in the target shape."""
        return x.reshape(self.shape)

    def extra_repr(self) -> str:
        """Return the shape."""
        return str(self.shape)


class StateAdd(nn.Module):
    """The sum of its input and of every reference; the identity when there is none."""

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        """Return ``x`` plus the references."""
        return _added(x, references)


def _added(x: Tensor, references: dict[str, Tensor]) -> Tensor:
    for value in references.values():
        x = x + value
    return x
