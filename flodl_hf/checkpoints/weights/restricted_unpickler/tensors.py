"""Meaning of the names in a torch file: records of storages and tensors, checked against their bounds.

Decides the list of names and that a tensor may only use bytes of its storage. The byte offsets are
in :mod:`flodl_hf.checkpoints.weights.restricted_unpickler.shard`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from flodl.errors import CheckpointError, capped, printable
from flodl.safetensors_header import name_fault
from flodl_hf.checkpoints.weights.checkpoint.manifest import DTYPES
from flodl_hf.checkpoints.weights.restricted_unpickler.opcodes import Function

_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A storage class of torch, with its number type (safetensors' name)."""

    dtype: str


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One run of numbers in the file, by the key that the container knows it under."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A view of a storage; equal records are one tensor under several names.

    Attributes:
        storage: the numbers.
        offset: the first of them, counted in numbers.
        shape: the sizes.
        strides: numbers to skip for a step along each dimension.
    """

    storage: StorageRecord
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return how many numbers the tensor has."""
        return prod(self.shape)

    @property
    def span(self) -> int:
        """Return the count of storage elements from its first to its last, inclusive."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Return whether its elements are adjacent in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


def storage_record(reference: Any) -> StorageRecord:
    """Return the storage that a program refers to as ``("storage", class, key, device, count[, view])``.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(reference, tuple) or len(reference) not in (5, 6) or reference[0] != "storage":
        raise ValueError("expected ('storage', class, key, device, count)")
    _, kind, key, device, numel, *view = reference
    if not isinstance(kind, StorageKind) or not isinstance(key, str) or not isinstance(device, str):
        raise ValueError("expected a storage class, a key and a device")
    if type(numel) is not int or not 0 <= numel < 2**63:
        raise ValueError("expected a count of numbers")
    if view and view[0] is not None:
        raise ValueError("found a view of another storage, as torch before 0.4 wrote them; expected whole storages")
    return StorageRecord(key, kind.dtype, numel)


def state_table(value: Any, where: str, max_bytes: int) -> dict[str, TensorRecord]:
    """Return the tensors in a program's result, by name.

    Args:
        value: the program's result.
        where: the file, for messages.
        max_bytes: the most that all different tensors may take together, the size of the file.

    Raises:
        CheckpointError: not a table from names to tensors, or more than the file can contain.
    """
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: contains a {type(value).__name__}, expected a table from names to tensors; "
            f"save the state_dict of the model",
            path=where,
            problems=["not a table"],
        )
    problems: list[str] = []
    for name, record in value.items():
        if not isinstance(name, str):
            problems.append(f"{name!r}: the name is no text")
        elif fault := name_fault(name):
            problems.append(f"{printable(name)}: the name {fault}")
        elif not isinstance(record, TensorRecord):
            what = "a table; save its values" if isinstance(record, dict) else f"a {type(record).__name__}"
            problems.append(f"{printable(name)}: {what}")
    if not problems:
        total = sum(record.numel * DTYPES[record.storage.dtype].itemsize for record in set(value.values()))
        if total > max_bytes:
            problems.append(f"its tensors would take {total:,} bytes, the file has {max_bytes:,}")
    if problems:
        raise CheckpointError(
            f"{where}: is not a table of tensors only:\n{capped(problems)}\n"
            f"expected a state_dict; save it with model.state_dict()",
            path=where,
            problems=problems,
        )
    return value


def _rebuild_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> TensorRecord:
    if not isinstance(storage, StorageRecord):
        raise ValueError("expected a storage")
    if not _counts((offset,)) or not _counts(shape) or not _counts(strides) or len(shape) != len(strides):
        raise ValueError("expected an offset, sizes and as many strides, none negative")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"found {len(shape)} dimensions, expected at most {_MAX_DIMS}")
    if hooks or metadata or not isinstance(requires_grad, bool):
        raise ValueError("expected no hooks and no metadata")
    if 0 in shape:
        # A slice that ran off the end of nothing: torch saves its offset all the same.
        return TensorRecord(storage, 0, shape, strides)
    record = TensorRecord(storage, offset, shape, strides)
    if offset + record.span > storage.numel:
        raise ValueError(f"sizes {list(shape)} from {offset} reach beyond the {storage.numel} numbers of the storage")
    if record.numel > record.span:
        # A repeated number costs nothing in the file and anything in memory.
        raise ValueError(f"sizes {list(shape)} show numbers more than once")
    return record


def _rebuild_parameter(data: Any, requires_grad: Any, hooks: Any) -> TensorRecord:
    if not isinstance(data, TensorRecord) or not isinstance(requires_grad, bool) or hooks:
        raise ValueError("expected a tensor, a truth value and no hooks")
    return data


def _table() -> dict[str, Any]:
    return {}


def _counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 2**63 for value in values)


_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}

NAMES: dict[str, Any] = {
    "collections.OrderedDict": Function("collections.OrderedDict", _table),
    "torch._utils._rebuild_tensor_v2": Function("torch._utils._rebuild_tensor_v2", _rebuild_tensor),
    "torch._utils._rebuild_parameter": Function("torch._utils._rebuild_parameter", _rebuild_parameter),
    **{f"torch.{name}": StorageKind(dtype) for name, dtype in _STORAGES.items()},
}
"""Every name that a program may use, with its replacement."""
