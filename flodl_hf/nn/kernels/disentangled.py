"""Kernels of disentangled attention for CUDA devices, written in Triton: scores, softmax and mix in one pass.

Position scores are read where they are needed: ``q_i . pk[r]`` and ``k_j . pq[r]`` come as products of every
token with every row ``r`` of the distance table, ``(heads, tokens, rows)``, linear in the length of a text, and
a tile of scores picks the entries of its distances. No ``(heads, seq, seq)`` tensor exists, forward or backward.

The running softmax and the two passes of the backward follow FlashAttention-2 (Dao 2023,
https://arxiv.org/abs/2307.08691). A score is ``scale * q_i . k_j + c2p + p2c`` in float32; the products with
the table arrive divided by the scale, so that half precision cannot overflow where the score does not.

Importing this file needs Triton. Launching, shapes and gradients are `flodl_hf.nn.disentangled.operator`'s.
Names: M rows of queries, N rows of keys in a tile, H width of a head, R table rows that a call reaches.
"""

# Kernel arguments are typed by Triton, and a launch has one argument a line of the signature.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from flodl_hf.nn.kernels.rows import kept, keys_of

_LOG2E = tl.constexpr(1.4426950408889634)
# Stands for minus infinity: differences of two of it are 0 and not NaN.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _text(offsets, ends, text, longest, PACKED: tl.constexpr, MASKED: tl.constexpr):
    """Return where a text starts and how many of its tokens are looked at."""
    if PACKED:
        start = tl.load(offsets + text)
        length = tl.load(offsets + text + 1) - start
    else:
        start = text * longest
        length = longest
        if MASKED:
            length = tl.load(ends + text)
    return start, length


@triton.jit
def _columns(lut, distance, longest, middle, OWN: tl.constexpr):
    """Return the table row of each distance; near distances have separate rows, in order."""
    if OWN:
        return distance + middle
    else:  # noqa: RET505
        return tl.load(lut + distance + (longest - 1))


@triton.jit
def _stretch(first, length, reach, PART: tl.constexpr, NEAR: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Return where the tiles of a part begin and end: far ones before a block of tokens, near ones, far ones after."""
    begin, end = 0, length
    if not NEAR:
        low = tl.minimum(tl.cdiv(tl.maximum(first + SIZE - 1 - reach, 0), STEP) * STEP, length)
        # The last tile of a text is cut short, so it is near if what there is of it is.
        high = tl.where(first + reach + 1 >= length, length, (first + reach + 1) // STEP * STEP)
        high = tl.maximum(high, low)
        if PART == 0:
            end = low
        elif PART == 1:
            begin, end = low, high
        else:
            begin = high
    return begin, end


@triton.jit
def _looked_up(products, row, columns, rows, NARROW: tl.constexpr):
    # Entries of a row are adjacent, in any order: declared so that threads are assigned along rows.
    at = tl.max_contiguous(row * rows + columns, (1, columns.shape[1]))
    found = tl.load(products + at).to(tl.float32)
    if NARROW:
        # A product beyond float16 is kept finite: the softmax of infinities would not be.
        found = tl.minimum(tl.maximum(found, -65504.0), 65504.0)
    return found


@triton.jit
def forward(
    q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse,
    q_stride, k_stride, v_stride, tokens, longest, rows, middle, reach, heads, scale, p,
    H: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    C2P: tl.constexpr, P2C: tl.constexpr, NEAR: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    DROPOUT: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the mixed values, ``(tokens, heads * H)``, and the logarithm of each row's sum, ``(heads, tokens)``."""
    tiles = tl.cdiv(longest, BM)
    pid = tl.program_id(0)
    first = (pid % tiles) * BM
    head = (pid // tiles) % heads
    text = pid // tiles // heads
    start, length = _text(offsets, ends, text, longest, PACKED, MASKED)
    if first >= length and PACKED:
        return
    unscale = 1.0 / scale
    if DROPOUT:
        one, two = keys_of(tl.load(seed), text * heads + head)
    h = tl.arange(0, HB)
    i = first + tl.arange(0, BM)
    # Places beyond the end read the last token's row, which is masked or never written.
    last = tl.maximum(length - 1, 0)
    at_i = tl.minimum(i, last)
    inside = h < H
    q_at = (start + at_i).to(tl.int64) * q_stride + head * H
    queries = tl.load(q + q_at[:, None] + h[None, :], mask=inside[None, :], other=0.0)
    table = (head * tokens + start).to(tl.int64) * rows
    best = tl.full((BM,), _LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, HB), tl.float32)
    for part in tl.static_range(1 if NEAR else 3):
        begin, end = _stretch(first, length, reach, part, NEAR, BM, BN)
        for j0 in range(begin, end, BN):
            j = j0 + tl.arange(0, BN)
            at_j = tl.minimum(j, last)
            k_at = (start + at_j).to(tl.int64) * k_stride + head * H
            keys = tl.load(k + k_at[:, None] + h[None, :], mask=inside[None, :], other=0.0)
            scores = tl.zeros((BM, BN), tl.float32)
            if C2P:
                columns = _columns(lut, at_i[:, None] - at_j[None, :], longest, middle, NEAR or part == 1)
                scores += _looked_up(qp + table, at_i[:, None], columns, rows, NARROW)
            if P2C:
                columns = _columns(lut, at_i[None, :] - at_j[:, None], longest, middle, NEAR or part == 1)
                scores += tl.trans(_looked_up(kp + table, at_j[:, None], columns, rows, NARROW))
            # Position scores are the initial accumulator of the product, so that all after it has the product's layout.
            scores = tl.dot(queries, tl.trans(keys), scores * unscale, input_precision=PRECISION) * (scale * _LOG2E)
            real = j < length
            if MASKED:
                real = real & (tl.load(keep + start + at_j) != 0)
            scores = tl.where(real[None, :], scores, _LOWEST)
            above = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - above[:, None])
            shrink = tl.exp2(best - above)
            total = total * shrink + tl.sum(weights, 1)
            if DROPOUT:
                stays = kept(one, two, i[:, None] * longest + j[None, :], p)
                weights = tl.where(stays, weights, 0.0)
            v_at = (start + at_j).to(tl.int64) * v_stride + head * H
            values = tl.load(v + v_at[:, None] + h[None, :], mask=inside[None, :], other=0.0)
            mixed = mixed * shrink[:, None]
            mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
            best = above
    if DROPOUT:
        mixed = mixed / (1.0 - p)
    mixed = mixed / tl.maximum(total, 1.0e-30)[:, None]
    # A padded row is written to its end, so that no token contains old memory.
    written = i < (length if PACKED else longest)
    o_at = (start + i).to(tl.int64) * (heads * H) + head * H
    tl.store(out + o_at[:, None] + h[None, :], mixed.to(out.dtype.element_ty), mask=written[:, None] & inside[None, :])
    tl.store(lse + head * tokens + start + i, best + tl.log2(tl.maximum(total, 1.0e-30)), mask=written)


@triton.jit
def _add(gradient, row, columns, rows, values, there, OWN: tl.constexpr):
    """Add to the gradient of products with the table: near distances come once, far ones share a row."""
    at = tl.max_contiguous(row * rows + columns, (1, columns.shape[1]))
    if OWN:
        tl.store(gradient + at, values.to(gradient.dtype.element_ty), mask=there)
    else:
        tl.atomic_add(gradient + at, values, mask=there, sem="relaxed")


@triton.jit
def backward_queries(
    q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse, d_out, d_q, d_qp, dots,
    q_stride, k_stride, v_stride, d_stride, tokens, longest, rows, middle, reach, heads, scale, p,
    H: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    C2P: tl.constexpr, P2C: tl.constexpr, NEAR: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    DROPOUT: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of queries and of their products with the table; leave ``out . d_out`` in ``dots``."""
    tiles = tl.cdiv(longest, BM)
    pid = tl.program_id(0)
    first = (pid % tiles) * BM
    head = (pid // tiles) % heads
    text = pid // tiles // heads
    start, length = _text(offsets, ends, text, longest, PACKED, MASKED)
    if first >= length and PACKED:
        return
    unscale = 1.0 / scale
    if DROPOUT:
        one, two = keys_of(tl.load(seed), text * heads + head)
    h = tl.arange(0, HB)
    i = first + tl.arange(0, BM)
    last = tl.maximum(length - 1, 0)
    at_i = tl.minimum(i, last)
    inside = h < H
    row_real = i < length
    both = row_real[:, None] & inside[None, :]
    o_at = (start + i).to(tl.int64)[:, None] * (heads * H) + head * H + h[None, :]
    q_at = (start + at_i).to(tl.int64)[:, None] * q_stride + head * H + h[None, :]
    queries = tl.load(q + q_at, mask=inside[None, :], other=0.0)
    d_mixed = tl.load(d_out + o_at, mask=both, other=0.0)
    mixed = tl.load(out + o_at, mask=both, other=0.0)
    dot = tl.sum(d_mixed.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(dots + head * tokens + start + i, dot, mask=row_real)
    sums = tl.load(lse + head * tokens + start + at_i)
    table = (head * tokens + start).to(tl.int64) * rows
    d_queries = tl.zeros((BM, HB), tl.float32)
    for part in tl.static_range(1 if NEAR else 3):
        begin, end = _stretch(first, length, reach, part, NEAR, BM, BN)
        for j0 in range(begin, end, BN):
            j = j0 + tl.arange(0, BN)
            at_j = tl.minimum(j, last)
            k_at = (start + at_j).to(tl.int64) * k_stride + head * H
            keys = tl.load(k + k_at[:, None] + h[None, :], mask=inside[None, :], other=0.0)
            v_at = (start + at_j).to(tl.int64) * v_stride + head * H
            values = tl.load(v + v_at[:, None] + h[None, :], mask=inside[None, :], other=0.0)
            scores = tl.zeros((BM, BN), tl.float32)
            columns = _columns(lut, at_i[:, None] - at_j[None, :], longest, middle, NEAR or part == 1)
            if C2P:
                scores += _looked_up(qp + table, at_i[:, None], columns, rows, NARROW)
            if P2C:
                turned = _columns(lut, at_i[None, :] - at_j[:, None], longest, middle, NEAR or part == 1)
                scores += tl.trans(_looked_up(kp + table, at_j[:, None], turned, rows, NARROW))
            scores = tl.dot(queries, tl.trans(keys), scores * unscale, input_precision=PRECISION) * (scale * _LOG2E)
            real = j < length
            if MASKED:
                real = real & (tl.load(keep + start + at_j) != 0)
            there = row_real[:, None] & real[None, :]
            weights = tl.where(there, tl.exp2(scores - sums[:, None]), 0.0)
            d_weights = tl.dot(d_mixed, tl.trans(values), input_precision=PRECISION)
            if DROPOUT:
                stays = kept(one, two, i[:, None] * longest + j[None, :], p)
                d_weights = tl.where(stays, d_weights / (1.0 - p), 0.0)
            d_scores = weights * (d_weights - dot[:, None])
            if C2P:
                _add(d_qp + table, at_i[:, None], columns, rows, d_scores, there, NEAR or part == 1)
            d_queries = tl.dot(d_scores.to(keys.dtype), keys, d_queries, input_precision=PRECISION)
    d_at = (start + i).to(tl.int64)[:, None] * d_stride + head * H + h[None, :]
    written = i < (length if PACKED else longest)
    d_queries = tl.where(row_real[:, None], d_queries * scale, 0.0)
    tl.store(d_q + d_at, d_queries.to(d_q.dtype.element_ty), mask=written[:, None] & inside[None, :])


@triton.jit
def backward_keys(
    q, k, v, qp, kp, lut, offsets, ends, keep, seed, out, lse, d_out, dots, d_q, d_k, d_v, d_qp, d_kp,
    q_stride, k_stride, v_stride, d_stride, tokens, longest, rows, middle, reach, heads, scale, p,
    H: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    C2P: tl.constexpr, P2C: tl.constexpr, NEAR: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    DROPOUT: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys, of values, and of the keys' products with the table.

    WHOLE is for texts no longer than a tile of keys: then this writes what `backward_queries` would, too.
    """
    tiles = tl.cdiv(longest, BN)
    pid = tl.program_id(0)
    first = (pid % tiles) * BN
    head = (pid // tiles) % heads
    text = pid // tiles // heads
    start, length = _text(offsets, ends, text, longest, PACKED, MASKED)
    if first >= length and PACKED:
        return
    unscale = 1.0 / scale
    if DROPOUT:
        one, two = keys_of(tl.load(seed), text * heads + head)
    h = tl.arange(0, HB)
    j = first + tl.arange(0, BN)
    last = tl.maximum(length - 1, 0)
    at_j = tl.minimum(j, last)
    inside = h < H
    k_at = (start + at_j).to(tl.int64)[:, None] * k_stride + head * H + h[None, :]
    v_at = (start + at_j).to(tl.int64)[:, None] * v_stride + head * H + h[None, :]
    keys = tl.load(k + k_at, mask=inside[None, :], other=0.0)
    values = tl.load(v + v_at, mask=inside[None, :], other=0.0)
    real = j < length
    if MASKED:
        real = real & (tl.load(keep + start + at_j) != 0)
    table = (head * tokens + start).to(tl.int64) * rows
    d_keys = tl.zeros((BN, HB), tl.float32)
    d_values = tl.zeros((BN, HB), tl.float32)
    for part in tl.static_range(1 if NEAR else 3):
        begin, end = _stretch(first, length, reach, part, NEAR, BN, BM)
        for i0 in range(begin, end, BM):
            i = i0 + tl.arange(0, BM)
            at_i = tl.minimum(i, last)
            row_real = i < length
            q_at = (start + at_i).to(tl.int64)[:, None] * q_stride + head * H + h[None, :]
            o_at = (start + at_i).to(tl.int64)[:, None] * (heads * H) + head * H + h[None, :]
            queries = tl.load(q + q_at, mask=inside[None, :], other=0.0)
            d_mixed = tl.load(d_out + o_at, mask=inside[None, :], other=0.0)
            sums = tl.load(lse + head * tokens + start + at_i)
            if WHOLE:
                mixed = tl.load(out + o_at, mask=inside[None, :], other=0.0)
                dot = tl.sum(d_mixed.to(tl.float32) * mixed.to(tl.float32), 1)
            else:
                dot = tl.load(dots + head * tokens + start + at_i)
            scores = tl.zeros((BN, BM), tl.float32)
            columns = _columns(lut, at_i[None, :] - at_j[:, None], longest, middle, NEAR or part == 1)
            if C2P:
                turned = _columns(lut, at_i[:, None] - at_j[None, :], longest, middle, NEAR or part == 1)
                scores += tl.trans(_looked_up(qp + table, at_i[:, None], turned, rows, NARROW))
            if P2C:
                scores += _looked_up(kp + table, at_j[:, None], columns, rows, NARROW)
            scores = tl.dot(keys, tl.trans(queries), scores * unscale, input_precision=PRECISION) * (scale * _LOG2E)
            there = real[:, None] & row_real[None, :]
            weights = tl.where(there, tl.exp2(scores - sums[None, :]), 0.0)
            d_weights = tl.dot(values, tl.trans(d_mixed), input_precision=PRECISION)
            left = weights
            if DROPOUT:
                stays = kept(one, two, i[None, :] * longest + j[:, None], p)
                left = tl.where(stays, weights / (1.0 - p), 0.0)
                d_weights = tl.where(stays, d_weights / (1.0 - p), 0.0)
            d_values = tl.dot(left.to(d_mixed.dtype), d_mixed, d_values, input_precision=PRECISION)
            d_scores = weights * (d_weights - dot[None, :])
            if P2C:
                _add(d_kp + table, at_j[:, None], columns, rows, d_scores, there, NEAR or part == 1)
            d_keys = tl.dot(d_scores.to(queries.dtype), queries, d_keys, input_precision=PRECISION)
            if WHOLE:
                across = tl.trans(d_scores)
                if C2P:
                    turned = _columns(lut, at_i[:, None] - at_j[None, :], longest, middle, NEAR or part == 1)
                    meet = row_real[:, None] & real[None, :]
                    _add(d_qp + table, at_i[:, None], turned, rows, across, meet, NEAR or part == 1)
                d_queries = tl.dot(across.to(keys.dtype), keys, input_precision=PRECISION) * scale
                d_at = (start + i).to(tl.int64)[:, None] * d_stride + head * H + h[None, :]
                d_queries = d_queries.to(d_q.dtype.element_ty)
                tl.store(d_q + d_at, d_queries, mask=row_real[:, None] & inside[None, :])
    if WHOLE and not PACKED:
        # Rows of padding are no queries.
        for i0 in range(length // BM * BM, longest, BM):
            i = i0 + tl.arange(0, BM)
            d_at = (start + i).to(tl.int64)[:, None] * d_stride + head * H + h[None, :]
            blank = ((i >= length) & (i < longest))[:, None] & inside[None, :]
            tl.store(d_q + d_at, tl.zeros((BM, HB), d_q.dtype.element_ty), mask=blank)
    at = (start + j).to(tl.int64)[:, None] * d_stride + head * H + h[None, :]
    written = (j < (length if PACKED else longest))[:, None] & inside[None, :]
    d_keys = tl.where(real[:, None], d_keys * scale, 0.0)
    d_values = tl.where(real[:, None], d_values, 0.0)
    tl.store(d_k + at, d_keys.to(d_k.dtype.element_ty), mask=written)
    tl.store(d_v + at, d_values.to(d_v.dtype.element_ty), mask=written)
