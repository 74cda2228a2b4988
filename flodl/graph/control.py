"""Gates, switches and maps: modules that decide which of their parts compute what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flodl.errors import GraphError
from flodl.graph.nodes import check_forward


class Gate(nn.Module):
    """A weighted sum of experts, differentiable in the router and in all experts.

    Args:
        router: returns weights of shape ``(..., experts)`` for an input ``(..., features)``.
        experts: modules that take the same input and return outputs of one shape.
    """

    def __init__(self, router: nn.Module, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return ``sum_k weight_k * expert_k(x)``; leading dimensions of weights and outputs are aligned.

        Raises:
            GraphError: the router does not return one weight for each expert.
        """
        weights = self.router(x, **references)
        experts = self.experts
        if weights.shape[-1] != len(experts):
            raise GraphError(
                f"gate: found {weights.shape[-1]} weights for {len(experts)} experts, expected one for each. "
                "Change the last dimension of the router's output.",
                weights=weights.shape[-1],
                experts=len(experts),
            )
        total: Tensor | None = None
        for weight, expert in zip(weights.split(1, dim=-1), experts, strict=True):
            output = expert(x)
            if output.dim() != weight.dim():
                # The weight of a row is broadcast over all feature dimensions of that row.
                weight = weight.reshape(weight.shape[:-1] + (1,) * (output.dim() - weight.dim() + 1))
            total = output * weight if total is None else total + output * weight
        assert total is not None
        return total

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return the arguments that the router or an expert does not accept."""
        return _check_routed(self.router, self.experts, keywords)


class Switch(nn.Module):
    """Runs the branch that the router selects, one for the whole batch.

    The index is read on the host: it is not differentiable, and `torch.compile` breaks its graph there.

    Args:
        router: returns one index, a tensor of one element.
        branches: modules that take the stream.
    """

    def __init__(self, router: nn.Module, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.router = router
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Any, **references: Any) -> Any:
        """Return the output of the chosen branch.

        Raises:
            GraphError: the router returns several values, or an index without a branch.
        """
        choice: Tensor = self.router(x, **references)
        branches = self.branches
        if choice.numel() != 1:
            raise GraphError(
                f"switch: found {choice.numel()} values of shape {tuple(choice.shape)}, expected one index. "
                "Decide once for the whole batch.",
                shape=tuple(choice.shape),
            )
        index = int(choice.item())
        if not 0 <= index < len(branches):
            raise GraphError(
                f"switch: the router chose branch {index}, expected 0 to {len(branches) - 1}",
                index=index,
                branches=len(branches),
            )
        return branches[index](x)

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return the arguments that the router or a branch does not accept."""
        return _check_routed(self.router, self.branches, keywords)


class MapWhole(nn.Module):
    """Applies its body once to the whole value, all rows together.

    Args:
        body: receives the value, and the map's references unchanged.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return ``body(x)``."""
        return self.body(x, **references)

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return the arguments that the body does not accept."""
        return check_forward(self.body, keywords)

    def structure(self) -> str:
        """Return what identifies the map in a structural hash."""
        return type(self).__name__


class MapRows(MapWhole):
    """Applies its body to each row, as a batch of one."""

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return the outputs concatenated along dimension 0; an input without rows is returned unchanged."""
        rows = [self.body(row, **references) for row in x.split(1)] if x.shape[0] else []
        return torch.cat(rows) if rows else x


class MapSlices(MapWhole):
    """Applies its body to equal slices of the last dimension, as one batch.

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
            GraphError: the input has fewer than two dimensions, or its last one is not divisible.
        """
        if x.dim() < 2 or x.shape[-1] % self.count:
            raise GraphError(
                f"map.slices({self.count}): found shape {tuple(x.shape)}, expected at least two dimensions "
                f"and a last one divisible by {self.count}",
                shape=tuple(x.shape),
                count=self.count,
            )
        leading = x.shape[:-1]
        parts = self.body(x.reshape(-1, x.shape[-1] // self.count), **references)
        return parts.reshape(*leading, self.count * parts.shape[-1])

    def structure(self) -> str:
        """Return what identifies the map in a structural hash."""
        return f"MapSlices({self.count})"


def _check_routed(router: nn.Module, members: Iterable[nn.Module], keywords: tuple[str, ...]) -> list[str]:
    problems = [f"{problem}; `using` feeds the router" for problem in check_forward(router, keywords)]
    return problems + [problem for member in members for problem in check_forward(member, ())]
