"""Threads that read requests in turn; the thread that read a request also answers it.

Requests are not passed between threads before they are processed (leader and followers, Schmidt et al. 2000). The idle
thread that worked last reads next, so two threads suffice at low load. The answering thread decides when another one
reads, because a woken thread competes for the interpreter, which a single request needs first.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any


def run_threads(read: Callable[[], Any], answer: Callable[[Any, Callable[[], None]], None], most: int) -> None:
    """Read and answer requests until the source ends; returns even if requests are still processed.

    Args:
        read: returns the next request, or None at the end; called by one thread at a time.
        answer: called with each request and with a function that lets another thread read, to be called before slow
            work. If it is not called, the same thread reads again after the request.
        most: maximum number of threads.
    """
    _Threads(read, answer, most).run()


class _Threads:
    def __init__(self, read: Callable[[], Any], answer: Callable[[Any, Callable[[], None]], None], most: int) -> None:
        self._read, self._answer, self._most = read, answer, most
        self._lock = Lock()
        self._idle: list[Lock] = []
        self._threads = 0
        self._vacant = True
        self._end = Event()

    def run(self) -> None:
        self._next_reader()
        self._end.wait()

    def _next_reader(self) -> None:
        """Let an idle thread read, or a new one; at the maximum, the first thread that finishes."""
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
        mine = Lock()
        mine.acquire()
        while True:
            try:
                request = self._read()
            except OSError:
                request = None
            except BaseException:
                self._end.set()  # no thread is left to read the next request
                raise
            if request is None:
                self._ended()
                return
            receive_socket = False

            def read_on() -> None:
                nonlocal receive_socket
                if not receive_socket:
                    receive_socket = True
                    self._next_reader()

            try:
                self._answer(request, read_on)
            except BaseException:
                read_on()
                raise
            if not receive_socket:
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
        """End the idle threads; other sources have their own threads."""
        with self._lock:
            self._end.set()
            while self._idle:
                self._idle.pop().release()
