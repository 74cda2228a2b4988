"""A background worker: one thread that runs functions in the order in which they were submitted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["BackgroundWorker"]


class BackgroundWorker:
    """Runs submitted functions one after another in a thread; a context manager that drains at its end.

    ::

        with BackgroundWorker("reports") as worker:
            worker.submit(write, path, text)     # returns a Future at once

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "flodl-worker") -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pending: set[Future[Any]] = set()

    def submit(self, call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Queue ``call(*args, **options)`` and return its future, which has the result or the error.

        Raises:
            RuntimeError: the worker was closed.
        """
        future = self._pool.submit(call, *args, **options)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def drain(self) -> None:
        """Wait until all submitted functions have ended; errors stay in their futures."""
        for future in tuple(self._pending):
            future.exception()

    def close(self) -> None:
        """Drain and end the thread; a further call does nothing."""
        self._pool.shutdown(wait=True)

    def __enter__(self) -> BackgroundWorker:
        """Return self."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the worker."""
        self.close()
