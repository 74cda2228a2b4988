"""Types of the parts of a `flodl.train.Trainer` on one rank, for the modules that the trainer itself imports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.policy import Choice
from flodl.distributed.sync import Sync
from flodl.monitor.timeline import Timeline
from flodl.train.callback import Hooks
from flodl.train.evaluate import Callbacks, Evaluator
from flodl.train.events import EpochMetrics, Events
from flodl.train.feed import Feed
from flodl.train.observing import Observing
from flodl.train.optim.ema import WeightAverage
from flodl.train.optim.rates import Rates
from flodl.train.plan import RunPlan
from flodl.train.precision import Precision
from flodl.train.requests import Requests
from flodl.train.settings import Settings
from flodl.train.step import Step, TrainStep
from flodl.train.steplog import StepLog, Tally


class TrainerParts(Protocol):
    """Parts of a trainer; created by `flodl.train.parts`."""

    plan: RunPlan
    settings: Settings
    ranks: Ranks
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train_step: TrainStep | None
    metrics_fn: Callable[[EpochMetrics], Any] | None
    feed: Feed | None
    callbacks: Callbacks
    events: Events
    precision: Precision
    observing: Observing
    graphs: Any
    rates: Rates
    identity: dict[str, Any]
    evaluator: Evaluator
    log: StepLog
    tally: Tally
    requests: Requests
    hooks: Hooks
    average: WeightAverage | None
    policy: Sync | LocalSteps
    policy_choice: Choice
    step_: Step
    timeline: Timeline | None
    saves: Any
    snapshots: Any
    loop: Any
    epoch_number: int
    stopping: bool
    sharded: bool
    min_rows: int
    unoptimised_at_start: set[str]

    @property
    def out_of_steps(self) -> bool:
        """Whether ``max_steps`` steps were taken."""
        ...

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights."""
        ...

    def use_policy(self, choice: Choice) -> None:
        """Set the policy of the run."""

    def model_was_replaced(self) -> None:
        """Note that parameters and buffers were overwritten."""

    def ask(self, request: str) -> None:
        """Request something of all ranks."""

    def stop(self) -> None:
        """Request the end of the run."""

    def warn(self, message: str) -> None:
        """Report a warning."""
