"""Checkpoint files of both formats, loaded into a model or renamed; the suffix of the path selects the format."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flodl.checkpoint import fdl_file, safetensors_file
from flodl.checkpoint.tensor_bytes import check_hash, refuse
from flodl.errors import printable
from flodl.safetensors_header import read_header


@dataclass(frozen=True)
class Checkpoint:
    """The contents of one checkpoint file, checked and copied.

    Attributes:
        tensors: named tensors, on the CPU, in the dtype and order of the file.
        structural_hash: 64 hexadecimal digits, or empty if the file has none.
        version: version of the file's format; 0 for a safetensors file of another writer.
        metadata: texts stored with the tensors.
        format: ``"safetensors"`` or ``"fdl"``.
        path: the file.
    """

    tensors: dict[str, Tensor]
    structural_hash: str
    version: int
    metadata: dict[str, str]
    format: str
    path: str = ""


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    structural_hash: str = "",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file atomically.

    ``.safetensors`` accepts every dtype of that format and ``metadata``; ``.fdl`` and ``.fdl.gz`` accept float16,
    bfloat16, float32, float64, int32 and int64. Values are written bit for bit.

    Args:
        path: the file; its folder must exist.
        tensors: named tensors.
        structural_hash: 64 hexadecimal digits of the model's structure; empty for no check when loading.
        metadata: texts to store with the tensors.

    Raises:
        CheckpointError: the suffix, a name, a dtype or the metadata does not fit the format. ``problems`` lists
            all faults; nothing was written.
        OSError: the file could not be written; an earlier file is unchanged.
    """
    text = os.fspath(path)
    try:
        digest = check_hash(structural_hash)
    except ValueError as error:
        refuse(text, [str(error)], "Nothing was written. Pass graph.structural_hash().")
    if _is_fdl(text):
        fdl_file.write(text, tensors, digest, metadata or {})
    else:
        safetensors_file.write(text, tensors, digest, metadata or {})


def load_tensors(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checked contents of a checkpoint file.

    Raises:
        CheckpointError: the file is absent, damaged, truncated, or breaks a rule of its format.
    """
    text = os.fspath(path)
    if _is_fdl(text):
        return Checkpoint(*fdl_file.read(text), {}, "fdl", text)
    return Checkpoint(*safetensors_file.read(text), "safetensors", text)


def checkpoint_keys(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the tensors in a checkpoint, in file order."""
    text = os.fspath(path)
    return list(fdl_file.read(text)[0]) if _is_fdl(text) else read_header(text).order


def _is_fdl(path: str) -> bool:
    lowered = path.lower()
    if not lowered.endswith((".safetensors", ".fdl", ".fdl.gz")):
        problem = "found another suffix, expected .safetensors, .fdl or .fdl.gz"
        refuse(path, [problem], "Rename the file.")
    return not lowered.endswith(".safetensors")


@dataclass(frozen=True)
class LoadReport:
    """The outcome of a load.

    Attributes:
        loaded: names copied into the model.
        skipped: names that only the file has.
        missing: names that only the model has; their values are unchanged.
        cast: ``(name, dtype in the file, dtype in the model)`` of loaded tensors with a changed dtype.
    """

    loaded: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    cast: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether file and model have the same names."""
        return not self.skipped and not self.missing


@dataclass(frozen=True)
class MigrateReport:
    """The outcome of a migration.

    Attributes:
        unchanged: names found in both, with equal shapes.
        remapped: ``(old name, new name)`` of entries matched by shape and dtype.
        dropped: names of the file without a match in the model.
        missing: names of the model without a match in the file.
    """

    unchanged: list[str] = field(default_factory=list)
    remapped: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every entry of the file and of the model has a match."""
        return not self.dropped and not self.missing


def load_into(
    named: Mapping[str, Tensor], checkpoint: Checkpoint, *, expected_hash: str = "", allow_nonfinite: bool = False
) -> LoadReport:
    """Copy a checkpoint into the tensors of a model with the same names; all checks precede the first copy.

    Values are cast to the model's dtype if that preserves their meaning. Names that only one side has are
    reported.

    Args:
        named: the model's parameters and buffers, written in place.
        checkpoint: result of ``load_tensors``.
        expected_hash: the model's structural hash, compared if the file has one.
        allow_nonfinite: load parameters with NaN or infinite values. Buffers may always contain them.

    Raises:
        CheckpointError: different hashes or shapes, a cast that changes the meaning of values or makes them
            infinite, parameters that are not finite, a target without memory, or two values for one tied
            tensor. ``problems`` lists all of them; no tensor was changed.
    """
    found, expected = checkpoint.structural_hash, check_hash(expected_hash)
    if found and expected and found != expected:
        problem = f"found structural hash {found[:8]}, expected {expected[:8]}"
        refuse(checkpoint.path, [problem], "Nothing was loaded. Build the graph as it was when it was saved.")
    report = LoadReport(
        skipped=[name for name in checkpoint.tensors if name not in named],
        missing=[name for name in named if name not in checkpoint.tensors],
    )
    problems: list[str] = []
    staged: dict[str, Tensor] = {}
    for name in (name for name in named if name in checkpoint.tensors):
        source, target = checkpoint.tensors[name], named[name]
        problem = _misfit(source, target, allow_nonfinite)
        if problem:
            problems.append(f"tensor {printable(name)}: {problem}")
        else:
            staged[name] = source.to(target.dtype)
    problems.extend(_disagreements(named, staged))
    if problems:
        refuse(checkpoint.path, problems, "Nothing was loaded. Load into the model that this file was saved from.")
    with torch.no_grad():
        for name in (name for name in named if name in staged):
            named[name].copy_(staged[name])
            report.loaded.append(name)
            if checkpoint.tensors[name].dtype != named[name].dtype:
                report.cast.append((name, str(checkpoint.tensors[name].dtype), str(named[name].dtype)))
    return report


def _misfit(source: Tensor, target: Tensor, allow_nonfinite: bool) -> str:
    """Return why a tensor cannot be loaded, or an empty string."""
    if source.shape != target.shape:
        return f"found shape {tuple(source.shape)}, expected {tuple(target.shape)}"
    if target.device.type == "meta":
        return "the model's tensor is on the meta device and has no memory. Use to_empty first"
    if _rank(source.dtype) > _rank(target.dtype):
        return f"{source.dtype} cannot be cast to {target.dtype} without changing its meaning"
    if _overflows(source, target.dtype):
        return f"finite values of {source.dtype} become infinite as {target.dtype}"
    if isinstance(target, nn.Parameter) and not allow_nonfinite and not _is_finite(source):
        return "found NaN or infinite values. Pass allow_nonfinite=True to load them"
    return ""


def _rank(dtype: torch.dtype) -> int:
    """Return the kind of number; a cast to a higher kind preserves the meaning of the value."""
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _overflows(source: Tensor, dtype: torch.dtype) -> bool:
    if source.dtype == dtype or not dtype.is_floating_point:
        return False
    return bool((source.to(dtype).double().isinf() & ~source.double().isinf()).any())


def _is_finite(values: Tensor) -> bool:
    if not values.is_floating_point() or values.numel() == 0:
        return True
    wide = values.float() if values.element_size() == 1 else values
    # A single read of the values: a NaN becomes both ends, an infinity one of them.
    return all(bool(end.isfinite()) for end in torch.aminmax(wide.detach()))


def _disagreements(named: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> list[str]:
    """Return tied tensors for which the file has two values."""
    first: dict[tuple[object, ...], str] = {}
    found: list[str] = []
    for name, target in named.items():
        if name in staged and target.numel():
            other = first.setdefault((target.device, target.data_ptr(), target.shape, target.stride()), name)
            if other != name and not torch.equal(staged[name], staged[other]):
                found.append(f"tensors {printable(other)} and {printable(name)} are tied in the model, not in the file")
    return found


def migrate_checkpoint(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], named: Mapping[str, Tensor]
) -> MigrateReport:
    """Copy a checkpoint with the names of a model with renamed parts.

    Entries with an equal name and shape keep their name. Each remaining entry, in file order, gets the first
    remaining name of the model with its shape and dtype, which is a guess if several have the same shape: check
    ``remapped``. Values are unchanged, ``dst`` has no structural hash, and each file may have any format.

    Raises:
        CheckpointError: ``src`` cannot be read or ``dst`` cannot store its tensors.
    """
    tensors = load_tensors(src).tensors
    report = MigrateReport()
    placed = {name: value for name, value in tensors.items() if name in named and named[name].shape == value.shape}
    report.unchanged.extend(placed)
    free: dict[tuple[torch.Size, torch.dtype], list[str]] = defaultdict(list)
    for name, target in named.items():
        if name not in placed:
            free[target.shape, target.dtype].append(name)
    for name in (name for name in tensors if tensors[name] is not placed.get(name)):
        candidates = free[tensors[name].shape, tensors[name].dtype]
        if candidates:
            report.remapped.append((name, candidates.pop(0)))
            placed[report.remapped[-1][1]] = tensors[name]
        else:
            report.dropped.append(name)
    report.missing.extend(name for name in named if name not in placed)
    save_tensors(dst, {name: placed[name] for name in named if name in placed})
    return report
