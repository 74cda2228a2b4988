"""Steps that are left out, beside a plain loop: what does not move, and what counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_contract import BATCH, DATA, LR, ROWS, Tied, flat, made
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.train import Callback, Loss, StepDone
from flodl.train.schedule import Exponential

RATES = Exponential(LR, 0.7)
BAD = (1, 3, 4)
"""Batches of each epoch that are spoilt."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=LR)


def parts() -> list[dict[str, torch.Tensor]]:
    return [{name: column[i : i + BATCH] for name, column in DATA.items()} for i in range(0, ROWS, BATCH)]


def is_spoilt(batch: Any) -> bool:
    bad = torch.cat([parts()[place]["x"] for place in BAD])
    return bool((batch["x"][:, None] == bad).all(-1).any())


def spoilt(model: nn.Module, batch: Any) -> Any:
    loss = cross_entropy(model(batch["x"]), batch["y"])
    return loss * float("inf") if is_spoilt(batch) else loss


def nothing(model: nn.Module, batch: Any) -> Any:
    count = torch.tensor(0.0 if is_spoilt(batch) else len(batch["y"]))
    return Loss(cross_entropy(model(batch["x"]), batch["y"], reduction="sum") * bool(count), count)


def plain(make: Any) -> tuple[nn.Module, torch.Tensor]:
    """Return the model and its average after a loop of two epochs that leaves steps out."""
    model = Tied()
    average, updates, optimizer = flat(model).clone(), 0, make(model.parameters())
    for step, batch in enumerate(2 * parts()):
        for group in optimizer.param_groups:
            group["lr"] = RATES.lr(step)
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        if not is_spoilt(batch):
            updates += 1
            optimizer.step()
            average = torch.lerp(average, flat(model), 1 - min(0.9, (1 + updates) / (10 + updates)))
        optimizer.zero_grad()
    return model, average


class Weights(Callback):
    """Keeps the weights that training ended with."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.seen = flat(trainer.model)


@pytest.mark.parametrize("step", [spoilt, nothing])
@pytest.mark.parametrize("make", [adam, rmsprop])
@pytest.mark.parametrize("most", [None, 4, 7])
def test_neither_weights_nor_their_average_know_of_it(step: Any, make: Any, most: int | None, tmp_path: Path) -> None:
    expected, average = plain(make)
    weights, told = Weights(), []
    settings: dict[str, Any] = {"ema": 0.9, "on_nan": "skip", "schedule": RATES, "callbacks": [weights]}
    for steps in (most, None):
        run = made(None, make, step, **settings, max_steps=steps).subscribe(told.append, StepDone)
        trained = run.checkpoints(str(tmp_path)).run().model
        if steps is None:
            break
    assert torch.equal(weights.seen, flat(expected))
    assert torch.equal(flat(trained), average)
    assert [event.skipped for event in told] == [place in BAD for _ in range(2) for place in range(5)]
    assert [event.step for event in told] == list(range(1, 11))
    assert [event.lr for event in told] == pytest.approx([RATES.lr(step) for step in range(10)])


@pytest.mark.parametrize("step", [spoilt, nothing])
@pytest.mark.parametrize("make", [adam, rmsprop])
def test_ranks_leave_it_out_together(step: Any, make: Any) -> None:
    _, average = plain(make)
    run = made(None, make, step, ema=0.9, on_nan="skip", schedule=RATES).devices(2, start="fork")
    trained = run.run().load_into(Tied())
    torch.testing.assert_close(flat(trained), average, rtol=1e-9, atol=1e-12)


class Moves(Callback):
    """Notes whether a step was applied, and whether weights and average moved in it."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool, bool]] = []

    def _now(self, trainer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return flat(trainer.model).clone(), torch.cat([t.flatten().clone() for t in trainer.average.tensors().values()])

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        self.before = self._now(trainer)

    def on_step_end(self, trainer: Any, result: Any) -> None:
        moved = [not torch.equal(a, b) for a, b in zip(self.before, self._now(trainer), strict=True)]
        self.seen.append((result.applied, moved[0], moved[1]))


def test_an_overflow_of_float16_moves_nothing() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return 500 * cross_entropy(model(batch["x"].float()), batch["y"])

    moves = Moves()
    made(Tied().float(), None, step, precision="fp16", ema=0.5, callbacks=[moves]).run()
    applied = [row[0] for row in moves.seen]
    assert True in applied
    assert False in applied
    assert moves.seen == [(one, one, one) for one in applied]
