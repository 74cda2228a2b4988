"""What memory is taken: of devices, by torch and by whomever, and of this process."""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from flodl.devices import find_device

__all__ = [
    "MemoryUse",
    "available_memory",
    "device_memory",
    "live_tensors",
    "process_memory",
]


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one device, in bytes.

    Attributes:
        total: what the device has.
        free: what nobody has taken.
        allocated: what tensors of this process hold.
        reserved: what torch keeps for them, and for those to come.
        peak: the most that tensors held since `reset_peak`.
    """

    total: int
    free: int
    allocated: int
    reserved: int
    peak: int

    @property
    def spill(self) -> int:
        """What torch keeps beyond what the device has, which unified memory allows and slows down."""
        return max(0, self.reserved - self.total)


def device_memory(device: str | torch.device = "auto") -> MemoryUse | None:
    """Return the memory of a device; None of one without memory of its own, such as the processor.

    Raises:
        DeviceError: it is not there.
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
    """Return the bytes of memory that this process holds, and the most it ever held; None where nobody says."""
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
    """Return how many tensors Python knows, and the bytes of their storages, each counted once.

    Tensors that only torch holds, such as those saved for a backward pass, are not among them.

    Args:
        device: count those there only; "cuda" stands for all CUDA devices.
    """
    wanted = None if device is None else torch.device(device)
    tracing = sys.modules.get("torch._subclasses.fake_tensor")
    shapes_alone = tracing.FakeTensor if tracing is not None else ()  # what a tracer left behind has no memory
    count, storages = 0, {}
    for one in gc.get_objects():
        # Asking other objects for their class may run code of theirs.
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
    """Return the bytes that may still be taken on a device, or of the machine's memory; None where nobody says.

    What a container allows counts, and files that the system keeps in memory and can drop do not.

    Raises:
        DeviceError: the device is not there.
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
    """Return what is left of a control group's limit; None without one."""
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(kept.get("inactive_file", 0)) + int(kept.get("active_file", 0)))
    return None
