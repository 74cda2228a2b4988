"""Rates are those of transformers' schedules, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flodl.errors import ConfigError
from flodl.train import warmed_up
from flodl.train.warmed_up import WarmedUp
from flodl_hf.training.job import make_schedule, warmup_steps
from flodl_hf.training.options import SCHEDULES, make_options

# our name and options; transformers' name and options
CURVES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("linear", {}, "linear", {}),
    ("cosine", {}, "cosine", {}),
    ("constant", {}, "constant_with_warmup", {}),
    ("cosine", {"cycles": 1.5}, "cosine", {"num_cycles": 1.5}),
    ("cosine", {"floor": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine", {"end": 1e-6}, "cosine_with_min_lr", {"min_lr": 1e-6}),
    ("cosine_with_restarts", {}, "cosine_with_restarts", {}),
    ("cosine_with_restarts", {"cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}, "polynomial", {}),
    ("polynomial", {"power": 2.5, "end": 1e-6}, "polynomial", {"power": 2.5, "lr_end": 1e-6}),
    ("inverse_sqrt", {}, "inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 11}, "inverse_sqrt", {"timescale": 11}),
    ("warmup_stable_decay", {"decay": 9}, "warmup_stable_decay", {"num_decay_steps": 9}),
    *(
        (
            "warmup_stable_decay",
            {"decay": 9, "stable": 10, "rise": rise, "fall": fall, "floor": 0.05},
            "warmup_stable_decay",
            {"num_decay_steps": 9, "num_stable_steps": 10, "warmup_type": rise, "decay_type": fall,
             "min_lr_ratio": 0.05},
        )
        for rise in warmed_up.CURVE.words
        for fall in warmed_up.CURVE.words
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("warmup", "rates"),
    [(0, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]), (2, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0])],
)
def test_the_line_rises_to_its_base_and_falls_to_nothing(warmup: int, rates: list[float]) -> None:
    line = WarmedUp("linear", 1.0, warmup, 4)
    assert [line.lr(step) for step in range(6)] == rates


@pytest.mark.transformers
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("name", "options", "theirs", "kwargs"), CURVES)
def test_every_step_has_the_rate_that_transformers_gives_it(
    name: str, options: dict[str, Any], theirs: str, kwargs: dict[str, Any], warmup: int
) -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    if "num_stable_steps" in kwargs:  # get_scheduler gives a total beside them, and warns of that
        scheduler = transformers.get_wsd_schedule(optimizer, warmup, **kwargs)
    else:
        scheduler = transformers.get_scheduler(
            theirs, optimizer, num_warmup_steps=warmup, num_training_steps=33, scheduler_specific_kwargs=kwargs
        )
    ours = make_schedule(name, 3e-5, warmup, 33, lower_is_better=True, options=options)
    for step in range(36):
        assert ours.lr(step) == optimizer.param_groups[0]["lr"], step
        optimizer.step()
        scheduler.step()


def test_every_curve_by_name_is_compared_with_transformers_or_is_ours_alone() -> None:
    assert set(SCHEDULES) - {name for name, *_ in CURVES} == {"one_cycle", "plateau"}


@pytest.mark.parametrize(
    ("schedule", "given", "says"),
    [
        ("polynomial", {"powre": 2}, "did you mean 'power'"),
        ("polynomial", {"power": "steep"}, "expected a number"),
        ("linear", {"end": 0}, "it takes none"),
        ("cosine", {"floor": 0.1, "end": 1e-6}, "expected one"),
        ("warmup_stable_decay", {"fall": 3}, "expected a text"),
    ],
)
def test_options_of_curves_that_cannot_be_are_refused(schedule: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_options({"schedule": schedule, "schedule_options": given})


def test_values_that_a_curve_cannot_have_are_refused() -> None:
    for name, given in [
        ("polynomial", {"end": 1.0}),
        ("warmup_stable_decay", {"fall": "steep"}),
        ("warmup_stable_decay", {"decay": 200}),
        ("cosine_with_restarts", {"cycles": 0}),
        ("inverse_sqrt", {"timescale": 0}),
    ]:
        with pytest.raises(ConfigError):
            make_schedule(name, 1e-3, 0.0, 100, lower_is_better=True, options=given)


def test_options_of_curves_are_numbers_even_when_written_as_text() -> None:
    assert make_options({"schedule": "polynomial", "schedule_options": {"end": "1e-6"}}).schedule_options == {
        "end": 1e-6
    }


def test_a_share_of_all_steps_is_rounded_up() -> None:
    assert [warmup_steps(w, 105) for w in (0.0, 0.1, 0.5, 1, 20)] == [0, 11, 53, 1, 20]


def test_other_shapes_come_by_name_and_objects_stay() -> None:
    one = make_schedule("one_cycle", 1e-3, 0.0, 100, lower_is_better=True)
    assert max(range(100), key=one.lr) in range(25, 35)
    assert make_schedule("plateau", 1e-3, 0.0, 100, lower_is_better=False).mode == "max"
    assert make_schedule(one, 1.0, 0.0, 1, lower_is_better=True) is one
