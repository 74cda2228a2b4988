"""Columns of the input that are named as the answer's: kept under other names, and said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flodl_hf.jobs.write import Pieces, Writer
from flodl_hf.readers.rows import Row

__all__ = ["renamed_writer"]


def renamed_writer(
    make: Callable[..., Writer], taken: Iterable[str], *, keep: tuple[str, ...] | None, lead: str | None,
    names: Sequence[str], types: Mapping[str, Any] | None, first: Sequence[Row],
) -> Writer:  # fmt: skip
    """Return a run's writer, which writes a column of the input that is named as one of the answer's as ``input_NAME``.

    Args:
        make: makes the writer of the columns that it is told: ``keep``, ``lead``, ``names``, ``types`` and ``first``.
        taken: names of the answer's columns.
        keep: see `flodl_hf.jobs.write.writer_for`; ``lead``, ``names``, ``types`` and ``first`` too.
        lead: see ``keep``.
        names: columns of the input.
        types: see ``keep``.
        first: see ``keep``.
    """
    answers = set(taken)
    renamed: dict[str, str] = {}
    for name in names:
        if name in answers:
            new = f"input_{name}"
            while new in answers or new in names:
                new += "_"
            renamed[name] = new
    if not renamed:
        return make(keep=keep, lead=lead, names=names, types=types, first=first)
    told = ", ".join(f"{old!r} is written as {new!r}" for old, new in renamed.items())
    warnings.warn(f"columns of the input: {told}, since the answer has one of that name", stacklevel=2)
    to = {name: renamed.get(name, name) for name in (*names, *(() if types is None else types))}
    inner = make(
        keep=None if keep is None else tuple(to[name] for name in keep),
        lead=None if lead is None else to.get(lead, lead),
        names=[to[name] for name in names],
        types=None if types is None else {to[name]: kind for name, kind in types.items()},
        first=[_renamed(row, renamed) for row in first],
    )
    return _Renaming(inner, renamed)


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    if row.values is None or names.keys().isdisjoint(row.values):
        return row
    return replace(row, values={names.get(name, name): value for name, value in row.values.items()}, text=None)


class _Renaming:
    """Another writer, which gets some of a row's own columns under other names."""

    def __init__(self, inner: Writer, names: Mapping[str, str]) -> None:
        self._inner, self._names = inner, names

    def keep(self, row: Row | None) -> Any:
        return self._inner.keep(None if row is None else _renamed(row, self._names))

    def misfits(self, rows: Sequence[Row]) -> dict[int, str]:
        return self._inner.misfits([_renamed(row, self._names) for row in rows])

    def line(self, kept: Any, answer: tuple[Any, ...] | None, error: str | None) -> Any:
        return self._inner.line(kept, answer, error)

    def lines(self, kept: Sequence[Any], answers: Sequence[tuple[Any, ...]]) -> Iterable[Any]:
        return self._inner.lines(kept, answers)

    def part(self, lines: Iterable[Any]) -> Iterator[bytes]:
        return self._inner.part(lines)

    def joined(self, parts: Pieces) -> Iterator[bytes]:
        return self._inner.joined(parts)
