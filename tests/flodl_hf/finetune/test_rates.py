"""Rates are those of transformers' schedules, to the bit."""

from __future__ import annotations

import pytest
import torch

from flodl_hf.finetuning.rates import WarmedUp, make_schedule, warmup_steps


@pytest.mark.parametrize(
    ("warmup", "rates"),
    [(0, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]), (2, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0])],
)
def test_the_line_rises_to_its_base_and_falls_to_nothing(warmup: int, rates: list[float]) -> None:
    line = WarmedUp("linear", 1.0, warmup, 4)
    assert [line.lr(step) for step in range(6)] == rates


@pytest.mark.transformers
@pytest.mark.parametrize("warmup", [0, 1, 7, 40])
@pytest.mark.parametrize(("shape", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("constant", None)])
def test_every_step_has_the_rate_that_transformers_gives_it(shape: str, theirs: str | None, warmup: int) -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    scheduler = transformers.get_scheduler(
        theirs or "constant_with_warmup", optimizer, num_warmup_steps=warmup, num_training_steps=33
    )
    ours = WarmedUp(shape, 3e-5, warmup, 33)
    for step in range(33):
        assert ours.lr(step) == optimizer.param_groups[0]["lr"], step
        optimizer.step()
        scheduler.step()


def test_a_share_of_all_steps_is_rounded_up() -> None:
    assert [warmup_steps(w, 105) for w in (0.0, 0.1, 0.5, 1, 20)] == [0, 11, 53, 1, 20]


def test_other_shapes_come_by_name_and_objects_stay() -> None:
    one = make_schedule("one_cycle", 1e-3, 0.0, 100, lower_is_better=True)
    assert max(range(100), key=one.lr) in range(25, 35)
    assert make_schedule("plateau", 1e-3, 0.0, 100, lower_is_better=False).mode == "max"
    assert make_schedule(one, 1.0, 0.0, 1, lower_is_better=True) is one
