"""Available devices, the best one, and errors for absent ones.

A device has torch's name (``cpu``, ``cuda``, ``cuda:1``, ``mps``), or ``auto`` for the best one: CUDA before Apple's
MPS before the CPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch.nn import functional as F

from flodl.errors import DeviceError, nearest

__all__ = [
    "find_device",
    "hardware_summary",
    "probe_device",
    "usable_devices",
]

Devices = int | str | Sequence[str | torch.device]


def cuda_count() -> int:
    """Return the number of CUDA devices of this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def default_device() -> torch.device | None:
    """Return torch's default device, or None if that is the CPU."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def best_device() -> torch.device:
    """Return the best device: the first CUDA device, else MPS, else the CPU.

    MPS is used only if it passes `probe_device`, otherwise a warning is given.
    """
    if cuda_count():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        fault = mps_fault()
        if fault is None:
            return torch.device("mps")
        warnings.warn(f"MPS is not used: {fault}", stacklevel=2)
    return torch.device("cpu")


@cache
def mps_fault() -> str | None:
    """Return why MPS cannot compute, or None if it can."""
    return probe_device("mps")


def all_devices() -> list[torch.device]:
    """Return every device of the best kind."""
    count = cuda_count()
    return [torch.device("cuda", index) for index in range(count)] if count else [best_device()]


def parse_device(name: str | torch.device) -> torch.device:
    """Return the device of a name, present or not.

    Raises:
        DeviceError: torch does not know the name.
    """
    if str(name) == "auto":
        return best_device()
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        word = str(name).partition(":")[0]
        # The closest spelling of "gpu" is cpu, which is not meant.
        hint = ", did you mean 'cuda'?" if word.lower() == "gpu" else nearest(word, ["cpu", "cuda", "mps", "auto"])
        raise DeviceError(
            f"device: found {str(name)[:60]!r}{hint}, expected cpu, cuda, cuda:1, mps or auto", device=str(name)
        ) from None


def find_device(name: str | torch.device) -> torch.device:
    """Return the device of a name, or the best device for "auto".

    Raises:
        DeviceError: the device is absent; the error lists the available ones.
    """
    found = parse_device(name)
    if found.type == "cuda":
        count = cuda_count()
        if not count:
            raise _absent(found, why_no_cuda())
        if (found.index or 0) >= count:
            raise _absent(found, "available is cuda:0" if count == 1 else f"available are cuda:0 to cuda:{count - 1}")
    elif found.type == "mps" and not torch.backends.mps.is_available():
        raise _absent(found, "MPS needs a Mac with an Apple processor, and macOS 12.3 or later")
    return found


def pick_device(device: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the device of a local rank: the requested one, else its CUDA device, else the CPU.

    Raises:
        DeviceError: a requested device is absent.
    """
    count = cuda_count()
    if device is None or str(device) == "auto":
        return torch.device("cuda", local_rank % count) if count else torch.device("cpu")
    found = _for_training(find_device(device))
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", local_rank % count)
    return found


def training_devices(devices: Devices | None, *, shared: bool = True) -> int | str | list[str] | None:
    """Return the devices for training: a number of ranks, one device, or one for each rank.

    Args:
        devices: as given by the user; "auto" is all CUDA devices, else the CPU, and None under a launcher that
            assigned a rank to this process.
        shared: whether several ranks may use one device.

    Raises:
        DeviceError: a device is absent, or too few are available.
    """
    if devices is None or (isinstance(devices, str) and devices == "auto" and "RANK" in os.environ):
        return None
    if isinstance(devices, str) and devices == "auto":
        found = [f"cuda:{index}" for index in range(cuda_count())] or ["cpu"]
        return found if len(found) > 1 else found[0]
    if isinstance(devices, int):
        count = cuda_count()
        if devices < 1 or (count and devices > count and not shared):
            raise DeviceError(
                f"devices: found {devices} with {count} CUDA devices, expected 1 to {max(count, 1)}, or auto for all. "
                "Name a device for each rank to share devices.",
                devices=devices,
                count=count,
            )
        return devices
    if isinstance(devices, (str, torch.device)):
        return str(_for_training(find_device(devices)))
    names = [str(_for_training(find_device(name))) for name in devices]
    if not names:
        raise DeviceError("devices: found an empty list, expected names such as cuda:0, or auto for all", devices=[])
    return names


def _for_training(device: torch.device) -> torch.device:
    if device.type == "mps":
        raise DeviceError(
            "device: training on mps is not supported, because sums of a step need float64, which MPS lacks. "
            "Use cpu; trained models can predict on mps.",
            device=str(device),
        )
    return device


def described(device: torch.device) -> str:
    """Return a device with its product name: ``cuda:0 (NVIDIA H200)``."""
    if device.type == "cuda" and cuda_count():
        index = torch.cuda.current_device() if device.index is None else device.index
        return f"cuda:{index} ({torch.cuda.get_device_name(index)})"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' * (threads > 1)})"
    return str(device)


def probe_device(device: str | torch.device) -> str | None:
    """Return why a device cannot compute, as half a sentence; None if it can.

    The operations of a small encoder layer are run and compared with the CPU. This detects a GPU that is too
    old for this torch, full or broken, and operations that MPS lacks.
    """
    try:
        got = _small_layer(find_device(device)).cpu()
    except (RuntimeError, TypeError, NotImplementedError) as fault:
        return (str(fault).splitlines() or [type(fault).__name__])[0][:200]
    expected = _small_layer(torch.device("cpu"))
    if not torch.allclose(got, expected, atol=1e-2):
        return f"its results differ by {float((got - expected).abs().max()):.1e} from the CPU's"
    return None


def _small_layer(device: torch.device) -> torch.Tensor:
    count = torch.arange(6, device=device)
    table = torch.arange(48.0, device=device).reshape(6, 8).sin()
    states = F.layer_norm(F.embedding(count, table), (8,)) @ table.T @ table
    heads = states.view(1, 2, 6, 4)
    mixed = F.gelu(F.scaled_dot_product_attention(heads, heads, heads).view(6, 8)).softmax(-1)
    sums = torch.zeros(3, 8, device=device).index_add_(0, count // 2, mixed)
    return sums + count.cumsum(0).float().mean() + torch.repeat_interleave(count, count).float().mean()


def usable_devices() -> list[torch.device]:
    """Return the devices of the best kind that pass `probe_device`; the CPU if none does."""
    return [device for device in all_devices() if probe_device(device) is None] or [torch.device("cpu")]


def hardware_summary() -> str:
    """Return a line with devices, cores and versions: ``2 x NVIDIA H200 (139.8 GiB), ..., torch 2.11.0``."""
    parts = []
    if cuda_count():
        cards = [torch.cuda.get_device_properties(index) for index in range(cuda_count())]
        names = [f"{card.name} ({card.total_memory / (1 << 30):.1f} GiB)" for card in cards]
        parts = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    elif torch.backends.mps.is_available():
        parts = ["MPS"]
    cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    parts.append(f"{cores} core{'s' * (cores > 1)}, {threads} thread{'s' * (threads > 1)}")
    cuda = f", CUDA {torch.version.cuda}" if cuda_count() and torch.version.cuda else ""
    return f"{', '.join(parts)}, torch {torch.__version__.partition('+')[0]}{cuda}"


def why_no_cuda() -> str:
    """Return the reason why no CUDA device is available, as half a sentence."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA; see pytorch.org for builds with CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all devices"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as fault:
        return "CUDA failed to start: " + (str(fault).splitlines() or ["unknown reason"])[0]
    return "found no driver or no device"


def _absent(device: torch.device, why: str) -> DeviceError:
    there = [str(found) for found in dict.fromkeys([*all_devices(), torch.device("cpu")])]
    return DeviceError(
        f"device: {device} is not available: {why}. Use {' or '.join(there[:4])}.",
        device=str(device),
        count=cuda_count(),
        known=there,
    )
