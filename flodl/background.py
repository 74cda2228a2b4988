"""A background worker: one thread that runs functions in the order in which they were submitted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

__all__ = ["BackgroundWorker"]


class BackgroundWorker(ThreadPoolExecutor):
    """Runs submitted functions one after another in a thread; a context manager that drains at its end.

    ::

        with BackgroundWorker("reports") as worker:
            worker.submit(write, path, text)     # returns a Future at once

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "flodl-worker") -> None:
        super().__init__(1, thread_name_prefix=name)

    def close(self) -> None:
        """Wait for all submitted functions and end the thread; a further call does nothing."""
        self.shutdown(wait=True)
