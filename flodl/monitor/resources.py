"""State of the machine: processors, memory, and GPUs with memory, power and temperature.

Processors and memory need psutil, GPUs need nvidia-ml-py (the extra ``monitor``). Values that cannot be read are
absent.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flodl.memory import process_memory

psutil: Any = None
with contextlib.suppress(ImportError):
    import psutil
pynvml: Any = getattr(torch.cuda, "pynvml", None)  # of nvidia-ml-py


class Resources:
    """Reads the state of the machine.

    Values are ``system/cpu`` (percent of all processors; the load average without psutil), ``system/ram`` and
    ``system/process`` (bytes), and for each GPU ``gpu0/util`` (percent), ``gpu0/memory`` (used bytes),
    ``gpu0/reserved`` (bytes reserved by torch in this process), ``gpu0/power`` (watts) and ``gpu0/temperature``
    (degrees Celsius).
    """

    def __init__(self) -> None:
        self._readers: dict[str, Callable[[], float]] = {}
        if psutil is not None:
            process, memory = psutil.Process(), psutil.virtual_memory
            self._readers["system/cpu"] = lambda: psutil.cpu_percent(None)
            self._readers["system/ram"] = lambda: memory().total - memory().available
            self._readers["system/process"] = lambda: process.memory_info().rss
            psutil.cpu_percent(None)  # the first result has no earlier one to compare with
        else:
            self._readers["system/cpu"] = lambda: 100 * os.getloadavg()[0] / (os.cpu_count() or 1)
            self._readers["system/process"] = lambda: (process_memory() or (math.nan,))[0]
        for gpu, handle in enumerate(_gpu_handles()):
            for name, read in _GPU_READERS.items():
                self._readers[f"gpu{gpu}/{name}"] = partial(read, handle)
            self._readers[f"gpu{gpu}/reserved"] = partial(torch.cuda.memory_reserved, gpu)

    def read(self) -> dict[str, float]:
        """Return the current values; the use of processors since the last call."""
        found: dict[str, float] = {}
        for name, read in list(self._readers.items()):
            try:
                found[name] = float(read())
            except Exception:
                del self._readers[name]
        return found


def usage_text(usage: dict[str, float]) -> str:
    """Return memory and load for a console line, such as ``GPU 2.1 GB, 82 %``; empty if unknown."""
    gpus = [name for name in usage if name.endswith("/util")]
    memory = sum(usage.get(name.replace("/util", "/memory"), 0.0) for name in gpus)
    load = sum(usage[name] for name in gpus) / max(1, len(gpus))
    if not gpus:
        if "system/process" not in usage:
            return ""
        memory, load = usage["system/process"], usage.get("system/cpu", 0.0)
    return f"{'GPU' if gpus else 'RAM'} {memory / 1e9:.1f} GB, {load:.0f} %"


def hardware() -> dict[str, Any]:
    """Return processors, memory, GPUs, and the versions of Python and torch."""
    found: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    if psutil is not None:
        found["ram"] = float(psutil.virtual_memory().total)
    with contextlib.suppress(Exception):
        for handle in _gpu_handles():
            memory, limit = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
            gpu = {"name": str(pynvml.nvmlDeviceGetName(handle)), "memory": float(memory.total)}
            found.setdefault("gpus", []).append({**gpu, "power_limit": limit / 1e3})
    return found


def _gpu_handles() -> list[Any]:
    """Return the NVML handles of the GPUs that are visible to this process."""
    try:
        # Its public functions for memory create a CUDA context in this process.
        return [torch.cuda._get_pynvml_handler(gpu) for gpu in range(torch.cuda.device_count())]
    except Exception:
        return []


_GPU_READERS: dict[str, Callable[[Any], Any]] = {
    "util": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "memory": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
    "power": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    "temperature": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
}
