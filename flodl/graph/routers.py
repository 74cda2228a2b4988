"""Routers for gates, selectors for switches, conditions for loops, and small modules for chains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from flodl.errors import GraphError


class _Linear(nn.Module):
    """A linear layer with one output for each expert or branch.

    Args:
        in_features: width of the input.
        count: number of experts or branches.
    """

    def __init__(self, in_features: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, count)


class SoftmaxRouter(_Linear):
    """Weights that sum to one: a linear layer and a softmax.

    Args:
        in_features: width of the input.
        count: number of experts.
    """

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        """Return weights ``(..., count)``; references are added to the input first."""
        return torch.softmax(self.linear(_added(x, references)), dim=-1)


class SigmoidRouter(_Linear):
    """Independent weights between 0 and 1: a linear layer and a sigmoid.

    Args:
        in_features: width of the input.
        count: number of experts.
    """

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        """Return weights ``(..., count)``, not normalised; references are added to the input first."""
        return torch.sigmoid(self.linear(_added(x, references)))


class FixedSelector(nn.Module):
    """Always the same branch.

    Args:
        index: the branch, counted from 0.

    Raises:
        GraphError: ``index`` is negative.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        if index < 0:
            raise GraphError(f"FixedSelector: found index {index}, expected 0 or more", index=index)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """Return the index, a tensor of one element."""
        return torch.full((1,), self.index, dtype=torch.long, device=x.device)


class ArgmaxSelector(_Linear):
    """The branch with the largest logit, decided once for the whole batch.

    The logits are averaged over every dimension but the last, so the index always names a branch, and a
    batch of one row gets the branch of that row.

    Args:
        in_features: width of the input.
        count: number of branches.
    """

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        """Return the index, a tensor of one element; references are added to the input first."""
        logits = self.linear(_added(x, references))
        return logits.reshape(-1, logits.shape[-1]).mean(dim=0).argmax().reshape(1)


class Reshape(nn.Module):
    """Reshapes its input.

    Args:
        shape: the target shape; one size may be -1.
    """

    def __init__(self, *shape: int | Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(size for part in shape for size in ([part] if isinstance(part, int) else part))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` in the target shape."""
        return x.reshape(self.shape)


class GaussianBlur(nn.Module):
    """Blurs images with a Gaussian kernel; the size is unchanged and edges are reflected.

    Args:
        sigma: standard deviation in pixels.
        kernel_size: odd number of pixels; 3 sigma to both sides by default.

    Raises:
        GraphError: a sigma of 0 or less, or an even kernel size.
    """

    weights: Tensor

    def __init__(self, sigma: float, kernel_size: int | None = None) -> None:
        super().__init__()
        size = 2 * math.ceil(3 * sigma) + 1 if kernel_size is None else kernel_size
        if not sigma > 0 or size < 1 or size % 2 == 0:
            raise GraphError(f"GaussianBlur: found sigma {sigma} and size {size}, expected sigma > 0 and an odd size")
        self.sigma, self.kernel_size = sigma, size
        weights = torch.exp(-0.5 * (torch.arange(size) - size // 2).square() / sigma**2)
        self.register_buffer("weights", weights / weights.sum(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the blurred images, ``(batch, channels, height, width)``."""
        channels, half = x.shape[1], self.kernel_size // 2
        weights = self.weights.to(x.dtype).expand(channels, 1, -1)
        padded = functional.pad(x, (half, half, half, half), mode="reflect")
        rows = functional.conv2d(padded, weights[:, :, None, :], groups=channels)
        return functional.conv2d(rows, weights[:, :, :, None], groups=channels)


class StateAdd(nn.Module):
    """The sum of its input and all references."""

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        """Return ``x`` plus the references."""
        return _added(x, references)


class ThresholdHalt(nn.Module):
    """Ends a loop when the largest element of the state exceeds a threshold.

    The decision is read on the host, so it has no gradient and `torch.compile` breaks its graph there.

    Args:
        threshold: in the units of the state.
    """

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """Return ``max(x) - threshold``, a scalar."""
        return x.max() - self.threshold


class LearnedHalt(nn.Module):
    """Ends a loop when a linear layer of the first row is positive.

    The decision has no gradient. Train the weights by a separate loss on the output of this module.

    Args:
        dim: width of the state's last dimension.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.read = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit for each row, ``(..., 1)``; a loop reads the first."""
        return self.read(x)


def _added(x: Tensor, references: dict[str, Tensor]) -> Tensor:
    for value in references.values():
        x = x + value
    return x
