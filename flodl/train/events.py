"""Events of a training run, and their distribution to subscribers.

Progress, monitor, trackers and timeline are subscribers; the loop does not know them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from flodl.distributed.group import Summed


@dataclass(frozen=True)
class Recorded:
    """Numbers of replayed and other steps of one rank, on a device that captures steps.

    Attributes:
        steps: steps of this process.
        replayed: replayed steps.
        shapes: captured shapes of batches.
        reason: why steps are not captured, or not any more; None if they are.
    """

    steps: int
    replayed: int
    shapes: int
    reason: str | None = None

    @property
    def share(self) -> float:
        """The share of steps that were replayed."""
        return self.replayed / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        if self.reason is not None and not self.replayed:
            return f"steps were launched one operation at a time, because {self.reason}"
        made = f"{self.shapes} shape{'s' * (self.shapes != 1)} of batches captured"
        why = f"because {self.reason}" if self.reason is not None else "the first of each shape"
        others = f"; others were launched one operation at a time, {why}"
        return (
            f"{self.share:.0%} of {self.steps:,} steps replayed, {made}{others if self.replayed < self.steps else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event; ``at_s`` is the monotonic clock in seconds, comparable on one host.

    Attributes:
        is_shown: whether monitors record events of the class.
    """

    is_shown: ClassVar[bool] = True

    at_s: float = field(default_factory=time.monotonic)
    rank: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values, with its class name as ``event``."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """An event at ``step``, the number of finished optimiser steps, in ``epoch``, counted from 0."""

    step: int
    epoch: int


@dataclass(frozen=True)
class Past:
    """The past of a resumed run, with all earlier parts.

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
    """The run starts or resumes: its length, its policy with the reason, and its past."""

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
        """Steps of the whole run, those before a resume included; exact if all epochs have the same length."""
        whole = self.steps_per_epoch * self.epochs
        return whole if self.max_steps is None else min(whole, self.max_steps)


@dataclass(frozen=True, kw_only=True)
class StepDone(StepEvent):
    """One optimiser step on this rank.

    If figures are read from the device in windows (``Settings.log_every``), these events come in groups, in order, and
    times are means over the window; ``at_s`` is when the step was launched.

    ``loss`` is the mean over the counted items of the step, ``count`` their number (over ranks under Sync), ``samples``
    the samples of this rank; ``compute_ms`` excludes waiting for other ranks.
    """

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
class Observed(StepEvent):
    """Values watched inside of the model, by dotted names of tags, groups and recorded scalars.

    With ``scope="step"`` they belong to one step of this rank and follow its `StepDone`. With ``scope="epoch"`` they
    are merged over ranks like metrics and follow the `EpochMetrics` of the epoch. Without values there is no event.
    """

    scope: Literal["step", "epoch"]
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Decided(StepEvent):
    """A rule of the run was applied, on all ranks alike.

    ``action`` is ``"stop"``, ``"freeze"``, ``"thaw"`` or ``"rate"``, ``path`` its target, ``rule`` the rule as text,
    ``reason`` the figures that met its condition, ``epoch`` the number of finished epochs.
    """

    action: str
    path: str
    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Synced(StepEvent):
    """Parameters were averaged.

    ``batches`` and ``work_ms`` are those of each rank since the last average, ``sync_ms`` is the time of this rank in
    the average, and ``wait_ms`` the part of it spent waiting for other ranks.
    """

    round: int
    batches: tuple[int, ...]
    work_ms: tuple[float, ...]
    sync_ms: float
    wait_ms: float
    divergence: float
    anchor: int
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EvalDone(StepEvent):
    """The model was evaluated.

    ``metrics`` are the figures; those of nested mappings have names such as ``report/macro avg/f1-score``. ``details``
    are results other than numbers, such as a confusion matrix, as JSON values.
    """

    metrics: Mapping[str, float]
    wall_ms: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EpochMetrics(StepEvent):
    """Figures of an epoch over all ranks: means weighted by count, times in milliseconds.

    ``share`` is the part of the samples of each rank, ``throughput`` its samples per millisecond of compute.
    ``by_rank`` contains ``samples``, ``compute_ms``, ``wall_ms`` and metrics of each rank, and ``loss`` if ranks step
    separately.
    """

    loss: float
    metrics: Mapping[str, float]
    samples: int
    epoch_ms: float
    share: tuple[float, ...]
    throughput: tuple[float, ...]
    eval: Mapping[str, float] = field(default_factory=dict)
    by_rank: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    bytes: int
    wall_ms: float


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A checkpoint could not be written; earlier ones are unchanged and the run continues."""

    step: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """A warning; the run continues."""

    step: int
    message: str


@dataclass(frozen=True, kw_only=True)
class RunDone(StepEvent):
    """The run ended without an error: ``reason`` is ``"finished"``, ``"stopped"`` or ``"signal"``.

    ``recorded`` contains how many steps of this rank were replayed from captured graphs, and why others were not; None
    on a device without capture. ``summed`` is the transport of gradients, and why a faster one was not used; None if
    ranks do not sum gradients.
    """

    reason: str
    recorded: Recorded | None = None
    summed: Summed | None = None


# A function or object that is called with events, passed to ``subscribe``; its result is ignored.
#
# Progress, trackers, the monitor and the timeline are subscribers. They are called in the process that subscribed and
# change nothing in the run; an error in a subscriber is warned of once. The last event of a run without an error is
# `RunDone`.
Subscriber = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class RunFailed(StepEvent):
    """The run, or one of its ranks, ended with an error, whose text is ``reason``.

    ``failed_rank`` and ``phase`` identify the rank and what it was doing, if known; with ``restarts`` the ranks are
    restarted.
    """

    reason: str
    failed_rank: int | None = None
    phase: str = ""
    restarts: bool = False


@dataclass(frozen=True, kw_only=True)
class RankWork(Event):
    """Activity of the rank ``of`` since its last such event, for a monitor: ``(kind, from, to)`` in Unix time.

    Kinds are ``compute``, ``sync``, ``wait`` and ``evaluation``.
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
    """Seconds of the forward pass, norms of the gradient and bytes of one step, by path, for a monitor.

    ``memory`` is what remains allocated after a part until its backward pass. Mappings that were not measured in this
    step are empty.
    """

    step: int
    seconds: Mapping[str, float]
    gradients: Mapping[str, float]
    memory: Mapping[str, float] = field(default_factory=dict)


class Events:
    """Passes each event to its subscribers, in the order of their subscription.

    Attributes:
        wants: whether `StepDone` and `Observed` have a subscriber.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._subscribers: list[tuple[Subscriber, tuple[type, ...]]] = []
        self.wants: dict[type[Event], bool] = {StepDone: False, Observed: False}
        self._failed: set[int] = set()

    def subscribe(self, call: Subscriber, *kinds: type[Event]) -> Callable[[], None]:
        """Call ``call(event)`` for each event of these kinds; all kinds by default.

        Returns:
            A function that ends the subscription.
        """
        entry = (call, kinds or (Event,))
        self._change([*self._subscribers, entry])
        return lambda: self._change([other for other in self._subscribers if other is not entry])

    def _change(self, subscribers: list[tuple[Subscriber, tuple[type, ...]]]) -> None:
        self._subscribers = subscribers
        self.wants = {kind: any(issubclass(kind, kinds) for _, kinds in subscribers) for kind in self.wants}

    def emit(self, event: Event) -> None:
        """Pass ``event`` on; an error of a subscriber is reported once and does not end the run."""
        for call, kinds in self._subscribers:
            if not isinstance(event, kinds):
                continue
            try:
                call(event)
            except Exception as error:
                if id(call) not in self._failed:
                    self._failed.add(id(call))
                    warnings.warn(
                        f"a subscriber of training events raised {type(error).__name__}: {error}; training continues, "
                        "and further errors of this subscriber are not shown",
                        RuntimeWarning,
                    )
