"""How rows become a batch: fixed shapes are stacked, token rows are padded or packed.

This file decides the shapes and names of the parts. What a row holds is the data set's affair, and which
rows come together is decided in ``batches``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from flodl.data.batch import Batch
from flodl.data.rng import Rng
from flodl.errors import DataError, capped

__all__ = ["CollateTokens", "Transform", "Where", "collate_rows"]


@dataclass(frozen=True)
class Where:
    """The address of a batch: which epoch, which batch, which rows.

    Random augmentation that draws from :meth:`rng` is the same after a resume, in any mode and for any
    prefetch.

    Attributes:
        seed: the loader's seed.
        epoch: counted from 0.
        number: the batch within the epoch, counted from 0, also after a resume.
        indices: row numbers in the data set.
    """

    seed: int
    epoch: int
    number: int
    indices: tuple[int, ...]

    def rng(self, purpose: str, row: int | None = None) -> Rng:
        """Return random numbers for this batch, or for one data set row of this epoch whatever its batch."""
        if row is None:
            return Rng(self.seed, purpose, self.epoch, "batch", self.number)
        return Rng(self.seed, purpose, self.epoch, "row", row)


Transform = Callable[[Batch, Where], Batch]
"""Changes a batch; a function of the batch and its address alone."""


def collate_rows(rows: Sequence[Any], where: Where | None = None) -> dict[str, Any]:
    """Return rows of fixed shape stacked into parts, each ``(batch, ...)``.

    A row is a mapping of names to values, a tuple or list of values (parts are named ``"0"``, ``"1"``,
    ...), or one value. Tensors, arrays, numbers and booleans are stacked; anything else stays a list.

    Raises:
        DataError: rows differ in their parts or shapes; ``problems`` lists each.
    """
    named = [_named(row) for row in rows]
    _same_parts(named, where)
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
                f"{name}: {_row(where, i)} has shape {tuple(tensors[i].shape)}, "
                f"{_row(where, 0)} has {tuple(tensors[0].shape)}"
            )
            continue
        parts[name] = torch.stack(tensors)
    if problems:
        raise DataError(
            "collate: rows of one batch differ in shape:\n"
            + capped(problems)
            + "\nexpected equal shapes; use CollateTokens for rows of tokens",
            problems=problems,
        )
    return parts


@dataclass(frozen=True)
class CollateTokens:
    """Collates rows of tokens of any length, padded to the longest row or packed end to end.

    Parts in ``ragged`` hold one value per token and must agree in length within a row. Padded they become
    ``(batch, seq)``, packed ``(tokens,)``. Beside them stand:

    - both: ``lengths``, int64 ``(batch,)``;
    - padded: ``attention_mask``, int64 ``(batch, seq)``, 1 for tokens (unless the rows bring their own);
    - packed: ``offsets``, int32 ``(batch + 1,)``, where each row starts and the last ends;
      ``position_ids``, int64 ``(tokens,)``, counted from 0 in each row; ``max_length``, a number.

    All other parts are stacked as :func:`collate_rows` does.

    Args:
        layout: ``"padded"`` or ``"packed"``.
        ragged: names of per-token parts; by default every part that is one-dimensional in all rows and as
            long as ``input_ids`` in each of them.
        pad: what fills up a part; 0 where nothing is said, -100 for ``labels``.
        multiple_of: the padded width is rounded up to this.
        tokens: the part that sets a row's length.
    """

    layout: Literal["padded", "packed"] = "padded"
    ragged: tuple[str, ...] | None = None
    pad: Mapping[str, int | float] = field(default_factory=dict)
    multiple_of: int = 1
    tokens: str = "input_ids"

    def __call__(self, rows: Sequence[Mapping[str, Any]], where: Where | None = None) -> dict[str, Any]:
        """Return the parts of one batch.

        Raises:
            DataError: a row has no ``tokens`` part, rows differ in their parts, or per-token parts of a row
                differ in length; ``problems`` lists each.
        """
        named = [_named(row) for row in rows]
        _same_parts(named, where)
        if self.tokens not in named[0]:
            raise DataError(
                f"collate: rows have no part {self.tokens!r}; they have {list(named[0])}; "
                "name the part that holds the tokens with CollateTokens(tokens=...)",
                name=self.tokens,
                names=tuple(named[0]),
            )
        lengths = [len(row[self.tokens]) for row in named]
        ragged = self._ragged_names(named, lengths)
        self._check(named, lengths, ragged, where)
        columns = {n: [torch.as_tensor(row[n]) for row in named] for n in ragged}
        others = [n for n in named[0] if n not in columns]
        parts = self._padded(columns, lengths) if self.layout == "padded" else self._packed(columns, lengths)
        if others:
            parts.update(collate_rows([{n: row[n] for n in others} for row in named], where))
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
        self, named: list[Mapping[str, Any]], lengths: list[int], ragged: list[str], where: Where | None
    ) -> None:
        problems = []
        for i, (row, length) in enumerate(zip(named, lengths, strict=True)):
            for name in ragged:
                if name not in row:
                    problems.append(f"{_row(where, i)} has no part {name!r}")
                elif len(row[name]) != length:
                    problems.append(f"{_row(where, i)}: {name} has {len(row[name])} values for {length} {self.tokens}")
        if problems:
            raise DataError(
                "collate: per-token parts do not fit their tokens:\n"
                + capped(problems)
                + "\nexpected one value per token",
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
        tally = torch.tensor(lengths)
        parts.setdefault("attention_mask", (torch.arange(width) < tally[:, None]).to(torch.int64))
        parts["lengths"] = tally
        return parts

    def _packed(self, columns: dict[str, list[torch.Tensor]], lengths: list[int]) -> dict[str, Any]:
        # a mask of ones says nothing once padding is gone
        parts: dict[str, Any] = {n: torch.cat(c) for n, c in columns.items() if n != "attention_mask"}
        tally = torch.tensor(lengths)
        ends = torch.cumsum(tally, 0)
        parts["offsets"] = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        parts.setdefault("position_ids", torch.cat([torch.arange(n) for n in lengths]))
        parts["lengths"] = tally
        parts["max_length"] = max(lengths)
        return parts


def _named(row: Any) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    if isinstance(row, (tuple, list)):
        return {str(i): value for i, value in enumerate(row)}
    return {"0": row}


def _same_parts(named: list[Mapping[str, Any]], where: Where | None) -> None:
    if not named or not named[0]:
        raise DataError("collate: a sample has no parts; expected at least one value per row")
    first = set(named[0])
    problems = [
        f"{_row(where, i)} has {sorted(row)}, {_row(where, 0)} has {sorted(first)}"
        for i, row in enumerate(named)
        if set(row) != first
    ]
    if problems:
        raise DataError(
            "collate: rows of one batch have different parts:\n"
            + capped(problems)
            + "\nexpected the same parts in every row",
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


def _row(where: Where | None, position: int) -> str:
    return f"row {where.indices[position]}" if where is not None else f"row {position} of the batch"
