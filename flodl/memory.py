"""Memory in use, of devices and of this process."""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from flodl.devices import find_device

__all__ = ["device_memory", "live_tensors", "process_memory"]


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one device, in bytes.

    Attributes:
        total: memory of the device.
        free: memory that no process uses.
        allocated: memory of this process's tensors.
        reserved: memory that torch has reserved for tensors.
        peak: largest ``allocated`` since ``torch.cuda.reset_peak_memory_stats``.
    """

    total: int
    free: int
    allocated: int
    reserved: int
    peak: int


def device_memory(device: str | torch.device = "auto") -> MemoryUse | None:
    """Return the memory of a device; None for the CPU.

    Raises:
        DeviceError: the device is absent.
    """
    found = find_device(device)
    if found.type == "mps":
        held = torch.mps.current_allocated_memory()
        total = torch.mps.recommended_max_memory()
        return MemoryUse(total, max(0, total - held), held, torch.mps.driver_allocated_memory(), held)
    if found.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(found)
    return MemoryUse(
        total,
        free,
        torch.cuda.memory_allocated(found),
        torch.cuda.memory_reserved(found),
        torch.cuda.max_memory_allocated(found),
    )


def process_memory() -> tuple[int, int] | None:
    """Return the current and the largest resident memory of this process in bytes; None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = {}
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(("VmRSS:", "VmHWM:")):
                found[line[:5]] = int(line.split()[1]) * 1024
        return found["VmRSS"], found["VmHWM"]
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource
        import sys

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return most, most
    return None


def live_tensors(device: str | torch.device | None = None) -> tuple[int, int]:
    """Return the number of Python tensors and the bytes of their storages.

    Tensors that only torch refers to, such as those saved for a backward pass, are not included.

    Args:
        device: count tensors of this device only; "cuda" stands for all CUDA devices.
    """
    wanted = None if device is None else torch.device(device)
    tracing = sys.modules.get("torch._subclasses.fake_tensor")
    shapes_alone = tracing.FakeTensor if tracing is not None else ()  # fake tensors have no memory
    count, storages = 0, {}
    for one in gc.get_objects():
        # isinstance may run code of other objects.
        if not issubclass(type(one), torch.Tensor) or issubclass(type(one), shapes_alone):
            continue
        if wanted is not None and (
            one.device.type != wanted.type or (wanted.index is not None and one.device.index != wanted.index)
        ):
            continue
        count += 1
        with contextlib.suppress(RuntimeError, NotImplementedError):  # meta and sparse tensors have none
            storage = one.untyped_storage()
            storages[one.device, storage.data_ptr()] = storage.nbytes()
    return count, sum(storages.values())


def available_memory(device: str | torch.device = "cpu") -> int | None:
    """Return the available memory of a device or of the machine in bytes; None if unknown.

    The limit of a container applies; cached files count as available.

    Raises:
        DeviceError: the device is absent.
    """
    found = find_device(device)
    if found.type == "cpu":
        bounds = [bound for bound in (_machine(), _container()) if bound is not None]
        return min(bounds) if bounds else None
    use = device_memory(found)
    return None if use is None else use.free + use.reserved - use.allocated


def _machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _container() -> int | None:
    """Return the available memory within the limit of a control group; None without one."""
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(kept.get("inactive_file", 0)) + int(kept.get("active_file", 0)))
    return None
