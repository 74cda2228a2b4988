"""Triton kernels of a training step's encoder layers: attention among short texts, and what lies between products.

Attention walks over blocks of tokens, as in `flodl_hf.runtime.kernels`: a block of queries meets the keys from the
first token of its first text to the last token of its last one. Its backward recomputes weights from the logarithms
of row sums (FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691), once for queries and once for keys, so
that nothing is added atomically and a step repeats to the bit.

What is dropped is a hash of a seed and of the place, never a mask in memory. Sums are float32 whatever the states are.
Launching and gradients are `flodl_hf.fused.operations`'s; importing this file needs Triton.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate", "add_parts", "column_sums", "mix", "mix_keys", "mix_queries", "norm", "norm_backward"]

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _keys(seed, stream):
    """Return two keys of 32 bits, independent for every seed and stream."""
    one, two, _, _ = tl.philox(tl.load(seed), stream, 0, 0, 0)
    return one, two


@triton.jit
def _kept(one, two, place, p):
    """Return True where a value stays: each bit of the mix depends on each bit of place and keys."""
    x = place.to(tl.uint32, bitcast=True) ^ one
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + two) * 0x846CA68B
    x = (x ^ (x >> 16)) * 0x9E3779B1
    x = x ^ (x >> 15)
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604645e-08 >= p


# ---- attention -----------------------------------------------------------------------------------------


@triton.jit
def _block(places, ends, tokens, B: tl.constexpr):
    """Return a block's tokens, where their texts begin and end, and the tokens from the first to the last of these."""
    rows = tl.program_id(0) * B + tl.arange(0, B)
    live = rows < tokens
    start = rows - tl.load(places + rows, mask=live, other=0).to(tl.int32)
    end = tl.load(ends + rows, mask=live, other=0)
    low = tl.min(tl.where(live, start, tokens), 0)
    high = tl.max(end, 0)
    return rows, live, start, end, low, high


@triton.jit
def mix(
    qkv, places, ends, seed, out, lse, tokens, stride, scale, p, stream,
    N: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write the mixed values ``(tokens, N*H)`` and the base-2 logarithm of each row's sum ``(N, tokens)``."""
    head = tl.program_id(1)
    rows, live, start, end, low, high = _block(places, ends, tokens, Q)
    cols = tl.arange(0, H)
    base = qkv + head * H
    if DROPOUT:
        one, two = _keys(seed, stream + head)
    q = tl.load(base + rows[:, None] * stride + cols[None, :], mask=live[:, None], other=0.0)
    most = tl.full([Q], float("-inf"), tl.float32)
    total = tl.zeros([Q], tl.float32)
    mixed = tl.zeros([Q, H], tl.float32)
    for at in range(low, high, K):
        keys = at + tl.arange(0, K)
        seen = keys < high
        k = tl.load(base + N * H + keys[:, None] * stride + cols[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scale * _LOG2E)
        own = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
        scores = tl.where(own, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        # A query may meet no key of its own in a block; its largest score is still minus infinity then.
        base_of = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base_of[:, None])
        shrink = tl.exp2(most - base_of)
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            weights = tl.where(_kept(one, two, rows[:, None] * tokens + keys[None, :], p), weights, 0.0)
        v = tl.load(base + 2 * N * H + keys[:, None] * stride + cols[None, :], mask=seen[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        most = now
    if DROPOUT:
        mixed = mixed / (1.0 - p)
    total = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / total[:, None]
    to = out + rows[:, None] * (N * H) + head * H + cols[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=live[:, None])
    tl.store(lse + head * tokens + rows, most + tl.log2(total), mask=live)


@triton.jit
def mix_queries(
    qkv, places, ends, seed, out, lse, d_out, d_qkv, dots, tokens, stride, scale, p, stream,
    N: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the queries into ``d_qkv``, and ``out . d_out`` of each row into ``dots``."""
    head = tl.program_id(1)
    rows, live, start, end, low, high = _block(places, ends, tokens, Q)
    cols = tl.arange(0, H)
    base = qkv + head * H
    if DROPOUT:
        one, two = _keys(seed, stream + head)
    here = rows[:, None] * (N * H) + head * H + cols[None, :]
    q = tl.load(base + rows[:, None] * stride + cols[None, :], mask=live[:, None], other=0.0)
    d_mixed = tl.load(d_out + here, mask=live[:, None], other=0.0)
    mixed = tl.load(out + here, mask=live[:, None], other=0.0)
    dot = tl.sum(d_mixed.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(dots + head * tokens + rows, dot, mask=live)
    sums = tl.load(lse + head * tokens + rows, mask=live, other=0.0)
    d_q = tl.zeros([Q, H], tl.float32)
    for at in range(low, high, K):
        keys = at + tl.arange(0, K)
        seen = keys < high
        k = tl.load(base + N * H + keys[:, None] * stride + cols[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(base + 2 * N * H + keys[:, None] * stride + cols[None, :], mask=seen[:, None], other=0.0)
        own = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
        scores = tl.dot(q, tl.trans(k)) * (scale * _LOG2E)
        weights = tl.where(own, tl.exp2(scores - sums[:, None]), 0.0)
        d_weights = tl.dot(d_mixed, tl.trans(v))
        if DROPOUT:
            kept = _kept(one, two, rows[:, None] * tokens + keys[None, :], p)
            d_weights = tl.where(kept, d_weights / (1.0 - p), 0.0)
        d_scores = weights * (d_weights - dot[:, None])
        d_q += tl.dot(d_scores.to(k.dtype), k)
    to = d_qkv + head * H + rows[:, None] * stride + cols[None, :]
    tl.store(to, (d_q * scale).to(d_qkv.dtype.element_ty), mask=live[:, None])


@triton.jit
def mix_keys(
    qkv, places, ends, seed, lse, d_out, d_qkv, dots, tokens, stride, scale, p, stream,
    N: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values into ``d_qkv``; a block is ``K`` keys, met by ``Q`` queries at a time."""
    head = tl.program_id(1)
    keys, live, start, end, low, high = _block(places, ends, tokens, K)
    cols = tl.arange(0, H)
    base = qkv + head * H
    if DROPOUT:
        one, two = _keys(seed, stream + head)
    k = tl.load(base + N * H + keys[:, None] * stride + cols[None, :], mask=live[:, None], other=0.0)
    v = tl.load(base + 2 * N * H + keys[:, None] * stride + cols[None, :], mask=live[:, None], other=0.0)
    d_k = tl.zeros([K, H], tl.float32)
    d_v = tl.zeros([K, H], tl.float32)
    for at in range(low, high, Q):
        rows = at + tl.arange(0, Q)
        seen = rows < high
        q = tl.load(base + rows[:, None] * stride + cols[None, :], mask=seen[:, None], other=0.0)
        here = rows[:, None] * (N * H) + head * H + cols[None, :]
        d_mixed = tl.load(d_out + here, mask=seen[:, None], other=0.0)
        sums = tl.load(lse + head * tokens + rows, mask=seen, other=0.0)
        dot = tl.load(dots + head * tokens + rows, mask=seen, other=0.0)
        own = (rows[None, :] >= start[:, None]) & (rows[None, :] < end[:, None])
        scores = tl.dot(k, tl.trans(q)) * (scale * _LOG2E)
        weights = tl.where(own, tl.exp2(scores - sums[None, :]), 0.0)
        d_weights = tl.dot(v, tl.trans(d_mixed))
        passed = weights
        if DROPOUT:
            kept = _kept(one, two, rows[None, :] * tokens + keys[:, None], p)
            d_weights = tl.where(kept, d_weights / (1.0 - p), 0.0)
            passed = tl.where(kept, weights / (1.0 - p), 0.0)
        d_v += tl.dot(passed.to(d_mixed.dtype), d_mixed)
        d_scores = weights * (d_weights - dot[None, :])
        d_k += tl.dot(d_scores.to(q.dtype), q)
    to = d_qkv + head * H + keys[:, None] * stride + cols[None, :]
    tl.store(to + N * H, (d_k * scale).to(d_qkv.dtype.element_ty), mask=live[:, None])
    tl.store(to + 2 * N * H, d_v.to(d_qkv.dtype.element_ty), mask=live[:, None])


# ---- between products ----------------------------------------------------------------------------------


@triton.jit
def norm(
    x, residual, weight, bias, seed, out, half, stats, p, eps, stream,
    W: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write the layer norm of ``drop(x) + residual`` in float32 and in ``x``'s dtype, with mean and 1/deviation."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    real = cols < W
    at = row.to(tl.int64) * W + cols
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if DROPOUT:
        one, two = _keys(seed, stream)
        value = tl.where(_kept(one, two, row * W + cols, p), value / (1.0 - p), 0.0)
    value += tl.load(residual + at, mask=real, other=0.0)
    mean = tl.sum(value, 0) / W
    apart = tl.where(real, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / W + eps)
    gain = tl.load(weight + cols, mask=real, other=0.0)
    shift = tl.load(bias + cols, mask=real, other=0.0)
    found = apart * scale * gain + shift
    tl.store(out + at, found, mask=real)
    tl.store(half + at, found.to(half.dtype.element_ty), mask=real)
    tl.store(stats + 2 * row, mean)
    tl.store(stats + 2 * row + 1, scale)


@triton.jit
def norm_backward(
    d_out, d_half, x, residual, weight, stats, seed, d_residual, d_x, parts, rows, p, stream,
    W: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr, FULL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ``x`` and ``residual``, and a part of those of gain, shift and ``x``'s bias."""
    pid, step = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    real = cols < W
    gain = tl.load(weight + cols, mask=real, other=0.0)
    if DROPOUT:
        one, two = _keys(seed, stream)
    d_gain = tl.zeros([BLOCK], tl.float32)
    d_shift = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    for row in range(pid, rows, step):
        at = tl.cast(row, tl.int64) * W + cols
        value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        if DROPOUT:
            kept = _kept(one, two, row * W + cols, p)
            value = tl.where(kept, value / (1.0 - p), 0.0)
        value += tl.load(residual + at, mask=real, other=0.0)
        grad = tl.zeros([BLOCK], tl.float32)
        if FULL:
            grad += tl.load(d_out + at, mask=real, other=0.0)
        if HALF:
            grad += tl.load(d_half + at, mask=real, other=0.0).to(tl.float32)
        mean = tl.load(stats + 2 * row)
        scale = tl.load(stats + 2 * row + 1)
        normed = tl.where(real, (value - mean) * scale, 0.0)
        d_gain += grad * normed
        d_shift += grad
        grad = grad * gain
        d_sum = (grad - (normed * (tl.sum(grad * normed, 0) / W) + tl.sum(grad, 0) / W)) * scale
        tl.store(d_residual + at, d_sum, mask=real)
        if DROPOUT:
            d_sum = tl.where(kept, d_sum / (1.0 - p), 0.0)
        d_sum = tl.where(real, d_sum, 0.0).to(d_x.dtype.element_ty)
        tl.store(d_x + at, d_sum, mask=real)
        d_bias += d_sum.to(tl.float32)
    to = parts + pid * (3 * W) + cols
    tl.store(to, d_gain, mask=real)
    tl.store(to + W, d_shift, mask=real)
    tl.store(to + 2 * W, d_bias, mask=real)


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr):
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        share = 1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner))
        return share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def activate(x, out, total, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """Write the GELU of each number."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < total
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, _gelu(value, TANH).to(out.dtype.element_ty), mask=there)


@triton.jit
def column_sums(
    d_out, x, d_x, parts, rows, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, GELU: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Write each program's part of the sums of columns; with ``GELU`` those of the gradient before it, and it too."""
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < width
    # Kept by row until the end: a sum over rows in every round would make threads wait for each other.
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * width + cols[None, :]
        grad = tl.load(d_out + at, mask=there, other=0.0)
        if GELU:
            value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            grad = (grad.to(tl.float32) * _gelu_slope(value, TANH)).to(d_x.dtype.element_ty)
            tl.store(d_x + at, grad, mask=there)
        total += tl.where(there, grad.to(tl.float32), 0.0)
    tl.store(parts + tl.program_id(0) * width + cols, tl.sum(total, 0), mask=inside)


@triton.jit
def add_parts(parts, out, count, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write the sums of the columns of ``(count, width)``, float32."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < width
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < count)[:, None] & inside[None, :]
        total += tl.load(parts + row[:, None] * width + cols[None, :], mask=there, other=0.0)
    tl.store(out + cols, tl.sum(total, 0), mask=inside)
