"""The Trainer: one class for complete runs, and for loops that users write.

`Trainer.fit` starts ranks if there are several devices. On each rank `prepare` creates the parts of the run, and
`flodl.train.loop` is the loop. A step is computed in `flodl.train.step`; `flodl.distributed.policy` determines which
batches a rank gets and when ranks average, and `flodl.train.saving.resume` what a checkpoint contains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from flodl.distributed.group import Ranks, is_first_rank, join_ranks, launched_world
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.policy import Choice
from flodl.errors import TrainError, TrainInterrupted
from flodl.train.audience import Audience
from flodl.train.builder import TrainerBuilder
from flodl.train.events import EpochMetrics, Event, Warned
from flodl.train.faults import check_settings
from flodl.train.handle import Handle, SendEvents, Trained
from flodl.train.loop import Loop
from flodl.train.optim.optimizers import OptimizerMaker
from flodl.train.own_loop import OwnLoop
from flodl.train.parts import create_parts, create_step
from flodl.train.plan import GivenModel, RunPlan, model_factory_of
from flodl.train.pre_run import Rehearsal, rehearse
from flodl.train.rate_search import RateSearch, search_rates
from flodl.train.settings import make_settings
from flodl.train.snapshots import ModelSnapshot, pack_weights
from flodl.train.step import StepResult, TrainStep
from flodl.train.trainer_parts import TrainerParts


class Trainer(TrainerParts):
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
    def builder(
        cls,
        model_factory: nn.Module | Callable[[torch.device], nn.Module],
        optimizer_factory: OptimizerMaker,
        train_step: TrainStep,
    ) -> TrainerBuilder:
        """Return a builder: add data and settings by its methods, then call ``run()``.

        Args:
            model_factory: as ``model`` of `Trainer`.
            optimizer_factory: as ``optimizer`` of `Trainer`.
            train_step: as for `Trainer`.
        """
        return TrainerBuilder(cls(model_factory, optimizer_factory, train_step))

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
        trainer.prepare(ranks or join_ranks(device=_first_device(trainer.plan), timeout_s=chosen.timeout_s))
        trainer._loop = OwnLoop(trainer)
        return trainer

    def prepare(self, ranks: Ranks) -> Self:
        """Create the parts of the run on this rank; all ranks call this together."""
        create_parts(self, ranks)
        self.loop = Loop(self)
        return self

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
            return Handle(plan, _run_rank).join()
        first = is_first_rank() if ranks is None else ranks.rank == 0
        with Audience(plan.settings, plan.subscribers, first=first, total=plan.total) as audience:
            return self._fit_here(audience)

    def subscribe(self, call: Callable[[Any], Any], *kinds: type[Event]) -> Self:
        """Call ``call(event)`` in this process for the events of rank 0 of these kinds, all kinds by default.

        Call it before the run; a run under way has ``trainer.events.subscribe``.
        """
        self.plan = replace(self.plan, subscribers=(*self.plan.subscribers, (call, kinds)))
        return self

    def start(self) -> Handle:
        """Start the run in separate processes and return its handle.

        Raises:
            TrainError: data or train_step are missing, or a function cannot be sent to a new process.
        """
        self.plan.check(self.plan.world)
        return Handle(self.plan, _run_rank)

    def _fit_here(self, audience: Audience | None = None) -> Trained:
        ranks = self._given_ranks or join_ranks(device=_first_device(self.plan), timeout_s=self.plan.settings.timeout_s)
        metrics: list[EpochMetrics] = []
        try:
            self.prepare(ranks)
            self.events.subscribe(metrics.append, EpochMetrics)
            if audience is not None:
                audience.listen(self.events, self.ask, evaluates=self.plan.evaluates)
            self.loop.train()
            # Sharded weights are gathered before ranks leave.
            trained = Trained.of(self.model, keep=ranks.rank == 0 or not self.sharded)
        finally:
            if self._given_ranks is None:
                ranks.leave()
        factory = None if self.sharded else GivenModel(self.model)
        return replace(trained, metrics=metrics, in_place=not self.sharded, _factory=factory)

    def find_lr(self, low: float = 1e-7, high: float = 1.0, steps: int = 100) -> RateSearch:
        """Train a copy of the model at rising rates, and return where its loss fell fastest.

        The run is not changed and nothing is written; one device is used, in this process.

        Raises:
            ConfigError: rates that do not rise, or fewer than 8 steps.
            TrainError: data are missing, or the loss is not finite from the start.
        """
        return search_rates(self._alone(), self._try, low=low, high=high, steps=steps)

    def dry_run(self, steps: int = 3) -> Rehearsal:
        """Train a copy of the model for some steps, the heaviest batch first, and return the requirements of the run.

        The run is not changed and nothing is written; one device is used, in this process. One batch of each
        evaluation set is evaluated.

        Raises:
            TrainError: data are missing; or any error of the run in its first steps.
        """
        return rehearse(self._alone(), self._try, steps=steps)

    def _alone(self) -> RunPlan:
        self.plan.check(1)
        return replace(self.plan, settings=replace(self.plan.settings, monitor=None))

    def _try(self, plan: RunPlan) -> Trained:
        return type(self).from_plan(plan)._fit_here()

    # ---- for callbacks and other threads ----------------------------------------------------------------

    @property
    def out_of_steps(self) -> bool:
        """Whether ``max_steps`` steps were taken."""
        return self.settings.max_steps is not None and self.policy.steps >= self.settings.max_steps

    @property
    def keeper(self) -> Any:
        """The writer of checkpoints; None without a folder."""
        return self.saves.keeper

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if the run keeps an average."""
        return self.average.applied() if self.average is not None else contextlib.nullcontext()

    def use_policy(self, choice: Choice) -> None:
        """Set the policy of the run, and create the step that belongs to it."""
        create_step(self, choice)

    def model_was_replaced(self) -> None:
        """Note that parameters and buffers were overwritten on all ranks alike."""
        self.step_.loaded()
        if isinstance(self.policy, LocalSteps):
            self.policy.mean.buffers.refresh()

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

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint in the background; all ranks must call this at the same step."""
        self.saves.save(wait=wait)

    def snapshot(self) -> Future[ModelSnapshot]:
        """Return a future of the run's weights, from any thread; the training thread must not wait for it.

        Raises:
            TrainError: the run is over, or its weights are sharded.
        """
        if self.sharded:
            raise TrainError("snapshot: the weights are sharded; expected whole weights. Read a checkpoint instead.")
        return self.snapshots.ask()

    # ---- a loop of your own ----------------------------------------------------------------------------

    _loop: OwnLoop | None = None

    @property
    def _own(self) -> OwnLoop:
        if self._loop is None:
            raise TrainError("trainer: found a call for a loop of your own; expected a trainer of Trainer.setup.")
        return self._loop

    def epochs(self, count: int) -> Iterator[int]:
        """Yield epochs from the present one (after a resume: where it stopped) to ``count`` - 1."""
        return self._own.epochs(count)

    def batches(self, loader: Any, **options: Any) -> Iterator[Any]:
        """Yield the batches of this rank in the present epoch, on its device; call `step` for each.

        With ``accumulate`` or ``micro_batch_size`` several batches form one step; `step` acts at the last of them.

        Args:
            loader: a `flodl.data.DataLoader`, or an iterable of batches that is equal on all ranks; without a length
                an epoch has ``max_steps`` steps.
            **options: ``shuffle``, ``drop_last``, ``collate`` for rows with a ``batch_size``.

        Raises:
            DataError: no length, and no ``max_steps``.
            TrainError: a batch cannot be divided among ranks, or there is none.
            TrainInterrupted: SIGINT (Ctrl-C) ended the run after it saved its state.
            SystemExit: SIGTERM ended the run after it saved its state.
        """
        return self._own.batches(loader, **options)

    def backward(self, loss: Any, count: float | None = None) -> None:
        """Add the gradient of one batch, exactly for any split into micro-batches and ranks.

        Args:
            loss: any value that a ``train_step`` may return, of everything the batch should teach.
            count: number of items of a plain mean; None for the samples of the batch.

        Raises:
            TrainError: the batch already had its backward pass, or there is no batch.
        """
        self._own.backward(loss, count)

    def step(self, loss: Any = None) -> StepResult | None:
        """Take one optimiser step over all ranks and clear gradients; return None before the last micro-batch.

        Args:
            loss: passed to `backward` first. Without it, gradients of a plain ``loss.backward()`` count as means over
                the samples of the batch, and the reported loss is NaN.

        Raises:
            TrainError: there is no batch, or a plain ``backward()`` was called on one of several micro-batches.
        """
        if loss is not None:
            self._own.backward(loss)
        return self._own.step()


def _first_device(plan: RunPlan) -> str | None:
    return None if isinstance(plan.devices, int) else plan.devices[0]


def _run_rank(ranks: Ranks, plan: RunPlan) -> bytes | None:
    """Train as one rank, and return the packed weights on rank 0."""

    def ask_starter(metrics: EpochMetrics) -> Any:
        ranks.pipe.send(("metrics", metrics))
        return ranks.pipe.recv()

    trainer = Trainer.from_plan(replace(plan, metrics_fn=ask_starter)).prepare(ranks)
    if plan.listening and ranks.rank == 0:
        trainer.events.subscribe(SendEvents(ranks.pipe, every_s=0.1 if plan.listening == "some" else 0.0))
    try:
        trainer.loop.train()
    except TrainInterrupted as stop:
        if ranks.rank == 0:
            ranks.pipe.send(("stopped", (stop.step, stop.folder, pack_weights(stop.trained))))
        raise
    if ranks.rank and not trainer.sharded:
        return None
    trained = Trained.of(trainer.model, keep=ranks.rank == 0)
    return pack_weights(trained) if ranks.rank == 0 else None
