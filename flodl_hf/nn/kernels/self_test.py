"""Whether a device computes by our kernels what torch's operations compute there.

Triton compiles at run time, for devices and with compilers that we have never seen. So each group of kernels is tried
on a small separate case, never on a user's batch: once per process, and permanently if the result can be written
down (a folder of the user's cache, by device, versions and the kernels' text). A device on which a group fails
uses torch's operations, with one warning that reports the kernel, the difference and the bound.

The bounds are relative distances (2-norm) from the same computation in float32: what rounding to half precision leaves
after the few roundings of each case. Kernels for float32 have a separate bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

BOUNDS = {torch.float64: 1e-9, torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
LEAST_CAPABILITY = (8, 0)

Trial = Callable[..., tuple[float, str]]
"""``trial(device, dtype, sizes)`` runs a small case and gives the largest relative distance, and where it is."""


def trusted(
    kind: str, device: torch.device, dtype: torch.dtype, sizes: Hashable, trial: Trial, *, rehearse: bool = False,
    bound: float | None = None,
) -> bool:  # fmt: skip
    """Return whether a group of kernels agrees with torch's operations on a device; if not, warn why, once.

    Args:
        kind: purpose of the kernels, for messages.
        device: where.
        dtype: what products are computed in.
        sizes: further compile-time constants of the kernels; its text distinguishes groups.
        trial: runs the small case.
        rehearse: run the case even where its verdict is written down, and warn of nothing: the device then has the
            kernels loaded.
        bound: the largest distance that is sound; None for the dtype's of `BOUNDS`.
    """
    key = (kind, device, dtype, sizes)
    with _LOCK:
        lock = _LOCKS.setdefault(key, threading.Lock())
    with lock:  # who asks while another tries the same waits for the answer
        if key not in _KNOWN:
            try:
                _KNOWN[key] = _fault(kind, device, dtype, sizes, trial, rehearse, bound or BOUNDS[dtype])
            except torch.OutOfMemoryError:
                return False  # which may pass, so it is not kept
        if _KNOWN[key] and key not in _TOLD and not rehearse:
            _TOLD.add(key)
            warnings.warn(
                f"{kind} on {device} in {str(dtype).removeprefix('torch.')}: falling back to torch's own kernels, "
                f"which are slower: {_KNOWN[key]}",
                stacklevel=3,
            )
        return not _KNOWN[key]


_LOCK = threading.Lock()
_LOCKS: dict[Any, threading.Lock] = {}
_KNOWN: dict[Any, str] = {}
_TOLD: set[Any] = set()


def forget() -> None:
    """Forget the results of this process."""
    _KNOWN.clear()
    _TOLD.clear()
    _Verdicts.of.cache_clear()


def _fault(
    kind: str, device: torch.device, dtype: torch.dtype, sizes: Hashable, trial: Trial, rehearse: bool, bound: float
) -> str:
    """Return the differences found in the kernels' results; empty if there are none."""
    if kind != "buckets" and find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"the device is older than compute capability {'.'.join(map(str, LEAST_CAPABILITY))}"
    noted = _Verdicts.of(device) if device.type == "cuda" else None
    name = f"{kind} {dtype} {sizes}"
    if noted is not None and noted.holds(name) and not rehearse:
        return ""
    try:
        # A run's own random numbers must not depend on whether its process has run the test before.
        devices = [device] if device.type == "cuda" else []
        current = torch.cuda.device(device if device.type == "cuda" else -1)
        with current, torch.random.fork_rng(devices=devices), torch.inference_mode(False):
            distance, where = trial(device, dtype, sizes)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Whatever a compiler may raise: torch's operations do the same work.
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if not distance <= bound:
        return f"{where} differs by {distance:.1e} (limit {bound:.0e})"
    if noted is not None and not noted.holds(name):
        noted.add(name)
    return ""


# ---- verdicts that outlive the process ------------------------------------------------------------------


class _Verdicts:
    """Passed tests for one kind of device, in a file of the user's cache.

    Nothing but approval is written down, so a file that is damaged, stale or absent costs a trial and nothing else.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: set[str] = set()
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.stat().st_size < 1 << 20:
                self.known = {str(name) for name in json.loads(path.read_text("utf-8"))}

    @classmethod
    @cache
    def of(cls, device: torch.device) -> _Verdicts | None:
        """Return the store for a device with these versions; None if writing is disabled."""
        folder = os.environ.get("FLODL_HF_CACHE") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "flodl-hf"
        )
        if folder in ("", "0", "off"):
            return None
        about = [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), torch.__version__]
        about += [
            torch.version.cuda,
            _version("triton"),
            hashlib.sha256(b"".join(file.read_bytes() for file in _tried())).hexdigest(),
        ]
        digest = hashlib.sha256(repr(about).encode()).hexdigest()[:24]
        return cls(Path(folder) / f"kernels-{digest}.json")

    def holds(self, name: str) -> bool:
        """Return whether a group was found sound."""
        return name in self.known

    def add(self, name: str) -> None:
        """Write down that a group is sound; a cache that cannot be written is done without."""
        self.known.add(name)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(f".{os.getpid()}.tmp")
            beside.write_text(json.dumps(sorted(self.known)), "utf-8")
            os.replace(beside, self.path)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _tried() -> list[Path]:
    """Return the files of the kernels, tables and operators that are tried."""
    here = Path(__file__).parents[1]
    return [here / "attention.py", *sorted(here.glob("*/*.py"))]
