"""One table of names, read both ways.

A row pairs a module prefix of ours with the one Hugging Face files use; ``{i}`` stands for a layer.
Rows name modules, so ``.weight`` and ``.bias`` ride along; a row may name a whole tensor where the
two sides disagree about the leaf. The same rows rename on load, rename back on export, pair the
modules to compare when parity fails, and become a table in the docs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flodl.errors import CheckpointError

__all__ = ["KeyMap", "KeyRow", "Tie", "rows_under", "translated"]


@dataclass(frozen=True)
class KeyRow:
    """``ours`` and ``theirs`` are prefixes (modules) or whole tensor names, with ``{holes}`` for repeated parts.

    ``[0/3]`` behind a module of theirs names a part of its tensors (`flodl_hf.nn.layers.parts`).
    """

    ours: str
    theirs: str


@dataclass(frozen=True)
class Tie:
    """Two of our names that hold one tensor when the configuration ties them.

    ``kept`` is the name that a file must have at least; ``also`` the one that repeats it.
    """

    kept: str
    also: str


def rows_under(prefix: str, rows: Iterable[KeyRow], moved: Mapping[str, str | None] = {}) -> tuple[KeyRow, ...]:
    """Return rows whose names of theirs begin with another prefix.

    Args:
        prefix: stands where each name of theirs has its first part.
        rows: of a family that this one resembles.
        moved: by our name, what a row has in place of the rest of its name; None leaves the row out.
    """
    found = []
    for row in rows:
        rest = moved.get(row.ours, row.theirs.partition(".")[2])
        if rest is not None:
            found.append(KeyRow(row.ours, f"{prefix}.{rest}"))
    return tuple(found)


class KeyMap:
    """The names of one model, ours to theirs and back.

    Args:
        rows: the table; order is graph order, which the parity probe follows.
        indices: what to fill the holes with, one mapping a layer: ``[{"i": 0}, {"i": 1}, ...]``.
        also: rows of further names that files may have for the same modules.

    Raises:
        CheckpointError: two rows give one name on either side, so the table cannot be read backwards.
    """

    def __init__(
        self, rows: Sequence[KeyRow], indices: Sequence[Mapping[str, int]], also: Sequence[KeyRow] = ()
    ) -> None:
        self._also = list(_expand(also, indices))
        self._ours: dict[str, str] = {}
        self._theirs: dict[str, str] = {}
        clashes: list[str] = []
        # Rows with holes are one block a layer, in layer order; that is the order of the graph.
        for ours, theirs in _expand(rows, indices):
            if ours in self._ours or theirs in self._theirs:
                clashes.append(f"{ours} <-> {theirs}")
                continue
            self._ours[ours] = theirs
            self._theirs[theirs] = ours
        if clashes:
            raise CheckpointError(
                "key rows collide, so names could not be read back: " + ", ".join(clashes), clashes=clashes
            )

    @property
    def pairs(self) -> Mapping[str, str]:
        """Every prefix of ours with theirs, in graph order."""
        return self._ours

    def theirs(self, name: str) -> str:
        """Return the Hugging Face name of our tensor.

        Raises:
            CheckpointError: no row covers the name.
        """
        found = translated(name, self._ours)
        if found is None:
            raise CheckpointError(f"no key row covers our tensor {name!r}", name=name)
        return found

    def ours(self, name: str) -> str | None:
        """Return our name of a Hugging Face tensor, or None if no row covers it."""
        return translated(name, self._theirs)

    def also(self, name: str) -> list[str]:
        """Return the further names that files may have for our tensor."""
        return [found for ours, theirs in self._also if (found := translated(name, {ours: theirs})) is not None]

    def names(self, tensors: Iterable[str]) -> dict[str, str]:
        """Return ``{our name: their name}`` for all ``tensors``, proven one to one.

        Raises:
            CheckpointError: a tensor has no row, or two tensors share a name.
        """
        result = {name: self.theirs(name) for name in tensors}
        if len(set(result.values())) != len(result):
            raise CheckpointError("two of our tensors have one name in the file", names=sorted(result))
        return result


def _expand(rows: Sequence[KeyRow], indices: Sequence[Mapping[str, int]]) -> Iterable[tuple[str, str]]:
    position = 0
    while position < len(rows):
        if "{" not in rows[position].ours:
            yield rows[position].ours, rows[position].theirs
            position += 1
            continue
        end = position
        while end < len(rows) and "{" in rows[end].ours:
            end += 1
        for holes in indices:
            for row in rows[position:end]:
                yield row.ours.format(**holes), row.theirs.format(**holes)
        position = end


def translated(name: str, table: Mapping[str, str]) -> str | None:
    """Return a tensor's name on the other side of a table of prefixes; None where no row covers it."""
    whole = table.get(name)
    if whole is not None:
        return whole
    module, _, leaf = name.rpartition(".")
    prefix = table.get(module)
    return None if prefix is None else f"{prefix}.{leaf}"
