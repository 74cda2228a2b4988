"""Conditions for loops: a module whose first output element, when positive, ends the loop.

The decision is read on the host, so no gradient flows through it and `torch.compile` breaks its graph there.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["LearnedHalt", "ThresholdHalt", "says_halt"]


def says_halt(decision: Tensor) -> bool:
    """Return whether the first element of a condition's output is positive."""
    return bool(decision.reshape(-1)[0].item() > 0)


class ThresholdHalt(nn.Module):
    """Halts when the largest element of the state exceeds a threshold.

    Args:
        threshold: in the units of the state. The maximum is compared, not a norm.
    """

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """Return ``max(x) - threshold``, a scalar."""
        return x.max() - self.threshold

    def extra_repr(self) -> str:
        """Return the threshold."""
        return f"threshold={self.threshold}"


class LearnedHalt(nn.Module):
    """Halts when a linear read-out of the state's first row is positive.

    The decision is discrete: the weights receive no gradient through it and are to be trained by a loss of
    their own on this module's output.

    Args:
        dim: width of the state's last dimension.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.read = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit for each row, ``(..., 1)``; a loop looks at the first."""
        return self.read(x)
