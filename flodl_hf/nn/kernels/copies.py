"""Copies of a layer's weights in half precision, in one piece of memory, written by one launch.

torch's operation for many copies reads four bytes at a time and reaches half of a device's bandwidth. Addresses travel
as arguments of the launch, so a recorded graph needs no table of them. Importing this file needs Triton.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of a program, and its warps.
BLOCK, WARPS = 4096, 4


@triton.jit
def copy(tensors, out, SIZES: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Write tensors one after another, each of its programs ``BLOCK`` numbers; ``SIZES`` are their numbers."""
    pid = tl.program_id(0)
    for i in tl.static_range(COUNT):
        size = SIZES[i]
        if (pid >= 0) & (pid * BLOCK < size):
            at = pid * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(tensors[i] + at, mask=at < size).to(out.dtype.element_ty), mask=at < size)
        # Less than nothing after this one's last program: the others take none of it.
        pid -= (size + BLOCK - 1) // BLOCK
        out += size


def copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return all numbers of contiguous tensors, one tensor after another, in another dtype."""
    sizes = tuple(t.numel() for t in tensors)
    out = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    programs = sum(triton.cdiv(size, BLOCK) for size in sizes)
    copy[(programs,)](tuple(tensors), out, sizes, len(sizes), BLOCK, num_warps=WARPS)
    return out
