"""Threads that take turns at reading requests: who has read one answers it, and another reads on.

So a request is not handed from thread to thread before its answer is begun (leader and followers, Schmidt et al. 2000).
Of those that wait, the last to have worked reads next: while few requests come, the same two threads do everything. Who
answers says when another is to read on: one that is woken wants the interpreter, which somebody alone needs first.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Semaphore, Thread
from typing import Any

__all__ = ["take_turns"]


def take_turns(read: Callable[[], Any], answer: Callable[[Any, Callable[[], None]], None], most: int) -> None:
    """Read and answer until there is nothing to be read; return then, whatever is still being answered.

    Args:
        read: gives the next request, or None at the end; called by one thread at a time.
        answer: called with each request, by as many threads at a time as there are requests, and at most ``most``; and
            with what lets another thread read on, which is to be called before anything that takes long. If it is not
            called at all, the same thread reads on behind the answer.
        most: threads.
    """
    _Turns(read, answer, most).run()


class _Turns:
    def __init__(self, read: Callable[[], Any], answer: Callable[[Any, Callable[[], None]], None], most: int) -> None:
        self._read, self._answer, self._most = read, answer, most
        self._lock = Lock()
        self._idle: list[Semaphore] = []
        self._threads = 0
        self._vacant = True
        self._end = Event()

    def run(self) -> None:
        self._next_reader()
        self._end.wait()

    def _next_reader(self) -> None:
        """Let a thread read that waits, or a new one; where there may be no more, the first that is done."""
        with self._lock:
            self._vacant = not self._idle and self._threads >= self._most
            if self._vacant:
                return
            if self._idle:
                self._idle.pop().release()
                return
            self._threads += 1
            Thread(target=self._work, name=f"flodl-hf-request-{self._threads}", daemon=True).start()

    def _work(self) -> None:
        mine = Semaphore(0)
        while True:
            try:
                request = self._read()
            except OSError:
                request = None
            except BaseException:
                self._end.set()  # nobody would read on
                raise
            if request is None:
                self._ended()
                return
            handed = False

            def read_on() -> None:
                nonlocal handed
                if not handed:
                    handed = True
                    self._next_reader()

            try:
                self._answer(request, read_on)
            except BaseException:
                read_on()
                raise
            if not handed:
                continue
            with self._lock:
                if self._end.is_set():
                    return
                reads = self._vacant
                self._vacant = False
                if not reads:
                    self._idle.append(mine)
            if not reads:
                mine.acquire()
                if self._end.is_set():
                    return

    def _ended(self) -> None:
        """Let the threads end that wait: there may be another source of requests, with threads of its own."""
        with self._lock:
            self._end.set()
            while self._idle:
                self._idle.pop().release()
