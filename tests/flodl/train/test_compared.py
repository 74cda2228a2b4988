"""Each setting of a run is compared when it is taken up again, or a table says why it may be another."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_callbacks import Doubles
from test_contract import made

from flodl.distributed.group import join_ranks
from flodl.distributed.rounds import Knobs
from flodl.errors import TrainError
from flodl.train.saving import resume
from flodl.train.schedule import Constant, Plateau
from flodl.train.settings import MAY_CHANGE, Settings

BASE: dict[str, Any] = {"schedule": Plateau(0.1, 1), "rules": ["stop when stalled(loss, 3)"]}
CHANGED: dict[str, Any] = {
    "num_epochs": 9, "max_steps": 3, "batch_size": 3, "accumulate": 2, "micro_batch_size": 2,
    "seed": 1, "devices": "cpu", "policy": "cadence", "shard": "fsdp", "precision": "bf16", "max_grad_norm": 0.5,
    "on_nan": "skip", "sum_of_means": True, "deterministic": True, "prepare_model": lambda model: None,
    "schedule": Constant(0.1), "lr_scale_ratio": 0.5,
    "parameter_groups": lambda model: [{"params": list(model.parameters()), "weight_decay": 0.5}], "folder": None,
    "save_every": 7, "save_epochs": "idle", "save_end": False, "keep_last": 4, "keep_best": "score", "resume": True,
    "allow_change": ("seed",), "identity": {"data": 1}, "eval_every": 3, "early_stopping": ("score", 2), "timeline": "t",
    "capture": False, "compile": True,
    "progress": None, "log_every": 3, "monitor": True, "callbacks": (Doubles(),), "watch": ("head",),
    "rules": ["stop when stalled(loss, 4)"], "trend_every": 2, "trackers": ("csv",), "tracker_folder": "x", "ema": 0.9,
}  # fmt: skip
KNOBS: dict[str, Any] = {
    "backend": "cpu", "shares": (0.5, 0.5), "anchor": 3, "max_anchor": 20, "overhead_target": 0.2, "max_batch_diff": 2,
    "max_overshoot": 2, "speed_hint": (0, 2.0), "divergence_threshold": None, "check_every": 3, "slowdown": {0: 1.0}, "timeout_s": 5.0, "max_restarts": 2,
}  # fmt: skip


def told(**settings: Any) -> dict[str, Any]:
    """Return what a run with these settings compares; a rank that is alone follows no policy and shards nothing."""
    several = {name: settings.pop(name) for name in ("policy", "shard") if name in settings}
    run = made(**{**BASE, **settings}).eval_fn(lambda model: {"score": 0.0})
    trainer = run.trainer().prepare(join_ranks(device="cpu"))
    trainer.policy.name = several.get("policy", trainer.policy.name)
    trainer.settings = replace(trainer.settings, shard=several.get("shard"))
    return resume.recipe(trainer)


def test_every_setting_is_looked_at_here() -> None:
    assert CHANGED.keys() == {row.name for row in fields(Settings)} - {"knobs"}
    assert KNOBS.keys() == {row.name for row in fields(Knobs)}
    assert CHANGED.keys() | KNOBS.keys() >= MAY_CHANGE


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_is_compared_or_may_change(name: str, tmp_path: Path) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        value = {"folder": str(tmp_path), "tracker_folder": str(tmp_path)}.get(name, CHANGED[name])
        before, after = told(), told(**{name: value})
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert (before == after) == (name in MAY_CHANGE), name


@pytest.mark.parametrize("name", KNOBS)
def test_a_setting_of_the_policy_is_compared_or_may_change(name: str) -> None:
    assert resume._knobs(Knobs()) == {}
    assert (resume._knobs(replace(Knobs(), **{name: KNOBS[name]})) == {}) == (name in MAY_CHANGE)


def test_the_figure_that_a_schedule_goes_by_is_that_of_the_run(tmp_path: Path) -> None:
    def run(metric: str, *accepted: str, **settings: Any) -> Any:
        judged = made(schedule=Plateau(0.1, 1, metric=metric), **settings)
        judged.eval_fn(lambda model: {"score": 0.0}).checkpoints(str(tmp_path), allow_change=accepted)
        return judged.run()

    run("loss", max_steps=3)
    with pytest.raises(TrainError, match="schedule_metric: was 'loss', is 'score'") as caught:
        run("score")
    assert caught.value.names == ["schedule_metric"]
    run("score", "schedule_metric")
