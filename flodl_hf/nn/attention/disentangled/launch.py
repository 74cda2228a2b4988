"""Calls of the kernels of disentangled attention in this package's terms, and the test where they may run.

The operator that they make up, with its gradients, is `operator`'s and is registered at the first call.

Shapes: B texts, S tokens of a row, T tokens in all, N heads, H width of a head, R table rows that a call reaches.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from flodl_hf.nn.attention.disentangled.positions import Relative, RelativePositions
from flodl_hf.nn.attention.disentangled.scores import PositionTables, attend_fast
from flodl_hf.nn.kernels.self_test import LEAST_CAPABILITY, trusted
from flodl_hf.nn.layout.layouts import Layout, Packed


def attend_by_kernel(
    states: tuple[Tensor, ...],
    layout: Layout,
    tables: PositionTables | None,
    relative: Relative | None,
    *,
    num_heads: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Return the mixed values, ``(B, S, N*H)`` or ``(T, N*H)``; rows of padding contain arbitrary numbers.

    Args:
        states: queries, keys and values, ``(B, S, N*H)`` or ``(T, N*H)``, with any row stride; or all three
            adjacent in one tensor ``(..., 3*N*H)``, with a gradient that is one tensor too.
        layout: which tokens belong together.
        tables: projected positions divided by ``scale``, the rows of ``relative.window``; None for none.
        relative: distances of the call; None for none.
        num_heads: N.
        scale: what scores are divided by.
        dropout: probability of dropping an attention weight, drawn from the device's generator.
    """
    # Registering takes a hundredth of a second, which an import should not.
    from flodl_hf.nn.attention.disentangled.operator import disentangled

    width = states[0].shape[-1] * len(states) // 3
    if len(states) == 1:
        q, k, v = states[0].reshape(-1, 3, num_heads, width // num_heads), None, None
    else:
        q, k, v = (x.reshape(-1, num_heads, width // num_heads) for x in states)
    offsets = ends = keep = None
    longest = layout.length(states[0])
    if isinstance(layout, Packed):
        offsets = layout.offsets
    elif layout.mask is not None:
        keep, ends = layout.mask.reshape(-1), layout.row_ends()
    seed = torch.randint(2**62, (1,), device=q.device) if dropout > 0.0 else None
    pk = pq = lut = None
    near, middle, reach = True, 0, 0
    if tables is not None and relative is not None:
        pk, pq = (None if table is None else table.to(q.dtype) for table in tables)
        near = relative.near
        middle = relative.used
        lut = None if near else relative.columns
        # Farther distances may share the last row of the single distances.
        reach = relative.reach - 1
    mixed, _ = disentangled(
        q, k, v, pk, pq, lut, offsets, ends, keep, seed, longest, middle, reach, near, 1.0 / scale, dropout
    )
    return mixed.view(*states[0].shape[:-1], width)


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

    def plain(keep: Tensor | None, q: Tensor, k: Tensor, v: Tensor, tables: PositionTables) -> Tensor:
        return attend_fast(q, k, v, tables, relative, num_heads=heads, scale=scale, keep=keep, dropout=0.0)

    def both(kind: torch.dtype, kernel: bool) -> list[Tensor]:
        given = [x.detach().to(kind).requires_grad_() for x in inputs]
        q, k, v, *tables = given
        if kernel:
            found = attend_by_kernel((q, k, v), layout, PositionTables(*tables), relative, num_heads=heads, scale=scale)
        else:
            found = layout.by_rows(partial(plain, tables=PositionTables(*tables)), q, k, v)
        return [found, *torch.autograd.grad(found, given, direction.to(found.dtype))]

    pairs = zip(both(dtype, True), both(torch.float32, False), strict=True)
    return max(float((a.detach().float() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)
