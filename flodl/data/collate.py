"""Collation of rows into a batch: rows of fixed shape are stacked, token rows are padded or packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from flodl.data.batch import Batch
from flodl.data.rng import Rng
from flodl.errors import DataError, capped


@dataclass(frozen=True)
class Where:
    """Address of a batch: its epoch, its number and its rows.

    Random augmentation that uses :meth:`rng` is equal after a resume, in any mode and for any prefetch.

    Attributes:
        seed: the loader's seed.
        epoch: counted from 0.
        number: number of the batch within the epoch, counted from 0, also after a resume.
        indices: row numbers in the data set.
    """

    seed: int
    epoch: int
    number: int
    indices: tuple[int, ...]

    def rng(self, purpose: str, row: int | None = None) -> Rng:
        """Return random numbers for this batch, or for one data set row, which do not depend on its batch."""
        if row is None:
            return Rng(self.seed, purpose, self.epoch, "batch", self.number)
        return Rng(self.seed, purpose, self.epoch, "row", row)


Transform = Callable[[Batch, Where], Batch]
"""Function that changes a batch. Its result must depend on the batch and its address only."""


def collate_rows(rows: Sequence[Any], batch: Where | None = None) -> dict[str, Any]:
    """Return rows of fixed shape stacked into parts, each ``(batch, ...)``.

    A row is a mapping of names to values, a tuple or list of values (parts are named ``"0"``, ``"1"``, ...), or one
    value. Tensors, arrays, numbers and booleans are stacked; other values stay a list.

    Raises:
        DataError: rows differ in their parts or shapes; ``problems`` lists each.
    """
    named = [_named(row) for row in rows]
    _same_parts(named, batch)
    parts: dict[str, Any] = {}
    problems: list[str] = []
    for name in named[0]:
        column = [row[name] for row in named]
        values = [_tensor(value) for value in column]
        if any(value is None for value in values):
            parts[name] = column
            continue
        tensors = [value for value in values if value is not None]
        uneven = [i for i, t in enumerate(tensors) if t.shape != tensors[0].shape]
        if uneven:
            i = uneven[0]
            problems.append(
                f"{name}: {_row(batch, i)} has shape {tuple(tensors[i].shape)}, "
                f"{_row(batch, 0)} has {tuple(tensors[0].shape)}"
            )
            continue
        parts[name] = torch.stack(tensors)
    if problems:
        raise DataError(
            f"collate: found rows of different shapes, expected equal shapes:\n{capped(problems)}\n"
            "Use CollateTokens for rows of tokens.",
            problems=problems,
        )
    return parts


@dataclass(frozen=True)
class CollateTokens:
    """Collates rows of tokens of any length, padded to the longest row or packed end to end.

    Parts in ``ragged`` contain one value per token and have equal lengths within a row. Padded parts have the shape
    ``(batch, seq)``, packed parts ``(tokens,)``. The batch also contains:

    - both layouts: ``lengths``, int64 ``(batch,)``;
    - padded: ``attention_mask``, int64 ``(batch, seq)``, 1 for tokens (unless the rows contain their own);
    - packed: ``offsets``, int32 ``(batch + 1,)``, the start of each row and the end of the last;
      ``position_ids``, int64 ``(tokens,)``, counted from 0 in each row; ``max_length``, a number.

    All other parts are stacked by :func:`collate_rows`.

    Args:
        layout: ``"padded"`` or ``"packed"``.
        ragged: names of per-token parts; by default every one-dimensional part with the length of ``tokens`` in all
            rows.
        pad: padding value of each part; the default is -100 for ``labels`` and 0 for others.
        multiple_of: the padded width is rounded up to a multiple of this.
        tokens: the part that determines the length of a row.
    """

    layout: Literal["padded", "packed"] = "padded"
    ragged: tuple[str, ...] | None = None
    pad: Mapping[str, int | float] = field(default_factory=dict)
    multiple_of: int = 1
    tokens: str = "input_ids"

    def __call__(self, rows: Sequence[Mapping[str, Any]], batch: Where | None = None) -> dict[str, Any]:
        """Return the parts of one batch.

        Raises:
            DataError: a row has no ``tokens`` part, rows differ in their parts, or per-token parts of a row differ in
                length; ``problems`` lists each.
        """
        named = [_named(row) for row in rows]
        _same_parts(named, batch)
        if self.tokens not in named[0]:
            raise DataError(
                f"collate: found rows with the parts {list(named[0])}, expected a part {self.tokens!r}. "
                "Name the part that contains the tokens with CollateTokens(tokens=...).",
                name=self.tokens,
                names=tuple(named[0]),
            )
        lengths = [len(row[self.tokens]) for row in named]
        ragged = self._ragged_names(named, lengths)
        self._check(named, lengths, ragged, batch)
        columns = {n: [torch.as_tensor(row[n]) for row in named] for n in ragged}
        others = [n for n in named[0] if n not in columns]
        parts = self._padded(columns, lengths) if self.layout == "padded" else self._packed(columns, lengths)
        if others:
            parts.update(collate_rows([{n: row[n] for n in others} for row in named], batch))
        return parts

    def _ragged_names(self, named: list[Mapping[str, Any]], lengths: list[int]) -> list[str]:
        if self.ragged is not None:
            return list(dict.fromkeys((self.tokens, *self.ragged)))
        return [
            name
            for name in named[0]
            if all(_is_line(row[name]) and len(row[name]) == n for row, n in zip(named, lengths, strict=True))
        ]

    def _check(
        self, named: list[Mapping[str, Any]], lengths: list[int], ragged: list[str], batch: Where | None
    ) -> None:
        problems = []
        for i, (row, length) in enumerate(zip(named, lengths, strict=True)):
            for name in ragged:
                if name not in row:
                    problems.append(f"{_row(batch, i)} has no part {name!r}")
                elif len(row[name]) != length:
                    problems.append(f"{_row(batch, i)}: {name} has {len(row[name])} values for {length} {self.tokens}")
        if problems:
            raise DataError(
                f"collate: found per-token parts of other lengths, expected one value per token:\n{capped(problems)}",
                problems=problems,
            )

    def _padded(self, columns: dict[str, list[torch.Tensor]], lengths: list[int]) -> dict[str, Any]:
        width = -(-max(lengths) // self.multiple_of) * self.multiple_of
        parts: dict[str, Any] = {}
        for name, column in columns.items():
            fill = self.pad.get(name, -100 if name == "labels" else 0)
            block = column[0].new_full((len(column), width), fill)
            for line, values in zip(block, column, strict=True):
                line[: values.numel()] = values
            parts[name] = block
        counts = torch.tensor(lengths)
        parts.setdefault("attention_mask", (torch.arange(width) < counts[:, None]).to(torch.int64))
        parts["lengths"] = counts
        return parts

    def _packed(self, columns: dict[str, list[torch.Tensor]], lengths: list[int]) -> dict[str, Any]:
        # Without padding the mask contains only ones.
        parts: dict[str, Any] = {n: torch.cat(c) for n, c in columns.items() if n != "attention_mask"}
        counts = torch.tensor(lengths)
        ends = torch.cumsum(counts, 0)
        parts["offsets"] = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        parts.setdefault("position_ids", torch.cat([torch.arange(n) for n in lengths]))
        parts["lengths"] = counts
        parts["max_length"] = max(lengths)
        return parts


def _named(row: Any) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    if isinstance(row, (tuple, list)):
        return {str(i): value for i, value in enumerate(row)}
    return {"0": row}


def _same_parts(named: list[Mapping[str, Any]], batch: Where | None) -> None:
    if not named or not named[0]:
        raise DataError("collate: found a row without parts, expected at least one value per row")
    first = set(named[0])
    problems = [
        f"{_row(batch, i)} has {sorted(row)}, {_row(batch, 0)} has {sorted(first)}"
        for i, row in enumerate(named)
        if set(row) != first
    ]
    if problems:
        raise DataError(
            f"collate: found rows with different parts, expected equal parts in every row:\n{capped(problems)}",
            problems=problems,
        )


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return torch.as_tensor(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, (bool, int, float)) for v in value):
        return torch.tensor(value)
    return None


def _is_line(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim == 1
    return isinstance(value, (list, tuple)) and all(isinstance(v, (bool, int, float)) for v in value)


def _row(batch: Where | None, position: int) -> str:
    return f"row {batch.indices[position]}" if batch is not None else f"row {position} of the batch"
