"""Whether the kernels of disentangled attention give on a device what the reference arithmetic gives there.

Triton compiles at run time, for devices and with compilers that we have never seen. So the first call of each
dtype and head width computes a small case both ways, forward and backward, and a device on which they part (or
nothing compiles) goes on with torch's own operations, with one warning.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from flodl_hf.disentangled.positions import Relative, RelativePositions
from flodl_hf.disentangled.scores import PositionTables
from flodl_hf.layout import Packed

__all__ = ["kernels_agree"]

# Texts of one tile and of several; near distances and, with 16 buckets, far ones.
CASES = ((37, 5, 1), (150, 33))
NEAREST = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@cache
def kernels_agree(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether forward and backward for heads of this width agree with the reference; asked once a process.

    Args:
        device: where.
        dtype: of queries, keys and values.
        width: of a head.
    """
    current = torch.cuda.device(device if device.type == "cuda" else -1)
    try:
        with (
            current,
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            apart = max(_apart(device, dtype, width, lengths) for lengths in CASES)
        found = "" if apart <= NEAREST[dtype] else f"they part from the reference by {apart:.1e}"
    except Exception as fault:  # whatever a compiler may raise: torch's operations do the same work
        found = f"{type(fault).__name__}: {fault}".splitlines()[0]
    if found:
        warnings.warn(
            f"disentangled attention: the kernels are not used on {device} in {dtype} ({found}); torch's operations "
            "do the work, more slowly",
            stacklevel=2,
        )
    return not found


def _apart(device: torch.device, dtype: torch.dtype, width: int, lengths: tuple[int, ...]) -> float:
    """Return the largest relative distance of the result and of all gradients."""
    from flodl_hf.disentangled.launch import attend_by_kernel

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
    from flodl_hf.disentangled.fast import attend_fast

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
