"""Where the kernels of disentangled attention run: how far they are from the reference there, on small cases.

`flodl_hf.nn.kernels.self_test` runs these, and decides which differences are accepted.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from flodl_hf.nn.attention.disentangled.fast import attend_fast
from flodl_hf.nn.attention.disentangled.launch import attend_by_kernel
from flodl_hf.nn.attention.disentangled.positions import Relative, RelativePositions
from flodl_hf.nn.attention.disentangled.scores import PositionTables
from flodl_hf.nn.kernels.self_test import LEAST_CAPABILITY, trusted
from flodl_hf.nn.layout.layouts import Packed

# Texts of one tile and of several; near distances and, with 16 buckets, far ones.
CASES = ((37, 5, 1), (150, 33))


@cache
def _able(device: torch.device) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def has_kernel(states: Tensor, num_heads: int, dtype: torch.dtype | None = None) -> bool:
    """Return whether the kernels take ``(..., N*H)`` states: CUDA from Ampere on, Triton there, H from 16 to 128.

    Where they do in principle, the first question computes a small case to see that they do, see
    `flodl_hf.nn.kernels.self_test`.

    Args:
        states: states of the device and width in question.
        num_heads: N.
        dtype: what queries will be; None for what ``states`` is.
    """
    dtype = dtype or states.dtype
    width = states.shape[-1] // num_heads
    able = (
        states.is_cuda
        and dtype in (torch.float16, torch.bfloat16, torch.float32)
        and 16 <= width <= 128
        and _able(states.device)
    )
    if not able or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return able
    return trusted("disentangled", states.device, dtype, width, furthest)


def furthest(device: torch.device, dtype: torch.dtype, width: int) -> tuple[float, str]:
    """Return the largest relative distance of a result or gradient from the reference's in float32, and of what.

    Args:
        device: where.
        dtype: of queries, keys and values.
        width: of a head.
    """
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        return max(_max_error(device, dtype, width, lengths) for lengths in CASES), "attention or a gradient of it"


def _max_error(device: torch.device, dtype: torch.dtype, width: int, lengths: tuple[int, ...]) -> float:
    """Return the largest relative distance of the result and of all gradients."""
    draw = torch.Generator().manual_seed(0)
    tokens, heads, scale = sum(lengths), 2, (3 * width) ** 0.5
    layout = Packed.of(lengths, device)
    hidden = torch.zeros(tokens, heads * width, device=device)
    relative = RelativePositions(heads * width, 16, 16, 64, None).to(device)(hidden, layout)
    assert relative is not None
    rows = relative.table[relative.window].shape[0]
    shapes = [(tokens, heads * width)] * 4 + [(heads, rows, width)] * 2
    *states, direction, pk, pq = (torch.randn(shape, generator=draw).to(device, dtype).float() for shape in shapes)
    inputs = [*states, pk / scale, pq / scale]

    def both(kind: torch.dtype, kernel: bool) -> list[Tensor]:
        given = [x.detach().to(kind).requires_grad_() for x in inputs]
        q, k, v, *tables = given
        if kernel:
            found = attend_by_kernel((q, k, v), layout, PositionTables(*tables), relative, num_heads=heads, scale=scale)
        else:
            found = _reference(q, k, v, PositionTables(*tables), layout, relative, heads, scale)
        return [found, *torch.autograd.grad(found, given, direction.to(found.dtype))]

    pairs = zip(both(dtype, True), both(torch.float32, False), strict=True)
    return max(float((a.detach().float() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: PositionTables,
    layout: Packed,
    relative: Relative,
    heads: int,
    scale: float,
) -> Tensor:
    parts: list[Tensor] = []
    start = 0
    for length in layout.lengths:
        row = slice(start, start + length)
        parts.append(
            attend_fast(
                q[None, row], k[None, row], v[None, row], tables, relative,
                num_heads=heads, scale=scale, keep=None, dropout=0.0,
            )[0]
        )  # fmt: skip
        start += length
    return torch.cat(parts)
