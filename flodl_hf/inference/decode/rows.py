"""Rows of tokens as flat arrays, the scores of their tokens, and records of answers.

Overlapping windows are put together here: every token of a text once, from the window where it has most context. Rows
are created by `flodl_hf.inference.token_table`, and every other file of this package defines its kind of answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError

T = TypeVar("T")


NAMES = {"entity": "label", "entity_group": "label", "answer": "text", "token_str": "token"}
"""Names of transformers' pipelines for fields of records."""


class Record:
    """A record with fields that can also be read by key, as in transformers' pipelines: ``record["score"]``."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        known = self.keys()
        ours = name if name in known else NAMES.get(name)
        if ours not in known:
            raise KeyError(f"{name!r}; expected one of {', '.join(known)}")
        return getattr(self, ours)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(field.name for field in fields(self))  # type: ignore[arg-type]


@cache
def _draft(kind: type) -> Any:
    names = [(field.name, Any) for field in fields(kind)]
    # Of the same slots, which is what lets an instance become one of ``kind``.
    return make_dataclass(
        f"_{kind.__name__}", names, bases=kind.__bases__, slots=True, eq=False, repr=False, match_args=False
    )


def build_records(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """Return ``[kind(*values) for values in zip(*columns)]``, without the checks in ``__post_init__``.

    Args:
        kind: a dataclass with slots.
        columns: the values of each of its fields, in order.
    """
    found = list(map(_draft(kind), *columns))
    for record in found:
        record.__class__ = kind
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Values of the tokens of many rows, in whatever order they were computed.

    Attributes:
        values: ``(tokens, ...)``.
        starts: where each row's first token is in ``values``, ``(rows,)``.
    """

    values: Tensor
    starts: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Placed:
        """Return the values of rows that are given one by one, in float32 on the CPU."""
        sizes = np.array([len(part) for part in parts], np.int64)
        return cls(torch.cat(list(parts)).detach().float().cpu(), np.cumsum(sizes) - sizes)

    def rows(self, table: TokenTable) -> list[Tensor]:
        """Return the values of each row, ``(tokens of the row, ...)``, in the order of the rows."""
        starts = zip(self.starts.tolist(), table.lengths.tolist(), strict=True)
        return [self.values[start : start + size] for start, size in starts]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Many rows of tokens as flat arrays, concatenated, without an object for each.

    Attributes:
        ids: token ids, ``(tokens,)``.
        types: token types, ``(tokens,)``; None where all are 0.
        lengths: tokens of each row, ``(rows,)``.
        owners: the text of each row, ``(rows,)``.
        counts: content tokens of each row, specials left out, ``(rows,)``.
        first_token: place of each row's first content token in its text's token stream, ``(rows,)``.
        window: index of each row among the rows of its text, ``(rows,)``.
        sequence: 0 or 1 for a token of the first or second text, -1 for a special, ``(tokens,)``.
        offsets: character spans, ``(tokens, 2)``; None if not requested.
        word_ids: word of each token, -1 for none, ``(tokens,)``; None if not requested.
        nulls: column of each row's first special token, 0 where there is none, ``(rows,)``.
    """

    ids: np.ndarray
    types: np.ndarray | None
    lengths: np.ndarray
    owners: np.ndarray
    counts: np.ndarray
    first_token: np.ndarray
    window: np.ndarray
    sequence: np.ndarray
    offsets: np.ndarray | None
    word_ids: np.ndarray | None
    nulls: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def picked(self, tokens: np.ndarray, rows: np.ndarray) -> TokenTable:
        """Return some tokens and some rows, each given by number or by flag, without adapting one to the other."""
        found = []
        for name in self.__slots__:
            values = getattr(self, name)
            of_tokens = name in ("ids", "types", "sequence", "offsets", "word_ids")
            found.append(None if values is None else values[tokens if of_tokens else rows])
        return TokenTable(*found)

    @property
    def starts(self) -> np.ndarray:
        """Where each row begins, ``(rows,)``."""
        return np.cumsum(self.lengths) - self.lengths


def not_finite(task: str) -> PredictError:
    """Return the error for logits that are not finite."""
    return PredictError(
        f"{task}: the logits are not finite; expected numbers; half precision may have overflowed, "
        "so predict in float32 or bfloat16"
    )


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """Return ``values`` as a tensor without gradient; arrays are shared, not copied, where that can be."""
    return values.detach() if isinstance(values, Tensor) else torch.as_tensor(np.ascontiguousarray(values))


def integers(lists: Iterable[Sequence[int | None]]) -> np.ndarray:
    """Return the values of lists end to end as int64, None as -1."""
    found = np.concatenate([np.zeros(0), *(np.array(values, np.float64) for values in lists)])
    found[np.isnan(found)] = -1
    return found.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TokenStream:
    """The content tokens of many rows as parallel arrays.

    Attributes:
        row: index of the row, ``(tokens,)``.
        column: place in the row, specials counted, ``(tokens,)``.
        text: index of the text, ``(tokens,)``.
        position: place in the text's token stream, ``(tokens,)``.
        offsets: character span in the text, ``(tokens, 2)``.
        word_ids: word index, -1 for none, ``(tokens,)``.
    """

    row: np.ndarray
    column: np.ndarray
    text: np.ndarray
    position: np.ndarray
    offsets: np.ndarray
    word_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def chosen(self, tokens: np.ndarray) -> TokenStream:
        """Return some of the tokens, given by number or by flag."""
        return TokenStream(*(getattr(self, name)[tokens] for name in self.__slots__))


def content_of(table: TokenTable, sequence: int = 0) -> TokenStream:
    """Return the tokens of rows that belong to text number ``sequence`` (0 or 1), in the order of the rows.

    A special token written by hand inside a text counts as content, since it covers characters of that text.
    """
    assert table.offsets is not None
    assert table.word_ids is not None
    kept = np.flatnonzero(table.sequence == sequence)
    row = np.repeat(np.arange(len(table)), table.lengths)[kept]
    counts = np.bincount(row, minlength=len(table))
    position = np.arange(len(kept)) + (table.first_token - (np.cumsum(counts) - counts))[row]
    return TokenStream(
        row, kept - table.starts[row], table.owners[row], position, table.offsets[kept], table.word_ids[kept]
    )


def merge_windows(content: TokenStream, owners: np.ndarray) -> TokenStream:
    """Return each token once, by text and place; of several windows the one counts where it has most context.

    Context is the distance in tokens to the nearest edge of the window; at equal distance the earlier window counts.
    Nothing is missing beyond the beginning and the end of a text, but they need no exception: of two windows with a
    token, the one that reaches the text's edge never has the nearer edge on that side.

    Args:
        content: the tokens of all windows, in the order of the rows.
        owners: index of the text of each row, ``(rows,)``.
    """
    if len(owners) == 0 or bool((np.diff(owners) > 0).all()):
        return content
    sizes = np.zeros(int(owners.max()) + 1, np.int64)
    np.maximum.at(sizes, content.text, content.position + 1)
    place = (np.cumsum(sizes) - sizes)[content.text] + content.position
    counts = np.bincount(content.row, minlength=len(owners))
    before = np.arange(len(content)) - (np.cumsum(counts) - counts)[content.row]
    context = np.minimum(before, counts[content.row] - 1 - before)
    # More context ranks higher, then the earlier row.
    rank = context * len(owners) + (len(owners) - 1 - content.row)
    best = np.full(int(sizes.sum()), -1)
    np.maximum.at(best, place, rank)
    tokens = np.flatnonzero(rank == best[place])
    chosen = np.full(len(best), -1)
    chosen[place[tokens]] = tokens
    return content.chosen(chosen[chosen >= 0])
