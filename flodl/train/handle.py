"""What the caller of a run holds: metrics as they come, and the trained state at the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import nn

from flodl.distributed.launch import LOOK_S, Crew
from flodl.errors import TrainError, TrainInterrupted
from flodl.train.events import EpochMetrics, Event, Events, Observed, RunFailed, StepDone
from flodl.train.saving.state import load_model, model_state
from flodl.train.snapshots import ModelSnapshot, taken_from

__all__ = ["Handle", "RankStatus", "SendEvents", "Trained"]


@dataclass(frozen=True)
class Trained:
    """The end of a run, on the CPU, by name.

    Weights that were in shards are put together on the first rank alone. On the others both dicts are empty, ``whole``
    is False, and what asks for the weights is refused.

    Attributes:
        parameters: every parameter.
        buffers: every persistent buffer.
        metrics: the figures of each epoch that this process saw.
        whole: whether the weights are here.
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    metrics: list[EpochMetrics] = field(default_factory=list)
    whole: bool = True

    @classmethod
    def of(cls, model: nn.Module, *, keep: bool = True) -> Trained:
        """Return copies of the state of ``model``; of shards all ranks call this together.

        Args:
            model: on this rank, whole or in shards.
            keep: whether this rank is to hold the weights; one tensor at a time is whole on ranks that do not.
        """
        state = model_state(model, keep=keep)
        if not keep:
            return cls({}, {}, whole=False)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return cls({k: v for k, v in state.items() if k in names}, {k: v for k, v in state.items() if k not in names})

    def __repr__(self) -> str:
        if not self.whole:
            return f"Trained(the weights are on rank 0, {len(self.metrics)} epochs)"
        numbers = sum(value.numel() for value in self.parameters.values())
        return f"Trained({numbers:,} parameters in {len(self.parameters)} tensors, {len(self.metrics)} epochs)"

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers together.

        Raises:
            TrainError: the weights are not on this rank.
        """
        self._check_whole()
        return {**self.parameters, **self.buffers}

    def load_into(self, model: nn.Module) -> nn.Module:
        """Copy the state into ``model`` and return it.

        Raises:
            TrainError: the weights are not on this rank.
            CheckpointError: names, shapes or dtypes differ.
        """
        load_model(model, self.state_dict())
        return model

    def to_bytes(self) -> bytes:
        """Return the state as safetensors, to be sent to another process.

        Raises:
            TrainError: the weights are not on this rank.
        """
        self._check_whole()
        marked = {f"p:{k}": v for k, v in self.parameters.items()} | {f"b:{k}": v for k, v in self.buffers.items()}
        return format_tensors(marked)

    def _check_whole(self) -> None:
        if not self.whole:
            raise TrainError(
                "trained: the weights were in shards and have been put together on rank 0 alone; expected this to be "
                "asked there. Ask `trained.whole` first, or read the checkpoint or the folder that was written."
            )

    @classmethod
    def from_bytes(cls, data: bytes, metrics: Sequence[EpochMetrics] = ()) -> Trained:
        """Return what `to_bytes` was given."""
        state = parse_tensors(data)
        kinds = {mark: {k[2:]: v for k, v in state.items() if k.startswith(mark)} for mark in ("p:", "b:")}
        return cls(kinds["p:"], kinds["b:"], list(metrics))


@dataclass(frozen=True)
class RankStatus:
    """What one rank is doing.

    Attributes:
        rank: its number.
        pid: its process.
        alive: whether the process runs.
        phase: what it does, one of `flodl.distributed.board.PHASES`.
        step: the last step that it began.
        silent_s: seconds since its last pulse.
    """

    rank: int
    pid: int
    alive: bool
    phase: str
    step: int
    silent_s: float


class Handle:
    """A run that was begun; made by ``TrainerBuilder.run``.

    Ranks in processes of their own are listened to while a method of this object waits, and by nothing
    else: call ``join``, or ask for metrics until there are none.

    Attributes:
        world_size: number of ranks.
        model: the trained model, where this process trained it; None otherwise.
    """

    def __init__(
        self,
        *,
        world: int,
        metrics_fn: Callable[[EpochMetrics], Any] | None = None,
        subscribers: Sequence[tuple[Callable[[Any], Any], tuple[type, ...]]] = (),
        over: Callable[[], Any] | None = None,
    ) -> None:
        self.world_size = world
        self.crew: Crew | None = None
        self.model: nn.Module | None = None
        self._metrics_fn = metrics_fn
        self._events = Events()
        self._failed = False
        self._over = over
        for call, kinds in subscribers:
            self._events.subscribe(call, *kinds)
        self._queue: deque[EpochMetrics] = deque()
        self._seen: list[EpochMetrics] = []
        self._trained: Trained | None = None
        self._snapshots: deque[ModelSnapshot] = deque()
        self._stopped: dict[str, Any] = {}

    def __repr__(self) -> str:
        state = "running" if self._trained is None else "over"
        return f"Handle({state}, {self.world_size} rank{'s' * (self.world_size != 1)}, {len(self._seen)} epochs seen)"

    def note(self, metrics: EpochMetrics) -> None:
        """Take in the figures of an epoch."""
        self._queue.append(metrics)
        self._seen.append(metrics)

    def on_message(self, rank: int, message: tuple[str, Any]) -> Any:
        """Handle what a rank sent; the answer to an epoch's figures is whether to go on."""
        kind, body = message
        if kind == "event":
            self._events.emit(body)
            return None
        if kind == "snapshot":
            self._snapshots.append(taken_from(body))
            return None
        if kind == "stopped":
            step, folder, data = body
            self._stopped = {"step": step, "folder": folder, "trained": Trained.from_bytes(data, self._seen)}
            return None
        if kind == "failed":
            error, restarts = body
            self._events.emit(
                RunFailed(
                    step=error.step, epoch=0, reason=str(error), failed_rank=error.rank, phase=error.phase,
                    restarts=restarts,
                )
            )  # fmt: skip
            return None
        self.note(body)
        if self._metrics_fn is None:
            return True
        try:
            return self._metrics_fn(body) is not False
        except Exception as error:
            if not self._failed:
                import warnings

                warnings.warn(f"metrics_fn raised {type(error).__name__}: {error}; training continues", RuntimeWarning)
            self._failed = True
            return True

    def finish(self, trained: Trained, model: nn.Module | None = None) -> None:
        """Be told how the run ended."""
        self._trained = replace(trained, metrics=list(self._seen))
        self.model = model

    # ---- while it runs -------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether ranks still train, as far as this process has heard; `poll` listens."""
        return self._trained is None and self.crew is not None and bool(self.crew.alive)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Listen to the ranks, for at most so long, and return whether the run goes on.

        Raises:
            RankError: a rank failed; it says which, where and why.
        """
        if self._trained is not None or self.crew is None:
            return False
        with self._interrupted(), self.crew.passing_signals():
            return not self.crew.poll(timeout_s)

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        """Give an interruption the state that rank 0 sent before it left."""
        try:
            yield
        except KeyboardInterrupt:
            self._trained = self._stopped.get("trained")
            raise TrainInterrupted(**self._stopped) from None

    def ranks(self) -> list[RankStatus]:
        """Return what each rank is doing right now, without asking it; nothing where this process trained."""
        if self.crew is None:
            return []
        board, alive = self.crew.board, set(self.crew.alive)
        return [
            RankStatus(rank, pid, rank in alive, board.phase(rank), board.step(rank), board.silence_s(rank))
            for rank, pid in enumerate(self.crew.pids)
        ]

    def rank_metrics(self) -> list[dict[str, float]]:
        """Return the figures of each rank in the newest epoch; see `EpochMetrics.by_rank`."""
        return [dict(figures) for figures in self._seen[-1].by_rank] if self._seen else []

    def stop(self) -> None:
        """Ask the run to end at the next meeting of its ranks, its state saved; `join` gives what it came to."""
        self.ask("stop")

    def snapshot(self, timeout_s: float = 60.0) -> ModelSnapshot:
        """Return the run's weights as they are now, without stopping it.

        Raises:
            TrainError: the run is over, or there was none within the time.
            RankError: a rank failed.
        """
        if self._trained is not None or self.crew is None:
            raise TrainError("snapshot: the run is over; expected one that trains. join() gives its weights.")
        self.crew.board.ask_snapshot(0)
        until = time.monotonic() + timeout_s
        while not self._snapshots:
            if not self.poll(timeout_s=0.05):
                break
            if time.monotonic() > until:
                raise TrainError(
                    f"snapshot: rank 0 gave none within {timeout_s:g} s; it is in phase "
                    f"{self.crew.board.phase(0)!r}. Expected a step to end in that time; give it more.",
                    timeout_s=timeout_s,
                )
        if not self._snapshots:
            raise TrainError("snapshot: the run ended before it took one. join() gives its weights.")
        return self._snapshots.popleft()

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the figures of the epochs that ended since the last call, without waiting."""
        if self._trained is None and self.crew is not None:
            self.crew.poll()
        out = list(self._queue)
        self._queue.clear()
        return out

    def next_metrics(self) -> EpochMetrics | None:
        """Wait for the next epoch's figures and return them; None when the run is over."""
        while not self._queue and self._trained is None and self.crew is not None:
            with self._interrupted(), self.crew.passing_signals():
                over = self.crew.poll(timeout_s=LOOK_S)
            if over:
                break
        return self._queue.popleft() if self._queue else None

    def join(self) -> Trained:
        """Wait for the end of the run and return the trained state.

        Raises:
            RankError: a rank failed; it says which, where and why.
            TrainInterrupted: SIGINT (Ctrl-C) ended the run, which has saved its state. A second call returns the
                trained state at that step.
            SystemExit: SIGTERM ended the run, which has saved its state; the code is 143.
        """
        if self._trained is None:
            assert self.crew is not None
            try:
                with self._interrupted():
                    data = self.crew.wait()[0]
            finally:
                if self._over is not None:
                    self._over()
            self._trained = Trained.from_bytes(data, self._seen)
        return self._trained

    def ask(self, wish: str) -> None:
        """Ask the run to ``"stop"``, ``"evaluate"`` or ``"save"`` when all ranks meet next; from any thread.

        A run that trained in this process is over when its handle is there, and is asked by ``trainer.ask``.
        """
        if self.crew is not None and self._trained is None:
            self.crew.board.ask(0, wish)

    def abort(self) -> None:
        """End the ranks at once, without saving."""
        if self.crew is not None:
            self.crew.stop()


class SendEvents:
    """Sends a rank's events to the process that started it.

    Args:
        pipe: to that process.
        every_s: least seconds between two steps that are told; people see no more.
    """

    def __init__(self, pipe: Any, every_s: float) -> None:
        self.pipe, self.every_s, self._last, self._passed_over = pipe, every_s, -math.inf, False

    def __call__(self, event: Event) -> None:
        """Send an event."""
        if isinstance(event, StepDone):
            self._passed_over = event.at_s - self._last < self.every_s
            self._last = self._last if self._passed_over else event.at_s
        if self._passed_over and (
            isinstance(event, StepDone) or (isinstance(event, Observed) and event.scope == "step")
        ):
            return
        self.pipe.send(("event", event))
