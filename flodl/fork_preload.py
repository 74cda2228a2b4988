"""Imported first by the process that forks ranks; its signals are set before the slow imports.

SIGINT ends it without a traceback. SIGTERM, which the launcher forwards to the ranks, is ignored. Beside a GPU it
imports what ranks import to compile kernels.
"""

import contextlib
import os
import signal
from importlib import import_module
from typing import Any

_PROCESS = os.getpid()


def _interrupt(number: int, frame: Any) -> None:
    if os.getpid() == _PROCESS:
        os._exit(128 + number)
    signal.default_int_handler(number, frame)  # in a process that was forked


signal.signal(signal.SIGINT, _interrupt)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
import_module("torch")
if os.path.exists("/dev/nvidiactl"):
    with contextlib.suppress(ImportError):
        import_module("triton")
