"""Convert user input to one form of texts, and tokenise it to flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from flodl_hf.errors import InputTypeError, PredictError, TokenizerError
from flodl_hf.inference.token_table import (
    Frame,
    TokenTable,
    cut_table,
    frame_of,
    framed,
    joined,
    of_encodings,
    of_one,
    table_of,
)  # fmt: skip
from flodl_hf.tokenization.backend import beginnings, replaced
from flodl_hf.tokenization.cuts import Cut, Overflow
from flodl_hf.tokenization.guard import check_batch

if TYPE_CHECKING:
    from flodl_hf.tokenization.backend import Backend, Flat
    from flodl_hf.tokenization.cuts import Row
    from flodl_hf.tokenization.tokenizer import Tokenizer

T = TypeVar("T")

FIRST_PLACE: ContextVar[int] = ContextVar("FIRST_PLACE", default=0)
"""Place in the whole input of the first item that is encoded, for error messages."""


def as_text_list(items: Any, method: str, *, mapping: bool = False) -> Any:
    """Return texts as a list where their number is known, and as an iterable where it is not; a string as it is.

    Lists are also what behaves like one: columns of pandas, polars, pyarrow and datasets, and arrays of numpy.

    Args:
        items: the caller's input.
        method: the name of the calling method.
        mapping: whether a dictionary is one item, as where pairs are.

    Raises:
        PredictError: a table instead of one of its columns, or a set, which has no order.
        InputTypeError: an object without texts.
    """
    if isinstance(items, str):
        return str(items)  # numpy's strings print as such in answers
    if isinstance(items, (list, tuple)) or (mapping and isinstance(items, Mapping)):
        return items
    found = type(items).__name__
    if isinstance(items, Mapping):
        raise PredictError(
            f"{method}: found a {found} with keys {[str(key) for key in items][:20]}; expected a string, or a list of "
            "them; give the texts alone",
            found=list(items),
        )
    if hasattr(items, "columns") or hasattr(items, "column_names"):
        # pyarrow's `columns` are the columns themselves.
        names = list(items.column_names if hasattr(items, "column_names") else items.columns)[:20]
        raise PredictError(
            f"{method}: found a whole table ({found} with columns {[str(n) for n in names]}); expected the texts; give "
            f"one of its columns",
            columns=names,
        )
    if isinstance(items, (set, frozenset)):
        raise PredictError(
            f"{method}: found a {found}, which has no order; expected a list of texts; pass list(...) of it"
        )
    for name in ("tolist", "to_pylist", "to_list"):
        if hasattr(items, name):
            return getattr(items, name)()
    if isinstance(items, (bytes, bytearray)) or not isinstance(items, Iterable):
        raise InputTypeError(f"{method}: found {found}; expected a string, or a list or iterator of them; pass texts")
    return list(items) if hasattr(items, "__len__") and not isinstance(items, Sequence) else items


def prompted(prompt: str, texts: Any, *, lower: bool = False) -> Any:
    """Return texts with a prompt before each, also in lower case; the tokenizer rejects values that are not strings."""
    found = [prompt + text if isinstance(text, str) else text for text in texts] if prompt else texts
    return [text.lower() if isinstance(text, str) else text for text in found] if lower else found


def plain_pairs(items: Sequence[Any]) -> bool:
    """Return whether all items are tuples of two strings; checked without a Python loop."""
    if set(map(type, items)) != {tuple} or set(map(len, items)) != {2}:
        return False
    return {kind for part in zip(*items, strict=True) for kind in set(map(type, part))} == {str}


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


# A text with more characters for each token that fits is read as a long one at once. English has four or five.
_LONG_CHARS = 6

TRUNCATION: ContextVar[Truncation | None] = ContextVar("TRUNCATION", default=None)
"""The `Truncation` of the calls of this thread. A server sets it for one request, and reports all dropped tokens."""


@dataclass(frozen=True)
class Encoded:
    """The windows of many texts.

    Attributes:
        table: the windows as arrays.
        texts: how many texts there are.
        rows: the windows as records, text after text; empty unless requested.
        truncated: the number of texts that were truncated.
        dropped: the number of their tokens that are in no window; incomplete unless `TRUNCATION` is set, because the
            ends of long texts are not read.
        uncut: whether windows were requested: these texts are pairs of two long texts.
    """

    table: TokenTable
    texts: int
    rows: list[Row] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0
    uncut: bool = False

    def by_text(self, values: Sequence[T]) -> list[tuple[list[T], list[Row]]]:
        """Return for each text a value of each of its windows, and their records.

        Args:
            values: a value of each window.
        """
        found: list[tuple[list[T], list[Row]]] = [([], []) for _ in range(self.texts)]
        for owner, value, row in zip(self.table.owners.tolist(), values, self.rows, strict=True):
            found[owner][0].append(value)
            found[owner][1].append(row)
        return found


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
    cut: Cut | None = None,
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
    elif cut == "second":
        raise TokenizerError("cut is 'second', but there are no second texts; pass pairs, or cut='first'")
    stated = TRUNCATION.get()
    own = stated or Truncation()
    limit = max_tokens if own.max_tokens is None else min(own.max_tokens, max_tokens or own.max_tokens)
    snap = snap and not truncate
    overflow: Overflow = "error" if strict else "truncate" if truncate else "windows"
    if records or words or not len(texts) or stride < 0 or (limit is not None and limit < 1):
        groups = tokenizer.encode_rows(
            texts, pairs, max_tokens=limit, stride=stride, cut=cut, words=words, overflow=overflow, snap=snap,
            offsets=offsets,
        )  # fmt: skip
        owners = [text for text, group in enumerate(groups) for _ in group]
        rows = [row for group in groups for row in group]
        return Encoded(table_of(rows, owners, offsets=offsets), len(texts), rows)
    for name, given in (("text", texts), ("second text", pairs)):
        if given is not None and not set(map(type, given)) <= {str}:
            check_batch(given, name, False)
    how: dict[str, Any] = {
        "cut": cut or "first", "overflow": overflow, "stride": stride, "snap": snap,
        "side": own.side or tokenizer.settings.truncation_side, "first_place": FIRST_PLACE.get(),
    }  # fmt: skip
    frame, backend = frame_of(tokenizer, pairs=pairs is not None), tokenizer._backend
    if len(texts) == 1 and pairs is None and not offsets and frame is not None and not any(frame.types):
        ids = backend.encodings(texts, fast=True)[0].ids
        if limit is None or len(ids) <= limit:
            return Encoded(of_one(ids, frame), 1)
    if offsets or frame is None:
        encodings = backend.encodings(texts, pairs, fast=not (offsets or snap))
        table = of_encodings(encodings, frame=frame, offsets=offsets, words=offsets or snap)
        table, lost = cut_table(table, limit, **how)
        table = table if offsets else replace(table, word_ids=None)
    elif limit is not None and snap and overflow == "windows":
        table, lost = _windows(backend, texts, pairs, frame, limit, how)
    elif limit is not None and overflow == "truncate" and how["side"] == "right" and stated is None:
        parts = _first_ids(backend, texts, pairs, limit - frame.size, how["cut"])
        table, lost = cut_table(framed(frame, *parts), limit, **how)
    else:
        parts = backend.flat(texts), None if pairs is None else backend.flat(pairs)
        table, lost = cut_table(framed(frame, *parts), limit, **how)
    return Encoded(table, len(texts), truncated=len(lost), dropped=int(lost.sum()), uncut=not truncate)


def _windows(
    backend: Backend, texts: Sequence[str], pairs: Sequence[str] | None, frame: Frame, limit: int, how: dict[str, Any]
) -> tuple[TokenTable, np.ndarray]:
    """Return the windows of texts, the long texts last, and how many tokens each truncated pair lost.

    Borders between words, where windows begin and end, follow from the ids or are read for long texts only.
    """
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    if pairs is not None:
        sizes += np.fromiter(map(len, pairs), np.int64, len(pairs))
    by_ids = backend.ids_show_words
    short = np.arange(len(texts)) if by_ids else np.flatnonzero(sizes <= _LONG_CHARS * limit)
    chosen = short.tolist()
    second = None if pairs is None else backend.flat(list(map(pairs.__getitem__, chosen)))
    table = framed(frame, backend.flat(list(map(texts.__getitem__, chosen))), second, owners=short)
    fits = table.lengths <= limit
    if len(short) == len(texts) and fits.all():
        return table, np.zeros(0, np.int64)
    if by_ids:
        windows, lost = cut_table(replace(table, word_ids=np.cumsum(~backend.continued[table.ids])), limit, **how)
        return replace(windows, word_ids=None), lost
    long = np.setdiff1d(np.arange(len(texts)), short[fits])
    chosen = long.tolist()
    encodings = backend.encodings([texts[i] for i in chosen], None if pairs is None else [pairs[i] for i in chosen])
    windows, lost = cut_table(of_encodings(encodings, long, frame=frame, words=True), limit, **how)
    return joined(table.picked(np.repeat(fits, table.lengths), fits), replace(windows, word_ids=None)), lost


def _first_ids(
    backend: Backend, texts: Sequence[str], pairs: Sequence[str] | None, space: int, cut: str
) -> tuple[Flat, Flat | None]:
    """Return the ids of texts and of second texts, without most of the tokens that truncation on the right removes.

    Args:
        backend: the tokenizer.
        texts: texts.
        pairs: second texts.
        space: how many tokens fit, without special tokens.
        cut: "first", "second" or "longest": the text that is truncated.
    """

    def read(batch: Sequence[str], name: str) -> Flat:
        if cut in (name, "longest") and backend.splits_at_spaces and space > 0:
            # One token more than fits shows that a text is truncated.
            return beginnings(batch, space + 1, backend.flat)[1]
        return backend.flat(batch)

    first, second = read(texts, "first"), None if pairs is None else read(pairs, "second")
    if pairs is not None and second is not None:
        # Of two long texts the longer one keeps one token more, so both are counted.
        unclear = np.flatnonzero((first[1] > space) & (second[1] > space)).tolist() if cut == "longest" else []
        if unclear and space % 2:
            first = replaced(first, unclear, backend.flat([texts[at] for at in unclear]))
            second = replaced(second, unclear, backend.flat([pairs[at] for at in unclear]))
    return first, second
