"""Annotations (words with tags, character spans, answers) to labels of tokens, and predicted labels back to tags.

Uses offsets and word numbers of tokenized rows only, without tokenizer and model. The label of a word is at its first
token. All other tokens, special ones included, have -100, which losses and metrics ignore.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flodl.data.rng import Rng
from flodl.errors import DataError, capped, nearest, printable
from flodl_hf.tokenization.cuts import Row

__all__ = ["align_tags", "join_words", "read_tags", "word_units"]

IGNORE = -100
"""The label of a token that does not count; PyTorch's cross entropy leaves it out."""

Extent = tuple[int, int]
"""Characters ``(start, end)`` of a text, ``end`` exclusive."""

TextSpan = tuple[int, int, str]
"""``(start, end, label)`` in characters, ``end`` exclusive."""

Span = tuple[str, int, int]
"""``(type, first, end)``: tags ``first`` to ``end - 1``."""

Scheme = Literal["IOB2", "IOBES", "BILOU"]

_BEGIN_INSIDE_END_SINGLE = {"IOB2": "BI  ", "IOBES": "BIES", "BILOU": "BILU"}


@dataclass(frozen=True)
class Units:
    """Where the units (words or tokens) of one text lie in its windows.

    Attributes:
        unit: for each window and token the number of its unit, None outside the text.
        first: for each window and token, whether it is the first token of its unit.
        extents: for each unit its characters, or ``(-1, -1)`` if no window holds it.
        owner: for each unit the window in which its first token has the most context, -1 if none holds it.
    """

    unit: list[list[int | None]]
    first: list[list[bool]]
    extents: list[Extent]
    owner: list[int]


def join_words(words: Sequence[str], delimiter: str = " ") -> tuple[str, list[Extent]]:
    """Return the text that the words make, and the characters of each word in it."""
    extents: list[Extent] = []
    at = 0
    for word in words:
        extents.append((at, at + len(word)))
        at += len(word) + len(delimiter)
    return delimiter.join(words), extents


def word_units(
    windows: Sequence[Row],
    *,
    extents: Sequence[Extent] | None = None,
    num_words: int | None = None,
    text: str | None = None,
) -> Units:
    """Return where words lie in the windows of one text.

    Args:
        windows: all windows of the text.
        extents: the words' characters in ascending order, where the text was tokenized whole (see
            :func:`join_words`). Without, the rows' own word numbers count.
        num_words: how many words there are; by default as many as ``extents``, or as the rows show.
        text: the text; with it, white space at the edges of a token does not count as its own.

    Raises:
        DataError: the rows have no offsets, or name more words than there are.
    """
    _check_offsets(windows)
    if extents is None:
        keys = [list(win.word_ids) for win in windows]
        highest = max((k for row in keys for k in row if k is not None), default=-1)
    else:
        keys = [_overlapped(win, extents, text) for win in windows]
        highest = len(extents) - 1
    count = highest + 1 if num_words is None else num_words
    if highest >= count:
        raise DataError(
            f"alignment: the tokens name word {highest}, and there are {count} words; "
            "were the rows made from other words?",
            found=highest,
            expected=count,
        )
    start, end, speaker = [-1] * count, [-1] * count, [-1] * count
    places = [_places(win) for win in windows]
    for win, row, line in zip(windows, keys, places, strict=True):
        for unit, offset, place in zip(row, win.offsets, line, strict=True):
            if unit is not None:
                a, b = _trimmed(offset, text)
                start[unit] = a if start[unit] < 0 else min(start[unit], a)
                end[unit] = max(end[unit], b)
                speaker[unit] = place if speaker[unit] < 0 else min(speaker[unit], place)
    first = [
        [unit is not None and place == speaker[unit] for unit, place in zip(row, line, strict=True)]
        for row, line in zip(keys, places, strict=True)
    ]
    units = Units(keys, first, [(-1, -1)] * count, [-1] * count)
    best = [-1] * count
    inside = [[at for at, unit in enumerate(row) if unit is not None] for row in keys]
    for number, at, unit in _first_tokens(units):
        context = min(at - inside[number][0], inside[number][-1] - at)
        if context > best[unit]:
            best[unit], units.owner[unit] = context, number
            units.extents[unit] = (start[unit], end[unit]) if extents is None else extents[unit]
    return units


def _first_tokens(units: Units, once: bool = False) -> Iterator[tuple[int, int, int]]:
    """Yield window, token and unit of the first token of each unit; ``once`` in the window with the most context."""
    for number, (row, flags) in enumerate(zip(units.unit, units.first, strict=True)):
        for at, (unit, is_first) in enumerate(zip(row, flags, strict=True)):
            if unit is not None and is_first and (units.owner[unit] == number or not once):
                yield number, at, unit


def _check_offsets(windows: Sequence[Row]) -> None:
    if any(len(win.sequence_ids) != len(win.offsets) for win in windows):
        raise DataError("alignment: the rows have no offsets; request them from the tokenizer")


def _places(window: Row) -> list[int]:
    """Return the place of each token among the tokens of the whole text, -1 for special tokens."""
    at, places = window.first_token, []
    for sequence in window.sequence_ids:
        places.append(-1 if sequence is None else at)
        at += sequence is not None
    return places


def _overlapped(window: Row, extents: Sequence[Extent], text: str | None) -> list[int | None]:
    starts = [a for a, _ in extents]
    found: list[int | None] = []
    for offset, owner in zip(window.offsets, window.sequence_ids, strict=True):
        a, b = _trimmed(offset, text)
        at = max(bisect_right(starts, a) - 1, 0)
        # a token that begins in the gap before a word belongs to that word
        while at < len(extents) and extents[at][1] <= a:
            at += 1
        hit = owner is not None and b > a and at < len(extents) and extents[at][0] < b
        found.append(at if hit else None)
    return found


def _trimmed(offset: tuple[int, int], text: str | None) -> Extent:
    start, end = offset
    if text is not None:
        while start < end and text[start].isspace():
            start += 1
        while end > start and text[end - 1].isspace():
            end -= 1
    return start, end


def align_tags(
    units: Units,
    tags: Sequence[str],
    label_ids: Mapping[str, int],
    *,
    once: bool = False,
) -> list[list[int]]:
    """Return a label for each token of each window, -100 where a token does not count.

    Args:
        units: where the units lie.
        tags: a tag for each unit.
        label_ids: label number of each tag.
        once: label each unit in one window only, the one with the most context, so that a metric counts it
            once.

    Raises:
        DataError: there is not one tag for each unit, or tags have no label; ``problems`` lists these.
    """
    if len(tags) != len(units.owner):
        raise DataError(
            f"alignment: {len(tags)} tags for {len(units.owner)} words; expected one for each",
            tags=len(tags),
            units=len(units.owner),
        )
    unknown = sorted(set(tags) - label_ids.keys())
    if unknown:
        problems = [f"{printable(tag)}{nearest(tag, label_ids)}" for tag in unknown]
        raise DataError(
            f"alignment: tags without a label:\n{capped(problems)}\nknown labels: {list(label_ids)[:20]}",
            problems=problems,
        )
    labels = [[IGNORE] * len(row) for row in units.unit]
    for number, at, unit in _first_tokens(units, once):
        labels[number][at] = label_ids[tags[unit]]
    return labels


def read_tags(
    units: Units,
    labels: Sequence[Sequence[int]],
    names: Sequence[str] | Mapping[int, str],
    *,
    fill: str = "O",
) -> list[str]:
    """Return the tag of each unit, from labels or predictions for each token of each window.

    The first token speaks for a unit, in the window that gives it the most context.

    Args:
        units: where the units lie.
        labels: label numbers, one for each token of each window; padding behind the tokens does not matter.
        names: the tag of each label number.
        fill: the tag of units that no token speaks for.
    """
    tags = [fill] * len(units.owner)
    for number, at, unit in _first_tokens(units, once=True):
        if (label := int(labels[number][at])) != IGNORE:
            tags[unit] = names[label]
    return tags


def tags_of_spans(extents: Sequence[Extent], spans: Sequence[TextSpan]) -> list[str]:
    """Return the tags that character spans give to units, ``B-`` for the first unit of a span and ``I-`` for others.

    A span that begins or ends inside a unit is widened to the whole unit; one that touches no unit is left out.

    Args:
        extents: characters of each unit, ``(-1, -1)`` for a unit that is in no window.
        spans: ``(start, end, label)``, in any order.

    Raises:
        DataError: spans share a unit, or hold no characters; ``problems`` lists each.
    """
    tags = ["O"] * len(extents)
    problems: list[str] = []
    taken: dict[int, TextSpan] = {}
    for span in sorted(spans):
        start, end, label = span
        if not 0 <= start < end:
            problems.append(f"span {span} holds no characters")
            continue
        held = [u for u, (a, b) in enumerate(extents) if a < end and b > start]
        clash = next((taken[u] for u in held if u in taken), None)
        if clash is not None:
            problems.append(f"span {span} overlaps {clash}")
            continue
        for unit in held:
            taken[unit] = span
            tags[unit] = f"{'B' if unit == held[0] else 'I'}-{label}"
    if problems:
        raise DataError(
            "alignment: spans that cannot be tags:\n"
            + capped(problems)
            + "\nexpected spans with characters, at most one for each word",
            problems=problems,
        )
    return tags


def spans_of(tags: Sequence[str], scheme: Scheme | None = None) -> list[Span]:
    """Return the spans of one sequence of tags, in order.

    Without a scheme, spans follow the rules of the CoNLL-2000 evaluation, as in seqeval's default mode: a span starts
    where a tag starts one or where the type changes, so that a single ``I-`` starts a span. With a scheme, only
    well-formed spans count, as in seqeval's strict mode.

    Args:
        tags: ``"O"``, or a prefix and a type, ``"B-person"``.
        scheme: the scheme that the tags must follow; None accepts any tags.

    Raises:
        DataError: a tag has a prefix that the scheme does not have.
    """
    # A type may contain dashes. A tag without a type has the type "_".
    split = [(tag[:1], tag[1:].split("-", 1)[-1] or "_") for tag in tags]
    if scheme is not None:
        return _strict(split, scheme)
    spans: list[Span] = []
    start = 0
    before, before_kind = "O", "O"
    for at, (prefix, kind) in enumerate([*split, ("O", "_")]):
        inside = prefix not in ("O", ".")
        changed = kind != before_kind
        if before in ("E", "S") or (
            before not in ("O", ".") and (changed or (before in ("B", "I") and prefix in ("B", "S", "O")))
        ):
            spans.append((before_kind, start, at))
        if prefix in ("B", "S") or (inside and (changed or (before in ("E", "S", "O") and prefix in ("E", "I")))):
            start = at
        before, before_kind = prefix, kind
    return spans


def _strict(tags: Sequence[tuple[str, str]], scheme: Scheme) -> list[Span]:
    if scheme not in _BEGIN_INSIDE_END_SINGLE:
        raise DataError(f"spans: found scheme {scheme!r}, expected 'IOB2', 'IOBES' or 'BILOU'", scheme=scheme)
    begin, inside, end, single = _BEGIN_INSIDE_END_SINGLE[scheme]
    allowed = {"O", begin, inside, end, single} - {" "}
    wrong = [f"tag {i}: {'-'.join(tag)}" for i, tag in enumerate(tags) if tag[0] not in allowed]
    if wrong:
        raise DataError(
            f"spans: found tags outside of {scheme}, expected the prefixes {sorted(allowed)}:\n{capped(wrong)}",
            problems=wrong,
            scheme=scheme,
        )
    spans: list[Span] = []
    at = 0
    while at < len(tags):
        first, (prefix, kind) = at, tags[at]
        at += 1
        if prefix == begin:
            while at < len(tags) and tags[at] == (inside, kind):
                at += 1
            if end != " " and (at == len(tags) or tags[at] != (end, kind)):
                continue
            at += end != " "
        if prefix in (begin, single):
            spans.append((kind, first, at))
    return spans


def answer_positions(windows: Sequence[Row], answer: Extent | None) -> list[tuple[int, int]]:
    """Return for each window of a context the first and last token of an answer, both inclusive.

    The context is the second text. The positions are 0, the class token, for a window without the whole answer.

    Args:
        windows: all windows of a question with its context.
        answer: characters of the context, None for a question without an answer.

    Raises:
        DataError: the answer has no characters, or the rows have no offsets.
    """
    if answer is None:
        return [(0, 0) for _ in windows]
    start, end = answer
    if not 0 <= start < end:
        raise DataError(f"alignment: the answer {answer} contains no characters", answer=answer)
    _check_offsets(windows)
    touched = [
        [
            at
            for at, ((a, b), sequence) in enumerate(zip(win.offsets, win.sequence_ids, strict=True))
            if sequence == 1 and a < end and b > start
        ]
        for win in windows
    ]
    # Compared with the other windows rather than with the answer's own ends, because an answer may begin or
    # end with characters that no token has.
    spots = [win.offsets[at] for win, held in zip(windows, touched, strict=True) for at in held]
    whole = min((a for a, _ in spots), default=0), max((b for _, b in spots), default=0)
    return [
        (held[0], held[-1]) if held and (win.offsets[held[0]][0], win.offsets[held[-1]][1]) == whole else (0, 0)
        for win, held in zip(windows, touched, strict=True)
    ]


def num_masked(free: int, probability: float) -> int:
    """Return how many of ``free`` tokens of a row are chosen, where words are not chosen whole: one at least."""
    return max(1, int(probability * free + 0.5))


def chosen_tokens(
    special: Sequence[bool], *, rng: Rng, probability: float, words: Sequence[int | None] | None = None
) -> NDArray[np.int64]:
    """Return which tokens are chosen, ascending; arguments as of `mask_tokens`, which draws further numbers."""
    free = [i for i, is_special in enumerate(special) if not is_special]
    if not free:
        return np.empty(0, np.int64)
    groups = _groups(free, words)
    wanted = num_masked(len(free), probability)
    chosen: list[int] = []
    for g in rng.permutation(len(groups)):
        if len(chosen) + len(groups[g]) <= wanted:
            chosen += groups[g]
    return np.array(sorted(chosen or min(groups, key=len)))


def mask_tokens(
    ids: Sequence[int],
    special: Sequence[bool],
    *,
    mask_id: int,
    random_ids: int | Sequence[int],
    rng: Rng,
    probability: float = 0.15,
    words: Sequence[int | None] | None = None,
    mask_share: float = 0.8,
    random_share: float = 0.1,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids with some hidden, and labels that ask for them, -100 everywhere else; both ``(seq,)``.

    Of the tokens of the text a share of ``probability`` (rounded, at least one) is chosen; of these 80 %
    become the mask token, 10 % a random token, and 10 % stay (Devlin et al., "BERT", 2019, section 3.1).

    Args:
        ids: token ids, special ones included.
        special: which tokens are special and never chosen.
        mask_id: the mask token.
        random_ids: the size of the vocabulary, or the ids that a random token may be.
        rng: for example ``Rng(seed, "mask", epoch, row)``.
        probability: share of tokens to choose.
        words: the word of each token, to choose whole words; words that would pass the share are passed over,
            and if none fits, the shortest word is chosen.
        mask_share: share of the chosen tokens that become the mask token.
        random_share: share that becomes a random token.

    Raises:
        DataError: shares are outside their range.
    """
    if not 0 < probability <= 1 or min(mask_share, random_share) < 0 or mask_share + random_share > 1:
        raise DataError(
            f"mask_tokens: probability {probability}, shares {mask_share} and {random_share}; expected a "
            "probability in (0, 1] and shares from 0 up that add up to at most 1",
            probability=probability,
        )
    hidden = np.array(ids, dtype=np.int64)
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    at = chosen_tokens(special, rng=rng, probability=probability, words=words)
    if not at.size:
        return hidden, labels
    labels[at] = hidden[at]
    fate = rng.uniforms(at.size)
    hidden[at[fate < mask_share]] = mask_id
    swap = at[(fate >= mask_share) & (fate < mask_share + random_share)]
    pool = np.arange(random_ids) if isinstance(random_ids, int) else np.asarray(random_ids, dtype=np.int64)
    hidden[swap] = pool[rng.integers(pool.size, swap.size)]
    return hidden, labels


def _groups(free: list[int], words: Sequence[int | None] | None) -> list[list[int]]:
    """Return positions chosen together; only neighbours, since word numbers start anew in a pair."""
    if words is None:
        return [[i] for i in free]
    groups: list[list[int]] = []
    for i in free:
        if groups and i == groups[-1][-1] + 1 and words[i] is not None and words[i] == words[i - 1]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
