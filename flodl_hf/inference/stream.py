"""Any iterable in, answers out in its order, a bounded number of texts in memory.

Decides how many items are answered together, and what happens at the same time: while an accelerator runs one
window of items, two threads tokenise the next two and the caller's thread decodes the last. Items are read in the
caller's thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from flodl.garbage_collection import gc_paused

__all__ = ["FIRST_PLACE", "WINDOW", "Job", "stream"]

FIRST_PLACE: ContextVar[int] = ContextVar("FIRST_PLACE", default=0)
"""Place in the whole input of the first item that is encoded, so that errors name places in what was given."""

T = TypeVar("T")
R = TypeVar("R")

# Enough texts to sort by length with little left over, few enough that the first answers come soon.
WINDOW = 1024


@dataclass(frozen=True)
class Job(Generic[T, R]):
    """The three steps from items to answers.

    Args:
        encode: what the device needs of some items; runs in other threads, ahead of the others and beside itself.
        start: sends that on its way and returns something to wait for.
        finish: the items, what `encode` gave and what `start` gave, to a sequence (or tensor) of one answer for
            each item; called in order.
        join: what is made of the answers of all parts where a sequence was given; a list of them without it.
    """

    encode: Callable[[list[T]], Any]
    start: Callable[[Any], Any]
    finish: Callable[[list[T], Any, Any], Any]
    join: Callable[[list[Any]], Any] | None = None

    def alone(self, items: list[T]) -> Any:
        """Return the answers, one step after another."""
        encoded = self.encode(items)
        return self.finish(items, encoded, self.start(encoded))


def stream(
    items: Iterable[T],
    job: Job[T, R],
    *,
    first: int = WINDOW,
    most: int = WINDOW,
    ahead: bool = False,
    deep: int = 2,
    meanwhile: Callable[[], Any] | None = None,
) -> Any:
    """Return the job's answers to all items: a list for a list, an iterator for an iterator.

    Args:
        items: a sequence, or any iterable of any length.
        job: what is done.
        first: items of the first window; each is twice the last.
        most: most items of a window.
        ahead: tokenise and run ahead of what is decoded. At most four windows are then in memory, else one.
        deep: most windows that run at a time, ahead; two more are in memory then.
        meanwhile: done while the first of several windows are tokenised, where that is ahead.
    """
    run = partial(_overlapped, deep=deep, meanwhile=meanwhile) if ahead else _in_turn
    parts = _unswept(run(iter(items), job, _windows(first, most)))
    if isinstance(items, Sequence):
        if job.join is not None:
            return job.join(list(parts))
        results: list[R] = []
        for part in parts:
            results += part
        return results
    return _each(parts)


def _unswept(parts: Iterator[Sequence[R]]) -> Iterator[Sequence[R]]:
    """Yield the parts, garbage collection being paused while each is made, and on while the caller has it.

    Answers are many objects that stay, and none of them garbage: sweeps through them, and through all that the
    program holds, would take ten times as long as making them.
    """
    while True:
        with gc_paused(settled=True):
            part = next(parts, None)
        if part is None:
            return
        yield part


def _windows(first: int, most: int) -> Iterator[int]:
    size = min(first, most)
    while True:
        yield size
        size = min(2 * size, most)


def _each(parts: Iterator[Sequence[R]]) -> Iterator[R]:
    for part in parts:
        yield from part


def _at(place: int, step: Callable[[list[T]], Any], chunk: list[T]) -> Any:
    """Return what a step makes of items, the first of which is at ``place`` in the input."""
    before = FIRST_PLACE.set(place)
    try:
        return step(chunk)
    finally:
        FIRST_PLACE.reset(before)


def _in_turn(items: Iterator[T], job: Job[T, R], sizes: Iterator[int]) -> Iterator[Sequence[R]]:
    place = 0
    while chunk := list(islice(items, next(sizes))):
        yield _at(place, job.alone, chunk)
        place += len(chunk)


def _overlapped(
    items: Iterator[T],
    job: Job[T, R],
    sizes: Iterator[int],
    *,
    deep: int = 2,
    meanwhile: Callable[[], Any] | None = None,
) -> Iterator[Sequence[R]]:
    chunk = list(islice(items, next(sizes)))
    if not chunk:
        return
    following = list(islice(items, next(sizes)))
    if not following:
        yield job.alone(chunk)
        return
    encoding: deque[tuple[list[T], Future[Any]]] = deque()
    running: deque[tuple[list[T], Any, Any]] = deque()
    # Two, so that the tokenizer's cores have texts while the interpreter makes arrays of the tokens of others.
    pool = ThreadPoolExecutor(2, thread_name_prefix="flodl-hf-encode")
    place = 0

    def encode(part: list[T]) -> None:
        nonlocal place
        encoding.append((part, pool.submit(_at, place, job.encode, part)))
        place += len(part)

    try:
        for part in (chunk, following):
            encode(part)
        if meanwhile is not None:
            meanwhile()
        while encoding:
            part, future = encoding.popleft()
            try:
                encoded = future.result()
                running.append((part, encoded, job.start(encoded)))
                if further := list(islice(items, next(sizes))):
                    encode(further)
            except Exception:
                # What was answered before the fault is handed out before it.
                while running:
                    yield job.finish(*running.popleft())
                raise
            if len(running) >= deep:
                yield job.finish(*running.popleft())
        while running:
            yield job.finish(*running.popleft())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
