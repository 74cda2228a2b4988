"""What users pass as texts, brought to one shape, and the rows of tokens made of it, as flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from flodl_hf.decode.rows import TokenTable
from flodl_hf.errors import PredictError
from flodl_hf.runtime.items import plain_pairs

if TYPE_CHECKING:
    from flodl_hf.tokenizer import Row, Tokenizer

__all__ = ["Encoded", "Text", "encode", "split_pairs", "table_of"]

Text = str | tuple[str, str] | Mapping[str, str]
"""A text; or a pair ``(a, b)``, also as ``{"text": a, "text_pair": b}``."""


@dataclass(frozen=True)
class Encoded:
    """The windows of many texts.

    Attributes:
        table: the windows as arrays.
        texts: how many texts there are.
        rows: the windows as records, text after text; empty unless they were asked for.
    """

    table: TokenTable
    texts: int
    rows: list[Row] = field(default_factory=list)

    @property
    def owners(self) -> np.ndarray:
        """The text of each window, ``(rows,)``."""
        return self.table.owners

    @property
    def counts(self) -> np.ndarray:
        """Content tokens of each window, ``(rows,)``."""
        return self.table.counts

    def first_windows(self) -> Encoded:
        """Return the first window of each text alone."""
        keep = self.table.window == 0
        return self if bool(keep.all()) else Encoded(chosen_rows(self.table, keep), self.texts)


def chosen_rows(table: TokenTable, keep: np.ndarray) -> TokenTable:
    """Return some rows of a table.

    Args:
        table: the rows.
        keep: True for those that stay, ``(rows,)``.
    """
    tokens = np.repeat(keep, table.lengths)

    def of_tokens(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[tokens]

    return TokenTable(
        table.ids[tokens], of_tokens(table.types), table.lengths[keep], table.owners[keep], table.counts[keep],
        table.first_token[keep], table.window[keep], table.sequence[tokens], of_tokens(table.offsets),
        of_tokens(table.word_ids), table.nulls[keep],
    )  # fmt: skip


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
    for place, item in enumerate(items):
        if isinstance(item, Mapping):
            item = (item.get("text"), item.get("text_pair")) if "text_pair" in item else item.get("text")
        pair: Any = (item, None) if isinstance(item, str) else item
        valid = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
        if not valid or not isinstance(pair[1], (str, type(None))):
            missing = " (missing; drop or fill missing values first)" if item is None or item != item else ""
            raise PredictError(
                f"{task}: item {place} is {type(item).__name__}{missing}; expected a string, a pair (a, b), or "
                '{"text": a, "text_pair": b}',
                place=place,
            )
        firsts.append(pair[0])
        seconds.append(pair[1])
    if all(second is None for second in seconds):
        return firsts, None
    alone = [place for place, second in enumerate(seconds) if second is None]
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
    records: bool = False,
) -> Encoded:
    """Return the windows of all texts.

    Args:
        tokenizer: whose tokens.
        texts: texts, or lists of words with ``words``.
        pairs: second texts, which are the ones that are cut into windows unless ``cut`` says otherwise.
        max_tokens: most tokens of a window, specials included.
        stride: tokens that neighbouring windows share.
        strict: raise on a text that needs several windows.
        words: the texts are split into words already.
        offsets: note where each token stands in its text.
        cut: "first" or "second": which text of a pair is cut.
        snap: let windows begin and end between words.
        records: also return the windows as records, which compatible outputs read.
    """

    def slowly(texts: Sequence[Any], pairs: Sequence[Any] | None) -> list[list[Row]]:
        return tokenizer.encode_rows(
            texts, pairs, max_tokens=max_tokens, stride=stride, words=words, offsets=offsets,
            overflow="error" if strict else "windows", cut=cut,  # type: ignore[arg-type]
            snap=snap,
        )  # fmt: skip

    if not records and not words and len(texts) and stride >= 0:
        found = _quickly(tokenizer, texts, pairs, max_tokens, offsets, strict, slowly)
        if found is not None:
            return Encoded(found, len(texts))
    groups = slowly(texts, pairs)
    rows = [row for group in groups for row in group]
    owners = [text for text, group in enumerate(groups) for _ in group]
    return Encoded(table_of(rows, owners, offsets=offsets), len(texts), rows)


@dataclass(frozen=True)
class _Template:
    """What a tokenizer puts around a single text or a pair: so many specials before, between and after.

    Attributes:
        lead: specials before the first text.
        between: specials after the first text and before the second.
        trail: specials at the end.
        types: token type of the lead, first text, specials between, second text and trail.
    """

    lead: int
    between: int
    trail: int
    types: tuple[int, ...]


_ZERO = np.zeros(1, np.int64)
_TEMPLATES: WeakKeyDictionary[Any, dict[bool, _Template | None]] = WeakKeyDictionary()


def _template(tokenizer: Tokenizer, *, pairs: bool = False) -> _Template | None:
    """Return the frame around a single text or a pair; None where it is not one, and each row must be asked."""
    known = _TEMPLATES.setdefault(tokenizer, {})
    if pairs not in known:
        known[pairs] = _pair_frame(tokenizer) if pairs else _frame(tokenizer)
    return known[pairs]


def _frame(tokenizer: Tokenizer) -> _Template | None:
    probe = tokenizer._backend.encodings(["a a a"])[0]
    mask = list(probe.special_tokens_mask)
    inside = [place for place, special in enumerate(mask) if not special]
    plain = bool(inside) and inside == list(range(inside[0], inside[-1] + 1)) and not any(probe.type_ids)
    if not plain or len(tokenizer._backend.encodings(["a a a"], special=False)[0]) != len(inside):
        return None
    return _Template(inside[0], 0, len(mask) - 1 - inside[-1], (0,) * 5)


def _pair_frame(tokenizer: Tokenizer) -> _Template | None:
    found: set[_Template] = set()
    # Texts of several lengths, so that what depends on them shows.
    for first, second in (("a a a", "a a"), ("a", "a a a a")):
        probe = tokenizer._backend.encodings([first], [second])[0]
        texts: list[int | None] = probe.sequence_ids
        kinds = [(text, bool(special)) for text, special in zip(texts, probe.special_tokens_mask, strict=True)]
        runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
        if [kind for kind, _ in runs] != [(None, True), (0, False), (None, True), (1, False), (None, True)]:
            return None
        sizes = [size for _, size in runs]
        ends = [sum(sizes[: i + 1]) for i in range(5)]
        types = [set(probe.type_ids[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        if any(len(kinds) != 1 for kinds in types):
            return None
        found.add(_Template(sizes[0], sizes[2], sizes[4], tuple(next(iter(kinds)) for kinds in types)))
    return found.pop() if len(found) == 1 else None


def _quickly(
    tokenizer: Tokenizer,
    texts: Sequence[Any],
    pairs: Sequence[Any] | None,
    max_tokens: int | None,
    offsets: bool,
    strict: bool,
    slowly: Callable[[Sequence[Any], Sequence[Any] | None], list[list[Row]]],
) -> TokenTable | None:
    """Return the table without an object for each row; texts that need windows come last in it."""
    from flodl_hf.tokenization.batch import check_batch

    check_batch(texts, "text", False)
    if pairs is not None:
        check_batch(pairs, "second text", False)
    template = _template(tokenizer, pairs=pairs is not None)
    encodings = tokenizer._backend.encodings(texts, pairs, fast=not offsets)
    if len(texts) == 1 and template is not None and pairs is None and not offsets:
        ids = encodings[0].ids
        if max_tokens is None or len(ids) <= max_tokens:
            return _alone(ids, template)
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    owners = np.arange(len(encodings))
    long = owners[:0]
    if max_tokens is not None and int(lengths.max()) > max_tokens:
        long = np.flatnonzero(lengths > max_tokens)
    if len(long) and strict:
        return None
    rest: TokenTable | None = None
    if len(long):
        seconds = None if pairs is None else [pairs[i] for i in long.tolist()]
        groups = slowly([texts[i] for i in long.tolist()], seconds)
        windows = [row for group in groups for row in group]
        owner_of = [int(text) for text, group in zip(long, groups, strict=True) for _ in group]
        rest = table_of(windows, owner_of, offsets=offsets)
        owners = np.delete(owners, long)
        encodings = [encodings[i] for i in owners.tolist()]
        lengths = lengths[owners]
        if not encodings:
            return rest
    table = _tabulated(encodings, lengths, owners, template, offsets, pairs is not None)
    return table if rest is None else _joined(table, rest)


def _alone(ids: list[int], template: _Template) -> TokenTable:
    """Return the table of one text, whose answer somebody waits for."""
    inner = len(ids) - template.lead - template.trail
    nulls = 0 if template.lead or not template.trail else inner
    sequence = np.full(len(ids), -1, np.int8)
    sequence[template.lead : template.lead + inner] = 0
    return TokenTable(
        np.array(ids, np.int32), None, np.array([len(ids)]), _ZERO, np.array([inner]), _ZERO, _ZERO,
        sequence, None, None, np.array([nulls]),
    )  # fmt: skip


def _tabulated(
    encodings: list[Any],
    lengths: np.ndarray,
    owners: np.ndarray,
    template: _Template | None,
    offsets: bool,
    pairs: bool,
) -> TokenTable:
    total, rows = int(lengths.sum()), len(lengths)

    # Read one after another: an encoding's lists are made when asked for, and their memory serves the next.
    def each(name: str) -> Iterable[Any]:
        return chain.from_iterable(map(attrgetter(name), encodings))

    ids = np.fromiter(each("ids"), np.int32, total)
    starts = np.cumsum(lengths) - lengths
    zeros = np.zeros(rows, np.int64)
    first: np.ndarray | None = None
    if template is not None and not pairs:
        types = None
        counts = lengths - template.lead - template.trail
        sequence = _laid_out(np.array([-1, 0, -1]), [template.lead, counts, template.trail], rows, np.int8)
        nulls = zeros if template.lead or not template.trail else lengths - template.trail
    elif template is not None:
        special = np.fromiter(each("special_tokens_mask"), bool, total)
        counts = lengths - template.lead - template.between - template.trail
        # The first special behind the lead ends the first text.
        special[(starts[:, None] + np.arange(template.lead)).ravel()] = False
        first = _first_true(special, lengths, starts) - template.lead
        sizes = [template.lead, first, template.between, counts - first, template.trail]
        sequence = _laid_out(np.array([-1, 0, -1, 1, -1]), sizes, rows, np.int8)
        types = _laid_out(np.array(template.types), sizes, rows, np.int32) if any(template.types) else None
        nulls = zeros
    else:
        types = np.fromiter(each("type_ids"), np.int32, total)
        special = np.fromiter(each("special_tokens_mask"), bool, total)
        sequence = _numbers(each("sequence_ids"), total).astype(np.int8)
        counts = _per_row(~special, lengths)
        nulls = _first_true(special, lengths, starts)
    spans = words = None
    if offsets:
        spans = np.fromiter(chain.from_iterable(each("offsets")), np.int64, 2 * total).reshape(total, 2)
        words = None if template is None else _content_words(encodings, sequence, template, first)
        if words is None:
            words = _numbers(each("word_ids"), total)
    return TokenTable(ids, types, lengths, owners, counts, zeros, zeros, sequence, spans, words, nulls)


def _content_words(
    encodings: list[Any], sequence: np.ndarray, template: _Template, first: np.ndarray | None
) -> np.ndarray | None:
    """Return the word of each token where only the frame's specials have none; None where others lack one too.

    Args:
        encodings: the rows.
        sequence: the text of each token, ``(tokens,)``.
        template: their frame.
        first: tokens of the first text of each pair, ``(rows,)``; None for single texts.
    """
    lead, end = template.lead, -template.trail or None
    lists = map(attrgetter("word_ids"), encodings)
    parts: Iterable[list[Any]]
    if first is None:
        parts = (words[lead:end] for words in lists)
    else:
        stops = (first + lead).tolist()
        parts = (
            part
            for words, stop in zip(lists, stops, strict=True)
            for part in (words[lead:stop], words[stop + template.between : end])
        )
    content = sequence >= 0
    found = np.full(len(sequence), -1, np.int64)
    try:
        found[content] = np.fromiter(chain.from_iterable(parts), np.int64, int(content.sum()))
    except TypeError:
        return None
    return found


def _laid_out(values: np.ndarray, sizes: list[Any], rows: int, dtype: Any) -> np.ndarray:
    """Return ``values[i]`` as often as ``sizes[i]`` (numbers, or one a row) says, row after row."""
    columns = [np.broadcast_to(np.asarray(size, np.int64), (rows,)) for size in sizes]
    return np.repeat(np.tile(values.astype(dtype), rows), np.stack(columns, 1).ravel())


def _numbers(values: Iterable[int | None], total: int) -> np.ndarray:
    """Return the values as int64, None as -1."""
    found = np.fromiter(values, object, total)
    found[found == None] = -1  # noqa: E711
    return found.astype(np.int64)


def _per_row(flags: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return how many flags each row has set, ``(rows,)``; a row may be empty."""
    before = np.concatenate([_ZERO, np.cumsum(flags)])
    ends = np.cumsum(lengths)
    return before[ends] - before[ends - lengths]


def _first_true(flags: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the column of each row's first flag, 0 where it has none, ``(rows,)``."""
    places = np.append(np.flatnonzero(flags), len(flags))
    least = places[np.searchsorted(places, starts)]
    return np.where(least < starts + lengths, least - starts, 0)


def table_of(rows: Sequence[Row], owners: Sequence[int], *, offsets: bool = True) -> TokenTable:
    """Return rows as a table.

    Args:
        rows: windows.
        owners: the text of each.
        offsets: whether they have offsets and words.
    """
    lengths = np.fromiter((len(row.ids) for row in rows), np.int64, len(rows))
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    special = np.fromiter(chain.from_iterable(row.special for row in rows), bool, total)
    spans = words = None
    if offsets:
        pairs = chain.from_iterable(chain.from_iterable(row.offsets for row in rows))
        spans = np.fromiter(pairs, np.int64, 2 * total).reshape(total, 2)
        words = _numbers(chain.from_iterable(row.word_ids for row in rows), total)
    types = np.fromiter(chain.from_iterable(row.type_ids for row in rows), np.int32, total)
    return TokenTable(
        np.fromiter(chain.from_iterable(row.ids for row in rows), np.int32, total),
        types if types.any() else None,
        lengths,
        np.asarray(owners, np.int64),
        _per_row(~special, lengths),
        np.fromiter((row.first_token for row in rows), np.int64, len(rows)),
        np.fromiter((row.window for row in rows), np.int64, len(rows)),
        _numbers(chain.from_iterable(row.sequence_ids for row in rows), total).astype(np.int8),
        spans,
        words,
        _first_true(special, lengths, starts),
    )


def _joined(a: TokenTable, b: TokenTable) -> TokenTable:
    def both(x: np.ndarray | None, y: np.ndarray | None) -> np.ndarray | None:
        if x is None and y is None:
            return None
        x = np.zeros(len(a.ids), np.int32) if x is None else x
        return np.concatenate([x, np.zeros(len(b.ids), np.int32) if y is None else y])

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(a, name), getattr(b, name)])

    return TokenTable(
        join("ids"), both(a.types, b.types), join("lengths"), join("owners"), join("counts"), join("first_token"),
        join("window"), join("sequence"), both(a.offsets, b.offsets), both(a.word_ids, b.word_ids), join("nulls"),
    )  # fmt: skip
