"""Where the kernels of disentangled attention can run, and calls of them in this package's terms.

The operator that they make up, with its gradients, is `operator`'s and is registered at the first call.

Shapes: B texts, S tokens of a row, T tokens in all, N heads, H width of a head, R table rows that a call reaches.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from flodl_hf.disentangled.positions import Relative, ends_of
from flodl_hf.disentangled.probe import kernels_agree
from flodl_hf.disentangled.scores import PositionTables
from flodl_hf.layout import Layout, Packed

__all__ = ["attend_by_kernel", "has_kernel"]


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


@cache
def _able(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernel(states: Tensor, num_heads: int, dtype: torch.dtype | None = None) -> bool:
    """Return whether the kernels take ``(..., N*H)`` states: CUDA from Ampere on, Triton there, H from 16 to 128.

    Where they do in principle, the first question computes a small case to see that they do, see `probe`.

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
        and _triton()
        and _able(states.device)
    )
    if not able or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return able
    return kernels_agree(states.device, dtype, width)


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
    """Return the mixed values, ``(B, S, N*H)`` or ``(T, N*H)``; rows of filling hold numbers that mean nothing.

    Args:
        states: queries, keys and values, ``(B, S, N*H)`` or ``(T, N*H)``, whose rows may lie apart; or all three
            side by side in one tensor ``(..., 3*N*H)``, whose gradient is then one tensor too.
        layout: which tokens belong together.
        tables: projected positions divided by ``scale``, the rows of ``relative.window``; None for none.
        relative: distances of the call; None for none.
        num_heads: N.
        scale: what scores are divided by.
        dropout: probability of dropping an attention weight, drawn from the device's generator.
    """
    # Registering takes a hundredth of a second, which an import should not.
    from flodl_hf.disentangled.operator import disentangled

    width = states[0].shape[-1] * len(states) // 3
    if len(states) == 1:
        q, k, v = states[0].reshape(-1, 3, num_heads, width // num_heads), None, None
    else:
        q, k, v = (x.reshape(-1, num_heads, width // num_heads) for x in states)
    offsets = ends = keep = None
    if isinstance(layout, Packed):
        offsets, longest = layout.offsets, layout.max_length
    else:
        longest = states[0].shape[1]
        if layout.mask is not None:
            keep = layout.mask.reshape(-1)
            ends = ends_of(layout.mask) if relative is None or relative.ends is None else relative.ends
    seed = torch.randint(2**62, (1,), device=q.device) if dropout > 0.0 else None
    pk = pq = lut = None
    near, middle, reach = True, 0, 0
    if tables is not None and relative is not None:
        pk, pq = (None if table is None else table.to(q.dtype) for table in tables)
        near = relative.near
        middle = relative.used
        lut = None if near else relative.columns
        # The last row that a distance has of its own may be where farther ones end up too.
        reach = relative.reach - 1
    mixed, _ = disentangled(
        q, k, v, pk, pq, lut, offsets, ends, keep, seed, longest, middle, reach, near, 1.0 / scale, dropout
    )
    return mixed.view(*states[0].shape[:-1], width)
