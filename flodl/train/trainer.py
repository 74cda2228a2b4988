"""The training loop, whole: epochs, steps, meetings of ranks, evaluation, checkpoints, leaving.

The loop is the same on a CPU, a GPU, several GPUs and several hosts, and whether the user writes its
body (`Trainer.setup`) or hands over a ``train_step`` (`Trainer.builder`). What a step computes is in
`flodl.train.step`, who does which part of the data and when ranks meet in `flodl.distributed.policy`,
what is saved in `flodl.train.saving.resume`.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from flodl.distributed.average import model_tensors
from flodl.distributed.group import Ranks, join_ranks
from flodl.distributed.policy import LocalSteps, Round, Sync, choose_policy, make_policy
from flodl.distributed.timeline import Timeline
from flodl.errors import TrainError
from flodl.train.callback import Hooks
from flodl.train.evaluate import Callbacks, Evaluator
from flodl.train.events import Events, RunDone, Warned
from flodl.train.feed import Feed, Share
from flodl.train.fitting import fit_micro_batch
from flodl.train.observing import Observing
from flodl.train.optim.ema import WeightAverage
from flodl.train.optim.optimizers import OptimizerMaker, make_optimizer
from flodl.train.optim.rates import Rates
from flodl.train.precision import Precision
from flodl.train.replicas import Replicas
from flodl.train.route import choose_route, compiled
from flodl.train.saving import resume
from flodl.train.saving.saves import Saves
from flodl.train.settings import Settings, make_settings
from flodl.train.signals import StopSignals
from flodl.train.step import Step, StepResult, TrainStep
from flodl.train.steplog import StepLog
from flodl.train.tally import Tally, epoch_metrics
from flodl.train.telling import evaluate_now, tell_meeting, tell_start

if TYPE_CHECKING:
    from flodl.train.builder import TrainerBuilder
    from flodl.train.own_loop import OwnLoop

__all__ = ["Trainer"]


class Trainer:
    """Trains one model; on several ranks each process holds one of these.

    Make one with `Trainer.setup` (you write the loop), `Trainer.builder` (you give functions), or use
    `Trainer.wrap` for the bare collectives.

    Attributes:
        model: the model, on this rank's device.
        optimizer: its optimiser.
        ranks: this process among its peers; ``ranks.device`` is where batches should be.
        events: subscribe here to what happens.
        epoch_number: the epoch that is running or comes next, counted from 0.
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
        self.model = model.to(ranks.device)
        resume.check_same_model(ranks, model)
        ranks.phase("first broadcast")
        with torch.no_grad():
            ranks.copy_from(0, model_tensors(model))
        _seed(settings.seed + ranks.rank)
        if settings.deterministic:
            torch.use_deterministic_algorithms(True)
        if settings.checkpoint_activations is not None:
            settings.checkpoint_activations(model)
        self.observing = Observing(model, ranks, settings)
        self.optimizer = self.observing.optimizer(lambda: make_optimizer(model, optimizer, settings.parameter_groups))
        self.precision = Precision(settings.precision, ranks.device)
        # a copy, since a schedule that waits for plateaus changes, and the caller may run again
        schedule = copy.deepcopy(settings.schedule(ranks.world) if callable(settings.schedule) else settings.schedule)
        self.rates = Rates(self.optimizer, schedule, ranks.world, settings.lr_scale_ratio)
        self.identity = resume.identity(model, self.optimizer, schedule)
        self.epoch_number = 0
        self.tally = Tally()
        self.log = StepLog(self.events, every=settings.log_every, on_nan=settings.on_nan)
        self.evaluator = Evaluator(self.callbacks, settings.early_stopping, settings.keep_best)
        self.stopping = False
        self.signals = StopSignals()
        self.hooks = Hooks(self, settings.callbacks)
        self.average = (
            WeightAverage(model, settings.ema, warmup=settings.ema_warmup) if settings.ema is not None else None
        )
        self.graphs = self.observing.graphs
        self._use_policy(choose_policy(ranks, settings.policy, settings.slowdown.get(ranks.rank, 1.0)))
        self._train_step = train_step
        self.saves = Saves(self)
        self.keeper = self.saves.keeper
        self.timeline = Timeline(ranks.rank) if settings.timeline else None
        if self.timeline is not None:
            self.events.subscribe(self.timeline.note)
        self._mark = time.perf_counter()
        # The statistics of a single row are no statistics: torch refuses them.
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        self._least = 2 if norms else 1

    def _use_policy(self, name: str) -> None:
        settings, ranks = self.settings, self.ranks
        self.policy: Sync | LocalSteps = make_policy(name, ranks, self.model, settings.knobs)
        if isinstance(self.policy, LocalSteps):
            self.policy.due = lambda steps, flags: any(flags) or self.saves.due or self._out_of_steps()
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
        )
        self.step_.hooks = self.hooks if self.hooks.around else None
        self.step_.accumulator.watching = self.observing.watching
        if self.average is not None and not ranks.solo and not isinstance(self.policy, Sync):
            raise TrainError(
                f"ema: ranks step on their own under {name!r}, and an average would be another on each. Expected one "
                "rank, or policy='sync'.",
                policy=name,
            )

    # ---- making one ----------------------------------------------------------------------------------

    # What stands on this class names itself here, so that this file need not import it.
    _own_loop: ClassVar[type[OwnLoop]]
    _builder: ClassVar[type[TrainerBuilder]]

    @staticmethod
    def setup(model: nn.Module, *, optimizer: OptimizerMaker, ranks: Ranks | None = None, **settings: Any) -> OwnLoop:
        """Return a trainer for a loop that you write; the same code runs on a CPU, a GPU, or under torchrun.

        ::

            trainer = Trainer.setup(model, optimizer=adamw(1e-3))
            for epoch in trainer.epochs(3):
                for batch in trainer.epoch(loader):
                    loss = cross_entropy(model(batch["x"]), batch["y"])
                    loss.backward()
                    trainer.step()

        Args:
            model: moved to this rank's device; every rank starts from rank 0's numbers.
            optimizer: a factory such as `flodl.train.adamw`, a ``torch.optim`` class with its options
                bound, or an optimiser over the model's parameters.
            ranks: who takes part; None asks the environment that torchrun sets, else this process alone.
            **settings: fields of `flodl.train.Settings`.

        Raises:
            TrainError: a setting that does not exist, or ranks that built different models.
        """
        chosen = make_settings(settings)
        return Trainer._own_loop(
            model, optimizer, settings=chosen, ranks=ranks or join_ranks(timeout_s=chosen.timeout_s)
        )

    @staticmethod
    def setup_head(head: Any, *, optimizer: OptimizerMaker, **settings: Any) -> OwnLoop:
        """Return `setup` of the graph that ``head`` holds (``head.graph``, attribute or method), or of ``head``."""
        graph = getattr(head, "graph", head)
        graph = graph if isinstance(graph, nn.Module) else graph()
        return Trainer.setup(graph, optimizer=optimizer, **settings)

    @staticmethod
    def builder(
        model_factory: nn.Module | Callable[[torch.device], nn.Module],
        optimizer_factory: OptimizerMaker,
        train_step: TrainStep,
    ) -> TrainerBuilder:
        """Return a builder for a run whose loop is ours: add data and settings, then ``run().join()``.

        Args:
            model_factory: ``model_factory(device)`` gives the model; or the model itself, which is trained in place
                where this process trains, and copied where ranks are processes of their own.
            optimizer_factory: ``optimizer_factory(parameters)`` gives the optimiser.
            train_step: ``train_step(model, batch)`` gives a `flodl.train.Loss`, a pair ``(sum, count)``, or
                the mean over the samples of the batch.
        """
        return Trainer._builder(model_factory, optimizer_factory, train_step)

    @staticmethod
    def wrap(*models: nn.Module, ranks: Ranks | None = None) -> Replicas:
        """Return the bare collectives over ``models``, for loops with several of them (GANs and the like)."""
        return Replicas(models, ranks or join_ranks())

    # ---- the loop ------------------------------------------------------------------------------------

    def fit(self) -> Trainer:
        """Train until the last epoch or a reason to stop, and return self.

        Raises:
            TrainError: a loss is not finite (``on_nan="stop"``), a rank is lost, or a checkpoint does not fit.
            SystemExit: SIGTERM or SIGINT came; the state is saved, the code is 143 or 130.
        """
        if self.feed is None or self._train_step is None:
            raise TrainError(
                "fit: found no data or no train_step; use Trainer.builder, or write the loop with epoch()."
            )
        with self._leaving_cleanly():
            self._begin_run()
            self.step_.train_step = self._cutting(self._train_step)
            if self.settings.micro_batch_size == "auto":
                fit_micro_batch(self)
            choose_route(self)
            while self.epoch_number < self.settings.num_epochs and not self.stopping:
                self._call("epoch_fn", self.epoch_number, self, may_stop=True)
                self.observing.look_again()
                self.step_.look_again()
                self._mark = time.perf_counter()
                self.hooks.call("on_epoch_begin", self.epoch_number)
                for turn, batches in self._work(self.feed):
                    self.rates.set(self.policy.lr_step)
                    self.hooks.call("on_step_begin", batches)
                    self.log.begin(self.ranks.device)
                    result = self.step_.run(batches, step=self.policy.lr_step, flags=self._flags())
                    self._after_step(turn, result)
                    if self.stopping:
                        break
                if not self.stopping:
                    self._end_epoch()
            self._end_run()
        return self

    def _cutting(self, train_step: TrainStep) -> TrainStep:
        """Return the step for models that remember: the history of what they remember is over with each pass."""
        if not self.graphs.remembers:
            return train_step

        def step(model: nn.Module, batch: Any) -> Any:
            self.graphs.cut()
            return train_step(model, batch)

        return step

    def _work(self, feed: Feed) -> Iterator[tuple[int, list[Any]]]:
        """Yield this rank's part of what is left of the epoch, one optimiser step at a time."""
        for turns, ratios in self.policy.turns(feed.turns(self.epoch_number)):
            share = Share(self.ranks.rank, ratios, self._least) if ratios else Share(0, (1.0,), self._least)
            self.ranks.phase("data")
            for turn, batches in feed.work(self.epoch_number, turns, share):
                yield turn, batches
                self.ranks.phase("data")

    def _after_step(self, turn: int, result: StepResult) -> None:
        round_ = self.policy.after_step(turn, result.samples, result.compute_ms, self._flags())
        if self.average is not None:
            self.average.update(self.policy.lr_step)
        now = time.perf_counter()
        wall_ms, self._mark = (now - self._mark) * 1e3, now
        about: Any = {"epoch": self.epoch_number, "lr": self.rates.first, "wall_ms": wall_ms}
        self.log.note(self.tally, result, step=self.policy.lr_step, **about)
        self.graphs.end_step()
        self.hooks.call("on_step_end", result)
        if round_ is not None:
            self._met(round_)
        elif isinstance(self.policy, Sync):
            self._at_rest(result.flags)

    def _met(self, round_: Round) -> None:
        tell_meeting(self, round_)
        if round_.held and not round_.all_dry:
            self._at_rest(round_.flags)
        elif round_.all_dry:
            self._left_over = round_.flags  # heeded when the epoch is closed

    def _at_rest(self, flags: Any) -> None:
        """All ranks are equal here and know the same; what they must decide alike is decided here."""
        every = self.settings.eval_every
        if every and self.evaluator.at_step // every < self.policy.steps // every >= self.settings.eval_delay / every:
            self._evaluate()
        if self.observing.due(self.policy.steps):
            self.log.settle(self.tally)
            self.observing.end_window(self.tally, self.policy.steps, shared_loss=self.step_.share_gradients)
        self._decide()
        if any(flags):
            self.save(wait=True)
            if flags[0]:
                self._leave(128 + round(flags[1] / flags[0]))
            self.stopping = True
        elif (self.saves.due or self.saves.best_due) and not self._epoch_ends():
            self.save()
        self.stopping = self.stopping or self._out_of_steps()
        self.saves.tell_news()

    def _decide(self) -> None:
        """Act on the rules of the run, where all ranks know the same."""
        for decided in self.observing.decide(self.policy.steps, self.epoch_number):
            self.events.emit(decided)
            self.step_.loaded()
            self.stopping = self.stopping or decided.action == "stop"

    def _flags(self) -> list[float]:
        """Return what this rank wants all to know: a signal that came (as 1 and its number), a wish to stop."""
        number = self.signals.number
        return [float(bool(number)), float(number), float(self._wish_to_stop)]

    _wish_to_stop = False
    _left_over: tuple[float, ...] = ()

    def stop(self) -> None:
        """Ask all ranks to stop at their next meeting; state is saved."""
        self._wish_to_stop = True

    def _leave(self, code: int) -> None:
        self.log.settle(self.tally)
        self.events.emit(
            RunDone(rank=self.ranks.rank, step=self.policy.lr_step, epoch=self.epoch_number, reason="signal")
        )
        self._close()
        raise SystemExit(code)

    def _epoch_ends(self) -> bool:
        """Return whether a save after the epoch follows at once."""
        if not isinstance(self.policy, Sync) or self.feed is None or self.settings.save_epochs is not True:
            return False
        return self.policy.position >= self.feed.turns(self.epoch_number)

    def _out_of_steps(self) -> bool:
        return self.settings.max_steps is not None and self.policy.steps >= self.settings.max_steps

    def _end_epoch(self) -> None:
        for round_ in self.policy.close_epoch(self._flags()):
            self._met(round_)
            if self.stopping:
                return
        self.log.settle(self.tally)
        self.tally.wall_ms += (time.perf_counter() - self._mark) * 1e3
        self._mark = time.perf_counter()
        done = self.epoch_number
        self.epoch_number += 1
        if self.evaluator.at_step != self.policy.steps:
            self._evaluate()
        parts = self.ranks.gather(self.tally.to_dict())
        metrics = epoch_metrics(
            parts,
            shared_loss=self.step_.share_gradients,
            epoch=done,
            step=self.policy.steps,
            evaluated=self.evaluator.found,
        )
        observed = self.observing.end_epoch(metrics, parts)
        self.hooks.call("on_epoch_end", done)
        self.tally = Tally()
        self.rates.observe(metrics, self.settings.schedule_metric)
        self.events.emit(metrics)
        if observed is not None:
            self.events.emit(observed)
        self._decide()
        wanted = self._call("metrics_fn", metrics) if self.ranks.rank == 0 else None
        every = self.settings.checkpoint_every
        if every and (done + 1) % every == 0 and self.ranks.rank == 0:
            self._call("checkpoint_fn", done + 1, self.model)
        rows = self.ranks.table([float(wanted is False or self._wish_to_stop), float(not self.saves.at_epochs_end)])
        self.stopping = self.stopping or any(row[0] for row in rows)
        self.stopping = self.stopping or self._out_of_steps()
        if any(self._left_over):
            self._at_rest(self._left_over)
        elif self.stopping or self.saves.best_due or not any(row[1] for row in rows):
            self.save()
        self.saves.tell_news()

    def _evaluate(self) -> None:
        if self.policy.steps >= self.settings.eval_delay or self._over():
            self.stopping = evaluate_now(self) or self.stopping

    def _over(self) -> bool:
        return self._out_of_steps() or self.epoch_number >= self.settings.num_epochs

    def _call(self, name: str, *args: Any, may_stop: bool = False) -> Any:
        """Call a function of the user; one that only looks on may fail without ending the run."""
        call = getattr(self.callbacks, name)
        if call is None:
            return None
        self.ranks.phase("callback")
        try:
            return call(*args)
        except Exception as error:
            if may_stop:
                raise
            if name not in self.callbacks.warned:
                self.callbacks.warned.add(name)
                self._warn(f"{name} raised {type(error).__name__}: {error}; training goes on")
            return None

    # ---- beginning and ending ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _leaving_cleanly(self) -> Iterator[None]:
        """Listen to signals while inside, and free the checkpoint folder however the inside ends."""
        try:
            with contextlib.ExitStack() as arranged, self.signals:
                arranged.callback(self.step_.drop_recordings)
                arranged.callback(self.hooks.call, "close")
                arranged.callback(self.observing.close)
                for way in (compiled if self.settings.compile else None, self.settings.arrange):
                    if way is not None:
                        arranged.callback(way(self.model))
                yield
        except BaseException:
            if self.keeper is not None:
                self.keeper.close(give_up=True)
            raise

    def _begin_run(self) -> None:
        self.model.train()
        self.restore()
        self.saves.begin()
        tell_start(self)
        self.hooks.call("on_train_begin")
        if self.settings.eval_start and not self.policy.steps:
            evaluate_now(self, counts=False)
        self._mark = time.perf_counter()

    def _end_run(self) -> None:
        self.log.settle(self.tally)
        if self.evaluator.at_step != self.policy.steps:
            evaluate_now(self)  # the run ended inside an epoch
        if self.keeper and (self.saves.at_step != self.policy.steps or self.saves.best_due):
            self.save()
        if self.average is not None:
            self.average.put()
        self.hooks.call("on_train_end")
        reason = "finished" if self.epoch_number >= self.settings.num_epochs else "stopped"
        self._close()
        self.events.emit(RunDone(rank=self.ranks.rank, step=self.policy.steps, epoch=self.epoch_number, reason=reason))

    def _close(self) -> None:
        self.ranks.phase("shutdown")
        self.saves.close()
        if self.timeline is not None:
            parts = self.ranks.gather(self.timeline.to_dict())
            if self.ranks.rank == 0:
                Timeline.merge(parts).write(self.settings.timeline or "timeline")

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint in the background; all ranks must call this at the same step."""
        self.saves.save(wait=wait)

    def restore(self) -> bool:
        """Go on from the newest whole checkpoint if the settings say so and there is one; errors as of `Saves`."""
        return self.saves.restore()

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint that the run went on from."""
        return self.saves.resumed_from

    def model_was_replaced(self) -> None:
        """Be told that parameters and buffers were overwritten on all ranks alike."""
        self.step_.loaded()
        if isinstance(self.policy, LocalSteps):
            self.policy.mean.buffers.refresh()

    def _warn(self, message: str) -> None:
        self.events.emit(Warned(rank=self.ranks.rank, step=self.policy.lr_step, message=message))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
