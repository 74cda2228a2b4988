"""The data sets that a loader accepts, converted to objects that return whole batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from flodl.data.collate import Where, collate_rows
from flodl.errors import DataError

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
