"""Operations between the products of an encoder layer: dropout, sum and norm; GELU, gates; column sums; gradients.

Dropout is decided by a hash of a seed and of the position (`kept`). Sums are float32 for any dtype of states.
Launching and gradients are `operations`'; importing this file needs Triton.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of(seed, stream):
    """Return two keys of 32 bits, independent for every seed and stream."""
    one, two, _, _ = tl.philox(seed, stream, 0, 0, 0)
    return one, two


@triton.jit
def kept(one, two, position, p):
    """Return True where a value stays: each bit of the hash depends on each bit of position and keys.

    Philox for each position would cost more than all else in a tile.
    """
    x = position.to(tl.uint32, bitcast=True) ^ one
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + two) * 0x846CA68B
    x = (x ^ (x >> 16)) * 0x9E3779B1
    x = x ^ (x >> 15)
    # Its first 24 bits as a fraction of one; integers are compared, which takes fewer instructions.
    return x >= tl.ceil(p * 16777216.0).to(tl.uint32) * 256


@triton.jit
def norm(
    x, residual, weight, bias, seed, out, half, stats, p, eps, stream,
    W: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr, SHIFT: tl.constexpr, CENTER: tl.constexpr,
    PRE: tl.constexpr, FULL: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Write the norm of ``drop(x) + residual`` in half precision, and with ``FULL`` a second result.

    The second result is the norm in the dtype of ``out``; with ``PRE`` it is the sum itself, as a layer that normalises
    before its parts hands it on. ``CENTER`` subtracts the mean (layer norm, else root mean square), ``SHIFT`` adds a
    bias, ``STATS`` keeps mean and 1/deviation for the backward pass.
    """
    row = tl.program_id(0)
    # Four numbers of a thread are adjacent: float32 is then read and written 16 bytes at a time, with no
    # exchange between threads before writing half precision.
    cols = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    real = cols < W
    at = row.to(tl.int64) * W + cols
    # All loads are issued before the first wait.
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    other = tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    gain = tl.load(weight + cols, mask=real, other=0.0).to(tl.float32)
    if SHIFT:
        shift = tl.load(bias + cols, mask=real, other=0.0).to(tl.float32)
    if DROPOUT:
        one, two = keys_of(tl.load(seed), stream)
        value = tl.where(kept(one, two, row * W + cols, p), value * (1.0 / (1.0 - p)), 0.0)
    value += other
    mean = 0.0
    apart = value
    if CENTER:
        mean = tl.sum(value, 0) / W
        apart = tl.where(real, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / W + eps)
    found = apart * scale * gain
    if SHIFT:
        found += shift
    if FULL:
        tl.store(out + at, (value if PRE else found).to(out.dtype.element_ty), mask=real)
    tl.store(half + at, found.to(half.dtype.element_ty), mask=real)
    if STATS:
        tl.store(stats + 2 * row, mean)
        tl.store(stats + 2 * row + 1, scale)


@triton.jit
def norm_backward(
    d_out, d_half, x, residual, weight, stats, seed, d_residual, d_x, parts, rows, p, stream,
    W: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr, CENTER: tl.constexpr, PRE: tl.constexpr,
    FULL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ``x`` and ``residual``, and partial sums for gain, shift and ``x``'s bias."""
    pid, step = tl.program_id(0), tl.num_programs(0)
    cols = tl.max_contiguous(tl.arange(0, BLOCK), 4)  # as in `norm`
    real = cols < W
    gain = tl.load(weight + cols, mask=real, other=0.0)
    if DROPOUT:
        one, two = keys_of(tl.load(seed), stream)
        raised = 1.0 / (1.0 - p)
    d_gain = tl.zeros([BLOCK], tl.float32)
    d_shift = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    for row in range(pid, rows, step):
        at = tl.cast(row, tl.int64) * W + cols
        value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        other = tl.load(residual + at, mask=real, other=0.0)
        grad = tl.zeros([BLOCK], tl.float32)
        if FULL:
            full = tl.load(d_out + at, mask=real, other=0.0)
            if not PRE:
                grad += full
        if HALF:
            grad += tl.load(d_half + at, mask=real, other=0.0).to(tl.float32)
        mean = tl.load(stats + 2 * row)
        scale = tl.load(stats + 2 * row + 1)
        if DROPOUT:
            stays = kept(one, two, row * W + cols, p)
            value = tl.where(stays, value * raised, 0.0)
        value += other
        # Beyond the row these are no zeros, but gradient and gain are, and nothing is stored.
        normed = (value - mean) * scale
        d_gain += grad * normed
        d_shift += grad
        grad = grad * gain
        d_sum = grad - normed * (tl.sum(grad * normed, 0) / W)
        if CENTER:
            d_sum -= tl.sum(grad, 0) / W
        d_sum = d_sum * scale
        if FULL and PRE:
            d_sum += full
        tl.store(d_residual + at, d_sum, mask=real)
        if DROPOUT:
            d_sum = tl.where(stays, d_sum * raised, 0.0)
        d_sum = d_sum.to(d_x.dtype.element_ty)
        tl.store(d_x + at, d_sum, mask=real)
        d_bias += d_sum.to(tl.float32)
    to = parts + pid * (3 * W) + cols
    tl.store(to, d_gain, mask=real)
    tl.store(to + W, d_shift, mask=real)
    tl.store(to + 2 * W, d_bias, mask=real)


@triton.jit
def gelu(x, TANH: tl.constexpr):
    """Return the GELU, by the error function or by its tanh form."""
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _below(x):
    """Return the share of the normal distribution below ``x``.

    The logarithm of the share of the nearer side is nearly a parabola. Seven powers, fitted up to 6, give that share to
    four millionths of itself, which ``1 + erf`` loses where it is small; further out they fall faster than it does.
    """
    far = tl.abs(x)
    log = -1.83481e-06 * far + 6.15982619e-05
    log = (log * far - 0.000930524569) * far + 0.0085078897
    log = (log * far - 0.0539600663) * far - 0.458464397
    share = tl.exp2((log * far - 1.15125104) * far - 0.999995295)
    return tl.where(x < 0.0, share, 1.0 - share)


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr):
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        share = 1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner))
        return share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return _below(x) + x * 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)


@triton.jit
def activate(x, out, total, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """Write the GELU of each number."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < total
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    found = gelu(value, TANH) if TANH else value * _below(value)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=there)


@triton.jit
def gate(x, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr, SILU: tl.constexpr, TANH: tl.constexpr):
    """Write the activation of the first half of each row of ``x``, ``(rows, 2*width)``, times the second half.

    Between the two it is rounded, as with separate operations.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = (row < rows)[:, None] & (cols < width)[None, :]
    opened = row.to(tl.int64)[:, None] * (2 * width) + cols[None, :]
    value = tl.load(x + opened, mask=there, other=0.0).to(tl.float32)
    raised = tl.load(x + opened + width, mask=there, other=0.0).to(tl.float32)
    value = value / (1.0 + tl.exp(-value)) if SILU else gelu(value, TANH)
    kind = out.dtype.element_ty
    value = (value.to(kind).to(tl.float32) * raised).to(kind)
    tl.store(out + row.to(tl.int64)[:, None] * width + cols[None, :], value, mask=there)


@triton.jit
def column_sums(
    d_out, x, d_x, parts, rows, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, GELU: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Write each program's partial column sums; with ``GELU`` those of GELU's gradient, and the gradient."""
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
