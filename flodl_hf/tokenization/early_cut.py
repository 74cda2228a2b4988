"""The beginning of a very long text, when only its beginning is wanted: cut before it is tokenized.

Tokens do not depend on what follows far behind them. So a prefix is tokenized, then one twice as long, and
where both begin alike the shorter one is enough; a text of ten megabytes then costs what a page costs. White space is
the exception: a special token may take all that stands before it, however much, so a prefix never ends in it.

Decides: how long a prefix suffices. Leaves to others: tokenization and truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["beginning", "beginnings"]

# Characters a token may stand for on average before a longer prefix is tried; English has four.
_CHARS = 16
# Texts up to this many characters per wanted token are simply tokenized.
_LONG = 4 * _CHARS
# Equal tokens wanted beyond those that are used.
_MARGIN = 32
# A text that is one endless word gives no such beginning, and trying on costs more than the whole.
_DOUBLINGS = 4


def beginnings(texts: Sequence[Any], max_tokens: int, encode: Callable[[str], Sequence[int]]) -> list[Any]:
    """Return the texts, of long ones a prefix that has more tokens than fit.

    Args:
        texts: texts; lists of words are returned as they are.
        max_tokens: number of tokens that fit.
        encode: ids of a text, without special tokens.
    """
    limit = _LONG * (max_tokens + 1)
    # One token more than fits, so that the row still records that something was dropped.
    return [beginning(t, max_tokens + 1, encode) if isinstance(t, str) and len(t) > limit else t for t in texts]


def beginning(text: str, tokens: int, encode: Callable[[str], Sequence[int]]) -> str:
    """Return a prefix of ``text`` whose first ``tokens`` tokens are those of the whole text.

    Args:
        text: the whole text.
        tokens: number of tokens wanted.
        encode: ids of a text, without special tokens.
    """
    size = _CHARS * (tokens + _MARGIN)
    wanted = tokens + _MARGIN
    prefix = text[:size].rstrip()
    short = encode(prefix)
    for _ in range(_DOUBLINGS):
        if 2 * size >= len(text):
            break
        longer = text[: 2 * size].rstrip()
        long = encode(longer)
        if len(short) > wanted and list(short[:wanted]) == list(long[:wanted]):
            return prefix
        size, prefix, short = 2 * size, longer, long
    return text
