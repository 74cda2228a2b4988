"""The Trainer: one class for complete runs, and for loops that users write.

`Trainer.fit` starts ranks if there are several devices. On each rank `Trainer.prepare` creates the parts of the run,
and `Trainer.train` is the loop; `flodl.train.ends` begins and ends runs and epochs. A step is computed in
`flodl.train.step`; `flodl.distributed.policy` determines which batches a rank gets and when ranks average, and
`flodl.train.saving` writes checkpoints.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from flodl.distributed.board import Requests
from flodl.distributed.group import Ranks, is_first_rank, launched_world
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.policy import Choice, Sync, choose_policy, make_policy
from flodl.distributed.rounds import Round
from flodl.errors import TrainError
from flodl.graph.graph import Graph
from flodl.monitor.timeline import Timeline
from flodl.train import ends, own_loop
from flodl.train.audience import Audience, callbacks_of
from flodl.train.builder import TrainerBuilder
from flodl.train.callback import Guarded, Hooks
from flodl.train.evaluate import Evaluator
from flodl.train.events import EpochMetrics, Event, Events, Synced, Warned
from flodl.train.feed import Feed, Share
from flodl.train.handle import Handle, Trained
from flodl.train.observing import Observing
from flodl.train.optim.ema import WeightAverage
from flodl.train.optim.optimizers import OptimizerMaker, check_learners, make_optimizer, unoptimised
from flodl.train.own_loop import OwnStep
from flodl.train.plan import GivenModel, RunPlan, model_factory_of
from flodl.train.saving.keeper import Keeper
from flodl.train.saving.state import identity, seed_all
from flodl.train.schedule import Rates
from flodl.train.settings import check_settings, make_settings
from flodl.train.snapshots import ModelSnapshot, Snapshots
from flodl.train.step.host import TrainStep
from flodl.train.step.outcome import StepResult
from flodl.train.step.route import choose_route, make_step, without_history
from flodl.train.steplog import StepLog, Tally
from flodl.train.trials import RateSearch, Rehearsal, fit_micro_batch, rehearse, search_rates


class Trainer:
    """Trains one model on one device or many.

    ::

        trained = Trainer(model, adamw(1e-3), train_step, batch_size=32, num_epochs=3).fit(data)

    Args:
        model: a model, which is trained in place; or a function of the device that returns one.
        optimizer: a factory such as `flodl.train.adamw`, a ``torch.optim`` class with bound options, or an optimiser of
            the model's parameters.
        train_step: ``train_step(model, batch)`` returns a `flodl.train.Loss`, a pair ``(sum, count)``, or the mean over
            the samples of the batch.
        ranks: ranks of the run; None joins the ranks of torchrun or starts one for each of ``devices``.
        **settings: fields of `flodl.train.Settings`.

    Attributes:
        model: the model, on the device of this rank.
        optimizer: its optimiser.
        ranks: this process among the ranks.
        events: events of the run; subscribe here.
        epoch_number: the present or next epoch, counted from 0.
        policy_choice: name of the policy and the reason.
        stopping: no further step is taken.

    Raises:
        TrainError: unknown settings or invalid values.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[torch.device], nn.Module],
        optimizer: OptimizerMaker,
        train_step: TrainStep | None = None,
        *,
        ranks: Ranks | None = None,
        **settings: Any,
    ) -> None:
        self.plan = RunPlan(model_factory_of(model), optimizer, train_step, make_settings(settings))
        self._given_ranks = ranks

    @classmethod
    def from_plan(cls, plan: RunPlan, ranks: Ranks | None = None) -> Self:
        """Return the trainer of a plan."""
        trainer = cls.__new__(cls)
        trainer.plan, trainer._given_ranks = plan, ranks
        return trainer

    @classmethod
    def builder(cls, model: Any, optimizer: OptimizerMaker, train_step: TrainStep) -> TrainerBuilder:
        """Return a builder: add data and settings by its methods, then call ``run()``; arguments as of `Trainer`."""
        return TrainerBuilder(cls(model, optimizer, train_step))

    @classmethod
    def setup(cls, model: Any, *, optimizer: OptimizerMaker, ranks: Ranks | None = None, **settings: Any) -> Self:
        """Return a trainer for a loop that you write; the same code runs on a CPU, a GPU, or under torchrun.

        ::

            trainer = Trainer.setup(model, optimizer=adamw(1e-3))
            for epoch in trainer.epochs(3):
                for batch in trainer.batches(loader):
                    trainer.step(cross_entropy(model(batch["x"]), batch["y"]))

        Args:
            model: a model, moved to the device of this rank; a function of the device; or an object with a model as its
                ``graph``. All ranks start from the weights of rank 0.
            optimizer: as for `Trainer`.
            ranks: ranks of the run; None joins the ranks of torchrun.
            **settings: fields of `flodl.train.Settings`.

        Raises:
            TrainError: unknown settings, or ranks with different models.
        """
        trainer = cls(model, optimizer, ranks=ranks, **settings)
        chosen = trainer.plan.settings
        check_settings(chosen, world=launched_world() if ranks is None else ranks.world, own_loop=True)
        trainer.prepare(ranks or trainer.plan.join_ranks())
        trainer.own_step = OwnStep()
        return trainer

    # ---- running -------------------------------------------------------------------------------------

    def fit(self, data: Any = None, *, eval_step: Any = None, eval_data: Any = None, **options: Any) -> Trained:
        """Train and return the result, on any number of devices.

        With several devices, and without torchrun, ranks are separate processes, which need picklable functions.

        Args:
            data: anything that `flodl.data.DataLoader` accepts, such a loader, or a torch loader.
            eval_step: ``eval_step(model, batch)`` returns ``{name: (sum, count)}``, or a loss.
            eval_data: data of the evaluation after each epoch.
            **options: ``collate``, ``batches``, ``shuffle`` and ``drop_last`` of the training data.

        Raises:
            TrainError: data or train_step are missing, a loss is not finite (``on_nan="stop"``), or a checkpoint does
                not fit.
            RankError: a rank failed.
            TrainInterrupted: SIGINT (Ctrl-C) ended the run after it saved its state.
            SystemExit: SIGTERM ended the run after it saved its state; the code is 143.
        """
        if data is not None:
            self.plan = self.plan.with_data(data, options)
        if eval_data is not None:
            self.plan = self.plan.with_evaluation(eval_step or self.plan.train_step, eval_data)
        plan, ranks = self.plan, self._given_ranks
        plan.check(launched_world(plan.world) if ranks is None else ranks.world)
        if ranks is None and plan.world > 1:
            return Handle(plan, self.from_plan).join()
        first = is_first_rank() if ranks is None else ranks.rank == 0
        with Audience(plan.settings, plan.subscribers, first=first, total=plan.total) as audience:
            return self._fit_here(audience)

    def start(self) -> Handle:
        """Start the run in separate processes and return its handle.

        Raises:
            TrainError: data or train_step are missing, or a function cannot be sent to a new process.
        """
        self.plan.check(self.plan.world)
        return Handle(self.plan, self.from_plan)

    def subscribe(self, call: Callable[[Any], Any], *kinds: type[Event]) -> Self:
        """Call ``call(event)`` in this process for the events of rank 0 of these kinds, all kinds by default.

        Call it before the run; a run under way has ``trainer.events.subscribe``.
        """
        self.plan = replace(self.plan, subscribers=(*self.plan.subscribers, (call, kinds)))
        return self

    def find_lr(self, low: float = 1e-7, high: float = 1.0, steps: int = 100) -> RateSearch:
        """Train a copy of the model at rising rates, and return where its loss fell fastest.

        The run is not changed and nothing is written; one device is used, in this process.

        Raises:
            ConfigError: rates that do not rise, or fewer than 8 steps.
            TrainError: data are missing, or the loss is not finite from the start.
        """
        return search_rates(self.plan, self._try, low=low, high=high, steps=steps)

    def dry_run(self, steps: int = 3) -> Rehearsal:
        """Train a copy of the model for some steps, the heaviest batch first, and return the requirements of the run.

        The run is not changed and nothing is written; one device is used, in this process. One batch of each
        evaluation set is evaluated.

        Raises:
            TrainError: data are missing; or any error of the run in its first steps.
        """
        return rehearse(self.plan, self._try, steps=steps)

    def _try(self, plan: RunPlan) -> Trained:
        return type(self).from_plan(plan)._fit_here()

    def _fit_here(self, audience: Audience | None = None) -> Trained:
        ranks = self._given_ranks or self.plan.join_ranks()
        metrics: list[EpochMetrics] = []
        try:
            self.prepare(ranks)
            self.events.subscribe(metrics.append, EpochMetrics)
            if audience is not None:
                audience.listen(self.events, self.ask, evaluates=self.plan.evaluates)
            self.train()
            # Sharded weights are gathered before ranks leave.
            trained = Trained.of(self.model, keep=ranks.rank == 0 or not self.sharded)
        finally:
            if self._given_ranks is None:
                ranks.leave()
        factory = None if self.sharded else GivenModel(self.model)
        return replace(trained, metrics=metrics, in_place=not self.sharded, _factory=factory)

    # ---- the parts of the run --------------------------------------------------------------------------

    def prepare(self, ranks: Ranks) -> Self:
        """Create the parts of the run on this rank; all ranks call this together.

        Raises:
            TrainError: invalid combinations of settings, or ranks with different models.
        """
        plan = self.plan
        settings = replace(plan.settings, resume=True) if ranks.attempt else plan.settings
        self.settings, self.ranks = settings, ranks
        self.metrics_fn = Guarded(plan.metrics_fn, "metrics_fn")
        seed_all(settings.seed)
        self.feed, evals = plan.feeds(ranks.device)
        self.events = Events(ranks.rank)
        self.sharded = settings.shard is not None and not ranks.solo
        model, self.precision = plan.make_model(ranks)
        self.model = model
        self.observing = Observing(model, ranks, settings)
        self.graphs = self.observing.graphs
        self.optimizer = self.observing.optimizer(
            lambda: make_optimizer(model, plan.optimizer_factory, settings.parameter_groups)
        )
        self._unoptimised = set(unoptimised(model, self.optimizer))
        self.rates = Rates(self.optimizer, settings.schedule, ranks.world, settings.lr_scale_ratio)
        if isinstance(self.rates.schedule, LRScheduler) and any(r.action == "rate" for r in self.observing.rules):
            raise TrainError("rules: found set_rate with a torch LRScheduler; expected a function of the step.")
        self.identity = identity(model, self.optimizer, self.rates.schedule)
        self.log = StepLog(self.events, every=settings.log_every, on_nan=settings.on_nan)
        self.evaluator = Evaluator(self, evals, plan.eval_fn)
        self.requests = Requests(ranks.board, ranks.rank)
        self.hooks = Hooks(self, (*callbacks_of(settings), *plan.functions))
        ema = settings.average
        self.average = None if ema is None else WeightAverage(model, ema.decay, warmup=ema.warmup)
        # torch refuses statistics over a single row.
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        self.min_rows = 2 if norms else 1
        self.timeline: Timeline | None = None
        self.epoch_number = self.step_number = 0  # of the step whose batches come next, as schedules count them
        self.last_step = float("inf") if settings.max_steps is None else settings.max_steps
        self.stopping, self.tally = False, Tally()
        self._since = time.perf_counter()
        self.pending: Sequence[float] = ()  # flags that are handled when the epoch is closed
        self.earlier_s, self.began_s = 0.0, time.monotonic()
        self.changes: list[Any] = []
        together = f"shard={settings.shard!r}" if self.sharded else "ema" if ema is not None else None
        self.use_policy(choose_policy(ranks, settings.policy, together=together))
        self.saves = Keeper(self) if settings.folder else None
        self.snapshots = Snapshots(self)
        # What the features of this run do after and between steps.
        self.after_step: list[Callable[[StepResult], Any]] = []
        if self.average is not None:
            self.after_step.append(self.average.after_step)
        if any(isinstance(module, Graph) for module in model.modules()):
            self.after_step.append(lambda result: self.graphs.end_step())
        self.between_steps: list[Callable[[Sequence[float]], Any]] = []
        if self.evaluator.evaluates:
            self.between_steps.append(self.evaluator.between_steps)
        if settings.rules:
            self.between_steps.append(partial(self.observing.apply_rules, self))
        if self.saves is not None:
            self.between_steps.append(self.saves.between_steps)
        return self

    def use_policy(self, choice: Choice) -> None:
        """Set the policy of the run, and create the step that belongs to it."""
        # Shards differ between ranks, so there is nothing to compare.
        knobs = replace(self.settings.knobs, check_every=0) if self.sharded else self.settings.knobs
        self.policy_choice = choice
        self.policy = policy = make_policy(choice.name, self.ranks, self.model, knobs)
        if isinstance(policy, LocalSteps):
            policy.due = lambda steps, flags: (
                any(flags) or policy.steps >= self.last_step or (self.saves is not None and self.saves.due)
            )
        self.step_ = make_step(self)

    # ---- the loop ------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run until the last epoch, or a reason to stop."""
        with ends.running(self):
            ends.restore(self)
            ends.begin(self)
            step = self.step_  # another one if the policy of the checkpoint differs
            step.train_step = without_history(self.plan.train_step, self.graphs)
            if self.settings.micro_batch_size == "auto":
                fit_micro_batch(self)
            choose_route(self)
            while self.epoch_number < self.settings.num_epochs and not self.stopping:
                for position, batches in self.steps(self.feed):
                    result = step.run(batches, step=self.step_number, flags=self.requests.flags())
                    self.end_step(position, result)
                    if self.stopping:
                        break
                if not self.stopping:
                    ends.end_epoch(self)
            ends.end(self)

    def steps(self, feed: Feed) -> Iterator[tuple[int, list[Any]]]:
        """Yield the position in the epoch and the micro-batches of this rank, one optimiser step at a time."""
        policy, ranks, epoch = self.policy, self.ranks, self.epoch_number
        self.hooks.call("on_epoch_begin", epoch)
        self.observing.refresh()
        self.step_.invalidate_if_changed()
        check_learners(self.model, self.optimizer, self._unoptimised, epoch)
        self.wall_ms()
        total, times_steps, alone = feed.turns(epoch), ranks.device.type == "cuda", ranks.solo
        self.step_number = policy.lr_step
        for turns, ratios in policy.turns(total):
            share = Share(ranks.rank, ratios, self.min_rows) if ratios else Share(0, (1.0,), self.min_rows)
            ranks.phase("data")
            done = -1
            for done, batches in feed.work(epoch, turns, share):
                if self.rates.schedule is not None:
                    self.rates.set(self.step_number)
                for hook in self.hooks.on_step_begin:
                    hook(self, batches)
                if times_steps:
                    self.log.begin(ranks.device)
                yield done, batches
                if alone:
                    ranks.progress[1] = self.step_number
                else:
                    ranks.phase("data", self.step_number)
            if done != turns[-1]:
                ends.run_out(self)
                return
        if not total:
            ends.run_out(self)

    def end_step(self, position: int, result: StepResult) -> None:
        """Report a step, and act if all ranks are equal after it."""
        policy = self.policy
        round_ = policy.after_step(position, result.samples, result.compute_ms, result.flags)
        for call in self.after_step:
            call(result)
        self.step_number = policy.steps if isinstance(policy, Sync) else policy.lr_step
        about: Any = {"epoch": self.epoch_number, "rates": self.rates, "wall_ms": self.wall_ms()}
        self.log.note(self.tally, result, step=self.step_number, **about)
        for hook in self.hooks.on_step_end:
            hook(self, result)
        if round_ is not None:
            self.after_round(round_)
        elif isinstance(policy, Sync):
            self.act(result.flags)

    def after_round(self, round_: Round) -> None:
        """Report a round of averaging, and act if all ranks are equal after it."""
        figures = {name: getattr(round_, name) for name in ("batches", "work_ms", "sync_ms", "wait_ms", "divergence")}
        cadence = {"anchor": round_.cadence.anchor, "counts": round_.cadence.counts}
        self.events.emit(Synced(**self.about(), round=round_.number, **figures, **cadence))
        if round_.held and not round_.all_dry:
            self.act(round_.flags)
        elif round_.all_dry:
            self.pending = round_.flags

    def act(self, flags: Sequence[float]) -> None:
        """Act where all ranks are equal and have the same flags: evaluate, apply rules, save, stop."""
        for act in self.between_steps:  # of features that the run has
            act(flags)
        if any(flags):
            self.requests.acknowledge(flags[2:])
            if flags[0]:
                ends.leave(self, round(flags[1] / flags[0]))
            self.stopping = self.stopping or bool(flags[2])
        if self.policy.steps >= self.last_step:
            self.stopping = True
        if self.requests.snapshots or self.snapshots.wanted:
            self.snapshots.serve()

    def wall_ms(self) -> float:
        """Return the milliseconds since the last call."""
        now = time.perf_counter()
        ms, self._since = (now - self._since) * 1e3, now
        return ms

    # ---- for callbacks and other threads ----------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Return the fields that events have in common."""
        return {"rank": self.ranks.rank, "step": self.policy.lr_step, "epoch": self.epoch_number}

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if the run keeps an average."""
        return self.average.applied() if self.average is not None else contextlib.nullcontext()

    def warn(self, message: str) -> None:
        """Report a warning."""
        self.events.emit(Warned(rank=self.ranks.rank, step=self.policy.lr_step, message=message))

    def stop(self) -> None:
        """Request the end of the run at the next step; state is saved."""
        self.ask("stop")

    def ask(self, request: str) -> None:
        """Request ``"stop"``, ``"evaluate"`` or ``"save"``, from any thread; all ranks act on it at one step.

        Raises:
            TrainError: an unknown request.
        """
        self.requests.ask(request)

    def snapshot(self) -> Future[ModelSnapshot]:
        """Return a future of the run's weights, from any thread; the training thread must not wait for it.

        Raises:
            TrainError: the run is over, or its weights are sharded.
        """
        return self.snapshots.ask()

    # ---- a loop of your own ----------------------------------------------------------------------------

    own_step: OwnStep | None = None  # the step under way in a loop that the user writes
    audience: Audience | None = None  # of such a loop
    has_begun = False

    epochs, batches, backward, step = own_loop.epochs, own_loop.batches, own_loop.backward, own_loop.step
