"""Weights that stay in their files: the conditions, and the tensors that are memory-mapped.

Decides whether weights exceed the free memory, and which weights cannot stay on disk. How
predictions are computed from them is in `flodl_hf.inference.layers_from_disk`.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from flodl.errors import ConfigError, nearest
from flodl.memory import available_memory
from flodl_hf.checkpoints.weights.checkpoint.manifest import DTYPES, SourceManifest

Weights = Literal["memory", "disk"]
_MADV_DONTNEED = 4  # asm-generic/mman-common.h


class OnDisk:
    """Which tensors of a model are shown by its files, and where it predicts.

    Args:
        tensors: as they were read, mapped.
        device: where layers are computed; the model itself stays on the processor.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.device = device
        ranges = sorted(_file_mappings())
        starts = [start for start, _ in ranges]
        self._read: set[int] = set()
        self._shown: dict[int, tuple[int, int]] = {}
        for tensor in tensors:
            place = tensor.data_ptr()
            self._read.add(place)
            at = bisect.bisect_right(starts, place) - 1
            if at >= 0 and place + tensor.nbytes <= ranges[at][1]:
                self._shown[place] = tensor.nbytes, tensor._version

    def holds(self, layers: nn.Module) -> bool:
        """Return whether the layers still have weights that were read; not where the model was moved or cast."""
        return any(parameter.data_ptr() in self._read for parameter in layers.parameters())

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a memory-mapped tensor, other tensors themselves; waits for the disk.

        Tensors in a file start at any multiple of eight bytes, and kernels add up in another order at such addresses.
        """
        if tensor.data_ptr() not in self._read:
            return tensor
        found = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        # numpy copies without additional threads next to the computing ones.
        target, source = (t.detach().reshape(-1).view(torch.uint8).numpy() for t in (found, tensor))
        np.copyto(target, source)
        self.release(tensor)
        return found

    def release(self, tensor: Tensor) -> None:
        """Release the memory pages of a mapped tensor; written values stay."""
        place = tensor.data_ptr()
        if self._shown.get(place) == (tensor.nbytes, tensor._version):
            _release_pages(place, tensor.nbytes)


def stays_on_disk(
    weights: str | None,
    manifest: SourceManifest,
    used: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    *,
    mapped: bool | None,
    notes: list[str],
) -> bool:
    """Return whether a folder's weights stay on disk: requested by the caller, or too large for memory.

    Args:
        weights: "memory", "disk", or None to decide by the memory that is free.
        manifest: the folder's weight files.
        used: stored names that the model takes.
        dtype: dtype of the model's weights.
        device: device of the model.
        mapped: the caller's ``mapped`` argument.
        notes: receives a line if the decision was made here.

    Raises:
        ConfigError: another word, or weights that cannot stay on disk.
    """
    if weights not in (None, "memory", "disk"):
        raise ConfigError(
            f"weights={weights!r}; expected 'memory', 'disk' or None{nearest(str(weights), ('memory', 'disk'))}",
            problems=["weights"],
        )
    if weights == "memory":
        return False
    stored = [manifest.tensors[name] for name in dict.fromkeys(used) if name in manifest.tensors]
    kinds = {tensor.dtype for tensor in stored}
    is_safetensors = manifest.layout in ("single", "sharded")
    faults = []
    if device.type not in ("cpu", "cuda"):
        faults.append(f"layers are loaded on demand on CPUs and CUDA devices, not on a {device.type}")
    if mapped is False:
        faults.append("mapped=False requests copies in memory")
    if not is_safetensors:
        faults.append(f"{Path(manifest.files[0].name).name} has to be converted once, by flodl-hf convert")
    if any(DTYPES[kind] != dtype for kind in kinds):
        word = str(dtype).removeprefix("torch.")
        faults.append(
            f"weights are stored in {', '.join(sorted(kinds))} but {word} needs copies; pass dtype= as "
            "they are stored, and predict with precision= to compute in another dtype"
        )
    if weights == "disk":
        if faults:
            raise ConfigError(f"{manifest.folder}: weights='disk' cannot be: {'; '.join(faults)}", problems=faults)
        return True
    need = sum(prod(tensor.shape) for tensor in stored) * dtype.itemsize
    free = available_memory(device)
    if free is None or need <= free or not is_safetensors:
        return False
    short = f"weights take {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {device} are free"
    if faults:
        notes.append(f"{short}; they could stay on disk (weights='disk'), but {'; '.join(faults)}")
        return False
    said = f"{short}: they stay on disk and are read layer by layer for each call (weights='disk'; 'memory' insists)"
    notes.append(said)
    warnings.warn(f"{manifest.folder}: {said}", stacklevel=2)
    return True


def _file_mappings() -> list[tuple[int, int]]:
    """Return the address ranges of private file mappings of this process; empty on systems other than Linux."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, rights, _, _, inode = line.split(maxsplit=5)[:5]
            if inode != "0" and rights[3] == "p":
                begin, end = addresses.split("-")
                found.append((int(begin, 16), int(end, 16)))
    return found


def _release_pages(address: int, length: int) -> None:
    """Release the whole pages of a mapped range; the next access reads them from the file again.

    The range must be unchanged since it was mapped. Without effect on systems other than Linux, which release such
    pages when memory is short.
    """
    if sys.platform != "linux":
        return
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = -(-address // page) * page, (address + length) // page * page
    if end > begin:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)
