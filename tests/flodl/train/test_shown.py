"""Progress of a run: totals that are true, lines for epochs and evaluations, nothing where it is not wanted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from flodl.data import TensorRows
from flodl.progress import Progress
from flodl.train import EvalDone, RunDone, RunStarted, StepDone, Trainer, sgd
from flodl.train.audience import ShowProgress

torch.set_num_threads(1)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_loss(model(batch["x"]), batch["x"])


def judge(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"error": (mse_loss(model(batch["x"]), batch["x"]), 1)}


def make_model(device: Any) -> nn.Module:
    return nn.Linear(3, 3)


def builder(**settings: Any) -> Any:
    data = TensorRows({"x": torch.ones(40, 3)})
    made = Trainer.builder(make_model, sgd(0.1), step).dataset(data).batch_size(10).num_epochs(3)
    return made.evaluate(judge, data).set(**settings)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("most", "total"), [(None, 12), (7, 7), (99, 12)])
def test_the_total_is_that_of_the_run(
    devices: int, most: int | None, total: int, capfd: pytest.CaptureFixture[str]
) -> None:
    made = builder(max_steps=most).progress(True)
    (made if devices == 1 else made.devices(devices, start="fork")).run()
    said = capfd.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0].startswith(f"training: 3 epochs, {total} steps")
    assert lines[-1].startswith(f"training: {total} of {total} steps (100 %), epoch ")
    epochs = -(-total // 4)
    assert sum(bool(re.match(r"epoch \d: loss \d", line)) for line in lines) == total // 4
    assert sum(bool(re.match(r"step \d+: error \d", line)) for line in lines) == epochs


@pytest.mark.parametrize("show", [None, False])
def test_a_short_run_shows_nothing(show: bool | None, capfd: pytest.CaptureFixture[str]) -> None:
    builder().progress(show).run()
    assert capfd.readouterr().err == ""


def test_a_loop_of_your_own_is_shown_too(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 3)
    trainer = Trainer.setup(model, optimizer=sgd(0.1), batch_size=10, progress=True)
    for _ in trainer.epochs(2):
        for batch in trainer.batches(TensorRows({"x": torch.ones(40, 3)})):
            step(model, batch).backward()
            trainer.step()
    lines = capfd.readouterr().err.splitlines()
    assert [line[:8] for line in lines] == ["training", "epoch 1:", "epoch 2:", "training"]
    assert lines[0] == "training: 2 epochs, 8 steps"
    assert lines[-1].startswith("training: 8 of 8 steps (100 %), epoch 2")


def test_an_error_takes_the_display_away(capfd: pytest.CaptureFixture[str]) -> None:
    def boom(epoch: int, trainer: Any) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        builder().progress(True).epoch_fn(boom).run()
    with Progress("next", 1, show=True) as after:
        after.say("seen")
    assert capfd.readouterr().err.splitlines()[-1].startswith("next")


def test_steps_of_the_whole_run_may_be_known_better(capfd: pytest.CaptureFixture[str]) -> None:
    shown = ShowProgress(True, total=11)
    shown(RunStarted(world=1, policy="sync", epochs=2, steps_per_epoch=5))
    shown(StepDone(step=11, epoch=1, loss=1.0, count=1, samples=1, lr=1.0, grad_norm=1.0, compute_ms=1, wall_ms=1))
    shown(EvalDone(step=11, epoch=2, metrics={"f1": 0.5, "f1/PER": 0.25}, wall_ms=1))
    shown(EvalDone(step=11, epoch=2, metrics={"dev/f1": 0.5, "dev/f1/PER": 0.25}, wall_ms=1))
    shown(RunDone(step=11, epoch=2, reason="finished"))
    lines = capfd.readouterr().err.splitlines()
    assert lines[1:3] == ["step 11: f1 0.5", "step 11: dev/f1 0.5"]
    assert lines[-1].startswith("training: 11 of 11 steps")
