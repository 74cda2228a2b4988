"""Apply rotary embedding to adjacent queries and keys: read once, written once.

The angles are computed in `flodl_hf.nn.positions`.

Roundings are the reference's: of each product and of their sum, in the states' dtype, or in float32 with one at the
end. Sums must not be contracted into fused multiply-adds, so launches disable this. Launching and gradients are
`operations`'; importing this file needs Triton. Names: N heads to turn, H width of a head.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned(one, two, c, s, KIND: tl.constexpr, WIDE: tl.constexpr):
    """Return both of all pairs turned, all float32; with ``WIDE`` rounded once, else as states of dtype KIND."""
    one_c, one_s, two_c, two_s = one * c, one * s, two * c, two * s
    if not WIDE:
        one_c, one_s = one_c.to(KIND).to(tl.float32), one_s.to(KIND).to(tl.float32)
        two_c, two_s = two_c.to(KIND).to(tl.float32), two_s.to(KIND).to(tl.float32)
    return (one_c - two_s).to(KIND), (two_c + one_s).to(KIND)


@triton.jit
def turn(
    x, out, cos, sin, tokens, x_stride, out_stride, angle_stride, heads, rest,
    H: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr,
    BACK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Write the first N heads of each row rotated, and with ``REST`` copy the rest of the row.

    A pair is a feature of a head's first half and one of its second with ``HALVES``, else two neighbours. ``cos`` and
    ``sin`` begin each row with a number for each pair. ``WIDE`` computes in float32 and rounds once; ``BACK`` turns the
    other way, as gradients do.
    """
    half: tl.constexpr = H // 2
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pairs = tl.arange(0, PAIRS)
    there = (rows < tokens)[:, None]
    live = there & (pairs < heads * half)[None, :]
    here = (pairs // half * H + pairs % half)[None, :]
    at = rows.to(tl.int64)[:, None] * x_stride + here
    to = rows.to(tl.int64)[:, None] * out_stride + here
    angles = rows.to(tl.int64)[:, None] * angle_stride + (pairs % half)[None, :]
    c = tl.load(cos + angles, mask=live, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=live, other=0.0).to(tl.float32)
    if HALVES:
        one = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        two = tl.load(x + at + half, mask=live, other=0.0).to(tl.float32)
    else:
        features = tl.arange(0, 2 * PAIRS)[None, :]
        whole = there & (features < heads * H)
        both = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + features, mask=whole, other=0.0).to(tl.float32)
        one, two = tl.split(tl.reshape(both, [ROWS, PAIRS, 2]))
    if BACK:
        s = -s
    first, second = turned(one, two, c, s, out.dtype.element_ty, WIDE)
    if HALVES:
        tl.store(out + to, first, mask=live)
        tl.store(out + to + half, second, mask=live)
    else:
        joined = tl.reshape(tl.join(first, second), [ROWS, 2 * PAIRS])
        tl.store(out + rows.to(tl.int64)[:, None] * out_stride + features, joined, mask=whole)
    if REST:
        columns = tl.arange(0, REST)
        kept = there & (columns < rest)[None, :]
        behind = heads * H + columns[None, :]
        found = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + behind, mask=kept, other=0.0)
        tl.store(out + rows.to(tl.int64)[:, None] * out_stride + behind, found, mask=kept)
