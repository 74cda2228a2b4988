"""What attention adds to its scores by the distance of two tokens, as a table or a slope gives it.

A module here makes a `DistanceBias` once a call, which every layer adds (`flodl_hf.nn.attention`). Shapes: N heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flodl_hf.nn.layout.layouts import Layout


class DistanceBias:
    """Biases added to scores in one call of a model; each length is computed once, for all layers.

    Args:
        values: ``values(distances)`` gives integers, key's place minus query's, the N biases of each.
    """

    def __init__(self, values: Callable[[Tensor], Tensor]) -> None:
        self._values = values
        self._made: dict[tuple[str, str, torch.dtype], Tensor] = {}
        self._along: dict[int, Tensor] = {}
        self._whole: Tensor | None = None

    def __call__(self, texts: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the biases of texts of one length, ``(texts, N, length, length)``."""
        # As text: numbers of a traced function have names and no hash.
        key = (str(texts), str(length), dtype)
        found = self._made.get(key)
        if found is None:
            found = self._among(length, device) if self._whole is None else self._whole[:, :length, :length]
            found = self._made[key] = found.to(dtype).expand(texts, -1, -1, -1)
        return found

    def _among(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        return self._values(places[None, :] - places[:, None]).permute(2, 0, 1)

    def prepare(self, length: int, device: torch.device) -> None:
        """Compute the biases of all texts up to a length now: a layer that is run again must not find them made."""
        self._whole = self._among(length, device)

    def along(self, length: int, device: torch.device) -> Tensor:
        """Return the biases of the distances in texts up to a length, ``(N, 2*length - 1)``, float32."""
        if length not in self._along:
            distances = torch.arange(1 - length, length, device=device)
            self._along[length] = self._values(distances).float().t().contiguous()
        return self._along[length]


class RelativeBias(nn.Module):
    """One table of biases by bucket of distance, for all layers (Raffel et al. 2020, section 2.1).

    Half of the buckets are for tokens before, half for tokens after. In each half the first half has one distance
    each; farther ones share buckets that widen logarithmically.

    Args:
        num_heads: N.
        buckets: that distances are sorted into; even.
        max_distance: the distance from which on all share the last bucket.
        rows: of the table; None for as many as buckets.
    """

    def __init__(self, num_heads: int, buckets: int = 32, max_distance: int = 128, rows: int | None = None) -> None:
        super().__init__()
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Embedding(rows or buckets, num_heads)

    def forward(self, hidden: Tensor, layout: Layout) -> DistanceBias:
        """Return what all layers of this call add."""
        bias = DistanceBias(self._values)
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_exporting():
            bias.prepare(layout.length(hidden), hidden.device)
        return bias

    def _values(self, distances: Tensor) -> Tensor:
        half = self.buckets // 2
        exact = half // 2
        far = distances.abs()
        # The reference's order of operations: which bucket a distance at an edge falls into is decided by rounding.
        share = torch.log(far.float() / exact) / math.log(self.max_distance / exact) * (half - exact)
        wide = (exact + share.to(torch.long)).clamp(max=half - 1)
        return self.table((distances > 0).long() * half + torch.where(far < exact, far, wide))


class SlopedBias(nn.Module):
    """Biases that fall with distance, with a slope per head, in both directions (Press et al. 2021, ALiBi).

    Of N heads, a power of two, head i (from 1) has the slope 2 to the power of -8i/N; further heads have every second
    slope of twice as many.

    Args:
        num_heads: N.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, hidden: Tensor, layout: Layout) -> DistanceBias:
        """Return what all layers of this call add."""
        return DistanceBias(self._values)

    def _values(self, distances: Tensor) -> Tensor:
        whole = 1 << (self.num_heads.bit_length() - 1)
        # On the device from the start: a recorded pass can copy nothing there.
        first = torch.arange(1, whole + 1, device=distances.device, dtype=torch.float32) * (8 / whole)
        rest = torch.arange(self.num_heads - whole, device=distances.device, dtype=torch.float32)
        slopes = torch.exp2(-torch.cat([first, (2 * rest + 1) * (4 / whole)]))
        return distances.abs().float()[..., None] * -slopes
