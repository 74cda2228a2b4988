"""Who gets which part of the work, as pure functions: no clock, no tensor, no process.

One epoch is one global order of samples, the same whatever the number of ranks; a share is a run of
places in that order. Shares of all ranks together cover every place exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flodl.errors import TrainError


def split(total: int, ratios: Sequence[float], least: int = 1) -> list[int]:
    """Return one integer per ratio, in proportion to it, with sum ``total`` exactly.

    Parts are rounded down, then the largest remainders get one more each (earlier ranks first on
    ties), so equal ratios differ by at most one. A ratio of 0 gets nothing.

    Args:
        least: a part smaller than this goes to the largest part instead (BatchNorm cannot train on one row).

    Raises:
        TrainError: a negative or non-finite ratio, or none above zero.
    """
    weight = float(sum(ratios))
    if not ratios or not math.isfinite(weight) or weight <= 0 or min(ratios) < 0:
        raise TrainError(
            f"shares: found ratios {list(ratios)}; expected finite numbers, none negative, not all zero.",
            ratios=list(ratios),
        )
    exact = [total * ratio / weight for ratio in ratios]
    parts = [math.floor(value) for value in exact]
    able = [rank for rank in range(len(ratios)) if ratios[rank] > 0]
    order = sorted(able, key=lambda rank: (parts[rank] - exact[rank], rank))
    missing = total - sum(parts)
    for turn in range(missing):
        parts[order[turn % len(order)]] += 1
    largest = max(range(len(parts)), key=lambda rank: (parts[rank], -rank))
    for rank, part in enumerate(parts):
        if 0 < part < least and rank != largest:
            parts[largest] += part
            parts[rank] = 0
    return parts


def ranges(counts: Sequence[int], start: int = 0) -> list[tuple[int, int]]:
    """Return consecutive half-open ranges of the given lengths, from ``start`` on."""
    out = []
    for count in counts:
        out.append((start, start + count))
        start += count
    return out


def deal(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Return the rank of each piece, so that ranks of these speeds end at about the same time.

    Each piece goes to the rank that would have done it first (on ties the lower one), which is within a third of the
    best division when costs fall (Graham, "Bounds on multiprocessing timing anomalies", 1969, for equal speeds).
    Equal costs and speeds give turns: rank 0, 1, 2, 0, ...

    Raises:
        TrainError: a negative or non-finite speed, or none above zero.
    """
    split(0, speeds)
    load = [0.0] * len(speeds)
    able = [rank for rank, speed in enumerate(speeds) if speed > 0]
    owners = []
    for cost in costs:
        rank = min(able, key=lambda r: ((load[r] + cost) / speeds[r], r))
        load[rank] += cost
        owners.append(rank)
    return owners


def ratios_from_ms(ms: Sequence[float], floor: float = 0.05) -> list[float]:
    """Return shares in proportion to speed, from milliseconds per unit of work; equal where unknown.

    No share falls beneath ``floor`` of the whole before renormalising, so that a rank that was slow
    for a moment keeps being measured.
    """
    if any(value <= 0 for value in ms):
        return [1 / len(ms)] * len(ms)
    speed = [1 / value for value in ms]
    shares = [max(value / sum(speed), floor) for value in speed]
    return [share / sum(shares) for share in shares]


def chunk_size(remaining: int, counts: Sequence[int], rank: int, parts: int = 4) -> int:
    """Return how many batches ``rank`` takes from a pool with ``remaining`` left.

    Its share of a ``parts``-th of the rest: large at first (contiguous reading, few requests),
    single batches at the end, so that no rank has a long queue while others run dry (guided
    self-scheduling, Polychronopoulos and Kuck 1987).
    """
    if remaining <= 0:
        return 0
    return max(1, min(remaining, remaining * counts[rank] // (sum(counts) * parts), counts[rank]))


def wants_chunk(remaining: int, ms: Sequence[float], rank: int) -> bool:
    """Return whether ``rank`` should take another batch, or leave the last ones to faster ranks.

    It should not when the faster ranks, each with one batch under way, finish all that is left
    before this rank would finish one. The fastest rank always takes.
    """
    mine = ms[rank]
    if remaining <= 0:
        return False
    if mine <= 0 or any(value <= 0 for value in ms):
        return True
    faster = [value for value in ms if value < mine]
    if not faster:
        return True
    capacity = sum(max(0, math.floor(mine / value) - 1) for value in faster)
    return capacity < remaining
