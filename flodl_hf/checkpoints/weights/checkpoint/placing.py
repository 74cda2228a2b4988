"""Tensors of a checkpoint onto the slots of a model, all checked before the first is read.

Decides that placing is all or nothing. Which source belongs to which target is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flodl.errors import CheckpointError, capped, nearest, printable

from .folder import Checkpoint
from .manifest import DTYPE_NAMES, DTYPES

__all__ = ["place"]


def place(
    targets: Mapping[str, Tensor],
    source: Checkpoint,
    rename: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mapped: bool = False,
) -> dict[str, Tensor]:
    """Return the new tensor of each target.

    A target on the ``meta`` device only states a shape and is *given* a tensor read from the file, in the
    stored dtype; hand the result to ``load_state_dict(..., assign=True)``. A target that has memory is filled
    in place and returned itself. Targets with one source (ties) are given one and the same tensor.

    Args:
        targets: our name to the tensor or meta tensor that waits there.
        source: the opened checkpoint.
        rename: our name to the stored name; names that are not in it are stored unchanged.
        dtype: convert floating-point tensors to this dtype; None keeps the stored dtype.
        device: the device of tensors for meta targets; the CPU by default.
        mapped: map the file for meta targets if nothing is converted or moved, see
            `Checkpoint.read_all` for the conditions.

    Raises:
        CheckpointError: before anything is read or written, with all ``problems``: names that the file lacks,
            shapes that differ, filled targets of another dtype than the stored and the requested one.
    """
    names = {target: (rename or {}).get(target, target) for target in targets}
    problems = [p for target, name in names.items() if (p := _misfit(target, targets[target], name, source, dtype))]
    if problems:
        raise CheckpointError(
            f"{source.manifest.folder}: {len(problems)} of {len(targets)} tensors cannot be placed:\n"
            f"{capped(problems)}\nexpected one stored tensor of the same shape for each; "
            f"check that config and weights belong together",
            path=str(source.manifest.folder),
            problems=problems,
        )
    given = [target for target, tensor in targets.items() if tensor.is_meta]
    stored = dict.fromkeys(names[target] for target in given)
    moves = device is not None and torch.device(device).type != "cpu"
    casts = any(_cast(source, name, dtype) is not None for name in stored)
    ready: dict[str, Tensor] = {}
    if moves or casts:
        # One at a time: the stored and the converted copy of only one tensor are alive together.
        for name, tensor in source.tensors(stored):
            ready[name] = tensor.to(device=device, dtype=_cast(source, name, dtype))
    else:
        ready = source.read_all(stored, mapped=mapped)
    result: dict[str, Tensor] = {}
    for target, tensor in targets.items():
        if tensor.is_meta:
            result[target] = ready[names[target]]
        else:
            source.read_into(names[target], tensor, cast=True)
            result[target] = tensor
    return result


def _cast(source: Checkpoint, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to convert ``name`` to, None when it stays as stored."""
    stored = DTYPES[source.manifest.tensors[name].dtype]
    return dtype if dtype is not None and stored.is_floating_point and stored != dtype else None


def _misfit(target: str, tensor: Tensor, name: str, source: Checkpoint, dtype: torch.dtype | None) -> str | None:
    stored = source.manifest.tensors.get(name)
    label = target if target == name else f"{target} (stored as {printable(name)})"
    if stored is None:
        return f"{label}: missing{nearest(name, source.manifest.tensors)}"
    if stored.shape != tuple(tensor.shape):
        return f"{label}: shape {list(stored.shape)} in the file, {list(tensor.shape)} in the model"
    asked = _cast(source, name, dtype)
    if not tensor.is_meta and DTYPE_NAMES.get(tensor.dtype) != stored.dtype and tensor.dtype != asked:
        return f"{label}: dtype {stored.dtype} in the file, {tensor.dtype} in the model; pass dtype="
    return None
