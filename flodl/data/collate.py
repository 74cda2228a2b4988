"""The data sets that a loader accepts, and the collation of their rows into batches.

Rows of fixed shape are stacked, token rows are padded or packed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

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


Collate = Callable[[Sequence[Any], Where], Mapping[str, Any]]


@runtime_checkable
class BatchDataset(Protocol):
    """Data set that returns whole batches.

    An attribute ``constant = True`` states that a row never changes. A loader may then keep the data on the device.
    """

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def get_batch(self, indices: Sequence[int]) -> Mapping[str, Any] | Sequence[Any]:
        """Return the rows ``indices`` as batched parts, each ``(len(indices), ...)``."""
        ...


class TensorRows:
    """Rows stored in tensors: row ``i`` is the ``i``-th entry of each tensor.

    Args:
        tensors: name to tensor, each ``(rows, ...)``. The parts of a plain sequence are called ``"0"``, ``"1"``, ...
        finish: function applied to the parts of each batch, for example to convert stored bytes to floats. Its result
            must depend on its argument only.

    Raises:
        DataError: there is no tensor, the numbers of rows differ, or ``finish`` is not callable.
    """

    constant = True

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
        finish: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
    ) -> None:
        if isinstance(tensors, torch.Tensor) or not (finish is None or callable(finish)):
            found = ", ".join(type(value).__name__ for value in (tensors, finish) if value is not None)
            raise DataError(
                f"TensorRows: found {found}, expected one mapping or sequence of tensors and optionally a function. "
                "Pass several tensors as TensorRows((x, y)) or TensorRows({'x': x, 'y': y}).",
                found=found,
            )
        named = tensors if isinstance(tensors, Mapping) else {str(i): t for i, t in enumerate(tensors)}
        self.tensors = dict(named)
        self.finish = finish
        sizes = {name: t.shape[0] if t.dim() else -1 for name, t in self.tensors.items()}
        if len(set(sizes.values())) != 1 or min(sizes.values()) < 0:
            raise DataError(
                f"TensorRows: found tensors with {sizes} rows, expected at least one tensor and equal numbers of rows",
                sizes=sizes,
            )

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def get_batch(self, indices: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows ``indices``, each part ``(len(indices), ...)``."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        parts = {name: t.index_select(0, at.to(t.device)) for name, t in self.tensors.items()}
        return parts if self.finish is None else self.finish(parts)

    def on(self, device: torch.device) -> TensorRows:
        """Return the same rows with their tensors on ``device``."""
        if all(t.device == device for t in self.tensors.values()):
            return self
        return TensorRows({name: t.to(device) for name, t in self.tensors.items()}, self.finish)

    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class RowSource:
    """Rows fetched one by one and collated into batches.

    Args:
        get: returns one row.
        num_rows: number of rows.
        collate: makes a batch of rows.
        get_many: returns several rows in one call, or None.
        lengths: length of each row, or None.
    """

    constant = False

    def __init__(
        self,
        get: Callable[[int], Any],
        num_rows: int,
        collate: Collate | None = None,
        get_many: Callable[[list[int]], Sequence[Any]] | None = None,
        lengths: Any = None,
    ) -> None:
        self._get, self._get_many = get, get_many
        self._num_rows = num_rows
        self.lengths = lengths
        self.collate: Collate = collate_rows if collate is None else _with_address(collate)

    def __len__(self) -> int:
        return self._num_rows

    def get_batch_at(self, batch: Where) -> Mapping[str, Any]:
        """Return the batch of the rows ``batch.indices``."""
        wanted = [int(i) for i in batch.indices]
        rows = [self._get(i) for i in wanted] if self._get_many is None else self._get_many(wanted)
        return self.collate(rows, batch)


def _collate_rows_only(collate: Callable[..., Mapping[str, Any]], rows: Any, batch: Where) -> Mapping[str, Any]:
    return collate(rows)


def _with_address(collate: Callable[..., Mapping[str, Any]]) -> Collate:
    """Return a collate function of rows and their address; torch's loaders call it with the rows only."""
    try:
        inspect.signature(collate).bind(None, None)
    except TypeError:
        return partial(_collate_rows_only, collate)
    except ValueError:  # A function written in C has no signature.
        pass
    return collate


def as_batches(data: Any, collate: Collate | None = None) -> BatchDataset | RowSource:
    """Return ``data`` as an object that returns whole batches.

    Objects with ``get_batch`` are returned unchanged. Other accepted forms: objects with ``get``; a tensor, or a tuple
    or dict of tensors; a torch ``TensorDataset``; any object with ``__getitem__`` and ``__len__``, such as lists of
    dicts, torch data sets and data sets of `datasets`.

    Raises:
        DataError: the data has no length or no rows, or no method that returns a row.
    """
    if isinstance(data, torch.Tensor):
        data = (data,)
    if isinstance(data, torch.utils.data.TensorDataset):
        data = data.tensors
    if collate is None and isinstance(data, tuple) and data and all(isinstance(t, torch.Tensor) for t in data):
        return _not_empty(TensorRows(data))
    if isinstance(data, Mapping) and data and all(isinstance(t, torch.Tensor) for t in data.values()):
        return _not_empty(TensorRows(data))
    # A data frame exports Arrow data, and indexing it returns columns.
    is_frame = hasattr(data, "__arrow_c_stream__") and not hasattr(data, "__getitems__")
    if is_frame or isinstance(data, Mapping):
        raise _refused(data, "a table by columns", "tensors by name, or a list with one dict for each row")
    if not hasattr(data, "__len__") or isinstance(data, torch.utils.data.IterableDataset):
        raise _refused(data, "data without a length", "rows with a length and an index. Put a stream into a list.")
    if hasattr(data, "get_batch"):
        if collate is not None:
            raise _refused(data, "get_batch and collate", "one of them")
        return _not_empty(data)
    get = getattr(data, "get", None) or getattr(data, "__getitem__", None)
    if not callable(get):
        raise _refused(data, "no method that returns rows", "get_batch(indices), get(i) or data[i]")
    lengths = getattr(data, "lengths", None)
    return RowSource(get, len(_not_empty(data)), collate, getattr(data, "__getitems__", None), lengths)


def _refused(data: Any, problem: str, expected: str) -> DataError:
    kind = type(data).__name__
    return DataError(f"data of type {kind}: found {problem}, expected {expected}", kind=kind)


def _not_empty(data: Any) -> Any:
    if len(data) == 0:
        raise DataError(f"data of type {type(data).__name__}: found no rows, expected at least one", rows=0)
    return data
