"""Rows of tokens as flat arrays, made without an object for each row where that can be.

Decides how a tokenizer's output becomes a `TokenTable`: ids of texts and the special tokens around them
(`Frame`), encodings of the tokenizers library, or records; and which rows are too long. `flodl_hf.tokenization.cuts`
decides where those are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from flodl_hf.tokenization.backend import packed
from flodl_hf.tokenization.cuts import Cut, Cuts, Overflow, divided_text, plan_cuts

if TYPE_CHECKING:
    from flodl_hf.tokenization.backend import Flat
    from flodl_hf.tokenization.cuts import Row
    from flodl_hf.tokenization.tokenizer import Tokenizer


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


_ZERO = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Frame:
    """The specials that a tokenizer puts around a single text, or around a pair.

    Attributes:
        lead: ids before the first text.
        between: ids after the first text and before the second; none of single texts.
        trail: ids at the end.
        types: token type of the lead, first text, specials between, second text and trail.
        pair: whether it is the frame of pairs.
    """

    lead: tuple[int, ...]
    between: tuple[int, ...]
    trail: tuple[int, ...]
    types: tuple[int, ...]
    pair: bool

    @cached_property
    def size(self) -> int:
        """How many specials there are."""
        return len(self.lead) + len(self.between) + len(self.trail)


_FRAMES: WeakKeyDictionary[Any, dict[bool, Frame | None]] = WeakKeyDictionary()
# Of several lengths, so that specials show which depend on them.
_PROBES = (("a a a", "a a"), ("a", "a a a a"), ("", "a"), ("a", ""))


def frame_of(tokenizer: Tokenizer, *, pairs: bool = False) -> Frame | None:
    """Return the frame around a text or a pair; None if it is not constant, and each row must be tokenised fully."""
    known = _FRAMES.setdefault(tokenizer, {})
    if pairs not in known:
        known[pairs] = _asked(tokenizer, pairs)
    return known[pairs]


def _asked(tokenizer: Tokenizer, pairs: bool) -> Frame | None:
    backend = tokenizer._backend
    firsts, seconds = [first for first, _ in _PROBES], [second for _, second in _PROBES] if pairs else None
    encodings = backend.encodings(firsts, seconds)
    frame = _seen_in(encodings[0], pairs)
    if frame is None:
        return None
    made = framed(frame, backend.flat(firsts), None if seconds is None else backend.flat(seconds))
    rows = of_encodings(encodings)
    assert rows.types is not None
    types = np.zeros_like(rows.types) if made.types is None else made.types
    same = np.array_equal(made.ids, rows.ids) and np.array_equal(made.lengths, rows.lengths)
    same = same and np.array_equal(made.sequence, rows.sequence) and np.array_equal(types, rows.types)
    return frame if same and np.array_equal(made.nulls, rows.nulls) else None


def _seen_in(row: Any, pair: bool) -> Frame | None:
    """Return the frame of a row, which others may not have."""
    texts = [None if special else text for text, special in zip(row.sequence_ids, row.special_tokens_mask, strict=True)]
    if 0 not in texts or (pair and 1 not in texts):
        return None
    a, b = texts.index(0), len(texts) - texts[::-1].index(0)
    c, d = (texts.index(1), len(texts) - texts[::-1].index(1)) if pair else (b, b)
    pieces = [slice(a), slice(a, b), slice(b, c), slice(c, d), slice(d, None)]
    types = [set(row.type_ids[piece]) for piece in pieces]
    if c < b or any(len(kinds) > 1 for kinds in types):
        return None
    lead, between, trail = (tuple(row.ids[piece]) for piece in pieces[::2])
    return Frame(lead, between, trail, tuple(next(iter(kinds), 0) for kinds in types), pair)


def framed(
    frame: Frame,
    first: Flat,
    second: Flat | None = None,
    *,
    owners: np.ndarray | None = None,
) -> TokenTable:
    """Return rows of ids, the frame around each.

    Args:
        frame: of the tokenizer.
        first: the ids of each row's first text.
        second: the ids of each row's second text.
        owners: see `TokenTable`; by default each row is a text.
    """
    ids, counts = first
    rows = len(counts)
    lead, between, trail = len(frame.lead), len(frame.between), len(frame.trail)
    sizes = [lead, counts, between + trail] if second is None else [lead, counts, between, second[1], trail]
    content = counts if second is None else counts + second[1]
    lengths = content + frame.size
    sequence = _laid_out(np.array([-1, 0, -1, 1, -1][: len(sizes)]), sizes, rows, np.int8)
    found = np.empty(len(sequence), np.int32)
    found[sequence == 0] = ids
    if second is not None:
        found[sequence == 1] = second[0]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    for at, specials in ((starts, frame.lead), (starts + lead + counts, frame.between), (ends - trail, frame.trail)):
        for place, special in enumerate(specials):
            found[at + place] = special
    types = None
    if any(frame.types):
        kinds = frame.types if second is not None else (*frame.types[:2], frame.types[4])
        types = _laid_out(np.array(kinds), sizes, rows, np.int32)
    zeros = np.zeros(rows, np.int64)
    nulls = zeros if lead or not frame.size else counts if between else content
    return TokenTable(
        found, types, lengths, np.arange(rows) if owners is None else owners, content, zeros, zeros, sequence, None,
        None, nulls,
    )  # fmt: skip


def of_one(ids: list[int], frame: Frame) -> TokenTable:
    """Return the table of one single text; all its token types are 0.

    Args:
        ids: with the specials.
        frame: of the tokenizer.
    """
    inner, lead = len(ids) - frame.size, len(frame.lead)
    nulls = 0 if lead or not frame.trail else inner
    sequence = np.full(len(ids), -1, np.int8)
    sequence[lead : lead + inner] = 0
    return TokenTable(
        np.array(ids, np.int32), None, np.array([len(ids)]), _ZERO, np.array([inner]), _ZERO, _ZERO,
        sequence, None, None, np.array([nulls]),
    )  # fmt: skip


def of_encodings(
    encodings: Sequence[Any], owners: np.ndarray | None = None, *, frame: Frame | None = None, offsets: bool = False,
    words: bool = False, special: str = "special_tokens_mask",
) -> TokenTable:  # fmt: skip
    """Return encodings of the tokenizers library as rows.

    Args:
        encodings: one for each row.
        owners: the text of each; by default each is a text.
        frame: of the tokenizer, for these rows; None queries each row.
        offsets: whether to record offsets.
        words: whether to record words.
        special: attribute with a flag for each special token.
    """
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    total, rows = int(lengths.sum()), len(lengths)
    starts = np.cumsum(lengths) - lengths
    zeros = np.zeros(rows, np.int64)

    # Read one after another: an encoding's lists are created on access, and their memory serves the next.
    def each(name: str) -> Iterable[Any]:
        return chain.from_iterable(map(attrgetter(name), encodings))

    ids = packed(map(attrgetter("ids"), encodings))
    types: np.ndarray | None = None
    sizes: list[Any] = []
    if frame is not None and not frame.pair:
        counts, kinds = lengths - frame.size, (*frame.types[:2], frame.types[4])
        sizes = [len(frame.lead), counts, len(frame.trail)]
        sequence = _laid_out(np.array([-1, 0, -1]), sizes, rows, np.int8)
        nulls = zeros if frame.lead or not frame.trail else counts
    elif frame is not None and frame.lead and frame.between:
        counts, kinds = lengths - frame.size, frame.types
        specials = ids == frame.between[0]
        if specials.sum() > rows * (*frame.lead, *frame.between, *frame.trail).count(frame.between[0]):
            specials = np.fromiter(each(special), bool, total)  # a text contains this id
        # The first special behind the lead ends the first text.
        specials[(starts[:, None] + np.arange(len(frame.lead))).ravel()] = False
        first = _first_true(specials, lengths, starts) - len(frame.lead)
        sizes = [len(frame.lead), first, len(frame.between), counts - first, len(frame.trail)]
        sequence = _laid_out(np.array([-1, 0, -1, 1, -1]), sizes, rows, np.int8)
        nulls = zeros
    else:
        kinds = ()
        specials = np.fromiter(each(special), bool, total)
        types = np.fromiter(each("type_ids"), np.int32, total)
        sequence = integers(map(attrgetter("sequence_ids"), encodings)).astype(np.int8)
        counts = _per_row(~specials, lengths)
        nulls = _first_true(specials, lengths, starts)
    if any(kinds):
        types = _laid_out(np.array(kinds), sizes, rows, np.int32)
    spans = word_ids = None
    if offsets:
        pairs = map(attrgetter("offsets"), encodings)
        spans = packed([*chain.from_iterable(each)] for each in pairs).astype(np.int64).reshape(total, 2)
    if words:
        word_ids = integers(map(attrgetter("word_ids"), encodings))
    owners = np.arange(rows) if owners is None else owners
    return TokenTable(ids, types, lengths, owners, counts, zeros, zeros, sequence, spans, word_ids, nulls)


def integers(lists: Iterable[Sequence[int | None]]) -> np.ndarray:
    """Return the values of lists end to end as int64, None as -1."""
    found = np.concatenate([np.zeros(0), *(np.array(values, np.float64) for values in lists)])
    found[np.isnan(found)] = -1
    return found.astype(np.int64)


def _laid_out(values: np.ndarray, sizes: list[Any], rows: int, dtype: Any) -> np.ndarray:
    """Return ``values[i]`` repeated ``sizes[i]`` times (numbers, or one per row), row after row."""
    counts = np.empty((rows, len(sizes)), np.int64)
    for column, size in enumerate(sizes):
        counts[:, column] = size
    return np.repeat(np.tile(values.astype(dtype), rows), counts.ravel())


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
    table = of_encodings(rows, np.asarray(owners, np.int64), offsets=offsets, words=offsets, special="special")
    assert table.types is not None
    return replace(
        table, types=table.types if table.types.any() else None,
        first_token=np.fromiter((row.first_token for row in rows), np.int64, len(rows)),
        window=np.fromiter((row.window for row in rows), np.int64, len(rows)),
    )  # fmt: skip


def joined(a: TokenTable, b: TokenTable) -> TokenTable:
    """Return the rows of two tables, one after the other; both have offsets, or neither has."""
    columns = []
    for name in TokenTable.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        if x is not None or y is not None:
            x = np.zeros(len(a.ids), np.int32) if x is None else x
            x = np.concatenate([x, np.zeros(len(b.ids), np.int32) if y is None else y])
        columns.append(x)
    return TokenTable(*columns)


def cut_table(
    table: TokenTable,
    limit: int | None,
    *,
    cut: Cut,
    overflow: Overflow,
    stride: int,
    snap: bool,
    side: Literal["left", "right"],
    first_place: int,
) -> tuple[TokenTable, np.ndarray]:
    """Return the rows that fit, then the windows of the others; and how many tokens each truncated row lost.

    Args:
        table: one row for each text or pair, with words if windows snap to them.
        limit: most tokens of a window, specials included; None leaves all rows whole.
        cut: see `flodl_hf.tokenization.cuts.plan_cuts`, as the following.
        overflow: windows, truncation or an error.
        stride: tokens that neighbouring windows share.
        snap: whether windows start and end between words.
        side: which end is dropped.
        first_place: number of the first text, in errors.

    Raises:
        TokenizerError: a row is too long and ``overflow`` is an error, or the text that is not cut leaves no space.
    """
    fits = np.ones(len(table), bool) if limit is None else table.lengths <= limit
    if limit is None or fits.all():
        return table, np.zeros(0, np.int64)
    long, short = np.flatnonzero(~fits), np.flatnonzero(fits)
    lengths, names = table.lengths[long], [f"text {place}" for place in (table.owners[long] + first_place).tolist()]
    places, sizes = _texts_of(table, long, names)

    def words(chosen: np.ndarray, texts: np.ndarray) -> np.ndarray | None:
        if not snap or table.word_ids is None:
            return None
        counts = sizes[texts, chosen]
        begins = table.starts[long[chosen]] + places[texts, chosen] - (np.cumsum(counts) - counts)
        return table.word_ids[np.arange(int(counts.sum())) + np.repeat(begins, counts)]

    cuts = plan_cuts(
        lengths, sizes, words, limit, cut=cut, overflow=overflow, stride=stride, side=side, names=names
    )  # fmt: skip
    tokens, lengths_kept = _kept_tokens(table, short, long, places, sizes, cuts)
    found = table.picked(tokens, np.concatenate([short, long[cuts.row]]))
    found = replace(
        found, lengths=lengths_kept,
        counts=np.concatenate([table.counts[short], (cuts.last - cuts.first).sum(0)]),
        first_token=np.concatenate([table.first_token[short], cuts.first[cuts.text, np.arange(len(cuts.row))]]),
        window=np.concatenate([table.window[short], cuts.window]),
        nulls=_first_true(found.sequence < 0, lengths_kept, np.cumsum(lengths_kept) - lengths_kept),
    )  # fmt: skip
    return found, lengths[cuts.truncated] - limit


def _texts_of(table: TokenTable, rows: np.ndarray, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return column and number of tokens of both texts of some rows, each ``(2, rows)``."""
    places, sizes = [], []
    new_row = np.diff(np.repeat(np.arange(len(table)), table.lengths)) > 0
    for text in (0, 1):
        flags = table.sequence == text
        begins = flags.copy()
        begins[1:] &= ~flags[:-1] | new_row
        if (several := np.flatnonzero(_per_row(begins, table.lengths)[rows] > 1)).size:
            raise divided_text(names[several[0]])
        sizes.append(_per_row(flags, table.lengths)[rows])
        columns = _first_true(flags, table.lengths, table.starts)[rows]
        places.append(np.where(sizes[-1] > 0, columns, table.lengths[rows]))
    return np.stack(places), np.stack(sizes)


def _kept_tokens(
    table: TokenTable, whole: np.ndarray, long: np.ndarray, places: np.ndarray, sizes: np.ndarray, cuts: Cuts
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the tokens of whole rows and of windows, and the new lengths.

    Args:
        table: the rows.
        whole: indices of rows, ``(whole,)``.
        long: indices of rows that are cut, ``(long,)``.
        places: column of each text of the cut rows, ``(2, long)``.
        sizes: tokens of each text, ``(2, long)``.
        cuts: the windows.
    """
    cut, places, sizes = long[cuts.row], places[:, cuts.row], sizes[:, cuts.row]
    # A row consists of specials, a text, specials, the other text and specials; the second text may come first.
    order = np.argsort(places, 0, kind="stable")
    first, second = (
        [np.take_along_axis(values, order, 0)[side] for values in (places, sizes, cuts.first, cuts.last)]
        for side in (0, 1)
    )
    (place, size, low, high), (then, rest, least, most) = first, second
    lengths, none = table.lengths[cut], np.zeros_like(cut)
    begins = np.stack([none, place + low, place + size, then + least, then + rest], 1)
    ends = np.stack([place, place + high, then, then + most, lengths], 1)
    counts = np.concatenate([table.lengths[whole], (ends - begins).ravel()])
    starts = np.concatenate([table.starts[whole], (begins + table.starts[cut][:, None]).ravel()])
    tokens = np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return tokens, np.concatenate([table.lengths[whole], (ends - begins).sum(1)])
