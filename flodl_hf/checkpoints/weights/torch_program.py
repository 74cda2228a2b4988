"""The program of a torch file, interpreted: a stack machine and the meaning of the names that a program may use.

Decides which instructions are supported (pickle protocol 2 as ``torch.save`` emits it for tables of tensors), limits
the work of a program, and checks that a tensor uses only bytes of its storage. Nothing is imported or called.
The byte offsets of storages are in :mod:`flodl_hf.checkpoints.weights.torch_file`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, NoReturn

from flodl.errors import CheckpointError, FlodlError, UnsafeFileError, capped, printable
from flodl.safetensors_header import name_fault
from flodl_hf.checkpoints.weights.manifest import DTYPES

_MAX_STEPS = 3_000_000  # a table of tensors takes about 25 instructions for each
_PROTOCOL = 2
_MAX_DIMS = 8
_MARK = object()
_ARGUMENTS = {op.code.encode("latin-1"): op.arg for op in pickletools.opcodes}


class Machine:
    """Run one program and return its result.

    Args:
        source: the program; its methods raise a ValueError beyond its end and beyond the limits of a program.
        path: the file, for messages.
        storage: given the tuple by which the program refers to a storage, returns a record of it.
    """

    def __init__(self, source: BinaryIO, path: str, storage: Callable[[Any], Any]) -> None:
        self._source = source
        self._where = path
        self._storage = storage
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the object that the program builds.

        Raises:
            UnsafeFileError: an instruction or a name that tables of tensors do not need.
            CheckpointError: the program is truncated, contradicts itself, or needs too much work.
        """
        try:
            for _ in range(_MAX_STEPS):
                code = self._source.read(1)
                if code == b".":
                    (result,) = self._stack
                    return result
                step = _STEPS.get(code)
                if step is None:
                    self._unsafe(f"instruction 0x{code[0]:02x}")
                argument = _ARGUMENTS[code]
                step(self, None if argument is None else argument.reader(self._source))
            raise ValueError(f"it takes more than {_MAX_STEPS:,} instructions")
        except FlodlError:
            raise
        except (LookupError, TypeError, ValueError) as error:
            found = printable(str(error))[1:-1]
            raise CheckpointError(
                f"{self._where}: its pickle program is damaged: {found}; expected a table of tensors "
                f"as torch.save writes it; fetch the file again",
                path=self._where,
                problems=[found],
            ) from None

    def _unsafe(self, problem: str) -> NoReturn:
        raise UnsafeFileError(
            f"{self._where}: its pickle program contains {problem}, which a table of tensors does not need; "
            f"expected only the names {', '.join(sorted(NAMES))}; nothing was executed; "
            f"do not load this file with anything that runs pickles, get safetensors instead",
            path=self._where,
            problems=[problem],
        )

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if (value := self._stack.pop()) is _MARK:
            raise ValueError("it takes a value where there is none")
        return value

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(value)
        return items[::-1]

    def _top(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"it adds to something that is no {kind.__name__}")
        return self._stack[-1]

    def _protocol(self, version: int) -> None:
        if version != _PROTOCOL:
            self._unsafe(f"pickle protocol {version} (torch.save writes {_PROTOCOL})")

    def _tuple(self, count: int) -> None:
        self._push(tuple([self._pop() for _ in range(count)][::-1]))

    def _remember(self, key: int) -> None:
        self._memo[key] = self._pop()
        self._push(self._memo[key])

    def _name(self, module_and_name: str) -> None:
        name = module_and_name.replace(" ", ".", 1)
        if name not in NAMES:
            self._unsafe(f"the name {printable(name)}")
        self._push(NAMES[name])

    def _apply(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not callable(function) or not isinstance(arguments, tuple):
            self._unsafe("a call of something that is no function on the list")
        self._push(function(*arguments))

    def _build(self) -> None:
        # A table of weights carries the versions of its modules as attributes; no tensor depends on them.
        if not isinstance(self._pop(), dict):
            self._unsafe("attributes that are no table")
        self._top(dict)

    def _set_items(self, items: list[Any]) -> None:
        table = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only flat keys: hashing deeply nested tuples can take unlimited time.
            if not isinstance(key, str | int):
                raise ValueError(f"a key that is a {type(key).__name__}")
            table[key] = value

    def _extend(self, items: list[Any]) -> None:
        self._top(list).extend(items)


_STEPS: dict[bytes, Callable[[Machine, Any], None]] = {
    b"\x80": Machine._protocol,
    b"(": lambda machine, _: machine._push(_MARK),
    b"N": lambda machine, _: machine._push(None),
    b"\x88": lambda machine, _: machine._push(True),
    b"\x89": lambda machine, _: machine._push(False),
    **dict.fromkeys((b"J", b"K", b"M", b"\x8a", b"X"), Machine._push),
    b"}": lambda machine, _: machine._push({}),
    b"]": lambda machine, _: machine._push([]),
    b")": lambda machine, _: machine._push(()),
    b"t": lambda machine, _: machine._push(tuple(machine._pop_to_mark())),
    b"\x85": lambda machine, _: machine._tuple(1),
    b"\x86": lambda machine, _: machine._tuple(2),
    b"\x87": lambda machine, _: machine._tuple(3),
    **dict.fromkeys((b"q", b"r"), Machine._remember),
    **dict.fromkeys((b"h", b"j"), lambda machine, key: machine._push(machine._memo[key])),
    b"c": Machine._name,
    b"R": lambda machine, _: machine._apply(),
    b"b": lambda machine, _: machine._build(),
    b"s": lambda machine, _: machine._set_items([machine._pop(), machine._pop()][::-1]),
    b"u": lambda machine, _: machine._set_items(machine._pop_to_mark()),
    b"a": lambda machine, _: machine._extend([machine._pop()]),
    b"e": lambda machine, _: machine._extend(machine._pop_to_mark()),
    b"Q": lambda machine, _: machine._push(machine._storage(machine._pop())),
}


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


def state_table(value: Any, path: str, max_bytes: int) -> dict[str, TensorRecord]:
    """Return the tensors in a program's result, by name.

    Args:
        value: the program's result.
        path: the file, for messages.
        max_bytes: the most that all different tensors may take together, the size of the file.

    Raises:
        CheckpointError: not a table from names to tensors, or more than the file can contain.
    """
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: contains a {type(value).__name__}, expected a table from names to tensors; "
            f"save the state_dict of the model",
            path=path,
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
            f"{path}: is not a table of tensors only:\n{capped(problems)}\n"
            f"expected a state_dict; save it with model.state_dict()",
            path=path,
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


def _table() -> dict[str, Any]:  # not dict, which would accept and hash any arguments
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
    "collections.OrderedDict": _table,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    **{f"torch.{name}": StorageKind(dtype) for name, dtype in _STORAGES.items()},
}
"""Every name that a program may use, with its replacement."""
