"""A stack machine for only the instructions needed to save a table of tensors.

Decides which instructions are supported (pickle protocol 2 as ``torch.save`` emits it for tables of
tensors; the format is described in Python's ``pickletools``) and limits the work of a program. The caller
defines the names in the program: nothing is imported, looked up or called here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from flodl.errors import CheckpointError, UnsafeFileError, printable

_MAX_STEPS = 3_000_000  # a table of tensors takes about 25 instructions for each
_MAX_BYTES = 64 << 20
_MAX_NAME = 256
_PROTOCOL = 2


class Source(Protocol):
    """Source of the program's bytes."""

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes, fewer only at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Function:
    """A name that the program may apply to arguments, and what that yields."""

    name: str
    apply: Callable[..., Any]


class _Mark:
    pass


_MARK = _Mark()


class Machine:
    """Run one program and return its result.

    Args:
        source: the program.
        where: the file, for messages.
        names: ``"module.name"`` to its replacement; any other name is refused.
        storage: given the tuple by which the program refers to a storage, returns a record of it.
    """

    def __init__(
        self,
        source: Source,
        where: str,
        names: Mapping[str, Any],
        storage: Callable[[Any], Any],
    ) -> None:
        self._source = source
        self._where = where
        self._names = names
        self._storage = storage
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = _MAX_BYTES

    def run(self) -> Any:
        """Return the object that the program builds.

        Raises:
            UnsafeFileError: an instruction or a name that tables of tensors do not need.
            CheckpointError: the program is truncated, contradicts itself, or needs too much work.
        """
        stack = self._stack
        for _ in range(_MAX_STEPS):
            code = self._take(1)
            if code == b".":
                if len(stack) != 1:
                    self._broken(f"it leaves {len(stack)} values")
                return stack[0]
            step = _STEPS.get(code)
            if step is None:
                self._unsafe(f"instruction 0x{code[0]:02x}")
            step(self)
        return self._broken(f"it takes more than {_MAX_STEPS:,} instructions")

    def _unsafe(self, found: str) -> NoReturn:
        allowed = ", ".join(sorted(self._names))
        raise UnsafeFileError(
            f"{self._where}: its pickle program contains {found}, which a table of tensors does not need; "
            f"expected only the names {allowed}; nothing was executed; "
            f"do not load this file with anything that runs pickles, get safetensors instead",
            path=self._where,
            problems=[found],
        )

    def _broken(self, found: str) -> NoReturn:
        raise CheckpointError(
            f"{self._where}: its pickle program is damaged: {found}; expected a table of tensors "
            f"as torch.save writes it; fetch the file again",
            path=self._where,
            problems=[found],
        )

    def _take(self, count: int) -> bytes:
        self._left -= count
        if self._left < 0:
            self._broken(f"it is longer than {_MAX_BYTES:,} bytes")
        data = self._source.take(count)
        if len(data) != count:
            self._broken("it ends before its last instruction")
        return data

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            self._broken("it takes a value where there is none")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        return self._broken("it closes a group that was never opened")

    def _top(self, kind: type) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            self._broken(f"it adds to something that is no {kind.__name__}")
        return self._stack[-1]

    def _protocol(self) -> None:
        (version,) = self._take(1)
        if version != _PROTOCOL:
            self._unsafe(f"pickle protocol {version} (torch.save writes {_PROTOCOL})")

    def _small_long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def _text(self) -> None:
        (length,) = struct.unpack("<I", self._take(4))
        try:
            self._stack.append(self._take(length).decode("utf-8"))
        except UnicodeDecodeError:
            self._broken("a text is not UTF-8")

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _put(self, key: int) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            self._broken("it remembers a value where there is none")
        self._memo[key] = self._stack[-1]

    def _get(self, key: int) -> None:
        if key not in self._memo:
            self._broken(f"it recalls value {key}, which it never remembered")
        self._stack.append(self._memo[key])

    def _line(self) -> str:
        data = bytearray()
        while (char := self._take(1)) != b"\n":
            data += char
            if len(data) > _MAX_NAME:
                self._unsafe(f"a name of more than {_MAX_NAME} characters")
        return data.decode("utf-8", "backslashreplace")

    def _name(self) -> None:
        name = f"{self._line()}.{self._line()}"
        if name not in self._names:
            self._unsafe(f"the name {printable(name)}")
        self._stack.append(self._names[name])

    def _apply(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            self._unsafe("a call of something that is no function on the list")
        try:
            self._stack.append(function.apply(*arguments))
        except (TypeError, ValueError) as error:
            self._broken(f"{function.name} is given unfit arguments ({printable(str(error))[1:-1]})")

    def _build(self) -> None:
        # A table of weights carries the versions of its modules as attributes; no tensor depends on them.
        if not isinstance(self._pop(), dict):
            self._unsafe("attributes that are no table")
        self._top(dict)

    def _set_items(self, items: list[Any]) -> None:
        table = self._top(dict)
        if len(items) % 2:
            self._broken("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only flat keys: hashing deeply nested tuples can take unlimited time.
            if not isinstance(key, str | int):
                self._broken(f"a key that is a {type(key).__name__}")
            table[key] = value

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _append(self) -> None:
        item = self._pop()
        self._top(list).append(item)

    def _extend(self) -> None:
        items = self._pop_to_mark()
        self._top(list).extend(items)

    def _persistent(self) -> None:
        try:
            self._stack.append(self._storage(self._pop()))
        except (TypeError, ValueError) as error:
            self._broken(f"a storage is described wrongly ({printable(str(error))[1:-1]})")

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]


def _push(make: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    def step(machine: Machine) -> None:
        machine._stack.append(make(machine))

    return step


_STEPS: dict[bytes, Callable[[Machine], None]] = {
    b"\x80": Machine._protocol,
    b"(": _push(lambda _: _MARK),
    b"N": _push(lambda _: None),
    b"\x88": _push(lambda _: True),
    b"\x89": _push(lambda _: False),
    b"J": _push(lambda machine: machine._number("<i")),
    b"K": _push(lambda machine: machine._number("<B")),
    b"M": _push(lambda machine: machine._number("<H")),
    b"\x8a": Machine._small_long,
    b"X": Machine._text,
    b"}": _push(lambda _: {}),
    b"]": _push(lambda _: []),
    b")": _push(lambda _: ()),
    b"t": _push(lambda machine: tuple(machine._pop_to_mark())),
    b"\x85": lambda machine: machine._tuple(1),
    b"\x86": lambda machine: machine._tuple(2),
    b"\x87": lambda machine: machine._tuple(3),
    b"q": lambda machine: machine._put(machine._number("<B")),
    b"r": lambda machine: machine._put(machine._number("<I")),
    b"h": lambda machine: machine._get(machine._number("<B")),
    b"j": lambda machine: machine._get(machine._number("<I")),
    b"c": Machine._name,
    b"R": Machine._apply,
    b"b": Machine._build,
    b"s": Machine._set_item,
    b"u": lambda machine: machine._set_items(machine._pop_to_mark()),
    b"a": Machine._append,
    b"e": Machine._extend,
    b"Q": Machine._persistent,
}
