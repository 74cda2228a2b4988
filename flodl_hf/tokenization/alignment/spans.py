"""Spans (entities) of a sequence of tags.

Without a scheme, spans follow the rules of the CoNLL-2000 evaluation, as in seqeval's default mode: a span starts where
a tag starts one or where the type changes, so that a single ``I-`` starts a span. With a scheme, only well-formed spans
count, as in seqeval's strict mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flodl.errors import DataError, capped

Span = tuple[str, int, int]
"""``(type, first, end)``: tags ``first`` to ``end - 1``."""

Scheme = Literal["IOB2", "IOBES", "BILOU"]

_BEGIN_INSIDE_END_SINGLE = {"IOB2": "BI  ", "IOBES": "BIES", "BILOU": "BILU"}


def spans_of(tags: Sequence[str], scheme: Scheme | None = None) -> list[Span]:
    """Return the spans of one sequence of tags, in order.

    Args:
        tags: ``"O"``, or a prefix and a type, ``"B-person"``.
        scheme: the scheme that the tags must follow; None accepts any tags.

    Raises:
        DataError: a tag has a prefix that the scheme does not have.
    """
    return _loose(tags) if scheme is None else _strict(tags, scheme)


def _split(tag: str) -> tuple[str, str]:
    # A type may contain dashes. A tag without a type has the type "_".
    return tag[:1], tag[1:].split("-", 1)[-1] or "_"


def _loose(tags: Sequence[str]) -> list[Span]:
    spans: list[Span] = []
    start = 0
    before, before_kind = "O", "O"
    for at, (prefix, kind) in enumerate([*map(_split, tags), ("O", "_")]):
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


def _strict(tags: Sequence[str], scheme: Scheme) -> list[Span]:
    if scheme not in _BEGIN_INSIDE_END_SINGLE:
        raise DataError(f"spans: found scheme {scheme!r}, expected 'IOB2', 'IOBES' or 'BILOU'", scheme=scheme)
    begin, inside, end, single = _BEGIN_INSIDE_END_SINGLE[scheme]
    allowed = {"O", begin, inside, end, single} - {" "}
    split = [_split(tag) for tag in tags]
    wrong = [f"tag {i}: {tags[i]!r}" for i, (prefix, _) in enumerate(split) if prefix not in allowed]
    if wrong:
        raise DataError(
            f"spans: found tags outside of {scheme}, expected the prefixes {sorted(allowed)}:\n{capped(wrong)}",
            problems=wrong,
            scheme=scheme,
        )
    spans: list[Span] = []
    at = 0
    while at < len(split):
        prefix, kind = split[at]
        first = at
        at += 1
        if prefix == single:
            spans.append((kind, first, at))
        elif prefix == begin:
            while at < len(split) and split[at] == (inside, kind):
                at += 1
            if end == " ":
                spans.append((kind, first, at))
            elif at < len(split) and split[at] == (end, kind):
                at += 1
                spans.append((kind, first, at))
    return spans
