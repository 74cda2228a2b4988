"""Threads that read requests in turn; the thread that read a request also answers it.

Requests are not passed between threads before they are processed (leader and followers, Schmidt et al. 2000). An idle
thread reads next, and a new one starts only if none is idle, so two suffice at low load. The answering thread decides
when another one reads, because a woken thread competes for the interpreter, which a single request needs first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
    turn, end, lock = Lock(), Event(), Lock()
    idle = threads = 0

    def next_reader() -> None:
        """Let an idle thread read, or a new one; at the maximum, the first thread that finishes."""
        nonlocal threads
        with lock:
            if idle or threads >= most:
                turn.release()
                return
            threads += 1
        Thread(target=work, name=f"flodl-hf-request-{threads}", daemon=True).start()

    def work() -> None:
        """Read and answer requests; the thread that reads has the turn."""
        nonlocal idle
        while not end.is_set():
            request, passed_on = None, False
            try:
                with suppress(OSError):
                    request = read()
            finally:
                if request is None:  # other sources have their own threads
                    end.set()
            if request is None:
                break

            def read_on() -> None:
                nonlocal passed_on
                if not passed_on:
                    passed_on = True
                    next_reader()

            try:
                answer(request, read_on)
            except BaseException:
                read_on()
                raise
            if passed_on:
                with lock:
                    idle += 1
                turn.acquire()
                with lock:
                    idle -= 1
        turn.release()  # the idle threads end one after another

    turn.acquire()
    next_reader()
    end.wait()
