"""Rows of a tokenised text for the decoders, and their alignment with logits of any layout.

This file decides how the rows of a batch become flat arrays: which positions are content, their positions in the
text, and which row of the logits belongs to each. Rows are created by the tokenizers package;
``windows.py`` merges several views of one token, and every other file defines its kind of answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar

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


class _Pairs(dict[int, tuple[int, int]]):
    """Pairs by a number that encodes both; created on demand."""

    def __missing__(self, key: int) -> tuple[int, int]:
        first, second = divmod(key, _APART)
        found = self[key] = (first, second)
        return found


_APART = 1 << 32
# Words and tokens of texts of ordinary length; entries beyond that are evicted periodically.
_MOST_PAIRS = 1 << 16
_PAIRS = threading.local()


def pairs_of(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int]]:
    """Return ``list(zip(first, second))`` of integers, equal pairs being one object.

    Spans of words repeat from text to text, and each new tuple is one more object for the collector of cycles to
    traverse: with a large program's heap, that is most of the cost of an answer.

    Args:
        first: integers, ``(n,)``.
        second: integers from 0 to 2**32, ``(n,)``.
    """
    known: _Pairs = _PAIRS.__dict__.setdefault("known", _Pairs())
    if len(known) > _MOST_PAIRS:
        known.clear()
    return list(map(known.__getitem__, (first * _APART + second).tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Values of the tokens of many rows, in whatever order they were computed.

    Attributes:
        values: ``(tokens, ...)``.
        starts: where each row's first token is in ``values``, ``(rows,)``.
    """

    values: Tensor
    starts: np.ndarray

    def rows(self, table: TokenTable) -> list[Tensor]:
        """Return the values of each row, ``(tokens of the row, ...)``, in the order of the rows."""
        return self.pieces(table.lengths.tolist())

    def pieces(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return ``sizes[i]`` values of each row, in the order of the rows."""
        return [self.values[a : a + size] for a, size in zip(self.starts.tolist(), sizes, strict=True)]


Logits: TypeAlias = Tensor | np.ndarray | Sequence[Tensor] | Sequence[np.ndarray] | Placed
"""Padded ``(rows, seq, ...)``, packed ``(tokens, ...)``, one array ``(seq, ...)`` per row, or with given positions."""


class TokenRow(Protocol):
    """One model input: the tokens of one window of one text or pair, specials included, padding excluded."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids."""
        ...

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """Character span of each token in its own original text; ``(0, 0)`` for added specials."""
        ...

    @property
    def word_ids(self) -> Sequence[int | None]:
        """Index of the word each token belongs to, counted over the whole text and not over the window."""
        ...

    @property
    def sequence_ids(self) -> Sequence[int | None]:
        """0 for the first text, 1 for the second, ``None`` for added specials."""
        ...

    @property
    def special(self) -> Sequence[bool]:
        """True for tokens that the tokenizer added."""
        ...

    @property
    def first_token(self) -> int:
        """Position of the window's first content token in the whole text's token stream."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The content tokens of many rows as parallel arrays, in row order.

    Attributes:
        row: index of the row, ``(tokens,)``.
        column: place in the row, specials counted, ``(tokens,)``.
        position: place in the whole text's token stream, ``(tokens,)``.
        offsets: character span in the original text, ``(tokens, 2)``.
        word_ids: word index, -1 where the tokenizer gave none, ``(tokens,)``.
        counts: number of content tokens of each row, ``(rows,)``.
    """

    row: np.ndarray
    column: np.ndarray
    position: np.ndarray
    offsets: np.ndarray
    word_ids: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Many rows of tokens as flat arrays, concatenated: the data of `TokenRow`, without an object for each.

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

    @property
    def starts(self) -> np.ndarray:
        """Where each row begins, ``(rows,)``."""
        return np.cumsum(self.lengths) - self.lengths


Rows: TypeAlias = Sequence[TokenRow] | TokenTable


def null_columns(rows: Rows) -> np.ndarray:
    """Return the position of each row's first special token, where models are trained to predict "no answer"."""
    if isinstance(rows, TokenTable):
        return rows.nulls
    return np.fromiter((next((i for i, s in enumerate(row.special) if s), 0) for row in rows), np.int64, len(rows))


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """Return ``values`` as a tensor without gradient; arrays are shared, not copied, where that can be."""
    return values.detach() if isinstance(values, Tensor) else torch.as_tensor(np.ascontiguousarray(values))


def integers(lists: Iterable[Sequence[int | None]]) -> np.ndarray:
    """Return the values of lists end to end as int64, None as -1."""
    found = np.concatenate([np.zeros(0), *(np.array(values, np.float64) for values in lists)])
    found[np.isnan(found)] = -1
    return found.astype(np.int64)


def _lengths(rows: Rows) -> np.ndarray:
    if isinstance(rows, TokenTable):
        return rows.lengths
    return np.fromiter((len(row.ids) for row in rows), np.int64, len(rows))


def content_of(rows: Rows, sequence: int = 0) -> Content:
    """Return the tokens of ``rows`` that belong to text number ``sequence`` (0 or 1), as arrays.

    A special token written by hand inside a text counts as content, since it covers characters of that text.

    Raises:
        PredictError: a row came without offsets.
    """
    lengths = _lengths(rows)
    if isinstance(rows, TokenTable):
        offsets, word_ids = rows.offsets, rows.word_ids
        sequences, first = rows.sequence, rows.first_token
    else:
        total, offsets, word_ids = int(lengths.sum()), None, None
        if all(len(row.offsets) == len(row.ids) for row in rows):
            pairs = chain.from_iterable(chain.from_iterable(row.offsets for row in rows))
            offsets = np.fromiter(pairs, np.int64, 2 * total).reshape(total, 2)
            word_ids = integers(row.word_ids for row in rows)
        sequences = integers(row.sequence_ids for row in rows)
        first = np.fromiter((row.first_token for row in rows), np.int64, len(rows))
    if offsets is None or word_ids is None:
        raise PredictError("decoding: rows without offsets; expected one span per token; encode the texts with offsets")
    kept = np.flatnonzero(sequences == sequence)
    row_of = np.repeat(np.arange(len(rows)), lengths)[kept]
    counts = np.bincount(row_of, minlength=len(rows)).astype(np.int64)
    rank = np.arange(len(kept)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Content(
        row=row_of,
        column=kept - (np.cumsum(lengths) - lengths)[row_of],
        position=first[row_of] + rank,
        offsets=offsets[kept],
        word_ids=word_ids[kept],
        counts=counts,
    )


def flat_logits(logits: Logits, rows: Rows, trailing: int) -> tuple[Tensor, np.ndarray]:
    """Return the logits as ``(positions, ...)`` and the place of each row's first token in them.

    Args:
        logits: padded on the right ``(rows, seq, ...)``, packed in row order ``(tokens, ...)``, or one array
            per row.
        rows: the model inputs, in the order of the logits.
        trailing: dimensions after the token dimension: 1 for ``(..., labels)``, 0 for span logits.

    Raises:
        PredictError: the logits do not have the shape that the rows require.
    """
    if isinstance(logits, Placed):
        return logits.values, logits.starts
    lengths = _lengths(rows)
    if not isinstance(logits, (Tensor, np.ndarray)):
        parts = [as_tensor(part) for part in logits]
        sizes = np.fromiter((part.shape[0] for part in parts), np.int64, len(parts))
        if len(parts) != len(rows) or bool((sizes < lengths).any()):
            raise _misfit([tuple(part.shape) for part in parts], lengths)
        flat = torch.cat(parts) if parts else torch.zeros((0,) * (1 + trailing), dtype=torch.float32)
        return flat, np.cumsum(sizes) - sizes
    tensor = as_tensor(logits)
    if tensor.ndim == 2 + trailing:
        batch, width = int(tensor.shape[0]), int(tensor.shape[1])
        if batch != len(rows) or (len(rows) and int(lengths.max()) > width):
            raise _misfit(tuple(tensor.shape), lengths)
        return tensor.reshape(batch * width, *tensor.shape[2:]), np.arange(batch, dtype=np.int64) * width
    if tensor.ndim == 1 + trailing and int(tensor.shape[0]) == int(lengths.sum()):
        return tensor, np.cumsum(lengths) - lengths
    raise _misfit(tuple(tensor.shape), lengths)


def _misfit(found: object, lengths: np.ndarray) -> PredictError:
    longest = int(lengths.max()) if len(lengths) else 0
    return PredictError(
        f"decoding: logits of shape {found} do not fit {len(lengths)} rows of up to {longest} tokens; "
        f"expected ({len(lengths)}, at least {longest}, ...) padded, ({int(lengths.sum())}, ...) packed, "
        "or one array per row; pass the logits together with the rows they were computed from",
        found=found,
        lengths=lengths.tolist(),
    )


def owners_of(owners: Sequence[int] | np.ndarray | None, rows: int, texts: int) -> np.ndarray:
    """Return for each row the index of its text; without ``owners`` row ``i`` is text ``i``, or all are the
    only text.

    Raises:
        PredictError: there is not one valid owner per row.
    """
    if owners is None:
        owners = [0] * rows if texts == 1 else range(rows)
    found = owners if isinstance(owners, np.ndarray) else np.asarray(list(owners), np.int64)
    if len(found) != rows or bool(((found < 0) | (found >= texts)).any()) or (rows and texts == 0):
        raise PredictError(
            f"decoding: {rows} rows of {texts} texts came with owners {found.tolist()[:20]}; "
            f"expected one index below {texts} per row; pass owners=[text index of each row]",
            owners=found.tolist(),
        )
    return found
