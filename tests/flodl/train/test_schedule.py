"""Each schedule gives the rate its formula says, at every step."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flodl.errors import ConfigError
from flodl.train.schedule import (
    Constant,
    Cosine,
    Cyclic,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    Plateau,
    Schedule,
    StepDecay,
    Warmup,
)
from flodl.train.warmed_up import Polynomial, WarmupStableDecay

TABLE = [
    (Constant(0.3), {0: 0.3, 10**6: 0.3}),
    (Linear(1.0, 0.0, 4), {0: 1, 1: 0.75, 4: 0, 9: 0}),
    (StepDecay(1.0, 3, 0.5), {0: 1, 2: 1, 3: 0.5, 5: 0.5, 6: 0.25}),
    (MultiStep(1.0, (2, 5), 0.1), {0: 1, 1: 1, 2: 0.1, 4: 0.1, 5: 0.01, 99: 0.01}),
    (Exponential(2.0, 0.5), {0: 2, 1: 1, 3: 0.25}),
    (Cosine(1.0, 0.2, 10), {0: 1, 5: 0.6, 10: 0.2, 50: 0.2}),
    (Warmup(Cosine(1.0, 0.0, 10), 1.0, 4), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 9: 0.5, 14: 0, 20: 0}),
    (Warmup(Constant(3.0), 1.0, 0), {0: 3.0}),
    (OneCycle(1.0, 100), {0: 0.04, 15: 0.52, 30: 1.0, 65: 0.52, 100: 0.04, 500: 0.04}),
    (OneCycle(1.0, 10, warmup_fraction=0.0), {0: 1.0, 5: 0.52, 10: 0.04}),
    (OneCycle(1.0, 10, warmup_fraction=1.0), {0: 0.04, 5: 0.52, 10: 0.04}),
    (Cyclic(0.0, 1.0, 4), {0: 0, 2: 0.5, 4: 1, 6: 0.5, 8: 0, 12: 1}),
    (Cyclic(0.0, 1.0, 1, 4), {0: 0, 1: 1, 2: 0.75, 4: 0.25, 5: 0, 6: 1}),
]


@pytest.mark.parametrize(("schedule", "rates"), TABLE, ids=lambda v: str(v)[:40])
def test_rates_follow_the_formula(schedule, rates):
    assert {step: pytest.approx(schedule.lr(step)) for step in rates} == rates
    assert isinstance(schedule, Schedule)


@pytest.mark.parametrize("schedule", [schedule for schedule, _ in TABLE], ids=lambda v: str(v)[:40])
def test_schedules_are_values(schedule):
    copied = pickle.loads(pickle.dumps(schedule))
    assert copied == schedule
    assert hash(copied) == hash(schedule)
    with pytest.raises(AttributeError):
        schedule.base = 1.0


@given(st.integers(0, 300))
def test_rates_stay_between_their_ends(step):
    for schedule, low, high in (
        (Cosine(1.0, 0.1, 100), 0.1, 1.0),
        (OneCycle(1.0, 100), 0.04, 1.0),
        (Cyclic(0.1, 1.0, 7, 13), 0.1, 1.0),
        (Linear(1.0, 0.1, 100), 0.1, 1.0),
    ):
        assert low - 1e-9 <= schedule.lr(step) <= high + 1e-9


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Cosine(0.5, 0.1, 20), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20, 0.1)),
        (StepDecay(0.5, 7, 0.3), lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.3)),
        (MultiStep(0.5, (3, 11), 0.2), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 11], 0.2)),
        (Exponential(0.5, 0.9), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)),
    ],
    ids=["cosine", "step", "multistep", "exponential"],
)
def test_rates_are_those_of_torch(ours, theirs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    reference = theirs(optimizer)
    for step in range(20):
        assert ours.lr(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cosine(1, 0, 0),
        lambda: Linear(1, 0, 0),
        lambda: StepDecay(1, 0),
        lambda: MultiStep(1, (5, 2)),
        lambda: MultiStep(1, (2, 2)),
        lambda: Warmup(Constant(1), 1, -1),
        lambda: OneCycle(1, 10, warmup_fraction=1.5),
        lambda: OneCycle(1, 0),
        lambda: Cyclic(0, 1, 0),
        lambda: Cyclic(0, 1, 3, 0),
        lambda: Plateau(1, 0),
        lambda: Plateau(1, 1, factor=1.0),
        lambda: Plateau(1, 1, mode="mean"),
    ],
)
def test_impossible_arguments_are_refused(make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.problems


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Linear("0.1", 0, 0), ["start", "total"]),
        (lambda: MultiStep(1, "ab"), ["milestones"]),
        (lambda: OneCycle(-1, 10, divisor=0), ["peak", "divisor"]),
        (lambda: Plateau(1, 1.5, factor="half"), ["patience", "factor"]),
        (lambda: Polynomial(1.0, 10, end=2.0), ["end"]),
        (lambda: WarmupStableDecay(1.0, 0, -1, 2, rise="log", floor=2), ["stable", "rise", "floor"]),
    ],
)
def test_an_error_names_each_argument_with_what_was_found_and_expected(make, names):
    with pytest.raises(ConfigError) as caught:
        make()
    assert [problem.partition(":")[0] for problem in caught.value.problems] == names
    assert all("found" in problem and "expected" in problem for problem in caught.value.problems)


def test_plateau_falls_after_patience_and_strict_improvement_resets_it():
    plateau = Plateau(1.0, 2, 0.5, 0.3)
    rates = [plateau.observe(metric) for metric in (5, 4, 4, 3, 3, 3, 3, 3, 3)]
    assert rates == [1, 1, 1, 1, 1, 0.5, 0.5, 0.3, 0.3]
    assert plateau.lr(10**9) == 0.3


def test_plateau_for_metrics_that_should_rise():
    plateau = Plateau(1.0, 1, 0.5, mode="max")
    assert [plateau.observe(metric) for metric in (1, 2, 2, 3)] == [1, 1, 0.5, 0.5]


def test_plateau_counts_nan_as_no_improvement():
    plateau = Plateau(1.0, 1, 0.5)
    assert [plateau.observe(metric) for metric in (math.nan, 2, math.nan)] == [0.5, 0.5, 0.25]


def test_plateau_resumes_where_it_stopped():
    first, second = Plateau(1.0, 2, 0.5), Plateau(1.0, 2, 0.5)
    for metric in (3, 3):
        first.observe(metric)
    second.load_state_dict(first.state_dict())
    assert [first.observe(m) for m in (3, 2, 2, 2)] == [second.observe(m) for m in (3, 2, 2, 2)]
