"""What the machine is doing: processors, memory, GPUs, power and temperature, as far as it can be found out.

psutil and nvidia-ml-py (the extra ``monitor``) are asked where they are installed; without them ``/proc`` and torch
say what they know. Nothing here raises: what cannot be read is absent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Resources", "hardware"]


class Resources:
    """Reads the machine's state.

    Figures are named ``system/cpu`` (percent of all processors), ``system/ram`` and ``system/process`` (bytes), and
    for each GPU ``gpu0/util`` (percent), ``gpu0/memory`` (bytes that are taken, by whomever), ``gpu0/reserved`` (bytes
    that torch holds in this process), ``gpu0/power`` (watts) and ``gpu0/temperature`` (degrees Celsius).
    """

    def __init__(self) -> None:
        self._psutil = _module("psutil")
        self._process = None if self._psutil is None else self._psutil.Process()
        self._busy: tuple[float, float] | None = None
        self._nvml = _Nvml.open()
        self._energy: tuple[float, float] | None = None
        self.read()  # the first reading of a share has nothing to compare with

    def read(self) -> dict[str, float]:
        """Return the figures of now; shares are those of the time since the last call."""
        found: dict[str, float | None] = {
            "system/cpu": self._cpu(),
            "system/ram": self._ram(),
            "system/process": self._own(),
            "system/power": self._power(),
            "system/temperature": self._temperature(),
        }
        if self._nvml is not None:
            found |= self._nvml.read()
        found |= _torch_memory()
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Let go of what was opened."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _cpu(self) -> float | None:
        if self._psutil is not None:
            with contextlib.suppress(Exception):
                return float(self._psutil.cpu_percent(None))
        with contextlib.suppress(Exception):
            fields = [float(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            idle, whole = fields[3] + fields[4], sum(fields)
            before, self._busy = self._busy, (idle, whole)
            if before is not None and whole > before[1]:
                return round(100 * (1 - (idle - before[0]) / (whole - before[1])), 1)
        return None

    def _ram(self) -> float | None:
        if self._psutil is not None:
            with contextlib.suppress(Exception):
                memory = self._psutil.virtual_memory()
                return float(memory.total - memory.available)
        with contextlib.suppress(Exception):
            memory = _meminfo()
            return memory["MemTotal"] - memory["MemAvailable"]
        return None

    def _own(self) -> float | None:
        if self._process is not None:
            with contextlib.suppress(Exception):
                return float(self._process.memory_info().rss)
        with contextlib.suppress(Exception):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return float(pages * os.sysconf("SC_PAGE_SIZE"))
        return None

    def _power(self) -> float | None:
        """Return watts of the processors, which few machines let everybody read."""
        with contextlib.suppress(Exception):
            joules = sum(
                int(path.read_text()) / 1e6 for path in Path("/sys/class/powercap").glob("intel-rapl:[0-9]/energy_uj")
            )
            now, before = time.monotonic(), self._energy
            self._energy = (now, joules)
            if joules and before is not None and joules >= before[1] and now > before[0]:
                return round((joules - before[1]) / (now - before[0]), 1)
        return None

    def _temperature(self) -> float | None:
        if self._psutil is not None and hasattr(self._psutil, "sensors_temperatures"):
            with contextlib.suppress(Exception):
                sensors = self._psutil.sensors_temperatures()
                chips = [
                    sensors[name] for name in ("coretemp", "k10temp", "zenpower", "cpu_thermal") if name in sensors
                ]
                return max((float(reading.current) for chip in chips for reading in chip), default=None)
        return None


class _Nvml:
    """The GPUs of this machine that this process may use, as NVIDIA's library sees them."""

    def __init__(self, library: Any, handles: list[Any]) -> None:
        self._library, self._handles = library, handles

    @classmethod
    def open(cls) -> _Nvml | None:
        """Return them, or None where there is no such library, no driver, or no GPU."""
        library = _module("pynvml")
        if library is None:
            return None
        try:
            library.nvmlInit()
            handles = [_handle(library, name) for name in _visible(library)]
        except Exception:
            return None
        return cls(library, handles) if handles else None

    def read(self) -> dict[str, float | None]:
        """Return the figures of each GPU."""
        library, found = self._library, {}
        for place, handle in enumerate(self._handles):
            with contextlib.suppress(Exception):
                found[f"gpu{place}/util"] = float(library.nvmlDeviceGetUtilizationRates(handle).gpu)
            with contextlib.suppress(Exception):
                found[f"gpu{place}/memory"] = float(library.nvmlDeviceGetMemoryInfo(handle).used)
            with contextlib.suppress(Exception):
                found[f"gpu{place}/power"] = library.nvmlDeviceGetPowerUsage(handle) / 1e3
            with contextlib.suppress(Exception):
                found[f"gpu{place}/temperature"] = float(
                    library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)
                )
        return found

    def about(self) -> list[dict[str, Any]]:
        """Return name, memory and power limit of each."""
        library, found = self._library, []
        for handle in self._handles:
            gpu: dict[str, Any] = {}
            with contextlib.suppress(Exception):
                name = library.nvmlDeviceGetName(handle)
                gpu["name"] = name.decode() if isinstance(name, bytes) else str(name)
            with contextlib.suppress(Exception):
                gpu["memory"] = float(library.nvmlDeviceGetMemoryInfo(handle).total)
            with contextlib.suppress(Exception):
                gpu["power_limit"] = library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
            found.append(gpu)
        return found

    def close(self) -> None:
        """Let go of the library."""
        with contextlib.suppress(Exception):
            self._library.nvmlShutdown()


def _visible(library: Any) -> list[int | str]:
    """Return the GPUs that CUDA shows to this process, in its order."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return list(range(library.nvmlDeviceGetCount()))
    names: list[int | str] = []
    for name in told.split(","):
        name = name.strip()
        if name.isdecimal():
            names.append(int(name))
        elif name.startswith(("GPU-", "MIG-")):
            names.append(name)
        else:
            break  # as CUDA does, what follows a wrong name is not seen
    return names


def _handle(library: Any, name: int | str) -> Any:
    if isinstance(name, int):
        return library.nvmlDeviceGetHandleByIndex(name)
    return library.nvmlDeviceGetHandleByUUID(name.encode())


def _torch_memory() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    found: dict[str, float] = {}
    with contextlib.suppress(Exception):
        for place in range(torch.cuda.device_count()):
            reserved = torch.cuda.memory_reserved(place)
            if reserved:
                found[f"gpu{place}/reserved"] = float(reserved)
    return found


def hardware() -> dict[str, Any]:
    """Return what of the machine does not change: processors, memory, GPUs, the versions of Python and torch."""
    import platform

    import torch

    found: dict[str, Any] = {
        "cpu": _cpu_name(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    psutil = _module("psutil")
    with contextlib.suppress(Exception):
        found["ram"] = float(psutil.virtual_memory().total) if psutil is not None else _meminfo()["MemTotal"]
    nvml = _Nvml.open()
    if nvml is not None:
        found["gpus"] = nvml.about()
        nvml.close()
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        with contextlib.suppress(Exception):
            cards = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
            found["gpus"] = [{"name": card.name, "memory": float(card.total_memory)} for card in cards]
    return {name: value for name, value in found.items() if value}


def _cpu_name() -> str:
    import platform

    with contextlib.suppress(Exception):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _meminfo() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {parts[0].rstrip(":"): float(parts[1]) * 1024 for parts in lines if len(parts) >= 2}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # not installed, or installed and broken
        return None
