"""What loading a model waits for and what needs no torch, begun while torch is being imported.

Importing torch takes a second or two of one core. Meanwhile the weights of a local folder are read
(`flodl_hf.checkpoints.weights.checkpoint.ahead`), and NVIDIA's driver makes the context of the device that was asked
for, which torch then finds made. Decides whether there is anything to begin; what goes wrong here is found again, and
told, by who needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from flodl_hf.checkpoints.system import make_cuda_context
from flodl_hf.checkpoints.weights.checkpoint.ahead import reading_ahead
from flodl_hf.checkpoints.weights.checkpoint.scatter import usable_cpus
from flodl_hf.checkpoints.weights.process_exit import skip_gc_at_exit

__all__ = ["beginning"]


@contextmanager
def beginning(name_or_path: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Begin what can be begun before torch, for a model that is loaded inside.

    Args:
        name_or_path: what the caller wants loaded.
        options: of loading.
    """
    if "torch" in sys.modules:
        yield
        return
    # A program that torch comes to with us ends quickly, too.
    skip_gc_at_exit()
    if usable_cpus() < 2:
        yield
        return
    place = _ordinal(options.get("device"))
    if place is not None and _uses_cuda():
        Thread(target=make_cuda_context, args=(place,), name="flodl-hf-driver", daemon=True).start()
    read = not any(options.get(name) for name in ("mapped", "subfolder", "verified"))
    read = read and options.get("weights") != "disk"
    with reading_ahead(name_or_path if read else None):
        yield


def _ordinal(device: Any) -> int | None:
    """Return the number of the CUDA device that a name asks for; None where it asks for none."""
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
