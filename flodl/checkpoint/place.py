"""Putting the tensors of a checkpoint into a model: everything is checked, then everything is copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flodl.checkpoint.raw import check_hash, refuse
from flodl.checkpoint.records import Checkpoint, LoadReport
from flodl.errors import printable

__all__ = ["load_into"]


def load_into(
    named: Mapping[str, Tensor], checkpoint: Checkpoint, *, expected_hash: str = "", allow_nonfinite: bool = False
) -> LoadReport:
    """Return what was copied from ``checkpoint`` into the tensors of ``named``, matched by name.

    Values are cast to the model's dtype where that keeps their kind. Names that only one side has are
    reported, not refused: pass ``expected_hash`` where file and model must be the same structure.

    Args:
        named: the model's parameters and buffers, written in place.
        checkpoint: what ``load_tensors`` gave.
        expected_hash: the model's structural hash; checked when the file has one too.
        allow_nonfinite: load parameters that hold NaN or infinite values. Buffers may always hold them.

    Raises:
        CheckpointError: the hashes differ, a shape differs, a cast would lose the kind of value or turn
            finite values infinite, a parameter holds values that are not finite, a target has no memory,
            or two names of one tensor got different values. ``problems`` lists all of them, and no tensor was changed.
    """
    _check_same_structure(checkpoint, expected_hash)
    report = LoadReport(
        skipped=[name for name in checkpoint.tensors if name not in named],
        missing=[name for name in named if name not in checkpoint.tensors],
    )
    problems: list[str] = []
    staged: dict[str, Tensor] = {}
    for name, target in named.items():
        if name not in checkpoint.tensors:
            continue
        source = checkpoint.tensors[name]
        problem = _misfit(source, target)
        cast = source if problem or source.dtype == target.dtype else source.to(target.dtype)
        if not problem and _overflows(source, cast):
            problem = f"finite values of {source.dtype} become infinite as {target.dtype}"
        if not problem and isinstance(target, nn.Parameter) and not allow_nonfinite and not _finite(source):
            problem = "holds NaN or infinite values; pass allow_nonfinite=True to load them all the same"
        if problem:
            problems.append(f"tensor {printable(name)}: {problem}")
            continue
        if cast is not source:
            report.cast.append((name, str(source.dtype), str(target.dtype)))
        report.loaded.append(name)
        staged[name] = cast
    problems.extend(_disagreements(named, staged))
    if problems:
        refuse(
            checkpoint.path,
            problems,
            "Nothing was loaded; expected what the model can hold. Load into the model that this file was saved from.",
        )
    with torch.no_grad():
        for name, value in staged.items():
            named[name].copy_(value)
    return report


def _check_same_structure(checkpoint: Checkpoint, expected_hash: str) -> None:
    found, expected = checkpoint.structural_hash, check_hash(expected_hash)
    if found and expected and found != expected:
        refuse(
            checkpoint.path,
            [f"structural hash {found[:8]}, expected {expected[:8]} for this model"],
            "Nothing was loaded. Build the graph as it was when saved, or load without the hash, by name.",
        )


def _misfit(source: Tensor, target: Tensor) -> str:
    if source.shape != target.shape:
        return f"shape {tuple(source.shape)}, the model has {tuple(target.shape)}"
    if target.device.type == "meta":
        return "the model's tensor is on the meta device and has no memory; move it with to_empty first"
    if _rank(source.dtype) > _rank(target.dtype):
        return f"{source.dtype} cannot become {target.dtype} without losing what it means"
    return ""


def _rank(dtype: torch.dtype) -> int:
    """Order the kinds of number so that a cast upwards keeps the value's meaning."""
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _overflows(source: Tensor, cast: Tensor) -> bool:
    if source is cast or not cast.is_floating_point() or torch.finfo(cast.dtype).max >= _largest(source.dtype):
        return False
    return bool((torch.isfinite(source.double()) & ~torch.isfinite(cast.double())).any())


def _finite(values: Tensor) -> bool:
    if not values.is_floating_point() or values.numel() == 0:
        return True
    wide = values.float() if values.element_size() == 1 else values
    # One pass: a NaN becomes both ends, an infinity one of them.
    return all(bool(end.isfinite()) for end in torch.aminmax(wide.detach()))


def _largest(dtype: torch.dtype) -> float:
    if dtype is torch.bool:
        return 1.0
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)


def _disagreements(named: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> list[str]:
    """Find tied tensors for which the file holds two values; the last would win silently."""
    first: dict[tuple[object, ...], str] = {}
    found: list[str] = []
    for name, value in staged.items():
        target = named[name]
        if not target.numel():
            continue
        place = (target.device, target.data_ptr(), target.shape, target.stride())
        other = first.setdefault(place, name)
        if other != name and not torch.equal(value, staged[other]):
            found.append(f"tensors {printable(other)} and {printable(name)} are one in the model, two in the file")
    return found
