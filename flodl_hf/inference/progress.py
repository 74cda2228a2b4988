"""How far a prediction is, told to `flodl.progress` by texts: after each batch where batches run one after another.

A device that works by itself is sent its batches long before it runs them; there texts count once they are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from flodl.progress import Progress
from flodl_hf.inference.pending import HEARD
from flodl_hf.inference.stream import Job

__all__ = ["seen"]

T = TypeVar("T")
R = TypeVar("R")


def seen(
    items: Iterable[T],
    job: Job[T, R],
    answers: Callable[[Job[T, R]], Any],
    *,
    what: str,
    show: bool | None,
    by_batch: bool,
) -> Any:
    """Return the answers to items, and show meanwhile how far they are.

    Args:
        items: what is answered.
        job: how.
        answers: runs a job over all items.
        what: the method.
        show: None shows what takes longer than a second, and nothing of an iterator, whose reader knows how far it is.
        by_batch: whether a batch has run when it is noted.
    """
    known = isinstance(items, Sequence)
    if show is False or not (known or show):
        return answers(job)
    progress = Progress(what, len(items) if isinstance(items, Sequence) else None, unit="texts", show=show)
    watched = _by_batch(job, progress) if by_batch else _by_window(job, progress)
    if not known:
        return _each(answers(watched), progress)
    with progress:
        return answers(watched)


def _each(found: Iterable[R], progress: Progress) -> Iterator[R]:
    with progress:
        yield from found


def _by_window(job: Job[T, R], progress: Progress) -> Job[T, R]:
    def finish(chunk: list[T], encoded: Any, running: Any) -> Any:
        found = job.finish(chunk, encoded, running)
        progress.advance(len(chunk))
        return found

    return replace(job, finish=finish)


def _by_batch(job: Job[T, R], progress: Progress) -> Job[T, R]:
    done = 0

    def encode(chunk: list[T]) -> Any:
        return len(chunk), job.encode(chunk)

    def start(found: tuple[int, Any]) -> Any:
        texts, encoded = found
        share = 0.0

        def heard(part: float) -> None:
            nonlocal share
            share += part
            # What is left of a text in windows counts when it is answered.
            progress.update(done + min(texts, int(share * texts)))

        before = HEARD.set(heard)
        try:
            return job.start(encoded)
        finally:
            HEARD.reset(before)

    def finish(chunk: list[T], found: tuple[int, Any], running: Any) -> Any:
        nonlocal done
        answered = job.finish(chunk, found[1], running)
        done += len(chunk)
        progress.update(done)
        return answered

    return Job(encode, start, finish, job.join)
