"""Examples of several texts as rows of tokens, and their collation.

A row is an example: its texts end to end, with the length of each. In a batch the texts are rows of the model, in the
order of the examples, so that padding, packing and shapes are the same as for all other tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.data import Where
from flodl_hf.training.rows import CollateRows, EncodedRows, TakenRows

__all__ = ["CollateTexts", "Laid", "TextRows"]

TABLE = "table"
PARTS = "parts"


@dataclass(frozen=True)
class Laid:
    """Lengths of the texts in a batch: all texts of each row, or some.

    Attributes:
        lengths: tokens of each row.
        widest: tokens of the longest text of each row.
        texts: most texts of a row.
    """

    lengths: NDArray[np.int64]
    widest: NDArray[np.int64]
    texts: int = 1


class TextRows:
    """The rows of several tables, one table after the other.

    Args:
        tables: rows of each, with the lengths of their texts as the value ``parts``, ``(rows, texts)``; 0 for one that
            is missing.
        texts: for each table which text each one is, ``(rows, texts)``: equal numbers are equal texts.
    """

    def __init__(self, tables: Sequence[EncodedRows], texts: Sequence[NDArray[np.int64]]) -> None:
        self.tables, self.texts = list(tables), list(texts)
        self.starts = np.cumsum([0, *(len(table) for table in tables)])
        self.lengths = np.concatenate([table.lengths for table in tables])
        self.owners = np.arange(len(self.lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """Per-token values of each table, by table and name."""
        return {f"{i}.{name}": column for i, table in enumerate(self.tables) for name, column in table.columns.items()}

    @property
    def values(self) -> dict[str, NDArray[Any]]:
        """Values of rows of each table, by table and name."""
        return {f"{i}.{name}": column for i, table in enumerate(self.tables) for name, column in table.values.items()}

    @property
    def width(self) -> int:
        """Most texts of an example."""
        return max(table.values[PARTS].shape[1] for table in self.tables)

    @property
    def is_ragged(self) -> bool:
        """Whether some examples have fewer texts than others."""
        return any(not table.values[PARTS].all() for table in self.tables)

    @property
    def laid(self) -> Laid:
        """Lengths of all texts of each row."""
        return Laid(self.lengths, np.concatenate([table.values[PARTS].max(1) for table in self.tables]), self.width)

    def get(self, index: int) -> dict[str, Any]:
        """Return one row."""
        at = self._table(index)
        return {**self.tables[at].get(index - int(self.starts[at])), TABLE: np.int64(at)}

    def __getitems__(self, indices: Sequence[int]) -> TakenRows:
        """Return several rows of one table."""
        at = self._table(int(indices[0]))
        taken = self.tables[at].__getitems__(np.asarray(indices) - self.starts[at])
        return TakenRows(taken.columns, taken.lengths, {**taken.values, TABLE: np.full(len(taken), at)})

    def _table(self, index: int) -> int:
        return int(np.searchsorted(self.starts, index, side="right")) - 1


@dataclass(frozen=True)
class CollateTexts(CollateRows):
    """Makes a batch of the texts of some examples.

    In addition to the parts of `CollateRows` there are ``examples``, their number, ``width``, the texts of each, and
    ``table``, all numbers; ``labels`` and ``guide``, ``(examples, ...)``, where there are any. If examples have
    different numbers of texts, ``there``, ``(examples, width)``, is true for the texts that an example has.

    Args:
        lengths: add the length of each text, for batches that are processed in parts.
        is_ragged: whether some examples have fewer texts than others; every rank's batches contain ``there`` then.
        further: gives parts that depend on the place of a batch in the run.
    """

    lengths: bool = False
    further: Callable[[Where], Mapping[str, Any]] | None = None
    is_ragged: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        taken = rows if isinstance(rows, TakenRows) else TakenRows.of(rows)
        parts = np.asarray(taken.values[PARTS])
        lengths = parts[parts > 0]
        batch = super().__call__(TakenRows(taken.columns, lengths, {}), where)
        if self.lengths:
            batch["row_lengths"] = lengths.tolist()
        named = {
            name: torch.from_numpy(np.asarray(taken.values[name]))
            for name in ("labels", "guide")
            if name in taken.values
        }
        if self.is_ragged or not parts.all():
            named["there"] = torch.from_numpy(parts > 0)
        table = int(np.asarray(taken.values[TABLE])[0])
        if self.further is not None:
            named |= self.further(where)
        return {**batch, **named, "examples": len(parts), "width": parts.shape[1], TABLE: table}
