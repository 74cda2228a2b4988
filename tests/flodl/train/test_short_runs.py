"""A run that ends inside an epoch is judged where it ended."""

from __future__ import annotations

import torch
from torch import nn

from flodl import Trainer
from flodl.train import EvalDone


def test_a_run_that_ends_inside_an_epoch_is_evaluated_at_its_last_step() -> None:
    told: list[EvalDone] = []
    Trainer.builder(
        lambda device: nn.Linear(2, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: model(batch["x"]).square().mean(),
    ).dataset({"x": torch.randn(12, 2)}).batch_size(2).num_epochs(2).set(max_steps=3).eval_fn(
        lambda model: {"size": float(model.weight.abs().sum())}
    ).subscribe(lambda event: told.append(event) if isinstance(event, EvalDone) else None).run()
    assert [(event.step, list(event.metrics)) for event in told] == [(3, ["size"])]
