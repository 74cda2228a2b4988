"""Calls of the kernels of disentangled attention in this package's terms.

The operator that they make up, with its gradients, is `operator`'s and is registered at the first call.

Shapes: B texts, S tokens of a row, T tokens in all, N heads, H width of a head, R table rows that a call reaches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flodl_hf.nn.attention.disentangled.positions import Relative
from flodl_hf.nn.attention.disentangled.scores import PositionTables
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
