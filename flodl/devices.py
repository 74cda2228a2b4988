"""Which devices there are, which is the best, and what to say of one that is not there.

A device is named as torch names it (``cpu``, ``cuda``, ``cuda:1``, ``mps``), or ``auto`` for the best there is: CUDA
before Apple's MPS before the processor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache

import torch

from flodl.errors import DeviceError, nearest

__all__ = [
    "all_devices",
    "best_device",
    "cuda_count",
    "default_device",
    "described",
    "find_device",
    "hardware_summary",
    "parse_device",
    "pick_device",
    "probe_device",
    "training_devices",
    "usable_devices",
]

Devices = int | str | Sequence[str | torch.device]
KINDS = ("cpu", "cuda", "mps")


def cuda_count() -> int:
    """Return how many CUDA devices this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def has_mps() -> bool:
    """Return whether there is a device of Apple's that this process can use."""
    return torch.backends.mps.is_available()


def default_device() -> torch.device | None:
    """Return the device on which the program makes its tensors where none is named; None for the CPU, as is usual."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def best_device() -> torch.device:
    """Return the best device there is: the first CUDA device, else MPS, else the processor.

    MPS is tried before it is taken without having been named; where it lacks an operation there is a warning instead.
    """
    if cuda_count():
        return torch.device("cuda")
    if has_mps():
        fault = mps_fault()
        if fault is None:
            return torch.device("mps")
        warnings.warn(f"MPS is here and was not taken, because {fault}", stacklevel=2)
    return torch.device("cpu")


@cache
def mps_fault() -> str | None:
    """Return why MPS cannot compute what an encoder needs, as half a sentence; None where it can."""
    device = torch.device("mps")
    try:
        count = torch.arange(6, device=device)
        states = torch.nn.functional.layer_norm(
            torch.nn.functional.embedding(count, torch.ones(6, 8, device=device)), (8,)
        )
        heads = states.view(1, 2, 6, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        total = torch.zeros(3, 8, device=device).index_add_(0, count // 2, torch.nn.functional.gelu(mixed.view(6, 8)))
        sums = (total.sum() + count.cumsum(0).float().sum() + torch.repeat_interleave(count, count).sum()).cpu()
    except (RuntimeError, TypeError, NotImplementedError) as fault:
        return (str(fault).splitlines() or [type(fault).__name__])[0][:200]
    return None if bool(sums.isfinite()) else "it computes numbers that are not finite"


def all_devices() -> list[torch.device]:
    """Return every device of the best kind there is."""
    count = cuda_count()
    return [torch.device("cuda", index) for index in range(count)] if count else [best_device()]


def parse_device(name: str | torch.device) -> torch.device:
    """Return the device that a name means, whether it is there or not.

    Raises:
        DeviceError: torch knows no device of that name.
    """
    if str(name) == "auto":
        return best_device()
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        word = str(name).partition(":")[0]
        # "gpu" is one letter from cpu, and the last thing meant by it.
        hint = ", did you mean 'cuda'?" if word.lower() == "gpu" else nearest(word, [*KINDS, "auto"])
        raise DeviceError(
            f"device: found {str(name)[:60]!r}{hint}; expected cpu, cuda, cuda:1, mps or auto",
            device=str(name),
        ) from None


def find_device(name: str | torch.device) -> torch.device:
    """Return the device that a name means.

    Args:
        name: as torch has it, or "auto" for the best there is.

    Raises:
        DeviceError: it is not there; the text says what is.
    """
    found = parse_device(name)
    if found.type == "cuda":
        count = cuda_count()
        if not count:
            raise _absent(found, why_no_cuda())
        if (found.index or 0) >= count:
            there = "the one CUDA device here is cuda:0" if count == 1 else f"here are cuda:0 to cuda:{count - 1}"
            raise _absent(found, there)
    elif found.type == "mps" and not has_mps():
        raise _absent(found, "MPS is for Macs with Apple's processors, and macOS 12.3 or later")
    return found


def pick_device(device: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the device of a local rank: as asked, else its CUDA device, else the processor.

    Raises:
        DeviceError: a device was asked for and is not there.
    """
    count = cuda_count()
    if device is None or str(device) == "auto":
        return torch.device("cuda", local_rank % count) if count else torch.device("cpu")
    found = _for_training(find_device(device))
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", local_rank % count)
    return found


def training_devices(devices: Devices | None, *, shared: bool = True) -> int | str | list[str] | None:
    """Return what to train on: a number of ranks, one device, or one for each rank.

    Args:
        devices: the same as users write it; "auto" is all CUDA devices, else the processor, and None where a
            launcher has given this process its rank already.
        shared: whether several ranks may be on one device.

    Raises:
        DeviceError: a device is not there, or there are fewer than were asked for.
    """
    if devices is None or (isinstance(devices, str) and devices == "auto" and "RANK" in os.environ):
        return None
    if isinstance(devices, str) and devices == "auto":
        found = [f"cuda:{index}" for index in range(cuda_count())] or ["cpu"]
        return found if len(found) > 1 else found[0]
    if isinstance(devices, int):
        count = cuda_count()
        if devices < 1 or (count and devices > count and not shared):
            there = f"{count} CUDA devices are" if count != 1 else "one CUDA device is"
            raise DeviceError(
                f"devices: {devices} were asked for and {there} here; expected 1 to {max(count, 1)}, or auto for all. "
                "Name a device for each rank to have several share one.",
                devices=devices,
                count=count,
            )
        return devices
    if isinstance(devices, (str, torch.device)):
        return str(_for_training(find_device(devices)))
    names = [str(_for_training(find_device(name))) for name in devices]
    if not names:
        raise DeviceError("devices: found an empty list; expected names such as cuda:0, or auto for all", devices=[])
    return names


def _for_training(device: torch.device) -> torch.device:
    if device.type == "mps":
        raise DeviceError(
            "device: training on mps was asked for, and sums of a step are kept in float64, which MPS does not "
            "support. Use cpu; models that were trained predict on mps.",
            device=str(device),
        )
    return device


def described(device: torch.device) -> str:
    """Return a device's name and what it is: ``cuda:0 (NVIDIA H200)``."""
    if device.type == "cuda" and cuda_count():
        index = torch.cuda.current_device() if device.index is None else device.index
        return f"cuda:{index} ({torch.cuda.get_device_name(index)})"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' * (threads > 1)})"
    return str(device)


def probe_device(device: str | torch.device) -> str | None:
    """Return why a device cannot compute, as half a sentence; None where it can.

    It runs a small product and a softmax and compares them with the processor's, so that a GPU too old for this torch,
    one that is full, and one that is broken are found before a model is on it.
    """
    x = torch.arange(256, dtype=torch.float32).reshape(16, 16).sin()
    try:
        found = find_device(device)
        there = x.to(found)
        got = (there @ there).softmax(-1).cpu()
    except (RuntimeError, NotImplementedError) as fault:
        return (str(fault).splitlines() or [type(fault).__name__])[0][:200]
    expected = (x @ x).softmax(-1)
    if not torch.allclose(got, expected, atol=1e-2):
        apart = float((got - expected).abs().max())
        return f"a product of 16 x 16 numbers differs by {apart:.1e} from the processor's"
    return None


def usable_devices() -> list[torch.device]:
    """Return the devices of the best kind there is that compute; the processor where none of them does."""
    return [device for device in all_devices() if probe_device(device) is None] or [torch.device("cpu")]


def hardware_summary() -> str:
    """Return one line on what this process computes with: ``2 x NVIDIA H200 (139.8 GiB), torch 2.11.0``."""
    parts = []
    if cuda_count():
        cards = [torch.cuda.get_device_properties(index) for index in range(cuda_count())]
        names = [f"{card.name} ({card.total_memory / (1 << 30):.1f} GiB)" for card in cards]
        parts = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    elif has_mps():
        parts = ["MPS"]
    cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    parts.append(f"{cores} core{'s' * (cores > 1)}, {threads} thread{'s' * (threads > 1)}")
    cuda = f", CUDA {torch.version.cuda}" if cuda_count() and torch.version.cuda else ""
    return f"{', '.join(parts)}, torch {torch.__version__.partition('+')[0]}{cuda}"


def why_no_cuda() -> str:
    """Return half a sentence on why there is no CUDA device."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA; pytorch.org says how to install one with it"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} leaves none to this process"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as fault:
        return "CUDA does not start: " + (str(fault).splitlines() or ["no reason was given"])[0]
    return "no driver or no device was found"


def _absent(device: torch.device, why: str) -> DeviceError:
    there = [str(found) for found in dict.fromkeys([*all_devices(), torch.device("cpu")])]
    return DeviceError(
        f"device: {device} was asked for and is not there: {why}. Use {' or '.join(there[:4])}.",
        device=str(device),
        count=cuda_count(),
        known=there,
    )
