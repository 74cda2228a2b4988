"""Disentangled attention by our own kernels, as an operator with gradients: ``flodl_hf::disentangled``.

Decides the shapes of the kernels' tiles, and the products around them: the products of queries and keys
with the distance table, and in the backward the gradients of both. An operator, so that compiled graphs carry it
and recorded ones replay it; the kernels are `kernels`'.

Shapes: T tokens, N heads, H width of a head, R table rows that a call reaches.
"""

# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """Rows of queries and of keys per program, its warps, and the number of pipeline stages."""

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


def _products(states: Tensor, table: Tensor | None) -> Tensor | None:
    """Return every token's product with every row, ``(N, T, R)``."""
    return None if table is None else torch.bmm(states.transpose(0, 1), table.transpose(1, 2))


def _options(
    kernel: str, q: Tensor, qp: Tensor | None, kp: Tensor | None, offsets: Tensor | None, keep: Tensor | None,
    longest: int, near: bool, dropout: float,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Return the number of texts, and the compile-time constants of a kernel."""
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
        "C2P": qp is not None,
        "P2C": kp is not None,
        "NEAR": near,
        "PACKED": offsets is not None,
        "MASKED": keep is not None,
        "DROPOUT": dropout > 0.0,
        "NARROW": q.dtype == torch.float16,
        "PRECISION": "tf32" if wide and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return texts, options


@torch.library.custom_op("flodl_hf::disentangled", mutates_args=())
def disentangled(
    q: Tensor, k: Tensor | None, v: Tensor | None, pk: Tensor | None, pq: Tensor | None, lut: Tensor | None,
    offsets: Tensor | None, ends: Tensor | None, keep: Tensor | None, seed: Tensor | None,
    longest: int, middle: int, reach: int, near: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the mixed values ``(T, N, H)`` and the logarithms of rows' sums ``(N, T)``, base 2, float32.

    Args:
        q: queries ``(T, N, H)``, like ``k`` and ``v``; or all three, ``(T, 3, N, H)``, without ``k`` and ``v``.
        k: keys.
        v: values.
        pk: what queries look up, divided by the scale, ``(N, R, H)``; None for no such scores.
        pq: position scores of keys, divided by the scale, ``(N, R, H)``; None for no such scores.
        lut: the row of each distance from ``-(longest - 1)``; None where all are near.
        offsets: where packed texts start, and their end; None for rows of ``longest`` tokens.
        ends: places up to each row's last real token.
        keep: True for keys that are real tokens, ``(T,)``; None for all.
        seed: what dropout draws from, ``(1,)``, int64.
        longest: upper bound of the lengths.
        middle: the row of distance 0.
        reach: distances up to this one have a row that no other has.
        near: whether that is all of them.
        scale: what products of queries and keys are multiplied by.
        dropout: probability of dropping a weight.
    """
    from flodl_hf.nn.kernels import disentangled as kernels

    if k is None or v is None:
        q, k, v = q.unbind(1)
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    qp, kp = _products(q, pk), _products(k, pq)
    rows = max(0 if table is None else table.shape[1] for table in (pk, pq))
    texts, options = _options("forward", q, qp, kp, offsets, keep, longest, near, dropout)
    grid = (-(-longest // options["BM"]) * heads * texts,)
    kernels.forward[grid](
        q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse,
        q.stride(0), k.stride(0), v.stride(0), tokens, longest, rows, middle, reach, heads, scale, dropout,
        **options,
    )  # fmt: skip
    return out, lse


@disentangled.register_fake
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
    from flodl_hf.nn.kernels import disentangled as kernels

    joint = None if k is not None else q.new_empty(q.shape)
    if k is None or v is None:
        q, k, v = q.unbind(1)
    tokens, heads, width = q.shape
    d_out = d_out.contiguous()
    # Computed again rather than kept since the forward: two products are cheaper than the memory of all layers.
    qp, kp = _products(q, pk), _products(k, pq)
    rows = max(0 if table is None else table.shape[1] for table in (pk, pq))
    if joint is not None:
        d_q, d_k, d_v = joint.unbind(1)
    else:
        d_q, d_k, d_v = (torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device) for _ in range(3))
    # Entries that no distance reaches stay zero. Far distances add up in a row, in float32.
    dtype = q.dtype if near else torch.float32
    d_qp, d_kp = (None if x is None else torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (qp, kp))
    dots = torch.empty_like(lse)
    about = (q, qp, kp, offsets, keep, longest, near, dropout)
    strides = (x.stride(0) for x in (q, k, v, d_q))
    numbers = (*strides, tokens, longest, rows, middle, reach, heads, scale, dropout)
    # Whether one tile of keys covers any text, so that one kernel computes all gradients.
    whole = q.element_size() == 2 and width <= 64 and longest <= TILES["whole"][0].keys
    if not whole:
        texts, options = _options("queries", *about)
        kernels.backward_queries[(-(-longest // options["BM"]) * heads * texts,)](
            q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse, d_out, d_q, d_qp, dots,
            *numbers, **options,
        )  # fmt: skip
    texts, options = _options("whole" if whole else "keys", *about)
    kernels.backward_keys[(-(-longest // options["BN"]) * heads * texts,)](
        q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse, d_out, dots, d_q, d_k, d_v, d_qp, d_kp,
        *numbers, **options, WHOLE=whole,
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


disentangled.register_autograd(_gradients, setup_context=_keep_for_backward)
