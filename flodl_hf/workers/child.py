"""Main function of a child process: runs its target and reports to the parent why it ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from threading import Thread

from flodl.errors import FlodlError
from flodl_hf.checkpoints.system import make_cuda_context


def main(target: str, descriptors: Sequence[int], cuda: int | None) -> None:
    """Run a function and end the process.

    Args:
        target: ``"module:function"``; the function receives a `flodl_hf.workers.messages.Stream`, and further file
            descriptors.
        descriptors: file descriptors of the connection with the parent, and of everything else that it passes.
        cuda: index of a CUDA device; its context is created while modules are imported.
    """
    # Terminals and service managers signal all processes; the parent decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    if cuda is not None:
        Thread(target=make_cuda_context, args=(cuda,), daemon=True).start()
    from flodl_hf.workers.messages import Stream

    stream = Stream(socket.socket(fileno=descriptors[0]))
    code, reason = 0, ""
    try:
        module, name = target.split(":")
        getattr(import_module(module), name)(stream, *descriptors[1:])
    except SystemExit as end:
        code, reason = (end.code, "") if isinstance(end.code, int) else (int(end.code is not None), end.code or "")
    except BaseException as fault:
        code, reason = 1, f"{type(fault).__name__}: {fault}"
        if not isinstance(fault, FlodlError):
            traceback.print_exc()
    if reason:
        with suppress(OSError):
            stream.write({"end": reason})
    sys.stdout.flush()
    sys.stderr.flush()
    # Other threads may still compute; their results are not needed.
    os._exit(code)
