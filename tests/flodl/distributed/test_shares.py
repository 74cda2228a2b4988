from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.distributed import Ranks
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.rounds import Knobs
from flodl.distributed.shares import chunk_size, ranges, ratios_from_ms, split, wants_chunk
from flodl.errors import TrainError

ratios = st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda values: max(values) > 1e-3)


@settings(max_examples=150, deadline=None)
@given(total=st.integers(0, 10_000), ratios=ratios)
def test_parts_cover_everything_once_and_follow_the_ratios(total, ratios):
    parts = split(total, ratios)
    assert sum(parts) == total
    for part, ratio in zip(parts, ratios, strict=True):
        assert part >= 0
        assert abs(part - total * ratio / sum(ratios)) <= 1 + 1e-6
        assert ratio > 0 or part == 0
    places = [i for a, b in ranges(parts) for i in range(a, b)]
    assert places == list(range(total))


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 60), ratios=ratios, least=st.integers(1, 4))
def test_no_part_is_smaller_than_the_least_unless_all_together_are(total, ratios, least):
    parts = split(total, ratios, least)
    assert sum(parts) == total
    if total >= least:
        assert all(part == 0 or part >= least for part in parts) or max(parts) == total


@pytest.mark.parametrize("ratios", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_impossible_ratios_are_refused(ratios):
    with pytest.raises(TrainError):
        split(10, ratios)


def test_shares_follow_speed_and_never_starve_a_rank():
    assert ratios_from_ms([10, 25]) == pytest.approx([25 / 35, 10 / 35])
    assert ratios_from_ms([10, 0]) == [0.5, 0.5]
    assert min(ratios_from_ms([1, 1000])) > 0.04


@settings(max_examples=100, deadline=None)
@given(
    total=st.integers(0, 400),
    ms=st.lists(st.floats(1, 50), min_size=2, max_size=5),
    counts=st.data(),
)
def test_ranks_that_take_chunks_at_their_own_speed_do_every_batch_once_and_end_together(total, ms, counts):
    """A small simulation: each rank takes a chunk when it is free."""
    slow = max(ms)
    planned = [max(1, round(10 * slow / m)) for m in ms]
    free = [0.0] * len(ms)
    left, done = total, [0] * len(ms)
    dry: set[int] = set()
    while len(dry) < len(ms):
        rank = min((r for r in range(len(ms)) if r not in dry), key=lambda r: free[r])
        if not wants_chunk(left, ms, rank):
            dry.add(rank)
            continue
        size = chunk_size(left, planned, rank)
        assert 1 <= size <= left
        left -= size
        done[rank] += size
        free[rank] += size * ms[rank]
    assert left == 0
    assert sum(done) == total
    best = total / sum(1 / m for m in ms)
    assert max(free) <= best + 2 * slow * (1 + len(ms) / 4)


def test_the_fastest_rank_always_takes_and_a_slow_one_leaves_the_last_batches():
    ms = [10.0, 25.0]
    assert wants_chunk(1, ms, 0)
    assert not wants_chunk(1, ms, 1)
    assert wants_chunk(10, ms, 1)
    assert wants_chunk(1, [0.0, 0.0], 1)
    assert not wants_chunk(0, ms, 0)


@dataclass
class OneOfTwo(Ranks):
    """A rank without a process group, which takes turns from a store in this process."""

    def tell(self, value, source=0):
        return 1


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(0, 40),
    speeds=st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=2, max_size=2),
    order=st.lists(st.integers(0, 1), max_size=80),
)
def test_no_turn_is_left_behind_by_ranks_that_know_different_speeds(total, speeds, order):
    store = torch.distributed.HashStore()
    ranks = [OneOfTwo(rank, 2, store=store) for rank in (0, 1)]
    policies = [LocalSteps(r, torch.nn.Linear(1, 1), Knobs(), overlap=False) for r in ranks]
    for policy, ms in zip(policies, speeds, strict=True):
        policy.total = total
        policy.cadence = replace(policy.cadence, ms=ms, calibrated=True)
    done = []
    while order or policies:
        # a rank that finds nothing is dry for good, whatever it learns later
        policy = policies[(order.pop() if order else 0) % len(policies)]
        if taken := policy._take():
            done += taken
        else:
            policies.remove(policy)
        if not policies:
            break
    assert sorted(done) == list(range(total))


def test_what_is_left_over_goes_to_the_largest_remainders():
    assert split(10, [5.9, 4.1]) == [6, 4]
    assert split(11, [2.2, 2.7, 6.1]) == [2, 3, 6]
    assert split(7, [1.0, 1.0, 1.0]) == [3, 2, 2]  # the earlier ranks on ties


class Landed:
    """An average that has arrived, with the rows of two ranks."""

    def __init__(self, *rows):
        self.rows = [list(row) for row in rows]

    def wait(self):
        pass


@pytest.mark.parametrize(("slowest_first", "anchor"), [(False, 10), (True, 10)])
def test_waiting_for_the_slowest_rank_is_no_cost_of_averaging(slowest_first, anchor):
    """The last rank to come measures the averaging alone; the other one measures its waiting as well."""
    policy = LocalSteps(
        OneOfTwo(0, 2, store=torch.distributed.HashStore()), torch.nn.Linear(1, 1), Knobs(), overlap=False
    )
    policy.mean.finish = lambda flight, keep_progress: (flight.rows, 0.0)
    # steps, samples, compute time, drift, time in the averaging, out of turns, turns taken
    rows = [(10, 80, 1000.0, 0.0, 900.0, 0.0, 20), (10, 80, 1000.0, 0.0, 60.0, 0.0, 20)]
    policy._flight = Landed(*(reversed(rows) if slowest_first else rows))
    policy._sent = (0, 0, 0.0)
    found = policy._land([])
    assert found.cadence.anchor == anchor  # 60 ms of 1,000 are below the target of 10 %, 900 ms are not
