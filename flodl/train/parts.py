"""The parts of a run on one rank (model, optimiser, policy, step, figures, checkpoints), and its start and end."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from flodl.distributed.average import model_tensors
from flodl.distributed.group import Ranks
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.policy import Choice, choose_policy, make_policy
from flodl.distributed.sharded import shard_model, spread
from flodl.distributed.sync import Sync
from flodl.errors import TrainError, TrainInterrupted
from flodl.graph.graph import Graph
from flodl.monitor.timeline import Timeline
from flodl.signals import stop_by
from flodl.train.audience import callbacks_of
from flodl.train.callback import Guarded, Hooks
from flodl.train.evaluate import Evaluator
from flodl.train.events import Events, RunDone, RunFailed, RunStarted, Warned
from flodl.train.handle import Trained
from flodl.train.observing import Observing
from flodl.train.optim.ema import WeightAverage
from flodl.train.optim.optimizers import make_optimizer
from flodl.train.optim.rates import Rates
from flodl.train.plan import RunPlan
from flodl.train.precision import Precision
from flodl.train.requests import Requests
from flodl.train.saving.keeper import Keeper
from flodl.train.saving.resume import past_of
from flodl.train.saving.state import check_same_model, identity
from flodl.train.settings import Settings, check_settings
from flodl.train.snapshots import Snapshots
from flodl.train.step.cuda_graphs import CudaCapturer
from flodl.train.step.device import Step
from flodl.train.step.host import TrainStep
from flodl.train.step.outcome import StepResult
from flodl.train.steplog import StepLog, Tally


class TrainerParts:
    """The parts of a trainer on one rank; see `flodl.train.Trainer`."""

    plan: RunPlan

    def prepare(self, ranks: Ranks) -> Self:
        """Create the parts of the trainer on this rank; all ranks call this together.

        Raises:
            TrainError: invalid combinations of settings, or ranks with different models.
        """
        plan = self.plan
        settings = replace(plan.settings, resume=True) if ranks.attempt else plan.settings
        self.settings, self.ranks = settings, ranks
        self.train_step, self.metrics_fn = plan.train_step, Guarded(plan.metrics_fn, "metrics_fn")
        seed_all(settings.seed)
        self.feed, evals = plan.feeds(ranks.device)
        self.events = Events(ranks.rank)
        ranks.phase("model build")
        model = plan.model_factory(ranks.device)
        check_settings(settings, world=ranks.world, run=plan)
        self.sharded = settings.shard is not None and not ranks.solo
        # A sharded model is moved layer by layer.
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
        self.precision = Precision(settings.precision, ranks.device)
        if self.sharded:
            # Kernels of prepared layers may require float32 parameters.
            plain = not getattr(settings.prepare_model, "needs_float32", False) or ranks.device.type == "cpu"
            shard_model(model, ranks, self.precision.products if plain else None)
        self.observing = Observing(model, ranks, settings)
        self.graphs = self.observing.graphs
        self.optimizer = self.observing.optimizer(
            lambda: make_optimizer(model, plan.optimizer_factory, settings.parameter_groups)
        )
        self.unoptimised_at_start = set(self._unoptimised())
        self.rates = Rates(self.optimizer, settings.schedule, ranks.world, settings.lr_scale_ratio)
        if isinstance(self.rates.schedule, LRScheduler) and any(r.action == "rate" for r in self.observing.rules):
            raise TrainError("rules: found set_rate with a torch LRScheduler; expected a function of the step.")
        self.identity = identity(model, self.optimizer, self.rates.schedule)
        self.log = StepLog(self.events, every=settings.log_every, on_nan=settings.on_nan)
        self.evaluator = Evaluator(self, evals, plan.eval_fn)
        self.requests = Requests(ranks)
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
        self._pending: Sequence[float] = ()  # flags that are handled when the epoch is closed
        self.earlier_s, self.began_s = 0.0, time.monotonic()
        self.changes: list[Any] = []
        together = f"shard={settings.shard!r}" if self.sharded else "ema" if ema is not None else None
        self.use_policy(choose_policy(ranks, settings.policy, together=together))
        self.saves: Keeper | None = Keeper(self) if settings.folder else None
        self.snapshots = Snapshots(self)
        self._register()
        return self

    def _register(self) -> None:
        """Register what the features of this run do after and between steps."""
        self.after_step: list[Callable[[StepResult], Any]] = []
        if self.average is not None:
            self.after_step.append(self.average.after_step)
        if any(isinstance(module, Graph) for module in self.model.modules()):
            self.after_step.append(lambda result: self.graphs.end_step())
        self.between_steps: list[Callable[[Sequence[float]], Any]] = []
        if self.evaluator.evaluates:
            self.between_steps.append(self.evaluator.between_steps)
        if self.settings.rules:
            self.between_steps.append(self.apply_rules)
        if self.saves is not None:
            self.between_steps.append(self.saves.between_steps)

    def use_policy(self, choice: Choice) -> None:
        """Set the policy of the run, and create the step that belongs to it."""
        settings, ranks = self.settings, self.ranks
        self.policy_choice = choice
        # Shards differ between ranks, so there is nothing to compare.
        knobs = replace(settings.knobs, check_every=0) if self.sharded else settings.knobs
        self.policy = policy = make_policy(choice.name, ranks, self.model, knobs)
        if isinstance(policy, LocalSteps):
            policy.due = lambda steps, flags: (
                any(flags) or policy.steps >= self.last_step or (self.saves is not None and self.saves.due)
            )
        self.step_ = Step(
            self.model,
            self.optimizer,
            None,
            ranks=ranks,
            precision=self.precision,
            share_gradients=policy.shares_gradients,
            max_grad_norm=settings.max_grad_norm,
            on_nan=settings.on_nan,
            sum_of_means=settings.sum_of_means,
            slowdown=settings.knobs.slowdown.get(ranks.rank, 1.0),
            reduce_on_cpu=settings.knobs.backend == "cpu",
            sharded=self.sharded,
        )
        self.step_.hooks = self.hooks if self.hooks.around else None
        self.step_.watching = self.observing.watching

    def choose_route(self) -> None:
        """Set up the fastest way to compute steps that settings and device allow.

        Steps in float32, TF32 or bfloat16 with Adam, AdamW or SGD are captured on a CUDA device. All others synchronise
        with the device once per step.

        Raises:
            TrainError: ``capture=True`` where steps cannot be captured.
        """
        settings, step = self.settings, self.step_
        capturer = make_capturer(self.ranks.device, settings)
        reason = None
        if capturer is None:
            reason = f"the device is a {self.ranks.device.type}, and CUDA devices capture graphs"
        elif settings.knobs.shares == "measured" and not self.ranks.solo:
            reason = "shares follow the time of each rank's own part, which is measured separately"
        elif self.graphs.remembers:
            reason = "the model has a state between calls, which a captured graph would not pass on"
        elif self.hooks.around:
            names = ", ".join(dict.fromkeys(type(call).__name__ for call in self.hooks.around))
            reason = f"{names} acts around the backward pass, which a captured graph would not repeat"
        else:
            reason = step.decide_on_device(
                capturer if settings.capture is not False else None,
                self.warn,
                deferred=isinstance(self.policy, Sync) and not settings.knobs.slowdown,
                strict=settings.capture is True,
                num_rows=getattr(self.train_step, "reads_num_rows", True),
            )
        if capturer is not None:
            step.unrecorded = "the settings disable it (capture=False)" if settings.capture is False else reason
        self.log.before, step.arrived = step.count_writes, self.log.arrived
        if reason is not None and settings.capture is True:
            raise TrainError(f"capture: steps cannot be captured, because {reason}. Leave it at 'auto'.", reason=reason)
        if reason is not None and settings.capture == "auto" and capturer is not None:
            self.warn(f"capture: steps run one operation at a time, because {reason}")

    def _unoptimised(self) -> list[str]:
        """Return the names of parameters that require gradients and are not in the optimiser."""
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in known]

    def check_learners(self) -> None:
        """Check that the optimiser has all parameters that were unfrozen since the run began.

        Raises:
            TrainError: it lacks some; ``names`` lists them.
        """
        names = [name for name in self._unoptimised() if name not in self.unoptimised_at_start]
        if names:
            raise TrainError(
                f"epoch {self.epoch_number}: {', '.join(names[:5])} require gradients but are not in the optimiser. "
                "Unfreeze them before the run, use the rule thaw_when, or call trainer.optimizer.add_param_group.",
                names=names,
            )

    def without_history(self, train_step: TrainStep) -> TrainStep:
        """Return a train_step that detaches the state of graphs with memory before each pass."""
        if not self.graphs.remembers:
            return train_step

        def step(model: nn.Module, batch: Any) -> Any:
            self.graphs.cut()
            return train_step(model, batch)

        return step

    def apply_rules(self, flags: Sequence[float] = ()) -> None:
        """Apply the rules of the run, if their trends have new values; all ranks call this."""
        if self.observing.due(self.policy.steps):
            self.log.settle(self.tally)
            self.observing.end_window(self.tally, self.policy.steps, shared_loss=self.step_.share_gradients)
        for decided in self.observing.decide(self.policy.steps, self.epoch_number):
            self.events.emit(decided)
            self.step_.loaded()
            self.stopping = self.stopping or decided.action == "stop"

    def about(self) -> dict[str, Any]:
        """Return the fields that events have in common."""
        return {"rank": self.ranks.rank, "step": self.policy.lr_step, "epoch": self.epoch_number}

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if the run keeps an average."""
        return self.average.applied() if self.average is not None else contextlib.nullcontext()

    def warn(self, message: str) -> None:
        """Report a warning."""
        self.events.emit(Warned(rank=self.ranks.rank, step=self.policy.lr_step, message=message))

    # ---- start and end -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Handle signals inside, and release the model and the checkpoint folder at the end."""
        settings = self.settings
        try:
            with contextlib.ExitStack() as stack, self.requests.signals:
                stack.callback(lambda: self.step_.drop_captures())
                stack.callback(self.hooks.call, "close")
                stack.callback(self.observing.watching.close)
                for change in (compiled if settings.compile else None, settings.prepare_model):
                    undo = change(self.model) if change is not None else None
                    if undo is not None:
                        stack.callback(undo)
                yield
        except BaseException as fault:
            self.snapshots.close(f"the run ended by {type(fault).__name__}")
            if not isinstance(fault, (GeneratorExit, SystemExit, TrainInterrupted)):
                ranks, reason = self.ranks, f"{type(fault).__name__}: {fault}"
                about = {**self.about(), "failed_rank": ranks.rank, "phase": ranks.board.phase(ranks.row)}
                self.events.emit(RunFailed(**about, reason=reason))
            if self.saves is not None:
                self.saves.close(give_up=True)
            raise

    def restore(self) -> None:
        """Resume from a checkpoint if the settings request it and there is one."""
        self.model.train()
        if self.saves is not None and self.settings.resume:
            self.saves.restore()

    def begin(self) -> None:
        """Report that the run begins, with its past."""
        self.began_s = time.monotonic()
        feed, settings, choice = self.feed, self.settings, self.policy_choice
        started = RunStarted(
            **self.about(),
            world=self.ranks.world,
            policy=self.policy.name,
            policy_reason=choice.reason,
            epochs=settings.num_epochs,
            steps_per_epoch=feed.turns(self.epoch_number) if feed is not None else 0,
            max_steps=settings.max_steps,
            resumed_from=self.saves.resumed_from if self.saves is not None else None,
            past=past_of(self),
        )
        self.events.emit(started)
        self.hooks.call("on_train_begin")
        self._since = time.perf_counter()

    def end(self) -> None:
        """End the run: evaluate and save what is not yet evaluated and saved."""
        self.log.settle(self.tally)
        if self.evaluator.at_step != self.policy.steps:
            self.evaluator.run()  # the run ended inside an epoch
        if self.saves is not None:
            self.saves.end()
        if self.average is not None:
            self.average.put()
        self.hooks.call("on_train_end")
        self.snapshots.serve()
        self.snapshots.close()
        reason = "finished" if self.epoch_number >= self.settings.num_epochs else "stopped"
        self._close(reason, self.policy.steps)

    def leave(self, number: int) -> NoReturn:
        """Leave because of a signal; after Ctrl-C the error contains the trained weights."""
        self.log.settle(self.tally)
        step = self.policy.lr_step
        state: dict[str, Any] = {}
        if number == signal.SIGINT:
            if self.average is not None:
                self.average.put()
            trained = Trained.of(self.model, keep=self.ranks.rank == 0 or not self.sharded)
            state = {"step": step, "folder": self.settings.folder, "trained": trained}
        self._close("signal", step)
        stop_by(number, **state)

    def _close(self, reason: str, step: int) -> None:
        self.ranks.phase("shutdown")
        if self.saves is not None:
            self.saves.join()
            self.saves.close()
        recorded, summed = self.step_.recorded(self.policy.steps), self.step_.summed
        self.events.emit(RunDone(**{**self.about(), "step": step}, reason=reason, recorded=recorded, summed=summed))


def make_capturer(device: torch.device, settings: Settings) -> CudaCapturer | None:
    """Return the capturer of a device; None for devices other than CUDA."""
    return CudaCapturer(device, tune=not settings.deterministic) if device.type == "cuda" else None


def compiled(model: nn.Module) -> Callable[[], Any]:
    """Compile the model, or its ``graph``, with ``torch.compile``; return a function that reverts it."""
    inner = getattr(model, "graph", model)
    target = inner if isinstance(inner, nn.Module) else model
    # Each bucket of lengths is a shape; torch compiles at most so many.
    before = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(before, 64)
    target.compile()

    def undo() -> None:
        target._compiled_call_impl = None
        torch._dynamo.config.recompile_limit = before

    return undo


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
