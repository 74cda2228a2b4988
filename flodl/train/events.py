"""The typed records that a training run emits, and the bus that hands them to whoever subscribed.

The loop knows no progress bar, monitor, log file or timeline; each of them is a subscriber.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from flodl.distributed.group import Summed
from flodl.train.recorded import Recorded

__all__ = [
    "Decided",
    "EpochDone",
    "EpochMetrics",
    "EvalDone",
    "Event",
    "Events",
    "LayersTimed",
    "ModelDescribed",
    "Observed",
    "Past",
    "RankWork",
    "RunDone",
    "RunFailed",
    "RunStarted",
    "SaveFailed",
    "Saved",
    "StepDone",
    "Subscriber",
    "Synced",
    "Warned",
    "figures_in",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Anything that happened; ``at_s`` is the monotonic clock in seconds, comparable on one host."""

    at_s: float = field(default_factory=time.monotonic)
    rank: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values, with its kind under ``event``."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Past:
    """What a run did before it was ended and taken up again; all of it, however often that was.

    Attributes:
        losses: mean training loss of every optimiser step.
        evaluations: ``step``, ``epoch`` and the figures of each evaluation.
        seconds: wall clock.
        changes: settings that were changed with ``allow_change``: ``step``, ``name``, ``was``, ``is``.
    """

    losses: tuple[float, ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0
    changes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The run begins or goes on: how much work is known to lie ahead, and what lies behind.

    ``total_steps`` is the best guess of all steps; ``policy_reason`` states why the policy was chosen.
    """

    world: int
    policy: str
    epochs: int
    steps_per_epoch: int
    policy_reason: str = ""
    max_steps: int | None = None
    step: int = 0
    epoch: int = 0
    resumed_from: str | None = None
    past: Past = field(default_factory=Past)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those before a resume included: exact where all epochs have as many."""
        whole = self.steps_per_epoch * self.epochs
        return whole if self.max_steps is None else min(whole, self.max_steps)


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimiser step on this rank.

    Where figures travel from the device in windows (``Settings.log_every``) these come in groups, in order, and
    times are means over the window; ``at_s`` is when the step was given to the device.

    ``loss`` is the mean over all counted items of the step; ``count`` their number (over ranks under
    Sync); ``samples`` those of this rank; ``compute_ms`` excludes waiting for other ranks.
    """

    step: int
    epoch: int
    loss: float
    count: float
    samples: int
    lr: float
    grad_norm: float
    compute_ms: float
    wall_ms: float
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Observed(Event):
    """What was watched inside of the model: values by dotted names, those of tags, groups and recorded scalars.

    With ``scope="step"`` these are one step's on this rank; they come in groups, in order, as `StepDone` does, right
    after the `StepDone` of their step. With ``scope="epoch"`` they are those of an epoch, merged over ranks as metrics
    are, and come right after the `EpochMetrics` of their epoch. A step or epoch without any has no such event.
    """

    step: int
    epoch: int
    scope: Literal["step", "epoch"]
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Decided(Event):
    """A rule of the run came true and was acted on, on all ranks alike.

    ``action`` is ``"stop"``, ``"freeze"``, ``"thaw"`` or ``"rate"``, ``path`` what it was done to, ``rule`` the rule
    as it is written in recipes, ``reason`` the figures that made it come true, ``epoch`` how many were done.
    """

    step: int
    epoch: int
    action: str
    path: str
    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Synced(Event):
    """Parameters were averaged: ``batches`` and ``wall_ms`` of each rank since the last time,
    ``sync_ms`` this rank's time in it, ``wait_ms`` the part spent waiting for peers.
    """

    step: int
    epoch: int
    round: int
    batches: tuple[int, ...]
    work_ms: tuple[float, ...]
    sync_ms: float
    wait_ms: float
    divergence: float
    anchor: int
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EvalDone(Event):
    """The model was evaluated.

    ``metrics`` are the figures; those of nested mappings have names such as ``report/macro avg/f1-score``. ``details``
    are the results that are not numbers, such as a confusion matrix, as JSON values.
    """

    step: int
    epoch: int
    metrics: Mapping[str, float]
    wall_ms: float
    details: Mapping[str, Any] = field(default_factory=dict)


def figures_in(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a record of `Past.evaluations`."""
    return {name: value for name, value in evaluation.items() if name not in ("step", "epoch", "details")}


@dataclass(frozen=True, kw_only=True)
class EpochMetrics(Event):
    """One epoch over all ranks: means weighted by count, times in milliseconds of wall clock.

    ``share`` is each rank's part of the samples, ``throughput`` its samples per millisecond of compute. ``by_rank`` has
    the figures of each rank: ``samples``, ``compute_ms``, ``wall_ms``, its metrics, and ``loss`` where ranks step on
    their own.
    """

    epoch: int
    step: int
    loss: float
    metrics: Mapping[str, float]
    samples: int
    epoch_ms: float
    share: tuple[float, ...]
    throughput: tuple[float, ...]
    eval: Mapping[str, float] = field(default_factory=dict)
    by_rank: tuple[Mapping[str, float], ...] = ()


EpochDone = EpochMetrics


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    bytes: int
    wall_ms: float


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A checkpoint could not be written; earlier ones are untouched and the run goes on."""

    step: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something that the user should know and that does not stop the run."""

    step: int
    message: str


@dataclass(frozen=True, kw_only=True)
class RunDone(Event):
    """The run ended by itself: ``reason`` is ``"finished"``, ``"stopped"`` or ``"signal"``.

    ``recorded`` says how many steps of this rank were replayed from captured graphs, and why others were not; None on a
    device that captures none. ``summed`` says by what ranks sum their gradients, and why not by what would be faster;
    None where they sum none.
    """

    step: int
    epoch: int
    reason: str
    recorded: Recorded | None = None
    summed: Summed | None = None


class Subscriber(Protocol):
    """Whoever looks on at a run: anything that can be called with an event.

    The progress bar (`flodl.train.ShowProgress`), trackers (`flodl.train.trackers`), the monitor, the timeline and what
    you write yourself are subscribers alike: given to ``subscribe``, called with each event when it happens, in the
    process that asked. A subscriber changes nothing in the run; what it raises is warned of once, and training
    continues. The last event of a run that ends by itself is `RunDone`.
    """

    def __call__(self, event: Any, /) -> Any:
        """Take in an event; what is returned is passed over."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """The run ended by an error, or a rank of it did: ``reason`` is the error's text.

    ``failed_rank`` and ``phase`` say which rank failed at what, where that is known; with ``restarts`` the ranks are
    started again and the run goes on.
    """

    step: int
    epoch: int
    reason: str
    failed_rank: int | None = None
    phase: str = ""
    restarts: bool = False


@dataclass(frozen=True, kw_only=True)
class RankWork(Event):
    """What the rank ``of`` did since it told of it last: ``(kind, from, to)`` in Unix time, in order.

    Kinds are ``compute``, ``sync``, ``wait`` and ``evaluation``. Told where a monitor looks on.
    """

    of: int
    spans: tuple[tuple[str, float, float], ...]
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelDescribed(Event):
    """The architecture as a tree of parts and as SVG text, and its numbers of parameters, for a monitor."""

    tree: Mapping[str, Any]
    facts: Mapping[str, Any]
    picture: str = ""


@dataclass(frozen=True, kw_only=True)
class LayersTimed(Event):
    """Seconds of the forward pass, norms of the gradient and bytes by path of a part, of one step, now and then.

    Told where a monitor looks on. ``memory`` is what stays taken when a part is done, until backward. What was not
    looked at in this step is empty.
    """

    step: int
    seconds: Mapping[str, float]
    gradients: Mapping[str, float]
    memory: Mapping[str, float] = field(default_factory=dict)


class Events:
    """Hands each record to its subscribers, in the order in which they subscribed."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._subscribers: list[tuple[Subscriber, tuple[type, ...]]] = []
        self._failed: set[int] = set()

    def subscribe(self, call: Subscriber, *kinds: type[Event]) -> Callable[[], None]:
        """Call ``call(event)`` for every event of these kinds (all when none is named).

        Returns:
            A function that ends the subscription.
        """
        entry = (call, kinds or (Event,))
        self._subscribers.append(entry)
        return lambda: self._subscribers.remove(entry) if entry in self._subscribers else None

    def wanted(self, kind: type[Event]) -> bool:
        """Return whether anybody listens to events of this kind."""
        return any(issubclass(kind, kinds) for _, kinds in self._subscribers)

    def emit(self, event: Event) -> None:
        """Hand ``event`` on; a subscriber that raises is reported once and does not stop the run."""
        for call, kinds in tuple(self._subscribers):
            if not isinstance(event, kinds):
                continue
            try:
                call(event)
            except Exception as error:
                if id(call) not in self._failed:
                    self._failed.add(id(call))
                    warnings.warn(
                        f"a subscriber of training events raised {type(error).__name__}: {error}; "
                        "training continues; further errors of this subscriber are not shown",
                        RuntimeWarning,
                    )
