"""Triton kernels for prediction on CUDA: attention among short texts laid end to end, and sum with layer norm.

Attention here walks over blocks of tokens rather than over texts. A block of queries meets the keys from the
first token of its first text to the last token of its last one, and each query keeps those of its own text: with
texts shorter than a block this is far less work than a block for every text. Triton is imported with this
module, which only a CUDA graph's preparation does.
"""

# pyright: reportGeneralTypeIssues=false, reportMissingImports=false, reportOptionalMemberAccess=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_norm", "mix_short"]


@triton.jit
def _mix(
    qkv, places, ends, out, tokens, stride, scale, N: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * Q + tl.arange(0, Q)
    live = rows < tokens
    start = rows - tl.load(places + rows, mask=live, other=0)
    end = tl.load(ends + rows, mask=live, other=0)
    cols = tl.arange(0, H)
    base = qkv + head * H
    q = tl.load(base + rows[:, None] * stride + cols[None, :], mask=live[:, None], other=0.0)
    low = tl.min(tl.where(live, start, tokens), 0)
    high = tl.max(end, 0)
    most = tl.full([Q], float("-inf"), tl.float32)
    total = tl.zeros([Q], tl.float32)
    mixed = tl.zeros([Q, H], tl.float32)
    for at in range(low, high, K):
        keys = at + tl.arange(0, K)
        seen = keys < high
        k = tl.load(base + N * H + keys[None, :] * stride + cols[:, None], mask=seen[None, :], other=0.0)
        scores = tl.dot(q, k) * scale
        own = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
        scores = tl.where(own, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        # A query may meet no key of its own in a block; its largest score is still minus infinity then.
        base_of = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base_of[:, None])
        kept = tl.exp2(most - base_of)
        v = tl.load(base + 2 * N * H + keys[:, None] * stride + cols[None, :], mask=seen[:, None], other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * kept + tl.sum(weights, 1)
        most = now
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + rows[:, None] * (N * H) + head * H + cols[None, :], mixed.to(out.dtype.element_ty), mask=live[:, None]
    )


def mix_short(qkv: Tensor, places: Tensor, ends: Tensor, num_heads: int) -> Tensor:
    """Return the mixed values of all heads, ``(tokens, N*H)``.

    Args:
        qkv: query, key and value side by side, ``(tokens, 3*N*H)``, fp16 or bf16, H one of 16, 32, 64, 128.
        places: each token's place in its text, ``(tokens,)``, int32.
        ends: index after the last token of each token's text, ``(tokens,)``, int32.
        num_heads: N.
    """
    tokens, width = qkv.shape[0], qkv.shape[1] // (3 * num_heads)
    out = torch.empty(tokens, num_heads * width, dtype=qkv.dtype, device=qkv.device)
    queries = 64
    grid = (triton.cdiv(tokens, queries), num_heads)
    scale = width**-0.5 * 1.4426950408889634  # powers of two are what the device raises fastest
    _mix[grid](qkv, places, ends, out, tokens, qkv.stride(0), scale, num_heads, width, queries, 32, num_warps=4)
    return out


@triton.jit
def _add_norm(a, b, weight, bias, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    real = cols < WIDTH
    x = tl.load(a + row * WIDTH + cols, mask=real, other=0.0).to(tl.float32)
    x += tl.load(b + row * WIDTH + cols, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / WIDTH
    apart = tl.where(real, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / WIDTH + eps)
    gain = tl.load(weight + cols, mask=real, other=0.0).to(tl.float32)
    shift = tl.load(bias + cols, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + cols, (apart * scale * gain + shift).to(out.dtype.element_ty), mask=real)


def add_norm(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of ``a + b``, ``(rows, width)``; both contiguous, sums in float32."""
    rows, width = a.shape
    out = torch.empty_like(a)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](a, b, weight, bias, out, eps, width, block, num_warps=2 if block <= 1024 else 8)
    return out
