"""The switch: a router picks one branch for the whole batch, and only that branch runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from flodl.errors import GraphError
from flodl.graph.nodes import check_forward

__all__ = ["Switch"]


class Switch(nn.Module):
    """Runs the branch whose index the router gives.

    The decision is read on the host: it is not differentiable, and `torch.compile` breaks its graph there.

    Args:
        router: gives one index, a tensor of one element.
        branches: modules that take the stream.
    """

    def __init__(self, router: nn.Module, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.router = router
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Any, **references: Any) -> Any:
        """Return the output of the chosen branch.

        Raises:
            GraphError: when the router gives several values, or an index that no branch has.
        """
        choice: Tensor = self.router(x, **references)
        branches = self.branches
        if choice.numel() != 1:
            raise GraphError(
                f"switch: the router gives {choice.numel()} values of shape {tuple(choice.shape)}; one "
                "decision is taken for the whole batch, so it has to give one index",
                shape=tuple(choice.shape),
            )
        index = int(choice.item())
        if not 0 <= index < len(branches):
            raise GraphError(
                f"switch: the router chose branch {index}, but there are {len(branches)} branches, "
                f"numbered 0 to {len(branches) - 1}",
                index=index,
                branches=len(branches),
            )
        return branches[index](x)

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return what the router would not accept, and the branches that need more than the stream."""
        return [
            f"{p}; the router of a switch receives what `using` names" for p in check_forward(self.router, keywords)
        ] + [problem for branch in self.branches for problem in check_forward(branch, ())]
