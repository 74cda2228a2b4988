"""Start of a process that imports modules early, from which ranks are forked. This module imports no torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import signal
from multiprocessing import resource_tracker

_is_prepared = False


def prepare_ranks(*modules: str) -> None:
    """Start a process that imports torch and modules, from which later ranks are forked.

    It works while this process imports or reads data, so that ranks begin without imports. Call it before CUDA is
    initialised.
    """
    global _is_prepared
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(["flodl.fork_preload", "flodl.distributed", *modules])
        # The new process receives SIGINT after `flodl.fork_preload` has set what it does. The resource tracker, which
        # would be started too, unblocks it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _is_prepared = True


def is_prepared() -> bool:
    """Return whether `prepare_ranks` started the process."""
    return _is_prepared
