"""Loading work that needs no torch, started while torch is imported.

Importing torch takes a second or two of one core. Meanwhile the weights of a local folder are read
(`flodl_hf.checkpoints.weights.checkpoint.parallel_read`), and NVIDIA's driver creates the context of the requested
device, which torch then reuses. Decides whether there is work to start; errors here are ignored, because the code
that needs the result finds and reports them again.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from flodl_hf.checkpoints.system import make_cuda_context
from flodl_hf.checkpoints.weights.checkpoint.parallel_read import prefetched, usable_cpus


@contextmanager
def prefetching(name_or_path: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Start the work that is possible before torch, while a model is loaded inside the context.

    Args:
        name_or_path: the model to load.
        options: of loading.
    """
    if "torch" in sys.modules:
        yield
        return
    # If this package is what imports torch, the process skips the last garbage collection too.
    skip_gc_at_exit()
    if usable_cpus() < 2:
        yield
        return
    place = _ordinal(options.get("device"))
    if place is not None and _uses_cuda():
        Thread(target=make_cuda_context, args=(place,), name="flodl-hf-driver", daemon=True).start()
    read = not any(options.get(name) for name in ("mapped", "subfolder", "verified"))
    read = read and options.get("weights") != "disk"
    with prefetched(name_or_path if read else None):
        yield


def _ordinal(device: Any) -> int | None:
    """Return the index of the CUDA device in a device name; None if it names none."""
    kind, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if device == "auto":
        number = os.environ.get("LOCAL_RANK", "0")
    elif kind != "cuda":
        return None
    return int(number or 0) if (number or "0").isdecimal() else None


def _uses_cuda() -> bool:
    """Return whether the torch that is installed would make a context itself."""
    with suppress(ImportError, ValueError):
        found = find_spec("torch")
        if found is not None and found.origin is not None:
            return (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()
    return False


_WRITERS = frozenset((io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))
_FILES = _WRITERS | {io.FileIO, io.BufferedReader}


def skip_gc_at_exit() -> None:
    """Let this process exit without a last garbage collection.

    At exit the interpreter visits all objects several times, which takes a third of the import time of torch if torch
    is loaded. Files that are being written are flushed. If any other object has a ``__del__``, or with
    ``python -X dev`` or ``gc.set_debug``, the process exits as usual.
    """
    # One registration, however many calls.
    atexit.unregister(_freeze_all)
    atexit.register(_freeze_all)


def _freeze_all() -> None:
    alive = gc.get_objects()
    ending = {kind for kind in set(map(type, alive)) if any("__del__" in vars(base) for base in kind.__mro__)}
    if not ending <= _FILES or sys.flags.dev_mode or gc.get_debug():
        return
    streams = (sys.stdin, sys.stdout, sys.stderr)  # the interpreter flushes these
    flushed = {id(part) for one in streams for part in (one, getattr(one, "buffer", None))}
    for one in [found for found in alive if type(found) in _WRITERS and id(found) not in flushed]:
        with suppress(OSError, ValueError):  # closed, or without a descriptor
            if not stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                return  # flushing a pipe may block
            one.flush()
    gc.freeze()
