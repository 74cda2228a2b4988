"""Renaming the entries of an old checkpoint after a model whose parts were renamed."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from flodl.checkpoint.formats import load_tensors, save_tensors
from flodl.checkpoint.records import MigrateReport

__all__ = ["migrate_checkpoint"]


def migrate_checkpoint(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], named: Mapping[str, Tensor]
) -> MigrateReport:
    """Write ``src`` again as ``dst`` under the names of ``named``, and return what became of each entry.

    First every name found on both sides with the same shape keeps its entry. Then each remaining entry,
    in file order, goes to the first remaining tensor of the model with its shape and dtype. That second
    pass is a guess wherever several share a shape and the order has changed: read ``remapped``.
    Values are not touched, ``dst`` carries no structural hash, and either side may be any format.

    Raises:
        CheckpointError: ``src`` cannot be read or ``dst`` cannot hold its tensors.
    """
    source = load_tensors(src)
    report = MigrateReport()
    placed: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        if name in named and named[name].shape == tensor.shape:
            report.unchanged.append(name)
            placed[name] = tensor
    open_names: dict[tuple[torch.Size, torch.dtype], deque[str]] = defaultdict(deque)
    for name, target in named.items():
        if name not in placed:
            open_names[target.shape, target.dtype].append(name)
    kept = set(report.unchanged)
    for name, tensor in source.tensors.items():
        if name in kept:
            continue
        candidates = open_names.get((tensor.shape, tensor.dtype))
        if candidates:
            new = candidates.popleft()
            report.remapped.append((name, new))
            placed[new] = tensor
        else:
            report.dropped.append(name)
    report.missing.extend(name for name in named if name not in placed)
    save_tensors(dst, {name: placed[name] for name in named if name in placed})
    return report
