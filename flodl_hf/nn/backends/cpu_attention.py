"""Attention in bfloat16 with scores of float32, for processors that multiply bfloat16 quickly.

torch's fused attention is no faster there in bfloat16 than in float32. Its batched product is, but it rounds its result
to bfloat16, too coarsely for scores: a second product computes the rounding error of the first, and both together
have 16 bits. Inference only.

oneDNN makes kernels for each count of texts and tokens and keeps them, so both are rounded up as rows are
(`flodl_hf.nn.layout.rounded`). Padding has no weight.

Shapes: B texts of S tokens each, N heads of width H.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flodl_hf.nn.attention.dot_product import fused
from flodl_hf.nn.backends.cpu_products import Scratch
from flodl_hf.nn.layout.rounded import rounded

# Tokens of a text below which torch's softmax alone takes as long as its fused attention, and the width of a head
# below which nothing is gained.
_SHORTEST = 16
_NARROWEST = 64
# Scores at a time, 2 MB of float32; a quarter and four times of it took longer.
_SCORES = 1 << 19


class HalfAttention:
    """``softmax(q k^T * scale) v`` in bfloat16, without mask and bias; the rest is left to torch's fused attention.

    Args:
        scratch: where heads and scores are kept.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, dropout: float, scale: float
    ) -> Tensor:
        """Return the mixed values, ``(B, N, S, H)``."""
        texts, heads, length, width = q.shape
        plain = mask is None and bias is None and k.shape == q.shape and q.dtype == torch.bfloat16
        if not plain or length < _SHORTEST or width < _NARROWEST:
            return fused(q, k, v, mask, bias, dropout, scale)
        out = q.new_empty(texts, length, heads, width).transpose(1, 2)
        count = max(1, _SCORES // (heads * length * length))
        for some in (slice(at, at + count) for at in range(0, texts, count)):
            out[some] = self._mixed(q[some], k[some], v[some], scale)
        return out

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        texts, heads, length, width = q.shape
        query, key, value = (self._laid(name, x) for name, x in (("queries", q), ("keys", k), ("values", v)))
        turned, places = key.transpose(1, 2), key.shape[1]
        whole, half = (
            self._scratch.take("scores", len(key) * places, places, dtype).view(-1, places, places)
            for dtype in (torch.float32, torch.bfloat16)
        )
        whole.copy_(torch.bmm(query, turned, out=half))
        whole.sub_(half.baddbmm_(query, turned, alpha=-1)).mul_(scale)
        whole[:, :, length:] = -torch.inf
        half.copy_(whole.softmax(-1))
        return torch.bmm(half, value, out=query).view(-1, heads, places, width)[:texts, :, :length]

    def _laid(self, name: str, x: Tensor) -> Tensor:
        """Return ``(B, N, S, H)`` head after head, ``(B * N, S, H)`` with B and S rounded up by zeros."""
        texts, heads, length, width = x.shape
        count, places = rounded(texts), rounded(length)
        room = self._scratch.take(name, count * heads * places, width, x.dtype).view(count, heads, places, width)
        room[:texts, :, :length] = x
        room[:texts, :, length:] = 0
        room[texts:] = 0
        return room.view(-1, places, width)


@cache
def has_half_attention() -> bool:
    """Return whether torch's batched products keep what `HalfAttention` relies on."""
    # A separate generator, so that the check leaves the random state alone; scores up to 30.
    numbers = torch.arange(3 * 2 * 2 * 18 * 64, dtype=torch.float32).mul_(0.37).sin_()
    q, k, v = numbers.view(3, 2, 2, 18, 64).bfloat16()
    with torch.inference_mode():
        wanted = fused(q.float(), k.float(), v.float(), None, None, 0.0, 1.0)
        found = HalfAttention(Scratch())(q, k, v, None, None, 0.0, 1.0).float()
    return float((found - wanted).norm()) <= 5e-3 * float(wanted.norm())
