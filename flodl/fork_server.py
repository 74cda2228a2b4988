"""Start of a process that imports modules early, from which ranks are forked. This module imports no torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver

_is_prepared = False


def prepare_ranks(*modules: str) -> None:
    """Start a process that imports torch and modules, from which later ranks are forked.

    It works while this process imports or reads data, so that ranks begin without imports. Call it before CUDA is
    initialised.
    """
    global _is_prepared
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(["flodl.fork_preload", "flodl.distributed", *modules])
        multiprocessing.forkserver.ensure_running()
        _is_prepared = True


def is_prepared() -> bool:
    """Return whether `prepare_ranks` started the process."""
    return _is_prepared
