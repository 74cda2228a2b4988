"""Rows of many requests through one device together.

Decides which rows run next: of the key that has had least, those of the request that is least far (start-time fair
queueing, Goyal, Vin and Cheng 1996, first among keys and then among a key's requests). So neither a long request nor a
key with many of them keeps others waiting; priorities decide among a key's requests alone. Rows of the same model,
options and work join a batch up to a number of tokens; requests that were given up leave it.

On an accelerator, rows that come while nothing waits and nothing runs are run at once by the thread that brings them: a
request alone is not handed from thread to thread.

How a batch runs is `flodl_hf.inference.engine`'s, sorted by length and packed; what a request is stands in
`flodl_hf.serving.tasks`.
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

from flodl_hf.inference.batch import check_rows
from flodl_hf.inference.decode.rows import TokenTable
from flodl_hf.inference.engine import Engine, Pending
from flodl_hf.inference.options import RunOptions
from flodl_hf.inference.passes import Work
from flodl_hf.serving.adapted import Together
from flodl_hf.serving.peak import Pace
from flodl_hf.serving.ticket import Awaited, Ticket

__all__ = ["Batcher"]

# So many batches an accelerator may have before the first is finished: it never waits, and nothing is decided early.
AHEAD = 2
# Most tokens that run at once when they come alone: with more, the next batch would not be prepared meanwhile.
ALONE = 2048
# Tokens of a request that run in one turn, at least: a row at a time costs the interpreter more than the device.
QUANTUM = 512
# Threads that may run what comes alone, at least: each has a workspace of the accelerator's libraries. Of those who ask
# by a link of their own, each has two threads that do everything while little is asked.
CALLERS, OF_LINK = 4, 2
# How many requests of its key, at most, one of high priority goes before, and one of low priority lets pass.
PASSES = 1000


@dataclass(eq=False)
class _Sent:
    """Rows of one call that wait."""

    ticket: Ticket
    table: TokenTable
    places: Sequence[Sequence[int]] | None
    pending: Awaited
    ends: np.ndarray
    """Tokens up to and with each row, ``(rows,)``."""
    start: float
    at: int = 0
    since: float = field(default_factory=time.perf_counter)

    @property
    def tag(self) -> float:
        """How far its flow is: what the next row is compared by."""
        return self.start + self._ran

    @property
    def waiting(self) -> int:
        """Tokens that have not run."""
        return int(self.ends[-1]) - self._ran

    @property
    def _ran(self) -> int:
        return int(self.ends[self.at - 1]) if self.at else 0

    def take(self, room: int, tag: float) -> int:
        """Take the rows that fit into ``room`` tokens before the turn of a flow at ``tag``; return their tokens.

        One row at least, and a quantum where there is room.
        """
        before = self._ran
        fit, turn, turns = np.searchsorted(
            self.ends, (before + room, tag - self.start, before + QUANTUM), side="right"
        ).tolist()
        self.at = max(self.at + 1, min(fit, max(turn + 1, turns), len(self.ends)))
        return self._ran - before


@dataclass(eq=False, slots=True)
class _Taken:
    """Rows of one call that run next: from the first to before the last."""

    sent: _Sent
    first: int
    last: int


class Batcher:
    """The queue of one device, and the threads that run it.

    Args:
        device: where the models are.
        max_tokens: most tokens of a batch.
        alone: whether rows that come alone are run by the thread that brings them; None on accelerators. On a processor
            each such thread would have threads of torch's own.
        links: how many ask.
    """

    def __init__(self, device: torch.device, max_tokens: int, *, alone: bool | None = None, links: int = 1) -> None:
        self.device = device
        self.max_tokens = max_tokens
        self.pace = Pace()
        self._ran: deque[tuple[int, int, float]] = deque(maxlen=10_000)
        self._ended = 0.0
        self.queued_tokens = 0
        self._models: dict[Any, tuple[Any, RunOptions]] = {}
        self._engines: dict[Any, Engine | Together] = {}
        self._waiting: dict[Any, dict[str, list[tuple[float, float, _Sent]]]] = {}
        self._active: Counter[str] = Counter()
        self._numbers = count()
        # How many tokens each key has had, counted from where the others were when it came; and how far its requests
        # are. Both only grow, so that who waited is served before who comes.
        self._had: dict[str, float] = {}
        self._far: dict[str, float] = {}
        self._now = 0.0
        self._changed = Condition()
        self._running: Queue[Any] = Queue(AHEAD)
        self._alone = device.type != "cpu" if alone is None else alone
        self._callers: set[int] = set()
        self._most_callers = max(CALLERS, OF_LINK * links)
        # Batches that are being started, by either kind of thread, and those that were and are not finished.
        self._starting = False
        self._unfinished = 0
        Thread(target=self._run, name="flodl-hf-batches", daemon=True).start()
        if device.type == "cuda":
            Thread(target=self._bring, name="flodl-hf-results", daemon=True).start()

    def send(
        self,
        ticket: Ticket,
        model: Any,
        options: RunOptions,
        table: TokenTable,
        work: Work,
        places: Sequence[Sequence[int]] | None,
    ) -> Pending:
        """Queue rows of a request; the results can be waited for.

        Args:
            ticket: the request.
            model: whose rows.
            options: how to run.
            table: the rows.
            work: what to compute.
            places: see `Engine.start`.
        """
        check_rows(table)
        if ticket.timeline is not None:
            ticket.timeline.sent()
        pending = Awaited(len(table), ticket)
        if not len(table):
            return pending
        ends = np.cumsum(table.lengths)
        ticket.rows += len(table)
        ticket.longest = max(ticket.longest, int(table.lengths.max()))
        ticket.tokens += int(ends[-1])
        if self._claimed(int(ends[-1])):
            self._run_alone(_Sent(ticket, table, places, pending, ends, 0.0), (model, options), work)
            return pending
        with self._changed:
            key = ticket.key
            if not self._active[key]:
                self._had[key] = max(self._had.get(key, 0.0), self._now)
            self._active[key] += 1
            self.queued_tokens += int(ends[-1])
            sent = _Sent(ticket, table, places, pending, ends, self._far.get(key, 0.0))
            self._models[id(model), options] = (model, options)
            group = self._waiting.setdefault((id(model), options, work), {})
            # Never equal: the shift of each priority ends in a fraction of its own.
            number = next(self._numbers) - (PASSES + 0.25) * ticket.priority
            heappush(group.setdefault(key, []), (sent.tag, number, sent))
            self._changed.notify()
        ticket.read_on()
        return pending

    def _claimed(self, tokens: int) -> bool:
        """Return whether this thread may run some rows at once; nothing else is started until it has."""
        if not self._alone or tokens > min(ALONE, self.max_tokens):
            return False
        caller = get_ident()
        with self._changed:
            if self._starting or self._unfinished or self._waiting:
                return False
            if caller not in self._callers:
                if len(self._callers) >= self._most_callers:
                    return False
                self._callers.add(caller)
            self._starting = True
            return True

    def _run_alone(self, sent: _Sent, of: tuple[Any, RunOptions], work: Work) -> None:
        started = time.perf_counter()
        key = (id(of[0]), of[1])
        taken = [_Taken(sent, 0, len(sent.ends))]
        try:
            self._models[key] = of
            _note(taken, sent.table, started)
            running = self._engine(key).start(sent.table, work, sent.places)
            sent.ticket.read_on()
            _share_out(taken, running)
        except Exception as fault:
            self._failed(taken, fault)
        else:
            self._count(sent.table, started)
        finally:
            self._started()

    def _started(self) -> None:
        with self._changed:
            self._starting = False
            self._changed.notify()

    def drained(self) -> list[tuple[int, int, float]]:
        """Return rows, tokens and seconds of the batches that have run since this was last asked."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._ran.popleft())
        return found

    def _engine(self, key: Any) -> Engine | Together:
        # Models that are served do not change: their graphs are prepared once and never compared again.
        if key not in self._engines:
            model, options = self._models[key]
            self._engines[key] = model if isinstance(model, Together) else Engine.of(model, options)
        return self._engines[key]

    def _next(self) -> tuple[Any, list[_Taken]]:
        """Return what the next batch computes, and its rows."""
        with self._changed:
            while self._starting or not self._waits():
                self._changed.wait()
            self._starting = True
            work, group = min(self._waiting.items(), key=lambda waiting: min(map(self._turn, waiting[1].items())))
            room, taken = self.max_tokens, dict[_Sent, _Taken]()
            while room > 0 and self._cleaned(group):
                key, heap = min(group.items(), key=self._turn)
                tag, number, sent = heap[0]
                if taken and int(sent.table.lengths[sent.at]) > room:
                    break
                heappop(heap)
                self._far[key] = max(self._far.get(key, 0.0), tag)
                self._now = max(self._now, self._had[key])
                if not sent.at:
                    sent.ticket.waited_s += time.perf_counter() - sent.since
                # What a request had in earlier turns of this batch, and what it has now, is one range of rows.
                rows = taken.setdefault(sent, _Taken(sent, sent.at, sent.at))
                tokens = sent.take(room // len(group), heap[0][0] if heap else float("inf"))
                rows.last = sent.at
                self._had[key] += tokens
                room -= tokens
                self.queued_tokens -= tokens
                if sent.at < len(sent.ends):
                    heappush(heap, (sent.tag, number, sent))
                else:
                    self._active[key] -= 1
            return work, list(taken.values())

    def _turn(self, waiting: tuple[str, list[Any]]) -> tuple[float, float, float]:
        key, heap = waiting
        return (self._had[key], *heap[0][:2])

    def _waits(self) -> bool:
        """Return whether anything waits that somebody waits for; forget the rest."""
        for work, group in list(self._waiting.items()):
            if not self._cleaned(group):
                del self._waiting[work]
        return bool(self._waiting)

    def _cleaned(self, group: dict[str, list[Any]]) -> bool:
        for key, heap in list(group.items()):
            while heap and self._left(heap[0][2]):
                heappop(heap)
            if not heap:
                del group[key]
        return bool(group)

    def _left(self, sent: _Sent) -> bool:
        """Return whether nobody waits for these rows, and forget them then."""
        if not sent.ticket.over and not sent.pending.faults:
            return False
        self._active[sent.ticket.key] -= 1
        self.queued_tokens -= sent.waiting
        return True

    def _run(self) -> None:
        while True:
            key, taken = self._next()
            self._start(key, taken)
            self._started()

    def _start(self, key: Any, taken: list[_Taken]) -> None:
        started = time.perf_counter()
        try:
            table, places = _joined(taken)
            _note(taken, table, started)
            found = self._engine(key[:2]).start(table, key[2], places)
            if self.device.type == "cuda":
                with self._changed:
                    self._unfinished += 1
                self._running.put((taken, table, found, started))
                return
            _share_out(taken, found)
        except Exception as fault:
            if len(taken) > 1:
                # One of them may be at fault, and the others are not.
                for rows in taken:
                    self._start(key, [rows])
                return
            self._failed(taken, fault)
        else:
            self._count(table, started)

    def _bring(self) -> None:
        while True:
            taken, table, found, started = self._running.get()
            try:
                _share_out(taken, found)
            except Exception as fault:
                self._failed(taken, fault)
            else:
                self._count(table, started)
            with self._changed:
                self._unfinished -= 1

    def _count(self, table: TokenTable, started: float) -> None:
        # While one batch runs the next is begun, and waits.
        began, self._ended = max(started, self._ended), time.perf_counter()
        tokens, seconds = int(table.lengths.sum()), self._ended - began
        self._ran.append((len(table), tokens, seconds))
        self.pace.ran(tokens, seconds, full=2 * tokens >= self.max_tokens or len(self._waiting) > 1)

    def _failed(self, taken: list[_Taken], fault: Exception) -> None:
        for rows in taken:
            rows.sent.pending.faults.append(fault)
            rows.sent.pending.here.set()


def _joined(taken: list[_Taken]) -> tuple[TokenTable, list[Sequence[int]] | None]:
    """Return the rows of all calls as one table; of what only decoders read there is nothing."""
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


def _note(taken: list[_Taken], table: TokenTable, started: float) -> None:
    """Tell the calls that are traced which batch they are in."""
    for part in taken:
        if part.sent.ticket.timeline is not None:
            part.sent.ticket.timeline.taken(started, len(table), int(table.lengths.sum()))


def _share_out(taken: list[_Taken], found: Pending) -> None:
    """Hand each call its rows' results."""
    if len(taken) == 1:
        (part,) = taken
        for rows, sizes, values in found.arrays():
            part.sent.pending.add(rows + part.first, sizes, torch.from_numpy(values), None)
        _shared(part)
        return
    counts = [part.last - part.first for part in taken]
    owner = np.repeat(np.arange(len(taken)), counts)
    offset = np.concatenate([np.arange(part.first, part.last) for part in taken])
    for rows, sizes, values in found.arrays():
        # All results change places at once, so that those of a call stand together.
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
    for part in taken:
        _shared(part)


def _shared(part: _Taken) -> None:
    """Note that the results of some rows are with their call."""
    sent = part.sent
    if sent.ticket.timeline is not None:
        sent.ticket.timeline.ran()
    sent.pending.left -= part.last - part.first
    if not sent.pending.left:
        sent.pending.here.set()
