"""Scaled dot-product attention over a layout: the one computation that mixes tokens.

Decides which kernel runs for which layout, and repeats the arithmetic of the reference
implementation operation by operation where it says so. Knows heads and widths; leaves projections
to its own small module and everything else to the encoder.

Shapes in this file: B batch, S tokens of a row, T tokens in all, N heads, H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.layout import Layout, Packed, Padded

__all__ = ["IMPLEMENTATIONS", "FusedSelfAttention", "SelfAttention", "attend", "equal_runs", "joined"]

# "fast" is what a family has beside the reference arithmetic; where it has nothing, it is "sdpa".
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]

IMPLEMENTATIONS = ("sdpa", "eager", "fast")


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection (Vaswani et al. 2017, section 3.2).

    Args:
        hidden_size: width of a token's state.
        num_heads: heads; divides ``hidden_size``.
        attention_dropout: probability of dropping a weight, in [0, 1).
        hidden_dropout: probability of dropping an output value, in [0, 1).
        implementation: "sdpa" for torch's fused kernels, "eager" for the plain products.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention_dropout: float,
        hidden_dropout: float,
        implementation: str = "sdpa",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_dropout = attention_dropout
        self.implementation = implementation
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the attended states, shaped like ``hidden``: ``(B, S, hidden)`` or ``(T, hidden)``."""
        mixed = attend(
            self.query(hidden),
            self.key(hidden),
            self.value(hidden),
            layout,
            num_heads=self.num_heads,
            dropout=self.attention_dropout if self.training else 0.0,
            implementation=self.implementation,
        )
        return self.dropout(self.output(mixed))

    def fused(self) -> FusedSelfAttention | None:
        """Return the same attention with one product for query, key and value; None where they are not plain."""
        parts = (self.query, self.key, self.value)
        plain = all(type(part) is nn.Linear and part.bias is not None and not part._forward_hooks for part in parts)
        return FusedSelfAttention(self) if plain and type(self) is SelfAttention else None


def joined(*parts: nn.Linear) -> nn.Linear:
    """Return one linear map whose outputs are those of several, side by side; for inference, its weights are copies."""
    found = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), device="meta")
    with torch.no_grad():
        found.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        found.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return found


class FusedSelfAttention(nn.Module):
    """`SelfAttention` for prediction: one product gives query, key and value, and nothing is dropped.

    Args:
        source: where the weights come from; query, key and value are copied, the output projection is shared.
    """

    def __init__(self, source: SelfAttention) -> None:
        super().__init__()
        self.num_heads = source.num_heads
        self.implementation = source.implementation
        self.qkv = joined(source.query, source.key, source.value)
        self.output = source.output

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the attended states, shaped like ``hidden``: ``(B, S, hidden)`` or ``(T, hidden)``."""
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        mixed = attend(
            query, key, value, layout, num_heads=self.num_heads, implementation=self.implementation
        )  # fmt: skip
        return self.output(mixed)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    num_heads: int,
    dropout: float = 0.0,
    implementation: str = "sdpa",
) -> Tensor:
    """Return ``softmax(q k^T / sqrt(H)) v`` within each text, all heads side by side.

    Args:
        query: ``(B, S, N*H)`` for `Padded`, ``(T, N*H)`` for `Packed`; ``key`` and ``value`` alike.
        layout: which tokens belong together.
        num_heads: N.
        dropout: probability of dropping an attention weight; 0 in evaluation.
        implementation: "sdpa" or "eager".
    """
    if isinstance(layout, Padded):
        split = (*query.shape[:-1], num_heads, -1)
        q, k, v = (x.view(split).transpose(1, 2) for x in (query, key, value))
        kernel = _eager if implementation == "eager" else _fused
        return kernel(q, k, v, layout.attention_mask, dropout).transpose(1, 2).reshape(query.shape)
    return _packed(query, key, value, layout, num_heads, dropout, implementation)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=q.shape[-1] ** -0.5)


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    if mask is not None:
        # The dtype's lowest number rather than -inf: a row without any real token stays finite.
        lowest = torch.finfo(scores.dtype).min
        scores = scores + torch.where(mask, torch.zeros((), dtype=scores.dtype, device=scores.device), lowest)
    weights = F.dropout(F.softmax(scores, dim=-1), p=dropout, training=dropout > 0.0)
    return torch.matmul(weights, v)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Packed,
    num_heads: int,
    dropout: float,
    implementation: str,
) -> Tensor:
    split = (query.shape[0], num_heads, -1)
    q, k, v = (x.view(split) for x in (query, key, value))
    if implementation == "sdpa" and _has_flash(q):
        return _flash(q, k, v, layout, dropout).reshape(query.shape)
    if implementation == "sdpa" and _has_efficient(q):
        return _efficient(q, k, v, layout, dropout).reshape(query.shape)
    kernel = _eager if implementation == "eager" else _fused
    if not layout.lengths:
        return _gathered(q, k, v, layout, dropout, kernel).reshape(query.shape)
    parts: list[Tensor] = []
    for start, count, length in equal_runs(layout.lengths):
        rows = slice(start, start + count * length)
        qs, ks, vs = (x[rows].view(count, length, num_heads, -1).transpose(1, 2) for x in (q, k, v))
        parts.append(kernel(qs, ks, vs, None, dropout).transpose(1, 2).reshape(count * length, -1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _has_flash(q: Tensor) -> bool:
    width = q.shape[-1]
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and width <= 256 and width % 8 == 0


def _has_efficient(q: Tensor) -> bool:
    return q.is_cuda and q.dtype == torch.float32 and q.shape[-1] % 4 == 0


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: Packed, dropout: float) -> Tensor:
    # What `torch.nn.attention.varlen` calls, which has no dropout of its own and costs more to launch.
    ends, longest = layout.offsets, _longest(q, layout)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, ends, ends, longest, longest, dropout, False, False, scale=q.shape[-1] ** -0.5
    )[0]


def _efficient(q: Tensor, k: Tensor, v: Tensor, layout: Packed, dropout: float) -> Tensor:
    ends, longest = layout.offsets, _longest(q, layout)
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, ends, ends, longest, longest, dropout, 0, wants_gradient,
        scale=q.shape[-1] ** -0.5,
    )[0][0]  # fmt: skip


def _longest(q: Tensor, layout: Packed) -> int:
    """Return a bound of a text's tokens that is none of all tokens: kernels refuse what is larger."""
    return min(layout.max_length, q.shape[0])


def _gathered(q: Tensor, k: Tensor, v: Tensor, layout: Packed, dropout: float, kernel: Kernel) -> Tensor:
    """Return the mix by laying texts out in rows and back: shapes from the bucket alone, on any device."""
    at, real = layout.grid()
    # A slot without tokens would have no weight to normalise; it sees its first place and nothing reads it.
    mask = (real | (torch.arange(at.shape[1], device=at.device) == 0))[:, None, None, :]
    qs, ks, vs = (x[at].transpose(1, 2) for x in (q, k, v))
    rows = kernel(qs, ks, vs, mask, dropout).transpose(1, 2)
    text = torch.searchsorted(
        layout.offsets[1:], torch.arange(q.shape[0], device=q.device, dtype=torch.int32), right=True
    )
    return rows[text, layout.positions(text)]


def equal_runs(lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(first token, texts, tokens each)`` for every run of neighbouring texts of one length.

    One attention call serves a run; sorting texts by length makes the runs long.
    """
    start = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        yield start, count, length
        start += count * length
