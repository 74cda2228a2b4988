"""What a load leaves with a model: its report and source, and the tensors that stay in their files.

How predictions are computed from tensors in files is in `flodl_hf.inference.layers_from_disk`.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flodl.errors import capped, visible
from flodl_hf.checkpoints.weights.manifest import SourceManifest

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


@dataclass
class LoadReport:
    """What became of every tensor of the source, and of the model.

    Attributes:
        source: origin of the tensors.
        head: the task the model was loaded for.
        source_head: the task the file was written for, or None if it states none.
        matched: our filled names, with the stored name of each.
        renamed: stored names that are not current Hugging Face names, with the current ones.
        ignored: stored names that this model does not use, with the reason.
        unexpected: the ignored names that are unknown and outside the model; loading warns of them.
        new: our names that the file does not have; they have fresh random values.
        tied: our names that share the tensor of another.
        untied: ties in the configuration that the file's values contradict.
        dtypes: how many tensors of each stored dtype were used.
        prefixed: whether encoder tensors carry the family's prefix in the file.
        notes: anything else worth knowing.
    """

    source: str
    head: str
    source_head: str | None = None
    matched: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    dtypes: dict[str, int] = field(default_factory=dict)
    prefixed: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def trained(self) -> bool:
        """Whether every tensor came from the file, so that predictions are meaningful."""
        return not self.new

    def __repr__(self) -> str:
        named = {"new": self.new, "ignored": self.ignored, "renamed": self.renamed, "notes": self.notes}
        more = "".join(f", {len(found)} {name}" for name, found in named.items() if found)
        return f"LoadReport({self.head} from {self.source}: {len(self.matched)} tensors{more})"

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.matched)} tensors for {self.head}"]
        if self.tied:
            lines.append(f"tied: {', '.join(self.tied)}")
        if self.untied:
            lines.append(f"not tied, because the file's values differ: {', '.join(self.untied)}")
        if self.renamed:
            lines.append(f"{len(self.renamed)} names in an older style")
        if self.new:
            lines.append(f"new, untrained:\n{capped(list(self.new))}")
        if self.ignored:
            lines.append(f"not used:\n{capped([f'{name}: {why}' for name, why in self.ignored.items()])}")
        lines += self.notes
        return "\n".join(lines)


def warn_of_unexpected(report: LoadReport, stored: Mapping[str, Any], stacklevel: int) -> None:
    """Warn once of unknown tensors that are ignored, as transformers does.

    Args:
        report: of the load.
        stored: headers by name, with shape and file.
        stacklevel: as for `warnings.warn`, of the caller of this function.
    """
    if not (names := report.unexpected):
        return
    files = ", ".join(sorted({visible(stored[name].file) for name in names}))
    lines = [f"{visible(name)} {list(stored[name].shape)}" for name in names]
    warnings.warn(
        f"{report.source}: {len(names)} tensor(s) of {files} belong to no module of this {report.head} model and are "
        f"ignored, as by transformers:\n{capped(lines)}\n"
        "The file may be for another task; select it with head=; strict_config=True refuses such a file.",
        stacklevel=stacklevel + 1,
    )


@dataclass
class Source:
    """Source of a loaded model: everything needed to write it back unchanged.

    Attributes:
        name: the repository or path as the caller gave it.
        folder: the local folder.
        commit: the resolved Hub commit, or None.
        manifest: names, dtypes, shapes and order of the stored tensors.
        placed: our name -> stored name.
        duplicates: stored names that repeat another, ``(repeated, kept)``.
        carried: stored tensors that the model does not use and an unchanged export writes back.
        kept: the carried names that any export writes, as named in new files.
        same_head: the file was written for the head that was loaded.
        config_text: the text of ``config.json``.
        tokenizer_files: files of a folder without a loaded tokenizer, by name, byte for byte.
    """

    name: str
    folder: Path
    commit: str | None
    manifest: SourceManifest = field(repr=False)
    placed: Mapping[str, str] = field(repr=False)
    duplicates: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    carried: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    kept: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    same_head: bool = True
    config_text: str = field(default="", repr=False)
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
