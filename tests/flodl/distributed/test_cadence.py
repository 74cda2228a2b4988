import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.distributed import ElChe
from flodl.distributed.cadence import DivergenceGuard


def test_the_worked_example_two_ranks_one_two_and_a_half_times_slower():
    che = ElChe.start(2, anchor=10)
    assert (che.counts, che.calibrated) == ((10, 10), False)
    che = che.report_timing((100, 250), (10, 10))
    assert (che.ms, che.counts, che.calibrated) == ((10, 25), (25, 10), True)
    che = che.report_timing((250, 250), (25, 10), sync_ms=100)
    assert (che.anchor, che.counts) == (40, (100, 40))


def test_a_change_within_ten_percent_is_ignored_and_a_larger_one_applied():
    che = ElChe.start(2, anchor=100).report_timing((100, 100), (1, 1))
    assert che.counts == (100, 100)
    # one smoothing step moves ms by alpha = the relative error itself, at least 0.1 of it
    near = che.report_timing((100 / 1.3, 100), (1, 1))
    assert near.counts == (100, 100), near.ms
    assert round(100 * 100 / near.ms[0]) <= 110
    far = che.report_timing((100 / 1.6, 100), (1, 1))
    assert round(100 * 100 / far.ms[0]) > 110
    assert far.counts[0] == round(100 * 100 / far.ms[0])


@pytest.mark.parametrize(
    ("new", "alpha"),
    [(10.1, 0.1), (13.0, 0.3), (100.0, 0.8)],
    ids=["at least 0.1", "the relative error", "at most 0.8"],
)
def test_smoothing_follows_the_relative_error_within_bounds(new, alpha):
    che = ElChe.start(2).report_timing((10, 10), (1, 1)).report_timing((new, 10), (1, 1))
    assert che.ms[0] == pytest.approx(alpha * new + (1 - alpha) * 10)


def test_the_anchor_shrinks_by_one_when_sync_is_cheap_but_not_beneath_its_start():
    che = ElChe.start(2, anchor=10).report_timing((100, 100), (10, 10), 20)
    assert che.anchor == 20
    for _ in range(30):
        che = che.report_timing((100, 100), (10, 10), 1)
    assert che.anchor == 10


@pytest.mark.parametrize(("target", "held"), [(0.001, 0.01), (0.2, 0.2), (3.0, 0.5)])
def test_the_overhead_target_is_held_within_its_range(target, held):
    assert ElChe.start(2, overhead_target=target).overhead_target == held


def test_max_anchor_bounds_growth_and_lowers_the_start():
    che = ElChe.start(2, anchor=10, max_anchor=12).report_timing((100, 100), (10, 10), 90)
    assert che.anchor == 12
    low = ElChe.start(2, anchor=10, max_anchor=4)
    assert (low.anchor, low.min_anchor, low.counts) == (4, 4, (4, 4))
    assert ElChe.start(2, max_anchor=-3).max_anchor == 1


def test_a_speed_hint_gives_the_slow_rank_the_anchor():
    hinted = ElChe.start(3, anchor=10, speed_hint=(1, 2.25))
    assert hinted.counts == (23, 10, 23)


@pytest.mark.parametrize(("factor", "anchor"), [(0.5, 20), (0.01, 4), (2.0, 40), (1.0, 40)])
def test_a_nudge_lowers_the_anchor_within_bounds_and_beneath_its_start(factor, anchor):
    che = ElChe.start(2, anchor=10).report_timing((100, 250), (10, 10), 100)
    assert che.anchor == 40
    nudged = che.nudge_anchor_down(factor)
    assert nudged.anchor == anchor
    assert che.nudge_anchor_down(0.1).nudge_anchor_down(0.1).anchor == 1


def test_a_count_changes_by_at_most_max_batch_diff_once_calibrated():
    che = ElChe.start(2, anchor=10, max_batch_diff=3).report_timing((100, 100), (10, 10))
    che = che.report_timing((100, 1000), (10, 10))
    assert che.counts == (13, 10)


def test_a_rank_without_work_keeps_its_speed_and_silence_changes_nothing():
    che = ElChe.start(2).report_timing((100, 250), (10, 10))
    assert che.report_timing((0, 0), (0, 0)) == che
    assert ElChe.start(2).report_timing((0, 0), (0, 0)).calibrated is False


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(2, 5),
    anchor=st.integers(1, 50),
    rounds=st.lists(st.tuples(st.lists(st.floats(0.5, 5000), min_size=5, max_size=5), st.floats(0, 2000)), max_size=6),
)
def test_counts_stay_whole_positive_and_near_equal_time(world, anchor, rounds):
    che = ElChe.start(world, anchor)
    for ms, sync in rounds:
        walls = [m * n for m, n in zip(ms, che.counts, strict=False)]
        che = che.report_timing(walls, che.counts, sync)
        assert all(isinstance(n, int) and n >= 1 for n in che.counts)
        assert 1 <= che.anchor <= che.max_anchor
        assert ElChe.from_dict(che.to_dict()) == che
    if len(rounds) == 1:
        times = [n * m for n, m in zip(che.counts, che.ms, strict=True)]
        assert max(times) - min(times) <= max(che.ms)


def test_the_guard_speaks_up_when_three_figures_rise_above_the_threshold():
    def verdicts(*figures):
        guard, out = DivergenceGuard(0.05), []
        for figure in figures:
            guard, verdict = guard.observe(figure)
            out.append(verdict)
        return out

    assert verdicts(0.01, 0.02, 0.04) == ["stable"] * 3
    assert verdicts(0.03, 0.05, 0.08) == ["stable", "stable", "suppress"]
    assert verdicts(0.03, 0.05, 0.2) == ["stable", "stable", "nudge"]
    assert verdicts(0.2, 0.2, 0.2, 0.1) == ["stable"] * 4
    assert not math.isnan(len(DivergenceGuard().recent))
