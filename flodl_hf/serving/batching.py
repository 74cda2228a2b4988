"""Batches with rows of many requests, on one device.

The next rows are those of the API key with the least processed tokens, and of its requests the least advanced one
(start-time fair queueing, Goyal, Vin and Cheng 1996, first between keys, then between requests). Neither a long request
nor a key with many requests delays others; priorities affect only requests of one key. Rows with the same model,
options and work form a batch up to a number of tokens; cancelled requests leave it.

On an accelerator, rows that arrive while the queue and the device are empty are started by the thread that brings them,
without a thread switch.

`flodl_hf.inference.engine` runs a batch, sorted by length and packed.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from queue import Queue
from threading import Condition, Thread, get_ident
from typing import Any

import numpy as np
import torch

from flodl_hf.inference.batch import Work, without_tokens
from flodl_hf.inference.engine import Engine, Pending
from flodl_hf.inference.options import RunOptions
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.serving.adapter_models import MixedAdapters
from flodl_hf.serving.request import AwaitedResults, WorkerRequest

# Batches that are started on an accelerator before the first one finishes: it never idles, and the order is decided
# late.
BATCHES_AHEAD = 2
# Maximum tokens that the bringing thread starts itself: with more, the next batch would not be prepared meanwhile.
MAX_DIRECT_TOKENS = 2048
# Minimum tokens of a request's turn: single rows cost the interpreter more time than the device.
QUANTUM = 512
# Minimum number of threads that may start rows themselves, since each needs a workspace of the accelerator's libraries;
# and such threads for each connection, which uses two threads at low load.
MIN_DIRECT_THREADS, DIRECT_THREADS_PER_LINK = 4, 2
# Number of requests of its key that a request of high priority overtakes, and that overtake one of low priority.
PRIORITY_SHIFT = 1000


class TokenRate:
    """Tokens per second of a device at full load.

    A small batch takes nearly as long as a larger one, so it counts only if it was faster than the known rate, or if no
    larger batch was possible.
    """

    def __init__(self) -> None:
        self.now = self._tokens = self._seconds = 0.0
        """Tokens per second; 0 before the first batch."""

    def ran(self, tokens: int, seconds: float, *, full: bool) -> None:
        """Add a batch.

        Args:
            tokens: its tokens.
            seconds: its time on the device.
            full: whether no larger batch was possible.
        """
        faster = tokens > self.now * seconds
        if seconds > 0 and (full or faster):
            # A rate that is too low would refuse requests for which there is capacity.
            keep = 0.5 if faster else 0.9
            self._tokens = keep * self._tokens + tokens
            self._seconds = keep * self._seconds + seconds
            self.now = self._tokens / self._seconds


@dataclass(eq=False)
class _QueuedRows:
    """Waiting rows of one call."""

    request: WorkerRequest
    table: TokenTable
    places: Sequence[Sequence[int]] | None
    pending: AwaitedResults
    ends: np.ndarray
    """Cumulative tokens, ``(rows,)``."""
    start: float
    """Progress of the request's flow before these rows; rows are ordered by it and ``ran``."""
    at: int = 0
    ran: int = 0
    """Number of tokens of rows before ``at``, which are in batches."""
    since: float = field(default_factory=time.perf_counter)

    def take(self, room: int, tag: float) -> int:
        """Take rows of up to ``room`` tokens, before the turn of a flow at ``tag``, and return their tokens.

        Takes at least one row, and a quantum if there is room.
        """
        before = self.ran
        fit, turn, turns = np.searchsorted(
            self.ends, (before + room, tag - self.start, before + QUANTUM), side="right"
        ).tolist()
        self.at = max(self.at + 1, min(fit, max(turn + 1, turns), len(self.ends)))
        self.ran = int(self.ends[self.at - 1])
        return self.ran - before


@dataclass(eq=False, slots=True)
class _BatchRows:
    """Rows ``first`` to ``last`` (exclusive) of a call in the next batch."""

    sent: _QueuedRows
    first: int
    last: int

    def finish(self, fault: Exception | None = None) -> None:
        """Mark the results of the rows as delivered, or as failed."""
        pending, timeline = self.sent.pending, self.sent.request.timeline
        if fault is not None:
            pending.faults.append(fault)
        else:
            pending.left -= self.last - self.first
            if timeline is not None:
                timeline.ran()
        if fault is not None or not pending.left:
            pending.complete()


class Batcher:
    """The queue of a device and the threads that run it.

    Args:
        device: device of the models.
        max_tokens: maximum tokens of a batch.
        direct: whether the bringing thread may start rows itself; None is True on accelerators. On a CPU each such
            thread would create its own threads of torch.
        links: number of connections.
    """

    def __init__(self, device: torch.device, max_tokens: int, *, direct: bool | None = None, links: int = 1) -> None:
        self.device = device
        self.max_tokens = max_tokens
        self.pace = TokenRate()
        self._ran: deque[tuple[int, int, float]] = deque(maxlen=10_000)
        self._ended = 0.0
        self.queued_tokens = 0
        self._models: dict[Any, tuple[Any, RunOptions]] = {}
        self._engines: dict[Any, Engine | MixedAdapters] = {}
        self._waiting: dict[Any, dict[str, list[tuple[float, float, _QueuedRows]]]] = {}
        self._active: Counter[str] = Counter()
        self._numbers = count()
        # Processed tokens of each key, counted from the level of the others when the key became active, and the
        # progress of its requests. Both only grow, so that waiting requests precede new ones.
        self._had: dict[str, float] = {}
        self._far: dict[str, float] = {}
        self._now = 0.0
        self._changed = Condition()
        self._running: Queue[Any] = Queue(BATCHES_AHEAD)
        self._direct = device.type != "cpu" if direct is None else direct
        self._callers: set[int] = set()
        self._most_callers = max(MIN_DIRECT_THREADS, DIRECT_THREADS_PER_LINK * links)
        # Whether a batch is being started, by either kind of thread, and the number of started batches that are not
        # finished.
        self._starting = False
        self._unfinished = 0
        Thread(target=self._run, name="flodl-hf-batches", daemon=True).start()
        if device.type == "cuda":
            Thread(target=self._bring, name="flodl-hf-results", daemon=True).start()

    def send(
        self,
        request: WorkerRequest,
        model: Any,
        options: RunOptions,
        table: TokenTable,
        work: Work,
        places: Sequence[Sequence[int]] | None,
    ) -> Pending:
        """Queue the rows of a request and return their pending results.

        Args:
            request: the request.
            model: the model.
            options: options of the run.
            table: the rows.
            work: the computation.
            places: see `Engine.start`.
        """
        if not table.lengths.all():
            raise without_tokens(table)
        if request.timeline is not None:
            request.timeline.sent()
        pending = AwaitedResults(len(table), request)
        if not len(table):
            return pending
        ends = np.cumsum(table.lengths)
        if not request.rows:
            request.table = table
            request.tokenized_s = time.perf_counter() - request.started
        request.rows += len(table)
        request.tokens += int(ends[-1])
        self._models[id(model), options] = (model, options)
        if self._direct and self._claimed(int(ends[-1])):
            rows = _QueuedRows(request, table, places, pending, ends, 0.0)
            self._start((id(model), options, work), [_BatchRows(rows, 0, len(ends))], direct=True)
            self._started()
            return pending
        with self._changed:
            key = request.key
            if not self._active[key]:
                self._had[key] = max(self._had.get(key, 0.0), self._now)
            self._active[key] += 1
            self.queued_tokens += int(ends[-1])
            sent = _QueuedRows(request, table, places, pending, ends, self._far.get(key, 0.0))
            group = self._waiting.setdefault((id(model), options, work), {})
            # Numbers are unique: each priority shifts them by a fraction of its own.
            number = next(self._numbers) - (PRIORITY_SHIFT + 0.25) * request.priority
            heappush(group.setdefault(key, []), (sent.start, number, sent))
            self._changed.notify()
        request.read_on()
        return pending

    def _claimed(self, tokens: int) -> bool:
        """Return whether this thread may start rows itself; if so, nothing else is started until it has."""
        caller = get_ident()
        with self._changed:
            if self._starting or self._unfinished or self._waiting or tokens > min(MAX_DIRECT_TOKENS, self.max_tokens):
                return False
            if caller not in self._callers and len(self._callers) >= self._most_callers:
                return False
            self._callers.add(caller)
            self._starting = True
            return True

    def _started(self) -> None:
        with self._changed:
            self._starting = False
            self._changed.notify()

    def drained(self) -> list[tuple[int, int, float]]:
        """Return rows, tokens and seconds of the batches that finished since the last call."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._ran.popleft())
        return found

    def _engine(self, key: Any) -> Engine | MixedAdapters:
        # Served models do not change, so their prepared graphs are never compared again.
        if key not in self._engines:
            model, options = self._models[key]
            self._engines[key] = model if isinstance(model, MixedAdapters) else Engine.of(model, options, coarse=True)
        return self._engines[key]

    def _next(self) -> tuple[Any, list[_BatchRows]]:
        """Return the work and the rows of the next batch."""
        with self._changed:
            self._drop_cancelled()
            while self._starting or not self._waiting:
                self._changed.wait()
                self._drop_cancelled()
            self._starting = True
            work, group = min(self._waiting.items(), key=lambda waiting: min(map(self._turn, waiting[1].items())))
            room, taken = self.max_tokens, dict[_QueuedRows, _BatchRows]()
            while room > 0 and self._has_live(group):
                key, heap = min(group.items(), key=self._turn)
                tag, number, sent = heap[0]
                if taken and int(sent.table.lengths[sent.at]) > room:
                    break
                heappop(heap)
                self._far[key] = max(self._far.get(key, 0.0), tag)
                self._now = max(self._now, self._had[key])
                if not sent.at:
                    sent.request.waited_s += time.perf_counter() - sent.since
                # All turns of a request in this batch form one range of rows.
                rows = taken.setdefault(sent, _BatchRows(sent, sent.at, sent.at))
                tokens = sent.take(room // len(group), heap[0][0] if heap else float("inf"))
                rows.last = sent.at
                self._had[key] += tokens
                room -= tokens
                self.queued_tokens -= tokens
                if sent.at < len(sent.ends):
                    heappush(heap, (sent.start + sent.ran, number, sent))
                else:
                    self._active[key] -= 1
            return work, list(taken.values())

    def _turn(self, waiting: tuple[str, list[Any]]) -> tuple[float, float, float]:
        key, heap = waiting
        return (self._had[key], *heap[0][:2])

    def _drop_cancelled(self) -> None:
        self._waiting = {work: group for work, group in self._waiting.items() if self._has_live(group)}

    def _has_live(self, group: dict[str, list[Any]]) -> bool:
        """Remove the rows of cancelled requests, and return whether others wait."""
        for key, heap in list(group.items()):
            while heap and ((sent := heap[0][2]).request.over or sent.pending.faults):
                heappop(heap)
                self._active[key] -= 1
                self.queued_tokens -= int(sent.ends[-1]) - sent.ran
            if not heap:
                del group[key]
        return bool(group)

    def _run(self) -> None:
        while True:
            key, taken = self._next()
            self._start(key, taken)
            self._started()

    def _start(self, key: Any, taken: list[_BatchRows], *, direct: bool = False) -> None:
        """Run a batch; on CUDA its results are awaited by another thread, unless ``direct`` rows are awaited here."""
        started = time.perf_counter()
        try:
            table, places = _joined(taken)
            for rows in taken:
                if rows.sent.request.timeline is not None:
                    rows.sent.request.timeline.taken(started, len(table), int(table.lengths.sum()))
            found = self._engine(key[:2]).start(table, key[2], places)
            if direct:
                taken[0].sent.request.read_on()
            elif self.device.type == "cuda":
                with self._changed:
                    self._unfinished += 1
                self._running.put((taken, table, found, started))
                return
            _distribute(taken, found)
        except Exception as fault:
            if len(taken) > 1:
                # The error may be caused by one request, so each runs separately.
                for rows in taken:
                    self._start(key, [rows])
                return
            taken[0].finish(fault)
        else:
            self._count(taken, table, started)

    def _bring(self) -> None:
        while True:
            taken, table, found, started = self._running.get()
            try:
                _distribute(taken, found)
            except Exception as fault:
                for rows in taken:
                    rows.finish(fault)
            else:
                self._count(taken, table, started)
            with self._changed:
                self._unfinished -= 1

    def _count(self, taken: list[_BatchRows], table: TokenTable, started: float) -> None:
        """Count a batch, and then let the threads that wait for its results continue."""
        # A batch may be started before the previous one has finished.
        began, self._ended = max(started, self._ended), time.perf_counter()
        tokens, seconds = int(table.lengths.sum()), self._ended - began
        self._ran.append((len(table), tokens, seconds))
        self.pace.ran(tokens, seconds, full=2 * tokens >= self.max_tokens or len(self._waiting) > 1)
        for rows in taken:
            rows.finish()


def _joined(taken: list[_BatchRows]) -> tuple[TokenTable, Sequence[Sequence[int]] | None]:
    """Return the rows of all calls as one table; of several calls without the columns that only decoders read."""
    if len(taken) == 1 and taken[0].last - taken[0].first == len(taken[0].sent.table):
        return taken[0].sent.table, taken[0].sent.places
    ids, types, lengths = [], [], []
    typed = any(rows.sent.table.types is not None for rows in taken)
    places: list[Sequence[int]] | None = None if taken[0].sent.places is None else []
    for rows in taken:
        sent, first, last = rows.sent, rows.first, rows.last
        table = sent.table
        a, b = int(sent.ends[first - 1]) if first else 0, int(sent.ends[last - 1])
        ids.append(table.ids[a:b])
        if typed:
            types.append(np.zeros(b - a, np.int64) if table.types is None else table.types[a:b])
        lengths.append(table.lengths[first:last])
        if places is not None and sent.places is not None:
            places += sent.places[first:last]
    sizes = np.concatenate(lengths)
    none = np.zeros(len(sizes), np.int64)
    tokens = np.concatenate(ids)
    found = TokenTable(
        tokens, np.concatenate(types) if typed else None, sizes, np.arange(len(sizes)), sizes, none, none,
        np.zeros(len(tokens), np.int8), None, None, none,
    )  # fmt: skip
    return found, places


def _distribute(taken: list[_BatchRows], results: Pending) -> None:
    """Assign results to their calls."""
    if len(taken) == 1:
        (part,) = taken
        for rows, sizes, values in results.parts():
            part.sent.pending.add(rows + part.first, sizes, torch.from_numpy(values), None)
        return
    counts = [part.last - part.first for part in taken]
    owner = np.repeat(np.arange(len(taken)), counts)
    offset = np.concatenate([np.arange(part.first, part.last) for part in taken])
    for rows, sizes, values in results.parts():
        # Results are sorted by call in one step.
        order = np.argsort(owner[rows], kind="stable")
        starts = (np.cumsum(sizes) - sizes)[order]
        rows, sizes = rows[order], sizes[order]
        values = values[np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(values))]
        bounds = np.searchsorted(owner[rows], np.arange(len(taken) + 1)).tolist()
        ends = [0, *np.cumsum(sizes).tolist()]
        places = offset[rows]
        for part, a, b in zip(taken, bounds[:-1], bounds[1:], strict=True):
            if a < b:
                part.sent.pending.add(places[a:b], sizes[a:b], torch.from_numpy(values[ends[a] : ends[b]]), None)
