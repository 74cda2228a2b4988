"""Settings of a run are checked when they are made: each by one table, with what was found and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flodl.checked_fields import Values
from flodl.distributed import RankError
from flodl.distributed.rounds import KNOB_VALUES, Knobs
from flodl.errors import FlodlError, TrainError
from flodl.train import Trainer, adamw
from flodl.train.schedule import Linear
from flodl.train.settings import VALUES, Settings, make_settings

TABLES: tuple[tuple[type[Any], Mapping[str, Values]], ...] = ((Settings, VALUES), (Knobs, KNOB_VALUES))
FIELDS = [(record, name) for record, table in TABLES for name in table]
OUT_OF_RANGE = [
    (record, name, "nothing of the kind" if values.words else -1)
    for record, table in TABLES
    for name, values in table.items()
    if values.words or (values.fits(1) and not values.fits(-1))
]


def made(**settings: Any) -> list[Any]:
    """The ways in which settings are given; each must refuse."""
    start = (nn.Linear(2, 2), adamw(0.1))
    return [
        lambda: make_settings(settings),
        lambda: Trainer.setup(start[0], optimizer=start[1], **settings),
        lambda: Trainer.builder(*start, lambda model, batch: model(batch).sum()).set(**settings),
    ]


@pytest.mark.parametrize(("record", "table"), TABLES)
def test_every_field_is_in_the_table_and_its_default_fits(record: type[Any], table: Mapping[str, Values]) -> None:
    assert {field.name for field in fields(record)} == set(table)
    record()


@pytest.mark.parametrize(("record", "name"), FIELDS)
def test_a_value_of_the_wrong_kind_is_refused(record: type[Any], name: str) -> None:
    for wrong in (object(), float("nan"), {"a": 1} if name != "identity" else {1: 2}):
        with pytest.raises(TrainError, match=rf"^{name}: found .*; expected .+\.$"):
            record(**{name: wrong})


@pytest.mark.parametrize(("record", "name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_every_entry_point(record: type[Any], name: str, value: Any) -> None:
    for make in [lambda: record(**{name: value}), *made(**{name: value})]:
        with pytest.raises(TrainError) as caught:
            make()
        assert [problem.partition(":")[0] for problem in caught.value.problems] == [name]


NUMBERS = [(record, name) for record, name in FIELDS if dict(TABLES)[record][name].fits(3) and name != "devices"]


@pytest.mark.parametrize(("record", "name"), NUMBERS)
def test_a_number_as_text_is_no_number_and_that_of_numpy_is_one(record: type[Any], name: str) -> None:
    with pytest.raises(TrainError, match=f"^{name}: found '3'"):
        record(**{name: "3"})
    if name != "monitor":
        record(**{name: np.int64(3)})


def test_all_faults_are_said_at_once_with_the_nearest_word() -> None:
    with pytest.raises(TrainError, match="did you mean 'bf16'") as told:
        Settings(precision="bf61", save_end="yes", keep_last=0)  # type: ignore[arg-type]
    assert [problem.partition(":")[0] for problem in told.value.problems] == ["keep_last", "precision", "save_end"]


FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ema": ({"ema": 0.9, "policy": "cadence"}, ["ema"]),
    "several": ({"ema": 0.9, "policy": "async", "shares": (1.0,), "keep_best": "f1"}, ["ema", "shares", "keep_best"]),
    "no work": ({"shares": (0.0, 0.0)}, ["shares"]),
    "speed_hint": ({"speed_hint": (2, 1.5)}, ["speed_hint"]),
    "restarts": ({"max_restarts": 1}, ["max_restarts"]),
    "figures": ({"early_stopping": ("loss", 1), "keep_best": "f1"}, ["early_stopping", "keep_best"]),
    "shards": ({"shard": "fsdp", "precision": "fp16", "compile": True}, ["shard='fsdp' with precision='fp16'", "shard='fsdp' with compile"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_settings_that_cannot_be_combined_are_all_reported_before_ranks_start(name: str) -> None:
    settings, expected = FAULTS[name]
    rows = [{"x": torch.zeros(2), "y": 0}] * 4
    run = Trainer.builder(nn.Linear(2, 2), adamw(0.1), lambda model, batch: model(batch["x"]).sum())
    run.dataset(rows).batch_size(2).devices(2, start="fork").set(**settings)
    with pytest.raises(TrainError) as told:  # not a RankError: no rank was started
        run.run()
    assert [problem.partition(":")[0] for problem in told.value.problems] == expected
    assert all("expected" in problem or "shard" in problem for problem in told.value.problems)


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: run.dataset([{"x": 1}] * 4), "no batch size"),
        (lambda run: run.evaluate(lambda model, batch: (0, 1), [{"x": 1}] * 4), "no batch size"),
        (lambda run: run.dataset(x for x in [1]), "without a length"),
        (lambda run: run.set(watch=["nowhere"]), "nowhere"),
        (lambda run: run.set(schedule=lambda world: "fast"), "schedule: found"),
        (lambda run: run.set(schedule=lambda: Linear(1, 0, 10)), "schedule: found"),
        (lambda run: run.set(schedule=type("S", (), {"lr": lambda self, step: None})()), "schedule: found"),
        (lambda run: run.set(rules=["freeze nowhere when after_epochs(1)"]), "nowhere"),
    ],
)
def test_data_and_paths_are_checked_before_ranks_start(change: Any, says: str) -> None:
    run = Trainer.builder(nn.Linear(2, 2), adamw(0.1), lambda model, batch: model(batch).sum())
    run.dataset([torch.zeros(3, 2)]).devices(2, start="fork")
    with pytest.raises(FlodlError, match=says) as told:
        change(run).run()
    assert not isinstance(told.value, RankError)


def test_a_given_model_that_cannot_learn_is_refused_before_ranks_start() -> None:
    run = Trainer.builder(frozen(), adamw(0.1), lambda model, batch: model(batch).sum())
    with pytest.raises(TrainError, match="no trainable parameter") as told:
        run.dataset([torch.zeros(3, 2)]).devices(2, start="fork").run()
    assert not isinstance(told.value, RankError)


def test_bounds_themselves_fit() -> None:
    Settings(save_end=0.0, num_epochs=0, early_stopping=("-loss", 1), max_grad_norm=float("inf"), monitor=0)
    Knobs(max_batch_diff=0, check_every=0, shares=(0.0, 1.0), speed_hint=(0, 1.0))
