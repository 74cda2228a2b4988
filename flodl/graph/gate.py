"""The gate: every expert runs, and a router says how much each counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from flodl.errors import GraphError
from flodl.graph.nodes import check_forward

__all__ = ["Gate"]


class Gate(nn.Module):
    """A weighted sum of experts, differentiable in the router and in all of them.

    Args:
        router: gives weights of shape ``(..., experts)`` for an input ``(..., features)``.
        experts: modules that take the same input and return outputs of one shape.
    """

    def __init__(self, router: nn.Module, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return ``sum_k weight_k * expert_k(x)``; the weights' leading dimensions align with the outputs'.

        Raises:
            GraphError: when the router does not give one weight for each expert.
        """
        weights = self.router(x, **references)
        experts = self.experts
        if weights.shape[-1] != len(experts):
            raise GraphError(
                f"gate: the router gives {weights.shape[-1]} weights for {len(experts)} experts; "
                f"its last dimension has to be {len(experts)}",
                weights=weights.shape[-1],
                experts=len(experts),
            )
        total: Tensor | None = None
        for weight, expert in zip(weights.split(1, dim=-1), experts, strict=True):
            output = expert(x)
            if output.dim() != weight.dim():
                # A weight for each row has to stretch over all feature dimensions of that row.
                weight = weight.reshape(weight.shape[:-1] + (1,) * (output.dim() - weight.dim() + 1))
            total = output * weight if total is None else total + output * weight
        assert total is not None
        return total

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return what the router would not accept, and the experts that need more than the stream."""
        return [
            f"{p}; the router of a gate receives what `using` names" for p in check_forward(self.router, keywords)
        ] + [problem for expert in self.experts for problem in check_forward(expert, ())]
