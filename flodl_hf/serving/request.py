"""One request in its worker: deadline, cancellation, results of its rows, and timeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import Pending
from flodl_hf.inference.token_table import TokenTable

_LATE = "the request timed out. Send fewer texts, or allow more time."
_GONE = "the request was cancelled"


MAX_BATCHES = 32
"""Maximum number of batches in a timeline."""

_now = time.perf_counter_ns


class Timeline:
    """Steps of a traced request with their times: tokenize, queue, batches, decode. `flodl_hf.serving.traces` makes
    spans of them."""

    def __init__(self) -> None:
        # Name, start, end and sizes of each finished step, and the start of the current one.
        self._steps: list[tuple[str, int, int, dict[str, Any]]] = []
        self._at, self._queued = _now(), False
        # Start, start on the device, end, rows and tokens of each batch; written by the threads that run batches.
        self._batches: list[list[Any]] = []

    def sent(self) -> None:
        """Record that rows were queued."""
        if not self._queued:
            now = _now()
            self._steps.append(("tokenise", self._at, now, {}))
            self._at, self._queued = now, True

    def taken(self, started_s: float, rows: int, tokens: int) -> None:
        """Record that rows are in a batch that starts on the device now.

        Args:
            started_s: start of the batch, by ``time.perf_counter``.
            rows: rows of the batch.
            tokens: tokens of the batch.
        """
        self._batches.append([int(started_s * 1e9), _now(), None, rows, tokens])

    def ran(self) -> None:
        """Record the end of the first unfinished batch."""
        for batch in self._batches:
            if batch[2] is None:
                batch[2] = _now()
                return

    def arrived(self) -> None:
        """Record that all results are available."""
        if not self._queued:
            return
        batches = [batch for batch in self._batches if batch[2] is not None]
        self._steps.append(("queue", self._at, batches[0][0] if batches else _now(), {}))
        for start, begun, end, rows, tokens in batches[:MAX_BATCHES]:
            self._steps += [("batch", start, end, {"rows": rows, "tokens": tokens}), ("device", begun, end, {})]
        self._at, self._queued, self._batches = _now(), False, []

    def to_steps(self) -> list[tuple[str, int, int, dict[str, Any]]]:
        """Return (name, start, end, sizes) of each step, in ns of ``time.time_ns``; "device" follows its "batch"."""
        last = ("decode" if self._steps else "tokenise", self._at, _now(), {})
        shift = time.time_ns() - _now()
        return [(name, start + shift, end + shift, sizes) for name, start, end, sizes in (*self._steps, last)]


class DeadlineError(PredictError):
    """A request whose deadline passed before its results were available."""


class GivenUpError(PredictError):
    """A request that its client cancelled."""


class Signal:
    """A wait for results.

    Attributes:
        is_set: whether the wait has ended.
        waits: whether a thread gave its turn away and waits for ``baton``.
        baton: released with the results and a turn.
    """

    __slots__ = ("baton", "is_set", "waits")

    def __init__(self, *, waits: bool = False) -> None:
        self.is_set, self.waits = False, waits
        self.baton = Lock()
        self.baton.acquire()


class Turns:
    """Turns of threads that compute. A thread that waits for results gives its turn away, and gets one with them.

    Other than with a semaphore and an event, a thread is woken once, when both its results and a turn are available:
    with many woken threads the interpreter is busy with switches between them.

    Args:
        count: number of threads that compute at a time.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._ready: deque[Lock] = deque()
        self._lock = Lock()

    def __enter__(self) -> None:
        signal = Signal(waits=True)
        self.set(signal)
        signal.baton.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._pass_on()

    def set(self, signal: Signal) -> None:
        """End a wait: its thread continues with the next turn."""
        with self._lock:
            self._end(signal)

    def wait(self, signal: Signal, seconds: float) -> bool:
        """Give the turn of this thread away until a signal is set; return False if it was not set in time."""
        with self._lock:
            if signal.is_set:
                return True
            signal.waits = True
            self._pass_on()
        if signal.baton.acquire(timeout=seconds):
            return True
        with self._lock:
            late = not signal.is_set
            self._end(signal)
        signal.baton.acquire()
        return not late

    def _end(self, signal: Signal) -> None:
        waits = signal.waits and not signal.is_set
        signal.is_set = True
        if waits and self._free:
            self._free -= 1
            signal.baton.release()
        elif waits:
            self._ready.append(signal.baton)

    def _pass_on(self) -> None:
        if self._ready:
            self._ready.popleft().release()
        else:
            self._free += 1


@dataclass(eq=False)
class WorkerRequest:
    """One request.

    Attributes:
        key: identifier of the API key.
        until: deadline, by ``time.monotonic``.
        priority: 1 is processed before other requests of the key, -1 after them.
        gone: whether it was cancelled.
        tokens: tokens of all its rows.
        table: the rows that were sent first.
        rows: number of its rows.
        dropped: truncated tokens.
        truncated: truncated texts.
        waited_s: time in which its rows waited before the first of them ran.
        received: when it was read, by ``time.perf_counter``.
        started: when its thread started to answer it, by ``time.perf_counter``.
        tokenized_s: time from ``started`` until its first rows were ready.
        timeline: its timeline if it is traced.
        turns: turns of the threads that compute, one of which its thread has unless it waits for a batch.
        read_on: called when the device has its rows, so that another request may be read.
    """

    key: str = ""
    until: float = float("inf")
    priority: int = 0
    gone: bool = False
    tokens: int = 0
    table: TokenTable | None = None
    rows: int = 0
    dropped: int = 0
    truncated: int = 0
    waited_s: float = 0.0
    received: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    tokenized_s: float = 0.0
    timeline: Timeline | None = None
    turns: Turns = field(default_factory=lambda: Turns(0))
    read_on: Callable[[], None] = lambda: None
    waits: list[Signal] = field(default_factory=list)

    def count_truncated(self, texts: int, tokens: int) -> None:
        """Add the numbers of truncated texts and tokens."""
        self.truncated += texts
        self.dropped += tokens

    def give_up(self) -> None:
        """Cancel the request: its rows leave the queue, and its thread continues."""
        self.gone = True
        for signal in self.waits:
            self.turns.set(signal)

    @property
    def over(self) -> bool:
        """Whether it was cancelled or is late."""
        return self.gone or time.monotonic() > self.until

    def check(self) -> None:
        """Raise if the request was cancelled or is late.

        Raises:
            GivenUpError: it was cancelled.
            DeadlineError: its deadline has passed.
        """
        if self.gone:
            raise GivenUpError(_GONE)
        if self.over:
            raise DeadlineError(_LATE)


class AwaitedResults(Pending):
    """Results that other threads deliver.

    Args:
        rows: number of rows.
        request: their request.
    """

    def __init__(self, rows: int, request: WorkerRequest) -> None:
        super().__init__(rows)
        self.left = rows
        self._signal = Signal()
        self._request = request
        request.waits.append(self._signal)
        # A concurrent cancellation either sees this wait or is visible here.
        if not rows or request.gone:
            self.complete()

    def complete(self) -> None:
        """Let the thread that waits for the results continue."""
        self._request.turns.set(self._signal)

    def parts(self) -> Any:
        """Wait for all results and return them batch by batch.

        Raises:
            GivenUpError: the request was cancelled.
            DeadlineError: its deadline has passed.
        """
        request = self._request
        if not request.turns.wait(self._signal, max(0.0, min(request.until - time.monotonic(), 1e6))):
            raise DeadlineError(_LATE)
        if request.gone and self.left:
            raise GivenUpError(_GONE)
        if request.timeline is not None:
            request.timeline.arrived()
        return super().parts()
