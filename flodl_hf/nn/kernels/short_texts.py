"""Attention among concatenated short texts, forward and backward.

It walks over blocks of tokens rather than over texts: a block of queries meets the keys from the first token of its
first text to the last token of its last one, and each query is masked to the keys of its text. With texts shorter than
a block this is far less work than a block for every text. The backward pass recomputes weights from the logarithms of
row sums (FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691), once for queries and once for keys, so that
nothing is added atomically and a step repeats to the bit; one launch does both. Sums are float32 whatever the states
are.

Launching and gradients are `operations`'. Names: N heads, H width of a head, Q queries and K keys of a tile.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from flodl_hf.nn.kernels.rotary import turned
from flodl_hf.nn.kernels.rows import kept, keys_of

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block(places, ends, tokens, window, B: tl.constexpr, WINDOW: tl.constexpr):
    """Return a block's tokens, where their texts begin and end, and the tokens from the first to the last it meets."""
    rows = tl.program_id(0) * B + tl.arange(0, B)
    live = rows < tokens
    start = rows - tl.load(places + rows, mask=live, other=0).to(tl.int32)
    end = tl.load(ends + rows, mask=live, other=0)
    if WINDOW:
        start = tl.maximum(start, rows - window)
        end = tl.minimum(end, rows + window + 1)
    low = tl.min(tl.where(live, start, tokens), 0)
    high = tl.max(tl.where(live, end, 0), 0)
    return rows, live, start, end, low, high


@triton.jit
def _turned(
    states, rows, stride, cos, sin, angle_stride, live,
    B: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Return both of all pairs of features of B rows, each turned by its place's angles; see `rotary.turn`."""
    pairs = tl.arange(0, H // 2)
    at = states + rows[:, None] * stride + pairs[None, :]
    angles = rows[:, None] * angle_stride + pairs[None, :]
    c = tl.load(cos + angles, mask=live, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=live, other=0.0).to(tl.float32)
    if HALVES:
        one = tl.load(at, mask=live, other=0.0)
        two = tl.load(at + H // 2, mask=live, other=0.0)
    else:
        both = tl.load(states + rows[:, None] * stride + tl.arange(0, H)[None, :], mask=live, other=0.0)
        one, two = tl.split(tl.reshape(both, [B, H // 2, 2]))
    return turned(one.to(tl.float32), two.to(tl.float32), c, s, one.dtype, WIDE)


@triton.jit
def mix(
    q, k, v, places, ends, seed, bias, cos, sin, out, lse, tokens, q_stride, k_stride, v_stride, angle_stride, scale, p,
    stream, window, reach,
    N: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    DROPOUT: tl.constexpr, LSE: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, TURN: tl.constexpr,
    WIDE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Write the mixed values ``(tokens, N*H)``; with ``LSE`` the base-2 logarithms of rows' sums ``(N, tokens)``.

    Of keys and values each head serves ``GROUP`` of queries. With ``BIAS`` scores are added what ``bias``,
    ``(N, 2*reach + 1)``, has for the distance from query to key, which is at most ``reach``. With ``TURN`` queries and
    keys are turned as they are read (`flodl_hf.nn.kernels.rotary`), which heads of at least 16 pairs allow.
    """
    head = tl.program_id(1)
    served = head // GROUP
    rows, live, start, end, low, high = _block(places, ends, tokens, window, Q, WINDOW)
    cols = tl.arange(0, H)
    if DROPOUT:
        one, two = keys_of(tl.load(seed), stream + head)
    if TURN:
        first, second = _turned(q + head * H, rows, q_stride, cos, sin, angle_stride, live[:, None], Q, H, WIDE, HALVES)
    else:
        queries = tl.load(q + head * H + rows[:, None] * q_stride + cols[None, :], mask=live[:, None], other=0.0)
    most = tl.full([Q], float("-inf"), tl.float32)
    total = tl.zeros([Q], tl.float32)
    mixed = tl.zeros([Q, H], tl.float32)
    for begin in range(low, high, K):
        places_of = begin + tl.arange(0, K)
        seen = places_of < high
        if TURN:
            ahead, behind = _turned(
                k + served * H, places_of, k_stride, cos, sin, angle_stride, seen[:, None], K, H, WIDE, HALVES
            )
            scores = tl.dot(second, tl.trans(behind), tl.dot(first, tl.trans(ahead)))
        else:
            of_keys = k + served * H + places_of[:, None] * k_stride + cols[None, :]
            scores = tl.dot(queries, tl.trans(tl.load(of_keys, mask=seen[:, None], other=0.0)))
        scores = scores * (scale * _LOG2E)
        own = (places_of[None, :] >= start[:, None]) & (places_of[None, :] < end[:, None])
        if BIAS:
            distance = places_of[None, :] - rows[:, None] + reach
            scores += tl.load(bias + head * (2 * reach + 1) + distance, mask=own, other=0.0) * _LOG2E
        scores = tl.where(own, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        # A query may have no key of its text in a block; its largest score is still minus infinity then.
        base_of = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base_of[:, None])
        shrink = tl.exp2(most - base_of)
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            weights = tl.where(kept(one, two, rows[:, None] * tokens + places_of[None, :], p), weights, 0.0)
        values = tl.load(v + served * H + places_of[:, None] * v_stride + cols[None, :], mask=seen[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        most = now
    if DROPOUT:
        mixed = mixed / (1.0 - p)
    total = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / total[:, None]
    to = out + rows[:, None] * (N * H) + head * H + cols[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=live[:, None])
    if LSE:
        tl.store(lse + head * tokens + rows, most + tl.log2(total), mask=live)


@triton.jit
def _mix_queries(
    q, k, v, places, ends, seed, out, lse, d_out, d_q, tokens, q_stride, k_stride, v_stride, d_stride, scale, p,
    stream, window,
    N: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of queries, who meet ``K`` keys at a time."""
    head = tl.program_id(1)
    rows, live, start, end, low, high = _block(places, ends, tokens, window, Q, WINDOW)
    cols = tl.arange(0, H)
    if DROPOUT:
        one, two = keys_of(tl.load(seed), stream + head)
        raised = 1.0 / (1.0 - p)
    here = rows[:, None] * (N * H) + head * H + cols[None, :]
    queries = tl.load(q + head * H + rows[:, None] * q_stride + cols[None, :], mask=live[:, None], other=0.0)
    d_mixed = tl.load(d_out + here, mask=live[:, None], other=0.0)
    mixed = tl.load(out + here, mask=live[:, None], other=0.0)
    dot = tl.sum(d_mixed.to(tl.float32) * mixed.to(tl.float32), 1)
    sums = tl.load(lse + head * tokens + rows, mask=live, other=0.0)
    d_queries = tl.zeros([Q, H], tl.float32)
    for at in range(low, high, K):
        places_of = at + tl.arange(0, K)
        seen = places_of < high
        keys = tl.load(k + head * H + places_of[:, None] * k_stride + cols[None, :], mask=seen[:, None], other=0.0)
        values = tl.load(v + head * H + places_of[:, None] * v_stride + cols[None, :], mask=seen[:, None], other=0.0)
        own = (places_of[None, :] >= start[:, None]) & (places_of[None, :] < end[:, None])
        scores = tl.dot(queries, tl.trans(keys)) * (scale * _LOG2E)
        weights = tl.where(own, tl.exp2(scores - sums[:, None]), 0.0)
        d_weights = tl.dot(d_mixed, tl.trans(values))
        if DROPOUT:
            stays = kept(one, two, rows[:, None] * tokens + places_of[None, :], p)
            d_weights = tl.where(stays, d_weights * raised, 0.0)
        d_scores = weights * (d_weights - dot[:, None])
        d_queries += tl.dot(d_scores.to(keys.dtype), keys)
    to = d_q + head * H + rows[:, None] * d_stride + cols[None, :]
    tl.store(to, (d_queries * scale).to(d_q.dtype.element_ty), mask=live[:, None])


@triton.jit
def _mix_keys(
    q, k, v, places, ends, seed, out, lse, d_out, d_k, d_v, tokens, q_stride, k_stride, v_stride, d_stride, scale,
    p, stream, window,
    N: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values, met by ``Q`` queries at a time."""
    head = tl.program_id(1)
    places_of, live, start, end, low, high = _block(places, ends, tokens, window, K, WINDOW)
    cols = tl.arange(0, H)
    if DROPOUT:
        one, two = keys_of(tl.load(seed), stream + head)
        raised = 1.0 / (1.0 - p)
    keys = tl.load(k + head * H + places_of[:, None] * k_stride + cols[None, :], mask=live[:, None], other=0.0)
    values = tl.load(v + head * H + places_of[:, None] * v_stride + cols[None, :], mask=live[:, None], other=0.0)
    d_keys = tl.zeros([K, H], tl.float32)
    d_values = tl.zeros([K, H], tl.float32)
    for at in range(low, high, Q):
        rows = at + tl.arange(0, Q)
        seen = rows < high
        queries = tl.load(q + head * H + rows[:, None] * q_stride + cols[None, :], mask=seen[:, None], other=0.0)
        here = rows[:, None] * (N * H) + head * H + cols[None, :]
        d_mixed = tl.load(d_out + here, mask=seen[:, None], other=0.0)
        sums = tl.load(lse + head * tokens + rows, mask=seen, other=0.0)
        mixed = tl.load(out + here, mask=seen[:, None], other=0.0)
        dot = tl.sum(d_mixed.to(tl.float32) * mixed.to(tl.float32), 1)
        own = (rows[None, :] >= start[:, None]) & (rows[None, :] < end[:, None])
        scores = tl.dot(keys, tl.trans(queries)) * (scale * _LOG2E)
        weights = tl.where(own, tl.exp2(scores - sums[None, :]), 0.0)
        d_weights = tl.dot(values, tl.trans(d_mixed))
        passed = weights
        if DROPOUT:
            stays = kept(one, two, rows[None, :] * tokens + places_of[:, None], p)
            d_weights = tl.where(stays, d_weights * raised, 0.0)
            passed = tl.where(stays, weights, 0.0)
        d_values += tl.dot(passed.to(d_mixed.dtype), d_mixed)
        d_scores = weights * (d_weights - dot[None, :])
        d_keys += tl.dot(d_scores.to(queries.dtype), queries)
    if DROPOUT:
        d_values *= raised
    to = head * H + places_of[:, None] * d_stride + cols[None, :]
    tl.store(d_k + to, (d_keys * scale).to(d_k.dtype.element_ty), mask=live[:, None])
    tl.store(d_v + to, d_values.to(d_v.dtype.element_ty), mask=live[:, None])


@triton.jit
def mix_backward(
    q, k, v, places, ends, seed, out, lse, d_out, d_q, d_k, d_v, tokens, q_stride, k_stride, v_stride, d_stride, scale,
    p, stream, window,
    N: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, MET: tl.constexpr, DROPOUT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Write the gradients of queries, keys and values: half the programs take blocks of keys, half of queries.

    None waits for another, at the price of ``out . d_out`` found twice, and a small batch keeps more of a device busy.
    """
    if tl.program_id(2) == 0:
        _mix_keys(
            q, k, v, places, ends, seed, out, lse, d_out, d_k, d_v, tokens, q_stride, k_stride, v_stride, d_stride,
            scale, p, stream, window, N, H, MET, TILE, DROPOUT, WINDOW,
        )  # fmt: skip
    else:
        _mix_queries(
            q, k, v, places, ends, seed, out, lse, d_out, d_q, tokens, q_stride, k_stride, v_stride, d_stride, scale, p,
            stream, window, N, H, TILE, MET, DROPOUT, WINDOW,
        )  # fmt: skip
