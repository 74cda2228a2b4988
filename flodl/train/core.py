"""What a run consists of on one rank (model, optimiser, precision, policy, step, figures), and how it is put together.

No loop is here. Whatever helps the loop (finding micro-batches, choosing how steps are carried out, checkpoints,
reports) is written against this class; the loop itself is in `flodl.train.loop`.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from dataclasses import replace

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
from flodl.monitor.timeline import Timeline
from flodl.signals import StopSignals
from flodl.train.callback import Hooks
from flodl.train.epoch_figures import Tally
from flodl.train.evaluate import Callbacks, Evaluator
from flodl.train.events import Events, Warned
from flodl.train.faults import check_settings
from flodl.train.feed import Feed
from flodl.train.monitored import callbacks_of
from flodl.train.observing import Observing
from flodl.train.optim.ema import WeightAverage
from flodl.train.optim.optimizers import OptimizerMaker, make_optimizer
from flodl.train.optim.rates import Rates
from flodl.train.precision import Precision
from flodl.train.requests import Wishes
from flodl.train.saving.identity import check_same_model, identity
from flodl.train.settings import Settings
from flodl.train.step import Step, TrainStep
from flodl.train.steplog import StepLog

__all__ = ["Stopwatch", "TrainerCore", "seed_all"]


class TrainerCore:
    """The parts of a trainer.

    Attributes:
        model: the model, on this rank's device.
        optimizer: its optimiser.
        ranks: this process among its peers; ``ranks.device`` is where batches should be.
        events: subscribe here to what happens.
        epoch_number: the epoch that is running or comes next, counted from 0.
        policy_choice: the name of the policy, and why it was chosen.
        stopping: no further step is taken.
        min_rows: the fewest rows that the model can learn from at once.
        watch: time since the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        train_step: TrainStep | None = None,
        *,
        settings: Settings,
        ranks: Ranks,
        feed: Feed | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.settings, self.ranks, self.feed = settings, ranks, feed
        self.callbacks = callbacks or Callbacks()
        self.events = Events(ranks.rank)
        ranks.phase("model build")
        check_settings(settings, world=ranks.world, callbacks=self.callbacks)
        self.sharded = settings.shard is not None and not ranks.solo
        # What is to be cut is moved by layers.
        self.model = model if self.sharded else model.to(ranks.device)
        check_same_model(ranks, model)
        ranks.phase("first broadcast")
        if self.sharded:
            spread(model, ranks)
        else:
            with torch.no_grad():
                ranks.copy_from(0, model_tensors(model))
        seed_all(settings.seed + ranks.rank)
        if settings.deterministic:
            torch.use_deterministic_algorithms(True)
        if settings.checkpoint_activations is not None:
            settings.checkpoint_activations(model)
        self.precision = Precision(settings.precision, ranks.device)
        if self.sharded:
            # Layers arranged for a device may have kernels that want float32.
            plain = settings.arrange is None or ranks.device.type == "cpu"
            shard_model(model, ranks, self.precision.products if plain else None)
        self.observing = Observing(model, ranks, settings)
        self.optimizer = self.observing.optimizer(lambda: make_optimizer(model, optimizer, settings.parameter_groups))
        self._left_out = {name for name, _ in self._not_optimised()}
        # a copy, since a schedule that waits for plateaus changes, and the caller may run again
        schedule = copy.deepcopy(settings.schedule(ranks.world) if callable(settings.schedule) else settings.schedule)
        self.rates = Rates(self.optimizer, schedule, ranks.world, settings.lr_scale_ratio)
        self.identity = identity(model, self.optimizer, schedule)
        self.epoch_number = 0
        self.tally = Tally()
        self.log = StepLog(self.events, every=settings.log_every, on_nan=settings.on_nan)
        self.evaluator = Evaluator(self.callbacks, settings.early_stopping, settings.keep_best)
        self.stopping = False
        self.signals = StopSignals()
        self.wishes = Wishes(ranks)
        self.hooks = Hooks(self, callbacks_of(settings))
        self.average = (
            WeightAverage(model, settings.ema, warmup=settings.ema_warmup) if settings.ema is not None else None
        )
        self.graphs = self.observing.graphs
        together = f"shard={settings.shard!r}" if self.sharded else "ema" if settings.ema is not None else None
        slowdown = settings.slowdown.get(ranks.rank, 1.0)
        self.use_policy(choose_policy(ranks, settings.policy, slowdown=slowdown, together=together))
        self.train_step = train_step
        self.timeline: Timeline | None = None
        self.watch = Stopwatch()
        # The statistics of a single row are no statistics: torch refuses them.
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        self.min_rows = 2 if norms else 1

    def use_policy(self, choice: Choice) -> None:
        """Set the policy of the run, and create the step that fits it.

        Raises:
            TrainError: the policy cannot keep an average of the weights.
        """
        settings, ranks, name = self.settings, self.ranks, choice.name
        self.policy_choice = choice
        # Ranks that hold different parts have nothing to compare.
        knobs = replace(settings.knobs, check_every=0) if self.sharded else settings.knobs
        self.policy: Sync | LocalSteps = make_policy(name, ranks, self.model, knobs)
        if isinstance(self.policy, LocalSteps):
            self.policy.due = lambda steps, flags: any(flags) or self._due()
        self.step_ = Step(
            self.model,
            self.optimizer,
            None,
            ranks=ranks,
            precision=self.precision,
            share_gradients=self.policy.shares_gradients,
            max_grad_norm=settings.max_grad_norm,
            on_nan=settings.on_nan,
            sum_of_means=settings.sum_of_means,
            slowdown=settings.slowdown.get(ranks.rank, 1.0),
            reduce_on_cpu=settings.knobs.backend == "cpu",
            sharded=self.sharded,
        )
        self.step_.hooks = self.hooks if self.hooks.around else None
        self.step_.watching = self.observing.watching
        if self.average is not None and not ranks.solo and not isinstance(self.policy, Sync):
            raise TrainError(
                f"ema: ranks step on their own under {name!r}, and an average would be another on each. Expected one "
                "rank, or policy='sync'.",
                policy=name,
            )

    def _due(self) -> bool:
        """Return whether ranks that step on their own have to meet for other reasons than averaging."""
        return self.out_of_steps

    @property
    def out_of_steps(self) -> bool:
        """Whether as many steps were taken as the settings allow."""
        return self.settings.max_steps is not None and self.policy.steps >= self.settings.max_steps

    def stop(self) -> None:
        """Ask all ranks to stop at their next meeting; state is saved."""
        self.ask("stop")

    def ask(self, wish: str) -> None:
        """Ask the run to ``"stop"``, ``"evaluate"`` or ``"save"`` when all ranks meet next; from any thread.

        Raises:
            TrainError: another word.
        """
        self.wishes.ask(wish)

    def model_was_replaced(self) -> None:
        """Note that parameters and buffers were overwritten on all ranks alike."""
        self.step_.loaded()
        if isinstance(self.policy, LocalSteps):
            self.policy.mean.buffers.refresh()

    def _not_optimised(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters that learn, as far as the model says, and that the optimiser does not have."""
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return ((n, p) for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in known)

    def check_learners(self) -> None:
        """Refuse parameters that are to learn since the run began and would not.

        Raises:
            TrainError: the optimiser does not have them; ``names`` lists them.
        """
        names = [name for name, _ in self._not_optimised() if name not in self._left_out]
        if names:
            raise TrainError(
                f"epoch {self.epoch_number}: {', '.join(names[:5])} are to learn from here on (requires_grad), and the "
                "optimiser does not have them, so they would stay as they are. Expected them to learn when the run "
                "begins, a rule that thaws them (rules=[thaw_when('PATH', after_epochs(2))]), or "
                "trainer.optimizer.add_param_group before the epoch.",
                names=names,
            )

    def warn(self, message: str) -> None:
        """Tell subscribers what they should know."""
        self.events.emit(Warned(rank=self.ranks.rank, step=self.policy.lr_step, message=message))


class Stopwatch:
    """Time since it was started last."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def ms(self) -> float:
        """Milliseconds since the last start."""
        return (time.perf_counter() - self._start) * 1e3

    def restart(self) -> float:
        """Return `ms`, and start anew."""
        now = time.perf_counter()
        ms, self._start = (now - self._start) * 1e3, now
        return ms


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
