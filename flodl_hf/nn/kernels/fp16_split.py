"""Rows of float32 numbers as sums of two fp16 numbers, and the operations between products of such rows.

A float32 number times a power of two is, up to its last two bits, the sum of two fp16 numbers with mantissas of 11
bits each. A product of two such rows is three products of fp16 rows, summed in float32 (Ootomo and Yokota 2022,
https://arxiv.org/abs/2203.03341, with one scale for each row in place of one for all); the omitted part is below
2**-22 of the numbers multiplied. Each row has its own power of two, so that no number is too large for fp16.

Launching is `split_products`'; importing this file needs Triton. Names: W numbers of a row.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from flodl_hf.nn.kernels.rows import gelu


@triton.jit
def _write(value, parts, scales, row, cols, real, W: tl.constexpr, WEIGHT: tl.constexpr):
    """Write a row as ``[low, high, high]``, of a weight ``[high, low, high]``, and what its numbers were divided by."""
    # The largest number lands between 2**12 and 2**14; fp16 ends at 2**16.
    power = tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(value), 0), 1e-30)))
    value = value * tl.exp2(13.0 - power)
    high = value.to(tl.float16)
    low = (value - high.to(tl.float32)).to(tl.float16)
    to = parts + row * (3 * W) + cols
    tl.store(to, high if WEIGHT else low, mask=real)
    tl.store(to + W, low if WEIGHT else high, mask=real)
    tl.store(to + 2 * W, high, mask=real)
    tl.store(scales + row, tl.exp2(power - 13.0))


@triton.jit
def _finished(x, scales, factors, bias, row, cols, real, W: tl.constexpr, BIAS: tl.constexpr):
    """Return a row of products in its true size, with a bias."""
    value = tl.load(x + row * W + cols, mask=real, other=0.0)
    value = value * tl.load(scales + row) * tl.load(factors + cols, mask=real, other=0.0)
    if BIAS:
        value += tl.load(bias + cols, mask=real, other=0.0)
    return value


@triton.jit
def split(x, parts, scales, W: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr):
    """Write each row's parts and its scale."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    real = cols < W
    value = tl.load(x + row * W + cols, mask=real, other=0.0)
    _write(value, parts, scales, row, cols, real, W, WEIGHT)


@triton.jit
def finish(x, scales, factors, bias, W: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """Give products their true size and a bias, in place."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = cols < W
    value = _finished(x, scales, factors, bias, row, cols, real, W, BIAS)
    tl.store(x + row * W + cols, value, mask=real)


@triton.jit
def finish_and_split(
    x, scales, factors, bias, parts, out_scales,
    W: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Write the parts of the GELU of products with their bias."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    real = cols < W
    value = _finished(x, scales, factors, bias, row, cols, real, W, BIAS)
    _write(tl.where(real, gelu(value, TANH), 0.0), parts, out_scales, row, cols, real, W, False)


@triton.jit
def norm_and_split(
    x, scales, factors, bias, residual, weight, shift, total, out, parts, out_scales, eps,
    W: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr, CENTER: tl.constexpr,
    PRE: tl.constexpr,
):  # fmt: skip
    """Write the norm of products with their bias plus ``residual``, and its parts; with ``PRE`` the sum too."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    real = cols < W
    value = _finished(x, scales, factors, bias, row, cols, real, W, BIAS)
    value += tl.load(residual + row * W + cols, mask=real, other=0.0)
    if PRE:
        tl.store(total + row * W + cols, value, mask=real)
    apart = value
    if CENTER:
        apart = tl.where(real, value - tl.sum(value, 0) / W, 0.0)
    value = apart * tl.rsqrt(tl.sum(apart * apart, 0) / W + eps) * tl.load(weight + cols, mask=real, other=0.0)
    if SHIFT:
        value += tl.load(shift + cols, mask=real, other=0.0)
    tl.store(out + row * W + cols, value, mask=real)
    _write(value, parts, out_scales, row, cols, real, W, False)
