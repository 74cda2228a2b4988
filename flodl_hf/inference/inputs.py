"""Convert user input to one form of texts, and tokenise it to flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flodl_hf.errors import PredictError, TokenizerError
from flodl_hf.inference.decode.rows import TokenTable
from flodl_hf.inference.items import FIRST_PLACE, plain_pairs
from flodl_hf.inference.token_table import Flat, Frame, frame_of, framed, joined, of_encodings, of_one, table_of
from flodl_hf.tokenization.backend import row_of
from flodl_hf.tokenization.batch import check_batch
from flodl_hf.tokenization.rows import cut_each, plan_windows

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Row, Tokenizer

__all__ = ["TRUNCATION", "Encoded", "Text", "Truncation", "encode", "split_pairs"]

Text = str | tuple[str, str] | Mapping[str, str]
"""A text; or a pair ``(a, b)``, also as ``{"text": a, "text_pair": b}``."""


@dataclass(frozen=True)
class Truncation:
    """How texts are shortened where a call does not specify it.

    Attributes:
        max_tokens: the most tokens of a row, if that is below the limit of the model.
        side: the end of a text that is removed; None as the tokenizer's folder specifies.
    """

    max_tokens: int | None = None
    side: Literal["left", "right"] | None = None


_NONE = np.zeros(0, np.int64)

TRUNCATION: ContextVar[Truncation | None] = ContextVar("TRUNCATION", default=None)
"""The `Truncation` of the calls of this thread. A server sets it for one request."""


@dataclass(frozen=True)
class Encoded:
    """The windows of many texts.

    Attributes:
        table: the windows as arrays.
        texts: how many texts there are.
        rows: the windows as records, text after text; empty unless requested.
        truncated: the number of texts that were truncated.
        dropped: the number of their tokens that are in no window.
        uncut: whether windows were requested: these texts are pairs of two long texts.
    """

    table: TokenTable
    texts: int
    rows: list[Row] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0
    uncut: bool = False

    @property
    def owners(self) -> np.ndarray:
        """The text of each window, ``(rows,)``."""
        return self.table.owners

    @property
    def counts(self) -> np.ndarray:
        """Content tokens of each window, ``(rows,)``."""
        return self.table.counts


def split_pairs(items: Sequence[Any], task: str) -> tuple[Sequence[str], list[str] | None]:
    """Return first and second texts; the second is None when no item is a pair.

    Raises:
        PredictError: an item is neither a text nor a pair, or texts and pairs are mixed.
    """
    if set(map(type, items)) <= {str}:
        return items, None
    if plain_pairs(items):
        first, second = zip(*items, strict=True)
        return first, list(second)
    firsts: list[str] = []
    seconds: list[str | None] = []
    for place, item in enumerate(items, FIRST_PLACE.get()):
        if isinstance(item, Mapping):
            if "text" not in item:
                raise PredictError(
                    f"{task}: item {place} has the keys {[str(key) for key in item][:20]}; expected 'text', and "
                    "'text_pair' for a pair; rename the key, or give the text alone",
                    place=place,
                )
            item = (item.get("text"), item.get("text_pair")) if "text_pair" in item else item.get("text")
        pair: Any = (item, None) if isinstance(item, str) else item
        valid = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
        if not valid or not isinstance(pair[1], (str, type(None))):
            missing = " (missing; drop or fill missing values first)" if item is None or item != item else ""
            raise PredictError(
                f"{task}: item {place} is {type(item).__name__}{missing}; expected a string, a pair (a, b), or "
                '{"text": a, "text_pair": b}; correct or drop the item',
                place=place,
            )
        firsts.append(pair[0])
        seconds.append(pair[1])
    if all(second is None for second in seconds):
        return firsts, None
    alone = [place for place, second in enumerate(seconds, FIRST_PLACE.get()) if second is None]
    if alone:
        raise PredictError(
            f"{task}: items {alone[:8]} are single texts among pairs; expected one kind in a call",
            places=alone,
        )
    return firsts, [second or "" for second in seconds]


def encode(
    tokenizer: Tokenizer,
    texts: Sequence[Any],
    pairs: Sequence[Any] | None = None,
    *,
    max_tokens: int | None,
    stride: int = 0,
    strict: bool = False,
    words: bool = False,
    offsets: bool = False,
    cut: str | None = None,
    snap: bool = True,
    truncate: bool = False,
    records: bool = False,
) -> Encoded:
    """Return the windows of all texts.

    Args:
        tokenizer: the tokenizer.
        texts: texts, or lists of words with ``words``.
        pairs: second texts. The longer text of a pair is cut into windows; if both are long, or with ``truncate``,
            both are truncated, the longer one first, as transformers does.
        max_tokens: most tokens of a window, specials included.
        stride: tokens that neighbouring windows share.
        strict: raise on a text that needs several windows.
        words: the texts are split into words already.
        offsets: record the position of each token in its text.
        cut: "first" or "second": the text of each pair that is cut; None for the longer one.
        snap: let windows begin and end between words.
        truncate: keep what fits into one window, up to the last token.
        records: also return the windows as records, which compatible outputs read.
    """

    if pairs is not None:
        cut = cut or ("longest" if truncate else "longer")
    own = TRUNCATION.get() or Truncation()
    max_tokens = min((most for most in (max_tokens, own.max_tokens) if most is not None), default=None)
    given: dict[str, Any] = {
        "max_tokens": max_tokens, "stride": stride, "cut": cut, "snap": snap and not truncate,
        "overflow": "error" if strict else "truncate" if truncate else "windows",
        "side": own.side or tokenizer._cut_side,
    }  # fmt: skip
    if not records and not words and len(texts) and stride >= 0 and (max_tokens is None or max_tokens > 0):
        check_batch(texts, "text", False)
        if pairs is not None:
            check_batch(pairs, "second text", False)
        frame = frame_of(tokenizer, pairs=pairs is not None)
        if offsets or frame is None:
            found, over = _of_encodings(tokenizer, texts, pairs, frame, offsets, given)
        else:
            found, over = _of_ids(tokenizer, texts, pairs, frame, given)
        return Encoded(found, len(texts), [], len(over), int(over.sum()), uncut=not truncate)
    del given["side"]
    groups = tokenizer.encode_rows(texts, pairs, words=words, offsets=offsets, **given)
    owners = [text for text, group in enumerate(groups) for _ in group]
    rows = [row for group in groups for row in group]
    return Encoded(table_of(rows, owners, offsets=offsets), len(texts), rows)


def _of_encodings(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    frame: Frame | None,
    offsets: bool,
    given: dict[str, Any],
) -> tuple[TokenTable, np.ndarray]:
    """Return the windows of texts, long texts last, and how many tokens each truncated text lost."""
    encodings = tokenizer._backend.encodings(texts, pairs, fast=not offsets)
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    long = _too_long(lengths, given["max_tokens"])
    if not len(long):
        return of_encodings(encodings, frame=frame, offsets=offsets), _NONE
    rows = [row_of(encodings[i]) for i in long.tolist()] if offsets else None
    rest, over = _windows(tokenizer, texts, pairs, long, offsets, given, rows)
    short = np.delete(np.arange(len(encodings)), long)
    if not len(short):
        return rest, over
    first = of_encodings([encodings[i] for i in short.tolist()], short, frame=frame, offsets=offsets)
    return joined(first, rest), over


def _of_ids(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None, frame: Frame, given: dict[str, Any]
) -> tuple[TokenTable, np.ndarray]:
    """Return what `_of_encodings` returns, without an object for each text."""
    backend, limit = tokenizer._backend, given["max_tokens"]
    if len(texts) == 1 and pairs is None and not any(frame.types):
        ids = backend.encodings(texts, fast=True)[0].ids
        if limit is None or len(ids) <= limit:
            return of_one(ids, frame), _NONE
    first, second = backend.flat(texts), None if pairs is None else backend.flat(pairs)
    lengths = first[1] + (0 if second is None else second[1]) + frame.size
    long = _too_long(lengths, limit)
    if not len(long):
        return framed(frame, first, second), _NONE
    short = np.delete(np.arange(len(texts)), long)
    if second is None and (cut := _cut_ids(tokenizer, texts, long, frame, given)) is not None:
        rest, owners, starts, numbers = cut
        ids, counts = _but(first, long)
        zeros = np.zeros(len(short), np.int64)
        table = framed(
            frame,
            (np.concatenate([ids, rest[0]]), np.concatenate([counts, rest[1]])),
            owners=np.concatenate([short, owners]),
            first_token=np.concatenate([zeros, starts]),
            window=np.concatenate([zeros, numbers]),
        )
        return table, lengths[long] - limit if given["overflow"] == "truncate" else _NONE
    windows, over = _windows(tokenizer, texts, pairs, long, False, given)
    if not len(short):
        return windows, over
    second = None if second is None else _but(second, long)
    return joined(framed(frame, _but(first, long), second, owners=short), windows), over


def _too_long(lengths: np.ndarray, limit: int | None) -> np.ndarray:
    return np.flatnonzero(lengths > limit) if limit is not None else np.zeros(0, np.int64)


def _but(flat: Flat, texts: np.ndarray) -> Flat:
    """Return the ids of all texts but some."""
    kept = np.ones(len(flat[1]), bool)
    kept[texts] = False
    return flat[0][np.repeat(kept, flat[1])], flat[1][kept]


def _windows(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    places: np.ndarray,
    offsets: bool,
    given: dict[str, Any],
    rows: list[Row] | None = None,
) -> tuple[TokenTable, np.ndarray]:
    """Return the windows of texts that are too long for one, and the numbers of dropped tokens of truncated ones.

    ``rows`` are those texts if they are tokenized already.
    """
    chosen = places.tolist()
    if rows is None:
        seconds = None if pairs is None else [pairs[i] for i in chosen]
        # Borders of words are looked for.
        rows = tokenizer._backend.rows([texts[i] for i in chosen], seconds, fast=not given["snap"])
    how = {**given, "cut": given["cut"] or ("first" if pairs is None else "second")}
    if how["cut"] == "second" and pairs is None:
        raise TokenizerError("cut is 'second', but there are no second texts; pass pairs, or cut='first'")
    numbers = [FIRST_PLACE.get() + place for place in chosen]
    groups = cut_each(rows, how.pop("max_tokens"), places=numbers, **how)
    owners = [place for place, group in zip(chosen, groups, strict=True) for _ in group]
    dropped = [len(row) - len(cut[0]) for row, cut in zip(rows, groups, strict=True) if cut[0].truncated]
    return table_of([row for group in groups for row in group], owners, offsets=offsets), np.array(dropped, np.int64)


def _cut_ids(
    tokenizer: Tokenizer, texts: Sequence[str], places: np.ndarray, frame: Frame, given: dict[str, Any]
) -> tuple[Flat, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return the windows of single texts: their ids, owners, first tokens and numbers; None if rows are required."""
    snap, stride, room = given["snap"], given["stride"], given["max_tokens"] - frame.size
    if given["overflow"] == "error" or given["cut"] == "second" or room < 1:
        return None
    if not snap and (stride >= room or given["side"] == "left"):
        return None
    chosen = places.tolist()
    parts: list[np.ndarray] = []
    told: list[tuple[int, int, int]] = []
    for place, found in zip(
        chosen, tokenizer._backend.encodings([texts[i] for i in chosen], special=False, fast=not snap), strict=True
    ):
        ids = np.array(found.ids, np.int32)
        windows = plan_windows(len(ids), room, stride, found.word_ids if snap else None)
        for number, (start, stop) in enumerate(windows[:1] if given["overflow"] == "truncate" else windows):
            parts.append(ids[start:stop])
            told.append((place, start, number))
    counts = np.fromiter(map(len, parts), np.int64, len(parts))
    owners, starts, numbers = np.array(told, np.int64).T
    return (np.concatenate(parts), counts), owners, starts, numbers
