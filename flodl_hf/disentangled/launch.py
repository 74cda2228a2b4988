"""Disentangled attention by kernels of our own, as an operator with gradients: ``flodl_hf::disentangled``.

Decides where the kernels can run, the shapes of their tiles, and what is multiplied around them: the
products of queries and keys with the distance table, and in the backward the gradients of both. An
operator, so that compiled graphs carry it and recorded ones replay it; the kernels are `kernels`'.

Shapes: T tokens, N heads, H width of a head, R table rows that a call reaches.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flodl_hf.disentangled.positions import Relative, ends_of
from flodl_hf.disentangled.scores import PositionTables
from flodl_hf.layout import Layout, Packed

__all__ = ["TILES", "Tile", "attend_by_kernel", "has_kernel"]


class Tile(NamedTuple):
    """Rows of queries and of keys that one program holds, its warps, and how far loads run ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel, for 2-byte numbers with heads up to 64 wide, up to 128 wide, and for 4-byte numbers.
TILES: dict[str, tuple[Tile, Tile, Tile]] = {
    "forward": (Tile(64, 32, 4, 3), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    "queries": (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    "whole": (Tile(32, 128, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 4, 1)),
    "keys": (Tile(32, 64, 4, 2), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1)),
}


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


@cache
def _able(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernel(states: Tensor, num_heads: int) -> bool:
    """Return whether the kernels take ``(..., N*H)`` states: CUDA from Ampere on, Triton there, H from 16 to 128."""
    return (
        states.is_cuda
        and states.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and 16 <= states.shape[-1] // num_heads <= 128
        and _triton()
        and _able(states.device)
    )


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
    mixed, _ = torch.ops.flodl_hf.disentangled(
        q, k, v, pk, pq, lut, offsets, ends, keep, seed, longest, middle, reach, near, 1.0 / scale, dropout
    )
    return mixed.view(*states[0].shape[:-1], width)


def _apart(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, ``(T, N, H)`` each, of three tensors or of one ``(T, 3, N, H)``."""
    if k is None or v is None:
        q, k, v = q.unbind(1)
    return q, k, v


def _products(states: Tensor, table: Tensor | None) -> Tensor | None:
    """Return every token's product with every row, ``(N, T, R)``."""
    return None if table is None else torch.bmm(states.transpose(0, 1), table.transpose(1, 2))


def _whole(q: Tensor, longest: int) -> bool:
    """Return whether one tile of keys holds any text, so that one kernel gives all gradients."""
    return q.element_size() == 2 and q.shape[-1] <= 64 and longest <= TILES["whole"][0].keys


def _options(q: Tensor, longest: int, offsets: Tensor | None, kernel: str) -> tuple[int, dict[str, Any]]:
    """Return how many texts there are, and what the kernels are compiled for."""
    width = q.shape[-1]
    block = max(16, 1 << (width - 1).bit_length())
    wide = q.element_size() > 2
    tile = TILES[kernel][2 if wide else int(block > 64)]
    shortest = max(16, 1 << (longest - 1).bit_length())
    texts = q.shape[0] // longest if offsets is None else offsets.shape[0] - 1
    options = {
        "H": width,
        "HB": block,
        "BM": min(tile.queries, shortest),
        "BN": min(tile.keys, shortest),
        "NARROW": q.dtype == torch.float16,
        "PRECISION": "tf32" if wide and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return texts, options


@torch.library.custom_op("flodl_hf::disentangled", mutates_args=())
def _disentangled(
    q: Tensor, k: Tensor | None, v: Tensor | None, pk: Tensor | None, pq: Tensor | None, lut: Tensor | None,
    offsets: Tensor | None, ends: Tensor | None, keep: Tensor | None, seed: Tensor | None,
    longest: int, middle: int, reach: int, near: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flodl_hf.disentangled import kernels

    q, k, v = _apart(q, k, v)
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    qp, kp = _products(q, pk), _products(k, pq)
    rows = _rows(pk, pq)
    texts, options = _options(q, longest, offsets, "forward")
    grid = (-(-longest // options["BM"]) * heads * texts,)
    kernels.forward[grid](
        q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse,
        q.stride(0), k.stride(0), v.stride(0), tokens, longest, rows, middle, reach, heads, scale, dropout,
        **_kinds(qp, kp, near, offsets, keep, dropout), **options,
    )  # fmt: skip
    return out, lse


@_disentangled.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, width = q.shape[0], q.shape[-2], q.shape[-1]
    return q.new_empty(tokens, heads, width), q.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("flodl_hf::disentangled_backward", mutates_args=())
def _backward(
    d_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor | None, v: Tensor | None, pk: Tensor | None, pq: Tensor | None, lut: Tensor | None,
    offsets: Tensor | None, ends: Tensor | None, keep: Tensor | None, seed: Tensor | None,
    longest: int, middle: int, reach: int, near: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from flodl_hf.disentangled import kernels

    joint = None if k is not None else q.new_empty(q.shape)
    q, k, v = _apart(q, k, v)
    tokens, heads, width = q.shape
    d_out = d_out.contiguous()
    # Made anew rather than kept since the forward: two products are cheaper than the memory of all layers.
    qp, kp = _products(q, pk), _products(k, pq)
    rows = _rows(pk, pq)
    if joint is not None:
        d_q, d_k, d_v = joint.unbind(1)
    else:
        d_q, d_k, d_v = (torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device) for _ in range(3))
    # Entries that no distance reaches stay zero. Far distances add up in a row, in float32.
    dtype = q.dtype if near else torch.float32
    d_qp, d_kp = (None if x is None else torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (qp, kp))
    dots = torch.empty_like(lse)
    kinds = _kinds(qp, kp, near, offsets, keep, dropout)
    numbers = (
        q.stride(0),
        k.stride(0),
        v.stride(0),
        d_q.stride(0),
        tokens,
        longest,
        rows,
        middle,
        reach,
        heads,
        scale,
        dropout,
    )
    whole = _whole(q, longest)
    if not whole:
        texts, options = _options(q, longest, offsets, "queries")
        kernels.backward_queries[(-(-longest // options["BM"]) * heads * texts,)](
            q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse, d_out, d_q, d_qp, dots,
            *numbers, **kinds, **options,
        )  # fmt: skip
    texts, options = _options(q, longest, offsets, "whole" if whole else "keys")
    kernels.backward_keys[(-(-longest // options["BN"]) * heads * texts,)](
        q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse, d_out, dots, d_q, d_k, d_v, d_qp, d_kp,
        *numbers, **kinds, **options, WHOLE=whole,
    )  # fmt: skip
    d_pk = _through(d_q, d_qp, pk, q)
    d_pq = _through(d_k, d_kp, pq, k)
    if joint is not None:
        return joint, q.new_empty(0), q.new_empty(0), d_pk, d_pq
    return d_q, d_k, d_v, d_pk, d_pq


def _through(d_states: Tensor, d_products: Tensor | None, table: Tensor | None, states: Tensor) -> Tensor:
    """Add what came through the products to the gradient of the states; return the table's, ``(N, R, H)``."""
    if d_products is None or table is None:
        return d_states.new_empty(0)
    d_products = d_products.to(states.dtype)
    d_states.transpose(0, 1).baddbmm_(d_products, table)
    return torch.bmm(d_products.transpose(1, 2), states.transpose(0, 1))


@_backward.register_fake
def _(
    d_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor | None, v: Tensor | None, pk: Tensor | None, pq: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_pk, d_pq = (q.new_empty(0) if table is None else q.new_empty(table.shape) for table in (pk, pq))
    d_k, d_v = (q.new_empty(0 if x is None else x.shape) for x in (k, v))
    return q.new_empty(q.shape), d_k, d_v, d_pk, d_pq


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:10])
    ctx.numbers = inputs[10:]


def _gradients(ctx: Any, d_out: Tensor, _: Any) -> tuple[Any, ...]:
    out, lse, *inputs = ctx.saved_tensors
    d_q, d_k, d_v, d_pk, d_pq = torch.ops.flodl_hf.disentangled_backward(d_out, out, lse, *inputs, *ctx.numbers)
    found = (d_q, d_k, d_v, d_pk, d_pq)
    given = (None if x is None else d for x, d in zip(inputs, found, strict=False))
    return *given, *(None,) * (len(inputs) - len(found) + len(ctx.numbers))


_disentangled.register_autograd(_gradients, setup_context=_keep_for_backward)


def _rows(pk: Tensor | None, pq: Tensor | None) -> int:
    table = pk if pk is not None else pq
    return 0 if table is None else table.shape[1]


def _kinds(
    qp: Tensor | None, kp: Tensor | None, near: bool, offsets: Tensor | None, keep: Tensor | None, dropout: float
) -> dict[str, bool]:
    return {
        "C2P": qp is not None,
        "P2C": kp is not None,
        "NEAR": near,
        "PACKED": offsets is not None,
        "MASKED": keep is not None,
        "DROPOUT": dropout > 0.0,
    }
