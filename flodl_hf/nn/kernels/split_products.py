"""Products of float32 rows by three products of fp16 rows, as functions: see `halves`.

A matrix unit rounds sums towards zero, and these errors do not cancel. So the small parts come first, and long
rows are summed in stretches that are added by ordinary sums.

Shapes: T rows, D numbers of a row, N rows of the weight.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flodl_hf.nn.kernels import fp16_split as halves

# Numbers of a row that one product sums up: with 384 a layer's result is about as near to float64's as by float32's own
# products, with 1024 half as near and a fifth faster (one H200).
STRETCH = 384


class Halves(NamedTuple):
    """Rows of float32 numbers as sums of fp16 numbers.

    Attributes:
        parts: ``(T, 3*D)``, fp16.
        scales: divisor of each row, ``(T,)``, powers of two.
    """

    parts: Tensor
    scales: Tensor


def _empty(rows: int, width: int, device: torch.device) -> Halves:
    parts = torch.empty(rows, 3 * width, dtype=torch.float16, device=device)
    return Halves(parts, torch.empty(rows, dtype=torch.float32, device=device))


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8


def split(x: Tensor, *, weight: bool = False) -> Halves:
    """Return rows as parts.

    Args:
        x: ``(T, D)``, float32, contiguous.
        weight: in the order that a product's second factor has.
    """
    rows, width = x.shape
    found = _empty(rows, width, x.device)
    block = triton.next_power_of_2(width)
    halves.split[(rows,)](x, *found, width, block, weight, num_warps=_warps(block))
    return found


def products(x: Halves, weight: Halves) -> Tensor:
    """Return ``x @ weight.T``, ``(T, N)``, float32, still to be multiplied by the scales of both."""
    width = x.parts.shape[1] // 3
    turned = weight.parts.t()
    cuts = [0, *range(2 * width + min(width, STRETCH), 3 * width, STRETCH), 3 * width]
    found = None
    for start, end in pairwise(cuts):
        part, other = x.parts[:, start:end], turned[start:end]
        if not part.is_cuda:
            product = part.float() @ other.float()
            found = product if found is None else found.add_(product)
        elif found is None:
            found = torch.mm(part, other, out_dtype=torch.float32)
        else:
            torch.addmm(found, part, other, out_dtype=torch.float32, out=found)
    assert found is not None
    return found


def finished(x: Tensor, of: Halves, weight: Halves, bias: Tensor | None) -> Tensor:
    """Return products in their true size with a bias, in place.

    Args:
        x: what `products` gave, ``(T, N)``.
        of: the rows that were multiplied.
        weight: the second factor.
        bias: ``(N,)``, float32; None for none.
    """
    rows, width = x.shape
    block = min(1024, triton.next_power_of_2(width))
    halves.finish[(rows, triton.cdiv(width, block))](
        x, of.scales, weight.scales, x if bias is None else bias, width, block, bias is not None, num_warps=4
    )
    return x


def finished_and_split(x: Tensor, of: Halves, weight: Halves, bias: Tensor | None, *, tanh: bool) -> Halves:
    """Return the parts of the GELU of products with their bias; arguments as of `finished`, tanh: GELU's form."""
    rows, width = x.shape
    found = _empty(rows, width, x.device)
    block = triton.next_power_of_2(width)
    halves.finish_and_split[(rows,)](
        x, of.scales, weight.scales, x if bias is None else bias, *found, width, block, bias is not None, tanh,
        num_warps=_warps(block),
    )  # fmt: skip
    return found


def normed_and_split(
    x: Tensor, of: Halves, weight: Halves, bias: Tensor | None, residual: Tensor,
    norm: tuple[Tensor, Tensor | None, float, bool], *, pre: bool,
) -> tuple[Tensor, Tensor, Halves]:  # fmt: skip
    """Return the sum of products, bias and ``residual`` (with ``pre``; else the norm again), its norm, and that split.

    Args:
        x: what `products` gave, ``(T, D)``.
        of: the rows that were multiplied.
        weight: the second factor.
        bias: ``(D,)``, float32; None for none.
        residual: ``(T, D)``, float32, contiguous.
        norm: gain, shift, epsilon, and whether the mean is subtracted.
        pre: the sum is wanted too.
    """
    rows, width = x.shape
    gain, shift, eps, center = norm
    found, out = _empty(rows, width, x.device), torch.empty_like(x)
    total = torch.empty_like(x) if pre else out
    block = triton.next_power_of_2(width)
    halves.norm_and_split[(rows,)](
        x, of.scales, weight.scales, x if bias is None else bias, residual, gain, gain if shift is None else shift,
        total, out, *found, eps, width, block, bias is not None, shift is not None, center, pre,
        num_warps=_warps(block),
    )  # fmt: skip
    return total, out, found
