"""The result of a run, and the handle of a run in the background."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from torch import nn

from flodl.devices import pick_device
from flodl.distributed.group import Ranks
from flodl.distributed.launch import launch
from flodl.errors import TrainError, TrainInterrupted
from flodl.train.audience import Audience
from flodl.train.callback import Guarded
from flodl.train.events import EpochMetrics, Event, Events, Observed, RunFailed, StepDone
from flodl.train.plan import GivenModel, RunPlan
from flodl.train.saving.state import learned_tensors, model_state
from flodl.train.snapshots import ModelSnapshot, ModelWeights, SharedWeights, Tensors


@dataclass(frozen=True)
class Trained(ModelWeights):
    """The result of a run: its weights on the CPU, its figures, and the model.

    Sharded weights are gathered on rank 0 only. On other ranks both dicts are empty, ``whole`` is False, and reading
    the weights raises an error.

    Attributes:
        parameters: all parameters, without tensors that the model lists as fixed (`fixed_names`), such as the base of
            an adapter.
        buffers: all persistent buffers, without fixed ones.
        metrics: the figures of each epoch that this process received.
        whole: whether the weights are on this rank.
        in_place: whether this process trained the model, which has the weights.
    """

    parameters: Tensors
    buffers: Tensors
    metrics: list[EpochMetrics] = field(default_factory=list)
    whole: bool = True
    in_place: bool = False
    _factory: Callable[[torch.device], nn.Module] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, model: nn.Module, *, keep: bool = True) -> Trained:
        """Return copies of the state of ``model``; all ranks call this together for a sharded model.

        Args:
            model: whole or sharded.
            keep: whether this rank keeps the weights; other ranks only contribute their parts.
        """
        state = model_state(model, keep=keep)
        if not keep:
            return cls({}, {}, whole=False)
        return cls(*cls.split(state, state.keys() - dict(model.named_parameters(remove_duplicate=False))))

    def __repr__(self) -> str:
        if not self.whole:
            return f"Trained(the weights are on rank 0, {len(self.metrics)} epochs)"
        numbers = sum(value.numel() for value in self.parameters.values())
        return f"Trained({numbers:,} parameters in {len(self.parameters)} tensors, {len(self.metrics)} epochs)"

    @cached_property
    def model(self) -> nn.Module:
        """The trained model: the one of this process, else one of the run's factory on the CPU with these weights.

        Raises:
            TrainError: the model was sharded, or the result was unpickled.
        """
        if self._factory is None:
            raise TrainError("trained: found no model in this process. Use trained.load_into(model) on rank 0.")
        model = self._factory(torch.device("cpu"))
        return model if self.in_place else self.load_into(model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the model and its factory, for pickle."""
        return {name: None if name == "_factory" else getattr(self, name) for name in self.__dataclass_fields__}

    def state_dict(self) -> Tensors:
        """Return parameters and buffers in one dict.

        Raises:
            TrainError: the weights are not on this rank.
        """
        if not self.whole:
            raise TrainError("trained: the weights are on rank 0 only. Check trained.whole, or read a checkpoint.")
        return super().state_dict()


@dataclass(frozen=True)
class RankStatus:
    """State of one rank.

    Attributes:
        rank: its number.
        pid: its process.
        alive: whether the process runs.
        phase: one of `flodl.distributed.board.PHASES`.
        step: the last step that it began.
        silent_s: seconds since its last sign of life.
    """

    rank: int
    pid: int
    alive: bool
    phase: str
    step: int
    silent_s: float


class Handle:
    """A run in the background, with ranks in separate processes; made by `Trainer.start`.

    Messages of the ranks are read while a method of this object waits: call `join`, or `poll` repeatedly.

    Args:
        plan: the run.
        make_trainer: called with the plan in each process; returns its trainer.

    Attributes:
        world_size: number of ranks.
        devices: name of the device of each rank.
    """

    def __init__(self, plan: RunPlan, make_trainer: Callable[[RunPlan], Any]) -> None:
        names, settings = plan.settings.device_names, plan.settings
        self.world_size = len(names)
        self.devices = [name or str(pick_device(None, rank)) for rank, name in enumerate(names)]
        self._plan = plan
        self._events = Events()
        self._metrics: list[EpochMetrics] = []
        self._weights = SharedWeights()
        self._trained: Trained | None = None
        self._snapshots: deque[ModelSnapshot] = deque()
        self._stopped: dict[str, Any] = {}
        self._metrics_fn = Guarded(plan.metrics_fn, "metrics_fn")
        self._audience = Audience(settings, plan.subscribers, first=True, total=plan.total)
        self._audience.listen(self._events, self.ask, evaluates=plan.evaluates)
        listening = "all" if self._audience.needs_all_events else "some" if self._audience.subscribers else ""
        own = replace(settings, trackers=(), monitor=self._audience.monitor is not None)
        sent = replace(plan, settings=own, subscribers=(), metrics_fn=None, listening=listening)
        try:
            self._crew = launch(
                _run_rank,
                (sent, make_trainer, self._weights),
                ranks=self.world_size,
                device=None if None in names else self.devices,
                start=plan.start,
                timeout_s=settings.knobs.timeout_s,
                max_restarts=settings.knobs.max_restarts,
                on_message=self._on_message,
            )
        except BaseException:
            self._audience.close()
            raise

    def svg(self) -> str:
        """Return a picture of the model's architecture as SVG text."""
        from flodl.graph.picture import svg

        return svg(self._plan.model_factory(torch.device("cpu")))

    def _on_message(self, rank: int, message: tuple[str, Any]) -> Any:
        """Handle a message of a rank; the answer to the figures of an epoch is whether training continues."""
        kind, body = message
        if kind == "event":
            self._events.emit(body)
        elif kind == "snapshot":
            step, epoch, data, buffers, metrics = body
            self._snapshots.append(
                ModelSnapshot(step, epoch, *ModelSnapshot.split(parse_tensors(data), buffers), metrics)
            )
        elif kind == "stopped":
            step, folder, *weights = body
            self._stopped = {"step": step, "folder": folder, "trained": self._result(*weights)}
        elif kind == "failed":
            error, restarts = body
            about: Any = {"failed_rank": error.rank, "phase": error.phase, "restarts": restarts}
            self._events.emit(RunFailed(step=error.step, epoch=0, reason=str(error), **about))
        else:
            self._metrics.append(body)
            return self._metrics_fn(partial(warnings.warn, category=RuntimeWarning, stacklevel=2), body) is not False
        return None

    def _result(self, table: list[tuple[Any, ...]], buffers: Collection[str]) -> Trained:
        """Return the result of the weights that rank 0 wrote; a model that the user passed gets them."""
        factory = self._plan.model_factory
        trained = Trained(*Trained.split(self._weights.read(table), buffers), list(self._metrics), _factory=factory)
        if isinstance(factory, GivenModel):
            trained.load_into(factory.model)
        return trained

    # ---- while it runs -------------------------------------------------------------------------------

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Read messages of the ranks for at most ``timeout_s``, and return whether the run continues.

        Raises:
            RankError: a rank failed.
        """
        if self._trained is not None:
            return False
        with self._interrupted(), self._crew.passing_signals():
            return not self._crew.poll(timeout_s)

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        """Add the state that rank 0 sent before it ended to an interruption."""
        try:
            yield
        except KeyboardInterrupt:
            self._trained = self._stopped.get("trained")
            raise TrainInterrupted(**self._stopped) from None

    def ranks(self) -> list[RankStatus]:
        """Return the state of each rank, read from shared memory."""
        board, alive = self._crew.board, set(self._crew.alive)
        return [
            RankStatus(rank, pid, rank in alive, board.phase(rank), board.step(rank), board.silence_s(rank))
            for rank, pid in enumerate(self._crew.pids)
        ]

    def rank_metrics(self) -> list[dict[str, float]]:
        """Return the figures of each rank in the newest epoch; see `EpochMetrics.by_rank`."""
        return [dict(figures) for figures in self._metrics[-1].by_rank] if self._metrics else []

    def ask(self, request: str) -> None:
        """Request ``"stop"``, ``"evaluate"`` or ``"save"``, from any thread; all ranks act on it at one step."""
        if self._trained is None:
            self._crew.board.ask(0, request)

    def stop(self) -> None:
        """Request the end of the run, with its state saved; `join` returns the result."""
        self.ask("stop")

    def abort(self) -> None:
        """End the ranks immediately, without saving."""
        self._crew.stop()

    def snapshot(self, timeout_s: float = 60.0) -> ModelSnapshot:
        """Return the present weights of the run without stopping it.

        Raises:
            TrainError: the run is over, or did not answer in time.
            RankError: a rank failed.
        """
        if self._trained is not None:
            raise TrainError("snapshot: the run is over. Read the weights of its result, join().")
        self._crew.board.ask_snapshot(0)
        until = time.monotonic() + timeout_s
        while not self._snapshots and self.poll(timeout_s=0.05):
            if time.monotonic() > until:
                raise TrainError(
                    f"snapshot: rank 0, in phase {self._crew.board.phase(0)!r}, sent none within {timeout_s:g} s.",
                    timeout_s=timeout_s,
                )
        if not self._snapshots:
            raise TrainError("snapshot: the run ended before one was taken. Read the weights of its result, join().")
        return self._snapshots.popleft()

    def join(self) -> Trained:
        """Wait for the end of the run and return its result.

        Raises:
            RankError: a rank failed; its attributes contain which, where and why.
            TrainError: the run was aborted, or ended without a result.
            TrainInterrupted: SIGINT (Ctrl-C) ended the run after it saved its state. A second call returns the result.
            SystemExit: SIGTERM ended the run after it saved its state; the code is 143.
        """
        if self._trained is None:
            with self._audience, self._interrupted():
                weights = self._crew.wait()[0]
            if weights is None:
                raise TrainError(
                    "join: found no result, because the run was aborted, or a signal or an error ended it. "
                    "Start again with resume to continue from the last checkpoint."
                )
            self._trained = self._result(*weights)
        return self._trained


class SendEvents:
    """Sends the events of a rank to the process that started it.

    Args:
        pipe: to that process.
        every_s: minimum of seconds between two steps that are sent.
    """

    def __init__(self, pipe: Any, every_s: float) -> None:
        self.pipe, self.every_s, self._last, self._skipped = pipe, every_s, -math.inf, False

    def __call__(self, event: Event) -> None:
        """Send an event."""
        if isinstance(event, StepDone):
            self._skipped = event.at_s - self._last < self.every_s
            self._last = self._last if self._skipped else event.at_s
        of_step = isinstance(event, StepDone) or (isinstance(event, Observed) and event.scope == "step")
        if not (self._skipped and of_step):
            self.pipe.send(("event", event))


def _run_rank(ranks: Ranks, plan: RunPlan, make_trainer: Callable[[RunPlan], Any], shared: SharedWeights) -> Any:
    """Train as one rank; rank 0 writes its weights to ``shared`` and returns their table."""

    def ask_starter(metrics: EpochMetrics) -> Any:
        ranks.pipe.send(("metrics", metrics))
        return ranks.pipe.recv()

    trainer = make_trainer(replace(plan, metrics_fn=ask_starter)).prepare(ranks)
    if plan.listening and ranks.rank == 0:
        trainer.events.subscribe(SendEvents(ranks.pipe, every_s=0.1 if plan.listening == "some" else 0.0))
    try:
        trainer.train()
    except TrainInterrupted as stop:
        if ranks.rank == 0:
            weights = shared.write(stop.trained.state_dict()), list(stop.trained.buffers)
            ranks.pipe.send(("stopped", (stop.step, stop.folder, *weights)))
        raise
    if ranks.rank and not trainer.sharded:
        return None
    model = trainer.model
    state = model_state(model, keep=ranks.rank == 0) if trainer.sharded else learned_tensors(model)
    buffers = state.keys() - dict(model.named_parameters(remove_duplicate=False))
    return (shared.write(state), list(buffers)) if ranks.rank == 0 else None
