"""Trends answer by the formulas of their docstrings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.errors import GraphError
from flodl.monitor.trend import Trend, TrendGroup

numbers = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12)


def test_an_empty_trend_answers_with_constants():
    trend = Trend([])
    assert (len(trend), trend.values(), trend.latest(), trend.mean()) == (0, [], 0.0, 0.0)
    assert (trend.min(), trend.max(), trend.slope()) == (math.inf, -math.inf, 0.0)
    assert not trend.improving()
    assert trend.stalled(0, 1e-9)
    assert not trend.converged(0, 1e9)


def test_the_slope_of_three_two_one():
    trend = Trend([3, 2, 1], "loss")
    assert trend.slope() == -1
    assert trend.improving()
    assert not trend.improving(mode="max")
    assert Trend([1, 2, 3]).improving(mode="max")
    assert Trend([9, 9, 1, 2]).slope(2) == 1
    assert Trend([5]).slope() == 0
    with pytest.raises(GraphError):
        trend.improving(mode="up")


@given(numbers, st.integers(0, 14))
def test_formulas_are_those_of_numpy(values, window):
    trend = Trend(values)
    seen = values[-window:] if window else values
    assert trend.last(window) == seen
    assert trend.mean(window) == pytest.approx(np.mean(seen), abs=1e-6)
    assert (trend.min(window), trend.max(window)) == (min(seen), max(seen))
    if len(seen) >= 2:
        assert trend.slope(window) == pytest.approx(np.polyfit(range(len(seen)), seen, 1)[0], rel=1e-6, abs=1e-6)
        variance = float(np.var(seen))
        assert trend.converged(window, variance * 1.01 + 1e-9)
        assert not trend.converged(window, variance * 0.99 - 1e-9)


def test_stalled_and_converged_are_strict():
    assert not Trend([0, 1]).stalled(0, 1.0)
    assert Trend([0, 1]).stalled(0, 1.01)
    assert not Trend([0, 2]).converged(0, 1.0)
    assert Trend([0, 2]).converged(0, 1.01)
    assert not Trend([1]).converged(0, 1.0)


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [math.nan, 1.0], [1e308, 1e308], [math.inf, 1.0]])
def test_a_diverged_run_is_no_error(values):
    trend = Trend(values)
    trend.mean(), trend.slope()
    assert not trend.converged(0, 1.0) or values[0] == values[1]
    assert not trend.improving()


def test_groups_ask_every_member():
    falling, flat = Trend([3, 2, 1]), Trend([1, 1, 1])
    both = TrendGroup([falling, flat])
    assert (len(both), both.slopes(), both.mean_slope()) == (2, [-1, 0], -0.5)
    assert both.any_improving()
    assert not both.all_improving()
    assert both.any_stalled(0, 0.1)
    assert not both.all_stalled(0, 0.1)
    assert both.any_converged(0, 0.1)
    assert not both.all_converged(0, 0.1)
    assert TrendGroup([falling, falling]).all_improving(2)
    assert TrendGroup([flat, flat]).all_stalled(0, 0.1)
    assert TrendGroup([flat]).all_converged(0, 0.1)


def test_an_empty_group_says_no():
    none = TrendGroup([])
    assert not none.all_improving()
    assert not none.all_stalled(0, 1)
    assert not none.all_converged(0, 1)
    assert not none.any_improving()
    assert none.mean_slope() == 0


def test_values_know_their_epochs():
    assert Trend([5, 6]).by_epoch() == {0: 5, 1: 6}
    assert Trend([5, 6], "a", [1, 3]).by_epoch() == {1: 5, 3: 6}
