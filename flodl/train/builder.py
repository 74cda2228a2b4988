"""The fluent form of a run whose loop is ours: say what, then ``run()`` it on one device or on many.

Each method returns the builder. What the settings mean stands in `flodl.train.settings`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flodl.devices import training_devices
from flodl.distributed.group import Ranks, is_first_rank, join_ranks, launched_world, under_torchrun
from flodl.distributed.launch import launch
from flodl.errors import TrainError, TrainInterrupted
from flodl.train.console import ShowProgress
from flodl.train.events import EpochMetrics, Event
from flodl.train.handle import Handle, SendEvents, Trained
from flodl.train.monitored import monitor_of, orders_of
from flodl.train.optim.optimizers import OptimizerMaker
from flodl.train.plan import GivenModel, RunPlan
from flodl.train.pre_run import Rehearsal, rehearse
from flodl.train.rate_search import RateSearch, search_rates
from flodl.train.settings import Settings, make_settings
from flodl.train.step import TrainStep
from flodl.train.trackers import Tracker

if TYPE_CHECKING:
    from flodl.monitor import Monitor

__all__ = ["TrainerBuilder"]

Subscription = tuple[Callable[[Any], Any], tuple[type, ...]]


def _check_factory(make: Any) -> None:
    """Refuse what would not give a model for a device.

    Raises:
        TrainError: it is a class of models that takes no device, or cannot be called with one.
    """
    name = getattr(make, "__qualname__", type(make).__name__)
    try:
        taken = inspect.signature(make)
        taken.bind(None)
        fits = not (isinstance(make, type) and issubclass(make, nn.Module)) or "device" in taken.parameters
    except TypeError:
        fits = False
    except ValueError:  # of what is written in C nobody knows
        fits = True
    if not fits:
        raise TrainError(
            f"model: found {name}, which is not called with a device; expected a model, or a function that gives one "
            "for a device: lambda device: ...",
            found=name,
        )


class TrainerBuilder:
    """Made by `Trainer.builder`, which says what the arguments are; ``make`` is the trainer's class."""

    def __init__(
        self,
        model_factory: nn.Module | Callable[[torch.device], nn.Module],
        optimizer_factory: OptimizerMaker,
        train_step: TrainStep,
        make: Callable[..., Any],
    ) -> None:
        if isinstance(model_factory, nn.Module):
            model_factory = GivenModel(model_factory)
        else:
            _check_factory(model_factory)
        self._plan = RunPlan(model_factory, optimizer_factory, train_step, Settings(), make)
        self._devices: int | Sequence[str] | str | None = None
        self._start = "spawn"
        self._metrics_fn: Callable[[EpochMetrics], Any] | None = None
        self._subscribers: list[Subscription] = []
        self._total: int | None = None

    def set(self, **settings: Any) -> TrainerBuilder:
        """Set any fields of `flodl.train.Settings` or `flodl.distributed.rounds.Knobs` by name.

        Raises:
            TrainError: there is no such setting.
        """
        self._plan = replace(self._plan, settings=make_settings(settings, self._plan.settings))
        return self

    def _call(self, **functions: Any) -> TrainerBuilder:
        self._plan = replace(self._plan, callbacks=replace(self._plan.callbacks, **functions))
        return self

    # ---- data ----------------------------------------------------------------------------------------

    def dataset(self, data: Any, *, collate: Any = None, batches: Any = None) -> TrainerBuilder:
        """Train on ``data``: anything that `flodl.data.DataLoader` takes, such a loader, or a torch loader.

        Args:
            collate: makes a batch of rows.
            batches: a source of batches (token budget, length groups) instead of ``batch_size``.
        """
        options = {k: v for k, v in (("collate", collate), ("batches", batches)) if v is not None}
        self._plan = replace(self._plan, data=data, data_options=options)
        return self

    def batch_size(self, samples: int) -> TrainerBuilder:
        """Put this many samples into a batch: one step of all ranks (Sync) or of one rank (Cadence, Async)."""
        return self.set(batch_size=samples)

    def accumulate(self, batches: int) -> TrainerBuilder:
        """Take one optimiser step for so many batches."""
        return self.set(accumulate=batches)

    def micro_batch_size(self, samples: int | str) -> TrainerBuilder:
        """Send at most so many samples through the model at once; ``"auto"`` for as many as fit."""
        return self.set(micro_batch_size=samples)

    def num_epochs(self, epochs: int) -> TrainerBuilder:
        """Pass so often over the data."""
        return self.set(num_epochs=epochs)

    def max_steps(self, steps: int) -> TrainerBuilder:
        """Stop after so many optimiser steps."""
        return self.set(max_steps=steps)

    def seed(self, seed: int) -> TrainerBuilder:
        """Decide all random numbers by ``seed``."""
        return self.set(seed=seed)

    def evaluate(
        self,
        step: Callable[[nn.Module, Any], Any],
        data: Any,
        *,
        every: int | None = None,
        name: str | None = None,
        **options: Any,
    ) -> TrainerBuilder:
        """Evaluate after each epoch, or every so many steps instead, the ranks sharing the work.

        The model of the last step is evaluated in either case.

        Called again with another name it adds a set of data, each with a step of its own.

        Args:
            step: ``step(model, batch)`` gives ``{name: (sum, count)}``, or a loss like a training step.
            data: like that of `dataset`.
            every: steps between evaluations; that of the last call holds for all sets.
            name: figures come as ``<name>/<figure>``; without one there is one set, and figures have plain names.
            **options: ``batch_size``, ``collate``, ``batches`` of the evaluation data.
        """
        others = {key: part for key, part in self._plan.evals.items() if name and key}
        self._plan = replace(self._plan, evals={**others, name or "": (step, data, options)})
        return self.set(eval_every=every)

    def eval_fn(self, call: Callable[[nn.Module], Mapping[str, Any]]) -> TrainerBuilder:
        """Evaluate by ``call(model) -> {name: value}`` on rank 0; the others wait and get the values.

        Numbers are figures, also in nested mappings; lists, arrays and texts are in `EvalDone.details`.
        """
        return self._call(eval_fn=call)

    # ---- ranks ---------------------------------------------------------------------------------------

    def devices(self, devices: int | Sequence[str] | str, *, start: str = "spawn") -> TrainerBuilder:
        """Train on so many local devices, or on these; each gets a process of ours. Under torchrun not needed.

        Args:
            devices: a number (CUDA devices where there are any, else CPU ranks), a list such as
                ``["cuda:0", "cuda:2"]`` or ``["cpu", "cpu"]``, one device's name, or ``"auto"`` for all there are.
            start: ``"spawn"``, or ``"fork"`` for CPU ranks, which allows lambdas.
        """
        self._devices, self._start = training_devices(devices), start
        return self

    def policy(self, name: str) -> TrainerBuilder:
        """Use ``"sync"``, ``"cadence"`` or ``"async"``; the default is Sync, and Cadence where device names differ."""
        return self.set(policy=name.lower())

    def backend(self, name: str) -> TrainerBuilder:
        """Average parameters on the devices (``"nccl"``) or through host memory (``"cpu"``).

        Raises:
            TrainError: another name.
        """
        if name not in ("nccl", "cpu", "gloo"):
            raise TrainError(f"backend: found {name!r}, expected 'nccl' or 'cpu'.", found=name)
        return self.set(backend="cpu" if name == "gloo" else name)

    def anchor(self, batches: int) -> TrainerBuilder:
        """Let the slowest rank do so many batches in the first round."""
        return self.set(anchor=batches)

    def max_anchor(self, batches: int) -> TrainerBuilder:
        """Bound the batches of the slowest rank in a round."""
        return self.set(max_anchor=batches)

    def overhead_target(self, part: float) -> TrainerBuilder:
        """Spend at most this part of compute time on averaging."""
        return self.set(overhead_target=part)

    def speed_hint(self, slow: int, ratio: float) -> TrainerBuilder:
        """Say in advance that all ranks but ``slow`` are ``ratio`` times as fast."""
        return self.set(speed_hint=(slow, ratio))

    def max_batch_diff(self, batches: int) -> TrainerBuilder:
        """Let no rank run more than so many batches ahead in a round."""
        return self.set(max_batch_diff=batches)

    def max_overshoot(self, batches: int) -> TrainerBuilder:
        """Async: let ranks do so many batches while an average travels."""
        return self.set(max_overshoot=batches)

    def shares(self, shares: Sequence[float] | str) -> TrainerBuilder:
        """Sync: give ranks these parts of each batch, or ``"measured"`` ones that follow their speed."""
        return self.set(shares=shares if isinstance(shares, str) else tuple(shares))

    partition_ratios = shares

    def divergence_threshold(self, figure: float) -> TrainerBuilder:
        """Average more often when ranks drift apart by more than this."""
        return self.set(divergence_threshold=figure)

    def no_divergence_guard(self) -> TrainerBuilder:
        """Do not watch how far ranks drift apart."""
        return self.set(divergence_threshold=None)

    def slowdown(self, rank: int, factor: float) -> TrainerBuilder:
        """Make ``rank`` so many times slower than it is, for experiments."""
        return self.set(slowdown={**self._plan.settings.slowdown, rank: factor})

    # ---- numbers -------------------------------------------------------------------------------------

    def precision(self, name: str) -> TrainerBuilder:
        """Train in ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp16"``."""
        return self.set(precision=name)

    def max_grad_norm(self, norm: float) -> TrainerBuilder:
        """Clip the gradient of the whole step to this 2-norm."""
        return self.set(max_grad_norm=norm)

    def scheduler(self, schedule: Any) -> TrainerBuilder:
        """Set learning rates by ``schedule.lr(step)``; a function of the number of ranks may return it."""
        return self.set(schedule=schedule)

    def lr_scale_ratio(self, ratio: float) -> TrainerBuilder:
        """Multiply learning rates by ``1 + (ranks - 1) * ratio``; 0 by default."""
        return self.set(lr_scale_ratio=ratio)

    def on_nan(self, what: str) -> TrainerBuilder:
        """``"stop"`` or ``"skip"`` when a loss or gradient is not finite."""
        return self.set(on_nan=what)

    def early_stopping(self, metric: str, patience: int = 3) -> TrainerBuilder:
        """Stop after ``patience`` evaluations without a better ``metric``; ``"-eval_loss"`` where less is better."""
        return self.set(early_stopping=(metric, patience))

    # ---- state and callbacks -------------------------------------------------------------------------

    def checkpoints(
        self,
        folder: str,
        *,
        every: int | None = None,
        keep_last: int = 2,
        keep_best: str | None = None,
        resume: bool = True,
        allow_change: Sequence[str] = (),
    ) -> TrainerBuilder:
        """Save into ``folder`` after each epoch and every so many steps, and go on from there when run again."""
        return self.set(
            folder=str(folder),
            save_every=every,
            keep_last=keep_last,
            keep_best=keep_best,
            resume=resume,
            allow_change=tuple(allow_change),
        )

    def max_restarts(self, times: int) -> TrainerBuilder:
        """Start ranks again from the last checkpoint after a failure, at most so often."""
        return self.set(max_restarts=times)

    def timeline(self, path: str) -> TrainerBuilder:
        """Write when each rank computed and waited, and the machine's state, as ``.json``, ``.csv`` and ``.html``."""
        return self.set(timeline=str(path))

    def epoch_fn(self, call: Callable[[int, Any], Any]) -> TrainerBuilder:
        """Call ``call(epoch, trainer)`` on every rank before each epoch; may unfreeze, set rates, stop."""
        return self._call(epoch_fn=call)

    def checkpoint_fn(self, call: Callable[[int, nn.Module], Any], every: int = 1) -> TrainerBuilder:
        """Call ``call(epochs done, model)`` on rank 0 after every so many epochs."""
        return self._call(checkpoint_fn=call).set(checkpoint_every=every)

    def metrics_fn(self, call: Callable[[EpochMetrics], Any]) -> TrainerBuilder:
        """Call ``call(metrics)`` in this process after each epoch; returning False stops the run."""
        self._metrics_fn = call
        return self

    def subscribe(self, call: Callable[[Any], Any], *kinds: type[Event]) -> TrainerBuilder:
        """Call ``call(event)`` in this process for rank 0's events of these kinds, of all kinds when none is named."""
        self._subscribers.append((call, kinds))
        return self

    def progress(self, show: bool | None, *, total: int | None = None) -> TrainerBuilder:
        """Show how far the run is: True always, None where it takes longer than a second, False never.

        Args:
            total: optimiser steps of the whole run, where epochs have different numbers of them.
        """
        self._total = total
        return self.set(progress=show)

    # ---- running -------------------------------------------------------------------------------------

    def find_lr(self, low: float = 1e-7, high: float = 1.0, steps: int = 100) -> RateSearch:
        """Train a copy of the model at rates that rise from ``low`` to ``high``, and say where its loss fell fastest.

        Nothing of the run is changed and nothing is written; it is searched on one device, in this process.

        Raises:
            ConfigError: rates that do not rise, or fewer than 8 steps.
            TrainError: data are missing, or the loss is not finite from the start.
        """
        if self._plan.data is None:
            raise TrainError("find_lr: found no dataset; call .dataset(...) first.", missing=["dataset"])
        return search_rates(self._unwatched(), lambda plan: self._run_here(plan, ()), low=low, high=high, steps=steps)

    def dry_run(self, steps: int = 3) -> Rehearsal:
        """Train a copy of the model for some steps, the heaviest batch first, and say what the run will need.

        Nothing of the run is changed and nothing is written; it is tried on one device, in this process. One batch of
        each set of held-out data is judged.

        Raises:
            TrainError: data are missing; or whatever the run would raise in its first steps.
        """
        if self._plan.data is None:
            raise TrainError("dry_run: found no dataset; call .dataset(...) first.", missing=["dataset"])
        return rehearse(self._unwatched(), lambda plan: self._run_here(plan, ()), steps=steps)

    def _unwatched(self) -> RunPlan:
        return replace(self._plan, settings=replace(self._plan.settings, monitor=None))

    def run(self) -> Handle:
        """Begin the run and return its handle.

        With one device, or under torchrun, this process trains before it returns. With several devices
        ranks train in processes of their own; call ``join`` soon, since they report through it.

        Raises:
            TrainError: data or batch size are missing, or something cannot be sent to a new process.
        """
        plan, world = self._plan, self._world()
        if plan.data is None:
            raise TrainError("run: found no dataset; call .dataset(...) first.", missing=["dataset"])
        plan.check(launched_world(world))
        shown = ShowProgress(plan.settings.progress, total=self._total)
        subscribers = [*self._subscribers, *([(shown, ())] if plan.settings.progress is not False else [])]
        trackers = plan.settings.made_trackers() if is_first_rank() else []
        subscribers += [(tracker, ()) for tracker in trackers]
        plan = replace(plan, settings=replace(plan.settings, trackers=()))  # they stay in this process
        over = contextlib.ExitStack()
        for close in (shown.close, *(tracker.end for tracker in trackers if isinstance(tracker, Tracker))):
            over.callback(close)
        monitor = monitor_of(plan.settings, is_first_rank())
        subscribers += [] if monitor is None else [(monitor, ())]
        if world == 1 or under_torchrun():
            with over:
                return self._run_here(plan, subscribers, monitor)
        return self._run_ranks(plan, world, subscribers, over.close, monitor)

    def _world(self) -> int:
        if self._devices is None:
            return 1
        if isinstance(self._devices, int):
            return self._devices
        return 1 if isinstance(self._devices, str) else len(self._devices)

    def _run_here(self, plan: RunPlan, subscribers: Sequence[Subscription], monitor: Monitor | None = None) -> Handle:
        device = self._devices if isinstance(self._devices, str) else None
        if isinstance(self._devices, (list, tuple)):
            device = self._devices[0]
        ranks = join_ranks(
            device=device, timeout_s=plan.settings.timeout_s, frozen_after_s=plan.settings.frozen_after_s
        )
        handle = Handle(world=ranks.world)
        plan = replace(plan, callbacks=replace(plan.callbacks, metrics_fn=self._metrics_fn))
        try:
            trainer = plan.trainer(ranks)
            trainer.events.subscribe(handle.note, EpochMetrics)
            for call, kinds in subscribers:
                trainer.events.subscribe(call, *kinds)
            if monitor is not None:
                monitor.enable_control(orders_of(plan.settings, plan.is_judged), trainer.ask)
            trainer.fit()
            # A model in shards is no use outside of its ranks, and is put together while they are there.
            keep = ranks.rank == 0 or not trainer.sharded
            handle.finish(Trained.of(trainer.model, keep=keep), None if trainer.sharded else trainer.model)
        except Exception as fault:
            if monitor is not None:
                monitor.failed(f"{type(fault).__name__}: {fault}")
            raise
        finally:
            ranks.leave()
        return handle

    def _run_ranks(
        self,
        plan: RunPlan,
        world: int,
        subscribers: Sequence[Subscription],
        over: Callable[[], Any],
        monitor: Monitor | None,
    ) -> Handle:
        handle = Handle(world=world, metrics_fn=self._metrics_fn, subscribers=subscribers, over=over)
        settings = plan.settings
        alone = not self._subscribers and len(subscribers) == 1 and isinstance(subscribers[0][0], ShowProgress)
        devices = None if isinstance(self._devices, (int, str)) else self._devices
        if monitor is not None:
            # a monitor stays in this process
            plan = replace(plan, settings=replace(settings, monitor=True))
            monitor.enable_control(orders_of(settings, plan.is_judged), handle.ask)
        handle.crew = launch(
            _run_rank,
            (replace(plan, listening="some" if alone else "all" if subscribers else ""),),
            ranks=world,
            device=devices,
            start=self._start,
            timeout_s=settings.timeout_s,
            frozen_after_s=settings.frozen_after_s,
            max_restarts=settings.max_restarts,
            on_message=handle.on_message,
        )
        return handle


def _run_rank(ranks: Ranks, plan: RunPlan) -> bytes | None:
    def ask_host(metrics: EpochMetrics) -> Any:
        ranks.pipe.send(("metrics", metrics))
        return ranks.pipe.recv()

    trainer = replace(plan, callbacks=replace(plan.callbacks, metrics_fn=ask_host)).trainer(ranks)
    if plan.listening and ranks.rank == 0:
        trainer.events.subscribe(SendEvents(ranks.pipe, every_s=0.1 if plan.listening == "some" else 0.0))
    try:
        trainer.fit()
    except TrainInterrupted as stop:
        if ranks.rank == 0:
            ranks.pipe.send(("stopped", (stop.step, stop.folder, stop.trained.to_bytes())))
        raise
    if ranks.rank == 0:
        return Trained.of(trainer.model).to_bytes()
    if trainer.sharded:
        Trained.of(trainer.model, keep=False)
    return None
