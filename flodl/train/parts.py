"""Creates the parts of a run on one rank: model, optimiser, precision, policy, step, figures and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from flodl.distributed.average import model_tensors
from flodl.distributed.group import Ranks
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.policy import Choice, choose_policy, make_policy
from flodl.distributed.sharded import shard_model, spread
from flodl.distributed.sync import Sync
from flodl.errors import TrainError
from flodl.train.audience import callbacks_of
from flodl.train.callback import Hooks
from flodl.train.evaluate import Evaluator
from flodl.train.events import Events
from flodl.train.faults import check_settings
from flodl.train.observing import Observing
from flodl.train.optim.ema import WeightAverage
from flodl.train.optim.optimizers import make_optimizer
from flodl.train.optim.rates import Rates
from flodl.train.precision import Precision
from flodl.train.requests import Requests
from flodl.train.saving.identity import check_same_model, identity
from flodl.train.saving.saves import Saves
from flodl.train.snapshots import Snapshots
from flodl.train.step import Step
from flodl.train.steplog import StepLog, Tally

if TYPE_CHECKING:
    from flodl.train.trainer_parts import TrainerParts


def create_parts(trainer: TrainerParts, ranks: Ranks) -> None:
    """Create the parts of ``trainer`` on this rank; all ranks call this together.

    Raises:
        TrainError: invalid combinations of settings, or ranks with different models.
    """
    plan = trainer.plan
    settings = replace(plan.settings, resume=True) if ranks.attempt else plan.settings
    trainer.settings, trainer.ranks = settings, ranks
    trainer.train_step, trainer.metrics_fn = plan.train_step, plan.metrics_fn
    seed_all(settings.seed)
    trainer.feed, evals = plan.feeds(ranks.device)
    trainer.callbacks = plan.calls(evals)
    trainer.events = Events(ranks.rank)
    ranks.phase("model build")
    model = plan.model_factory(ranks.device)
    check_settings(settings, world=ranks.world, callbacks=trainer.callbacks)
    trainer.sharded = settings.shard is not None and not ranks.solo
    # A sharded model is moved layer by layer.
    trainer.model = model if trainer.sharded else model.to(ranks.device)
    check_same_model(ranks, model)
    ranks.phase("first broadcast")
    if trainer.sharded:
        spread(model, ranks)
    else:
        with torch.no_grad():
            ranks.copy_from(0, model_tensors(model))
    seed_all(settings.seed + ranks.rank)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
    trainer.precision = Precision(settings.precision, ranks.device)
    if trainer.sharded:
        # Kernels of prepared layers may require float32 parameters.
        plain = not getattr(settings.prepare_model, "needs_float32", False) or ranks.device.type == "cpu"
        shard_model(model, ranks, trainer.precision.products if plain else None)
    trainer.observing = Observing(model, ranks, settings)
    trainer.graphs = trainer.observing.graphs
    trainer.optimizer = trainer.observing.optimizer(
        lambda: make_optimizer(model, plan.optimizer_factory, settings.parameter_groups)
    )
    trainer.unoptimised_at_start = {name for name, _ in unoptimised(trainer)}
    trainer.rates = Rates(trainer.optimizer, settings.schedule, ranks.world, settings.lr_scale_ratio)
    trainer.identity = identity(model, trainer.optimizer, trainer.rates.schedule)
    trainer.epoch_number, trainer.stopping, trainer.tally = 0, False, Tally()
    trainer.log = StepLog(trainer.events, every=settings.log_every, on_nan=settings.on_nan)
    trainer.evaluator = Evaluator(trainer.callbacks, settings.early_stopping, settings.keep_best)
    trainer.requests = Requests(ranks)
    trainer.hooks = Hooks(trainer, (*callbacks_of(settings), *plan.functions))
    ema = settings.average
    trainer.average = None if ema is None else WeightAverage(model, ema.decay, warmup=ema.warmup)
    together = f"shard={settings.shard!r}" if trainer.sharded else "ema" if ema is not None else None
    create_step(trainer, choose_policy(ranks, settings.policy, together=together))
    trainer.timeline = None
    # torch refuses statistics over a single row.
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    trainer.min_rows = 2 if norms else 1
    trainer.saves = Saves(trainer)
    trainer.snapshots = Snapshots(ranks)


def create_step(trainer: TrainerParts, choice: Choice) -> None:
    """Set the policy of the run, and create the step that belongs to it.

    Raises:
        TrainError: the policy cannot keep an average of the weights.
    """
    settings, ranks = trainer.settings, trainer.ranks
    trainer.policy_choice = choice
    # Shards differ between ranks, so there is nothing to compare.
    knobs = replace(settings.knobs, check_every=0) if trainer.sharded else settings.knobs
    trainer.policy = make_policy(choice.name, ranks, trainer.model, knobs)
    if isinstance(trainer.policy, LocalSteps):
        trainer.policy.due = lambda steps, flags: any(flags) or trainer.saves.due or trainer.out_of_steps
    trainer.step_ = Step(
        trainer.model,
        trainer.optimizer,
        None,
        ranks=ranks,
        precision=trainer.precision,
        share_gradients=trainer.policy.shares_gradients,
        max_grad_norm=settings.max_grad_norm,
        on_nan=settings.on_nan,
        sum_of_means=settings.sum_of_means,
        slowdown=settings.slowdown.get(ranks.rank, 1.0),
        reduce_on_cpu=settings.knobs.backend == "cpu",
        sharded=trainer.sharded,
    )
    trainer.step_.hooks = trainer.hooks if trainer.hooks.around else None
    trainer.step_.watching = trainer.observing.watching
    if trainer.average is not None and not ranks.solo and not isinstance(trainer.policy, Sync):
        raise TrainError(
            f"ema: found policy {choice.name!r}, under which each rank would have another average; expected one rank, "
            "or policy='sync'.",
            policy=choice.name,
        )


def unoptimised(trainer: TrainerParts) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters that require gradients and are not in the optimiser."""
    known = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    return ((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in known)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
