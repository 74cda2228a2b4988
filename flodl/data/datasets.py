"""What may be loaded, and how each kind becomes rows or whole batches.

A loader needs one question answered: give me these rows. This file turns the forms in which data comes
(tensors, plain sequences, torch data sets, dict rows, objects that fetch whole batches) into that answer.
It reads no files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from flodl.data.arrow import is_table, rows_of_table
from flodl.data.collate import Where, collate_rows
from flodl.errors import DataError

__all__ = ["BatchDataset", "Dataset", "RowSource", "TensorRows", "as_batches"]

Collate = Callable[[Sequence[Any], Where], Mapping[str, Any]]


@runtime_checkable
class Dataset(Protocol):
    """Rows one by one: ``get(i)`` gives a list of tensors, or a mapping of names to values."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def get(self, index: int) -> Any:
        """Return row ``index``."""
        ...


@runtime_checkable
class BatchDataset(Protocol):
    """Whole batches at once, for data that is cheaper to fetch so.

    An object that also has ``constant = True`` says that a row is always the same, so that a loader may
    keep the whole set on the device.
    """

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def get_batch(self, indices: Sequence[int]) -> Mapping[str, Any] | Sequence[Any]:
        """Return the rows ``indices`` as batched parts, each ``(len(indices), ...)``."""
        ...


class TensorRows:
    """Rows held in tensors: row ``i`` is the ``i``-th entry of each.

    Args:
        tensors: name to tensor, each ``(rows, ...)``; from a plain sequence the parts are called ``"0"``,
            ``"1"``, ...
        finish: applied to the parts of each batch, for example to turn stored bytes into floats. It must be a
            function of its argument alone.

    Raises:
        DataError: there is no tensor, or the numbers of rows differ.
    """

    constant = True

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
        finish: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
    ) -> None:
        named = tensors if isinstance(tensors, Mapping) else {str(i): t for i, t in enumerate(tensors)}
        self.tensors = dict(named)
        self.finish = finish
        sizes = {name: t.shape[0] if t.dim() else -1 for name, t in self.tensors.items()}
        if len(set(sizes.values())) != 1 or min(sizes.values()) < 0:
            raise DataError(
                f"TensorRows: rows per tensor are {sizes}; expected at least one tensor, all with the same first size",
                sizes=sizes,
            )

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def get_batch(self, indices: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows ``indices``, each part ``(len(indices), ...)``."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        return self.finished({name: t.index_select(0, at.to(t.device)) for name, t in self.tensors.items()})

    def finished(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return ``parts`` after the ``finish`` function, if there is one."""
        return parts if self.finish is None else self.finish(parts)

    def on(self, device: torch.device) -> TensorRows:
        """Return the same rows with their tensors on ``device``."""
        if all(t.device == device for t in self.tensors.values()):
            return self
        return TensorRows({name: t.to(device) for name, t in self.tensors.items()}, self.finish)

    def num_bytes(self) -> int:
        """Return the bytes that the tensors take."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class RowSource:
    """Rows fetched one by one and collated into a batch.

    Args:
        get: gives one row.
        num_rows: how many there are.
        collate: makes a batch of rows.
        get_many: gives several rows at once, where the data can.

    Attributes:
        lengths: of each row, where the data says.
    """

    constant = False
    lengths: Any = None

    def __init__(
        self,
        get: Callable[[int], Any],
        num_rows: int,
        collate: Collate | None = None,
        get_many: Callable[[list[int]], Sequence[Any]] | None = None,
    ) -> None:
        self._get = get
        self._num_rows = num_rows
        self._get_many = get_many
        self.collate: Collate = collate_rows if collate is None else _with_address(collate)

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the rows ``indices`` as the data gives them."""
        wanted = [int(i) for i in indices]
        return [self._get(i) for i in wanted] if self._get_many is None else self._get_many(wanted)

    def get_batch_at(self, where: Where) -> Mapping[str, Any]:
        """Return the batch of the rows that ``where`` names."""
        return self.collate(self.rows(where.indices), where)


@dataclass(frozen=True)
class _OfRowsAlone:
    """A collate function as torch's loaders call it, with the rows and nothing else."""

    call: Callable[[Sequence[Any]], Mapping[str, Any]]

    def __call__(self, rows: Sequence[Any], where: Where) -> Mapping[str, Any]:
        return self.call(rows)


def _with_address(collate: Callable[..., Mapping[str, Any]]) -> Collate:
    """Return a collate function that takes rows and their address, of one that may want the rows alone."""
    try:
        inspect.signature(collate).bind(None, None)
    except TypeError:
        return _OfRowsAlone(collate)
    except ValueError:  # of what is written in C nobody knows
        pass
    return collate


def as_batches(data: Any, collate: Collate | None = None) -> BatchDataset | RowSource:
    """Return ``data`` in a form that gives whole batches.

    Taken as they are: objects with ``get_batch``. Adapted: objects with ``get``; a tensor, or a tuple or
    dict of tensors; a torch ``TensorDataset`` or any object with ``__getitem__`` and ``__len__``, which
    includes lists of dicts, torch data sets and those of `datasets`.

    Raises:
        DataError: the data has no length or no rows, or nothing to fetch a row with.
    """
    if isinstance(data, torch.Tensor):
        data = (data,)
    if isinstance(data, torch.utils.data.TensorDataset):
        data = data.tensors
    if is_table(data):
        data = list(rows_of_table(data))
    if collate is None and isinstance(data, tuple) and data and all(isinstance(t, torch.Tensor) for t in data):
        return _filled(TensorRows(data))
    if isinstance(data, Mapping) and data and all(isinstance(t, torch.Tensor) for t in data.values()):
        return _filled(TensorRows(data))
    if not hasattr(data, "__len__") or isinstance(data, torch.utils.data.IterableDataset):
        raise DataError(
            f"data: {type(data).__name__} has no length and numbers; expected rows that can be counted and fetched by "
            "number; put a stream into a list first",
            kind=type(data).__name__,
        )
    if hasattr(data, "get_batch"):
        if collate is not None:
            raise DataError(
                f"data: {type(data).__name__} makes its own batches (get_batch), so collate has nothing to do; "
                "drop one of the two",
                kind=type(data).__name__,
            )
        return _filled(data)
    if isinstance(data, Mapping):
        raise DataError(
            f"data: a dict of columns {list(data)[:8]}; expected tensors in it, or rows (a list of dicts)",
            kind="dict",
        )
    get = getattr(data, "get", None) or getattr(data, "__getitem__", None)
    if callable(get):
        source = RowSource(get, len(_filled(data)), collate, getattr(data, "__getitems__", None))
        source.lengths = getattr(data, "lengths", None)
        return source
    raise DataError(
        f"data: {type(data).__name__} has neither get_batch(indices), get(i) nor data[i]; expected one of them",
        kind=type(data).__name__,
    )


def _filled(data: Any) -> Any:
    if len(data) == 0:
        raise DataError(f"data: {type(data).__name__} is empty; expected at least one row", rows=0)
    return data
