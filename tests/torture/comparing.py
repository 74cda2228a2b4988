"""What is right: a loaded model beside the undamaged one, to the bit, and beside what its file says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.torture import library
from tests.torture.case import Verdict, right
from tests.torture.checkpoints import write_files

__all__ = ["IDS", "Seen", "same_as", "seen", "undamaged", "unlike_file"]

IDS = torch.tensor([[2, 5, 7, 8, 9, 5, 10, 3], [2, 6, 18, 12, 14, 3, 3, 3]])
"""Two rows of token ids that every made checkpoint knows."""


class Seen(NamedTuple):
    """What is read from a folder: the model, its weights by stored name, and its scores of `IDS`."""

    model: Any
    tensors: Mapping[str, Tensor]
    scores: Tensor


def seen(folder: Path, head: str) -> Seen:
    """Return what is read from a folder."""
    model = library.load(folder, head)
    return Seen(model, library.tensors(model), library.scores(model, IDS))


_kept: dict[tuple[str, str], Seen] = {}


def undamaged(root: Path, name: str, files: Mapping[str, bytes], head: str) -> Seen:
    """Return what is read from undamaged files; loaded once in a process.

    Args:
        root: a folder to write them to.
        name: of the files.
        files: the checkpoint.
        head: a head's name.
    """
    key = (name, head)
    if key not in _kept:
        folder = root / f"undamaged-{name}-{head}"
        write_files(folder, files)
        found = seen(folder, head)
        _kept[key] = found._replace(tensors={stored: tensor.clone() for stored, tensor in found.tensors.items()})
    return _kept[key]


def same_as(found: Seen, clean: Seen) -> Verdict | None:
    """Return "right" where a model is the undamaged one to the bit, else None."""
    same = found.tensors.keys() == clean.tensors.keys() and _equal(found.scores, clean.scores)
    return right() if same and all(_equal(found.tensors[name], clean.tensors[name]) for name in clean.tensors) else None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def unlike_file(found: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> str | None:
    """Return which tensor is not what a file says, in value or kind of number; None if all are.

    Args:
        found: a model's weights by stored names.
        stored: the file's.
    """
    for name, tensor in stored.items():
        if name not in found:
            return f"{name} is not there"
        mine = found[name]
        same = mine.shape == tensor.shape and torch.equal(mine.double(), tensor.double())
        if not (same and tensor.is_floating_point()):
            return f"{name} holds other numbers"
    return None
