"""Scaled dot-product attention over a layout: the one computation that mixes tokens.

Decides which kernel runs for which layout, and repeats the arithmetic of the reference
implementation operation by operation if requested. Knows heads and widths; leaves projections
to its own small module and everything else to the encoder.

Shapes in this file: B batch, S tokens of a row, T tokens in all, N heads, H width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.errors import ConfigError, nearest
from flodl_hf.nn.joined_tensors import products
from flodl_hf.nn.layout import Layout, Packed
from flodl_hf.nn.positions import Rotary

# "fast" is a family's alternative to the reference arithmetic; without one, it is "sdpa".
IMPLEMENTATIONS = ("sdpa", "eager", "fast")

Bias = Callable[[int, int, torch.dtype, torch.device], Tensor]
"""``bias(texts, length, dtype, device)`` is added to scores, ``(texts or 1, N or 1, length, length)``."""
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float, float], Tensor]
"""``kernel(q, k, v, mask, bias, dropout, scale)`` is what `fused` is: ``(B, N, S, H)`` each."""


def check_implementation(name: str) -> str:
    """Return the name of an attention implementation if it exists.

    Raises:
        ConfigError: it does not.
    """
    if name not in IMPLEMENTATIONS:
        hint = nearest(name, IMPLEMENTATIONS) if isinstance(name, str) else ""
        raise ConfigError(
            f"attention={name!r}{hint}; expected one of {', '.join(IMPLEMENTATIONS)}", problems=["attention"]
        )
    return name


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection (Vaswani et al. 2017, section 3.2).

    Args:
        hidden_size: width of a token's state.
        num_heads: heads; divides ``hidden_size``.
        attention_dropout: probability of dropping a weight, in [0, 1).
        hidden_dropout: probability of dropping an output value, in [0, 1).
        implementation: "sdpa" for torch's fused kernels, "eager" for the plain products.
        bias: whether projections add a bias.
        kv_heads: heads of keys and values, each of which serves several of queries; None for one each.
        window: how many tokens to each side a token attends to; None for all.
        rotary: turns queries and keys by their places; None for none.
        scale_first: whether queries are scaled before they are turned rather than scores after; equal but for rounding.
        joined: whether the reference has one matrix for query, key and value.
        fused: whether the reference has fused kernels. Without them "sdpa" repeats its plain products, with scores
            that are divided rather than multiplied, and "fast" takes fused kernels.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention_dropout: float,
        hidden_dropout: float,
        implementation: str = "sdpa",
        *,
        bias: bool = True,
        kv_heads: int | None = None,
        window: int | None = None,
        rotary: Rotary | None = None,
        scale_first: bool = False,
        joined: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.joined = joined
        self.scale_first = scale_first
        self.fused = fused
        self.num_heads = num_heads
        self.kv_heads = kv_heads or num_heads
        self.window = window
        self.attention_dropout = attention_dropout
        self.implementation = implementation
        self.seen: tuple[list[Tensor], ...] = ()  # where eager attention leaves its weights while somebody looks
        of_keys = hidden_size // num_heads * self.kv_heads
        self.query = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.key = nn.Linear(hidden_size, of_keys, bias=bias)
        self.value = nn.Linear(hidden_size, of_keys, bias=bias)
        self.rotary = rotary
        self.output = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = nn.Dropout(hidden_dropout)
        self.prefix: Any = None  # what makes keys and values to add before each text's (`flodl_hf.nn.prompts`)

    def forward(self, hidden: Tensor, layout: Layout, bias: Bias | None = None) -> Tensor:
        """Return the attended states, shaped like ``hidden``: ``(B, S, hidden)`` or ``(T, hidden)``."""
        if self.joined:
            query, key, value = products(hidden, self.query, self.key, self.value)
        else:
            query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        return self.dropout(self.output(self.mixed(query, key, value, layout, bias)))

    def mixed(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias | None = None, *,
        fast: bool = False, placed: bool = False, kernel: Kernel | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mixed values of projected states, ``(..., N*H)``, heads side by side.

        Args:
            query: ``(..., N*H)``; ``key`` and ``value`` alike, as wide as their heads.
            layout: which tokens belong together.
            bias: added to the scores; None for nothing.
            fast: take fused kernels where ``implementation`` leaves the choice.
            placed: queries and keys know their places already.
            kernel: takes the place of torch's fused attention; None for none.
        """
        scale = None
        if not placed:
            if self.scale_first:
                scale, query = 1.0, query * (query.shape[-1] // self.num_heads) ** -0.5
            if self.rotary is not None:
                query, key = self.rotary(query, layout, self.num_heads), self.rotary(key, layout, self.kv_heads)
                if self.rotary.values:
                    value = self.rotary(value, layout, self.kv_heads)
        chosen = self.implementation
        plain = chosen == "eager" or (chosen == "sdpa" and not self.fused and not fast)
        return attend(
            query,
            key,
            value,
            layout,
            num_heads=self.num_heads,
            kv_heads=self.kv_heads,
            bias=bias,
            window=self.window,
            dropout=self.attention_dropout if self.training else 0.0,
            implementation="eager" if plain else "sdpa",
            scale=scale,
            divides=not self.fused,
            seen=self.seen,
            lead=None if self.prefix is None else self.prefix.keys_and_values(),
            kernel=kernel,
        )

    def mixed_first(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias | None) -> Tensor:
        """Return what `mixed` gives each text's first token, ``(texts, N*H)``, without positions; for inference.

        Args:
            query: of first tokens alone, ``(texts, N*H)``.
            key: of all tokens; ``value`` alike.
            layout: which tokens belong together.
            bias: added to the scores; None for nothing.
        """
        parts: list[Tensor] = []
        done = 0
        for keep, (keys, values) in layout.rows(key, value):
            texts, length = keys.shape[:2]
            q = query[done : done + texts].view(texts, 1, self.num_heads, -1).transpose(1, 2)
            k = keys.view(texts, length, self.kv_heads, -1).transpose(1, 2)
            v = values.view(texts, length, self.kv_heads, -1).transpose(1, 2)
            mask = None if keep is None else keep[:, None, None, :]
            if self.window is not None and self.window < length - 1:
                near = torch.arange(length, device=key.device) <= self.window
                mask = near.expand(texts, 1, 1, length) if mask is None else mask & near
            if bias is not None:
                mask = _added(mask, bias(texts, length, q.dtype, q.device)[..., :1, :])
            grouped = self.kv_heads != self.num_heads
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped))
            done += texts
        if done < len(query):  # slots without tokens
            parts.append(parts[0].new_zeros(len(query) - done, *parts[0].shape[1:]))
        return torch.cat(parts).view(query.shape)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    num_heads: int,
    kv_heads: int | None = None,
    bias: Bias | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    implementation: str = "sdpa",
    scale: float | None = None,
    divides: bool = False,
    seen: Sequence[list[Tensor]] = (),
    lead: tuple[Tensor, Tensor] | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Return ``softmax(q k^T / sqrt(H) + bias) v`` within each text, all heads side by side.

    Args:
        query: ``(B, S, N*H)`` for `Padded`, ``(T, N*H)`` for `Packed`; ``key`` and ``value`` alike, as wide as
            their heads.
        layout: which tokens belong together.
        num_heads: N.
        kv_heads: heads of keys and values; None for N.
        bias: added to the scores; None for nothing.
        window: how many tokens to each side a token attends to; None for all.
        dropout: probability of dropping an attention weight; 0 in evaluation.
        implementation: "sdpa" or "eager".
        scale: what scores are multiplied by; None for ``1 / sqrt(H)``.
        divides: eager scores are divided by ``sqrt(H)`` instead, which rounds differently.
        seen: each takes the weights of eager attention, ``(B, N, S, S)``.
        lead: further keys and values that every token of a text attends to, ``(count, N*H)`` each, as wide as their
            heads; with neither bias nor window.
        kernel: takes the place of torch's fused attention; None for none.
    """
    assert lead is None or (bias is None and window is None)
    kv_heads = kv_heads or num_heads
    width = query.shape[-1] // num_heads
    factor = width**-0.5 if scale is None else scale
    if isinstance(layout, Packed) and implementation == "sdpa" and bias is None and lead is None and query.is_cuda:
        q, k, v = (x.view(x.shape[0], n, -1) for x, n in ((query, num_heads), (key, kv_heads), (value, kv_heads)))
        # Kernels refuse a longest text that is longer than all tokens.
        ends, longest = (layout.offsets,) * 2, (min(layout.max_length, q.shape[0]),) * 2
        if q.dtype in (torch.float16, torch.bfloat16) and width <= 256 and width % 8 == 0:
            # The operator that `torch.nn.attention.varlen` calls, which has no dropout and costs more to launch.
            flash = torch.ops.aten._flash_attention_forward
            near = {} if window is None else {"window_size_left": window, "window_size_right": window}
            mixed = flash(q, k, v, *ends, *longest, dropout, False, False, scale=factor, **near)[0]
            return mixed.reshape(query.shape)
        if q.dtype == torch.float32 and width % 4 == 0 and window is None and kv_heads == num_heads:
            efficient = torch.ops.aten._efficient_attention_forward
            learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            x = (q[None], k[None], v[None], None, *ends, *longest, dropout, 0, learns)
            return efficient(*x, scale=factor)[0][0].reshape(query.shape)
    eager = partial(_eager, divisor=math.sqrt(width) if divides else None, seen=seen)
    mix = eager if implementation == "eager" else kernel or fused

    def rows(keep: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q = query.view(*query.shape[:-1], num_heads, -1).transpose(1, 2)
        k = key.view(*key.shape[:-1], kv_heads, -1).transpose(1, 2)
        v = value.view(*value.shape[:-1], kv_heads, -1).transpose(1, 2)
        if lead is not None:
            k, v = (
                torch.cat(
                    [own.to(x.dtype).view(-1, kv_heads, x.shape[-1]).transpose(0, 1).expand(len(x), -1, -1, -1), x], 2
                )
                for own, x in zip(lead, (k, v), strict=True)
            )
            keep = None if keep is None else torch.cat([keep.new_ones(len(keep), len(lead[0])), keep], 1)
        mask = _mask(keep, window, q)
        added = None if bias is None else bias(q.shape[0], q.shape[2], q.dtype, q.device)
        return mix(q, k, v, mask, added, dropout, factor).transpose(1, 2).reshape(query.shape)

    return layout.by_rows(rows, query, key, value)


def _mask(keep: Tensor | None, window: int | None, q: Tensor) -> Tensor | None:
    """Return True where scores are kept, ``(B or 1, 1, S or 1, S)``; None where all are."""
    length = q.shape[2]
    mask = None if keep is None else keep[:, None, None, :]
    # At the window's own length nothing is out of reach; the reference masks nothing below it, and all tokens there.
    # A traced function serves rows of any length.
    if window is not None and (torch.compiler.is_exporting() or window <= length):
        places = torch.arange(length, device=q.device)
        near = ((places[:, None] - places[None, :]).abs() <= window)[None, None]
        mask = near if mask is None else mask & near
        if keep is not None and q.device.type != "cpu":
            # A padding token may have no kept neighbour; it keeps its own position, which nothing reads. On
            # processors such rows are finite by themselves, and as the reference has them.
            mask = mask | torch.eye(length, dtype=torch.bool, device=q.device)
    return mask


def _added(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Return a bias with the dtype's lowest number where scores are not kept: rows without any stay finite."""
    return bias if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min)


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """Return ``softmax(q k^T * scale + bias) v`` by torch's fused attention, ``(B, N, S, H)``."""
    if bias is not None:
        mask = _added(mask, bias)
    grouped = q.shape[1] != k.shape[1]
    if grouped and mask is not None:  # kernels that take a mask have no groups
        k, v, grouped = *_repeated(q, k, v), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values once for every head of queries that shares them."""
    groups = q.shape[1] // k.shape[1]
    return tuple(x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(q.shape[0], -1, *x.shape[2:]) for x in (k, v))  # type: ignore[return-value]


def _eager(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, dropout: float, scale: float, *,
    divisor: float | None = None, seen: Sequence[list[Tensor]] = (),
) -> Tensor:  # fmt: skip
    if q.shape[1] != k.shape[1]:
        k, v = _repeated(q, k, v)
    scores = torch.matmul(q, k.transpose(2, 3))
    scores = scores * scale if divisor is None else scores / divisor
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        # The dtype's lowest number rather than -inf: a row without any real token stays finite.
        lowest = torch.finfo(scores.dtype).min
        scores = scores + torch.where(mask, torch.zeros((), dtype=scores.dtype, device=scores.device), lowest)
    weights = F.dropout(F.softmax(scores, dim=-1), p=dropout, training=dropout > 0.0)
    for taker in seen:
        taker.append(weights)
    return torch.matmul(weights, v)
