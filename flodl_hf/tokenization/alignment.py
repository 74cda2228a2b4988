"""Tags of words, or spans of characters, to labels of tokens, and back.

The label of a word is at its first token. All other tokens, special ones included, have -100, which losses and metrics
ignore. Positions of words are computed in ``units``, spans in ``spans``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flodl.errors import DataError, capped, nearest, printable
from flodl_hf.tokenization.alignment.spans import Scheme, spans_of
from flodl_hf.tokenization.alignment.units import Extent, Units

IGNORE = -100
"""The label of a token that does not count; PyTorch's cross entropy leaves it out."""

TextSpan = tuple[int, int, str]
"""``(start, end, label)`` in characters, ``end`` exclusive."""

_LETTERS = {"IO": "IIII", "IOB2": "BIIB", "IOBES": "BIES", "BILOU": "BILU"}
"""Prefixes for the first, inner, last and only unit of a span."""


def align_tags(
    units: Units,
    tags: Sequence[str],
    label_ids: Mapping[str, int],
    *,
    label_all: bool = False,
    once: bool = False,
) -> list[list[int]]:
    """Return a label for each token of each window, -100 where a token does not count.

    Args:
        units: where the units lie.
        tags: a tag for each unit.
        label_ids: label number of each tag.
        label_all: label every token of a unit; after a first ``B-x`` come ``I-x`` where that label exists.
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
    starts = [label_ids[tag] for tag in tags]
    follow = [label_ids.get("I" + tag[1:], label_ids[tag]) if tag[:2] == "B-" else label_ids[tag] for tag in tags]
    labels: list[list[int]] = []
    for number, (row, flags) in enumerate(zip(units.unit, units.first, strict=True)):
        line = [IGNORE] * len(row)
        for i, (unit, is_first) in enumerate(zip(row, flags, strict=True)):
            if unit is None or (once and units.owner[unit] != number):
                continue
            if is_first:
                line[i] = starts[unit]
            elif label_all:
                line[i] = follow[unit]
        labels.append(line)
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
    for number, (row, flags) in enumerate(zip(units.unit, units.first, strict=True)):
        for i, (unit, is_first) in enumerate(zip(row, flags, strict=True)):
            if unit is None or not is_first or units.owner[unit] != number:
                continue
            label = int(labels[number][i])
            if label != IGNORE:
                tags[unit] = names[label]
    return tags


@dataclass(frozen=True)
class SpanTags:
    """Tags made of spans, and what could not be kept.

    Attributes:
        tags: a tag for each unit.
        widened: ``(span, span as tagged)`` for each that began or ended inside a unit.
        missing: spans that touch no unit.
    """

    tags: list[str]
    widened: list[tuple[TextSpan, TextSpan]] = field(default_factory=list)
    missing: list[TextSpan] = field(default_factory=list)


def tags_of_spans(
    extents: Sequence[Extent],
    spans: Sequence[TextSpan],
    scheme: Scheme | Literal["IO"] = "IOB2",
    *,
    misfit: Literal["widen", "error"] = "widen",
) -> SpanTags:
    """Return the tags that character spans give to units.

    Args:
        extents: characters of each unit, ``(-1, -1)`` for a unit that is in no window.
        spans: ``(start, end, label)``, in any order.
        scheme: how spans are written as tags.
        misfit: what to do with a span that begins or ends inside a unit: widen it to the whole unit and
            report it, or raise.

    Raises:
        DataError: spans share a unit, hold no characters, or fit badly with ``misfit="error"``; ``problems``
            lists each.
    """
    tags = ["O"] * len(extents)
    problems: list[str] = []
    widened: list[tuple[TextSpan, TextSpan]] = []
    missing: list[TextSpan] = []
    taken: dict[int, TextSpan] = {}
    for start, end, label in sorted(spans):
        span = (start, end, label)
        if not 0 <= start < end:
            problems.append(f"span {span} holds no characters")
            continue
        held = [u for u, (a, b) in enumerate(extents) if a < end and b > start]
        if not held:
            missing.append(span)
            continue
        clash = next((taken[u] for u in held if u in taken), None)
        if clash is not None:
            problems.append(f"span {span} overlaps {clash}")
            continue
        outer = (extents[held[0]][0], extents[held[-1]][1], label)
        if outer[0] < start or outer[1] > end:
            widened.append((span, outer))
            if misfit == "error":
                problems.append(f"span {span} begins or ends inside a word; whole words are {outer[:2]}")
        letters = _LETTERS[scheme]
        for position, unit in enumerate(held):
            taken[unit] = span
            letter = letters[0 if position == 0 else 2 if position == len(held) - 1 else 1]
            tags[unit] = f"{letters[3] if len(held) == 1 else letter}-{label}"
    if problems:
        raise DataError(
            "alignment: spans that cannot be tags:\n"
            + capped(problems)
            + "\nexpected spans with characters, at most one for each word",
            problems=problems,
        )
    return SpanTags(tags, widened, missing)


def read_spans(extents: Sequence[Extent], tags: Sequence[str], scheme: Scheme | None = None) -> list[TextSpan]:
    """Return ``(start, end, label)`` in characters for each span that the tags of units make.

    Args:
        extents: characters of each unit; those in no window, ``(-1, -1)``, are left out.
        tags: a tag for each unit.
        scheme: hold tags to a scheme; None takes them as they come.
    """
    found = []
    for label, first, end in spans_of(tags, scheme):
        held = [extents[u] for u in range(first, end) if extents[u] != (-1, -1)]
        if held:
            found.append((held[0][0], held[-1][1], label))
    return found
