"""Some rows of a table, concatenated, with the requested output: the unit that an engine processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flodl_hf.errors import PredictError
from flodl_hf.inference.decode.rows import TokenTable
from flodl_hf.inference.passes import ScoresAt, Work

__all__ = ["Batch", "batch_of", "check_rows"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tokens of some rows.

    Attributes:
        work: what to compute.
        ids: token ids, rows end to end, ``(tokens,)``.
        types: token types, ``(tokens,)``; None where all are 0 or the graph reads none.
        lengths: tokens of each row, ``(rows,)``.
        sizes: results of each row, ``(rows,)``.
        at: which tokens are wanted, ``(results,)``, for `ScoresAt`; None for all.
        count: results of all rows together.
    """

    work: Work
    ids: np.ndarray
    types: np.ndarray | None
    lengths: np.ndarray
    sizes: np.ndarray
    at: np.ndarray | None
    count: int


_FIRST = np.zeros(1, np.int64)
_ONE = np.ones(1, np.int64)


def batch_of(
    table: TokenTable, rows: np.ndarray, work: Work, places: Sequence[Sequence[int]] | None, *, types: bool
) -> Batch:
    """Return the batch of some rows.

    Args:
        table: all rows.
        rows: which of them, ``(rows,)``.
        work: what to compute.
        places: for `ScoresAt`: which tokens of each row of the table.
        types: whether the graph reads token types.
    """
    if len(table) == 1:
        # A single text: the caller waits for it, and sorting or gathering would change nothing.
        lengths, starts, ids = table.lengths, _FIRST, table.ids
        kinds = table.types if types else None
        if places is None and work.per_text:
            return Batch(work, ids, kinds, lengths, _ONE, None, 1)
    else:
        lengths = table.lengths[rows]
        starts = np.cumsum(lengths) - lengths
        tokens = np.arange(int(lengths.sum())) + np.repeat(table.starts[rows] - starts, lengths)
        ids = table.ids[tokens]
        kinds = table.types[tokens] if types and table.types is not None else None
    at = None
    if work.per_text:
        sizes = np.ones(len(rows), np.int64)
    elif places is not None:
        sizes = np.fromiter((len(places[i]) for i in rows), np.int64, len(rows))
    else:
        sizes = lengths
    if isinstance(work, ScoresAt):
        assert places is not None
        at = np.concatenate([start + np.asarray(places[i], np.int64) for start, i in zip(starts, rows, strict=True)])
    return Batch(work, ids, kinds, lengths, sizes, at, int(sizes.sum()))


def check_rows(table: TokenTable) -> None:
    """Raise unless every row has a token.

    Raises:
        PredictError: a row has none.
    """
    if len(table) and not int(table.lengths.min()):
        at = int(np.argmin(table.lengths))
        raise PredictError(f"row {at} has no tokens; expected at least one, such as a special token", row=at)
