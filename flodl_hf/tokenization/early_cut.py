"""The beginning of a very long text, cut before it is tokenized, where truncation removes the rest.

Tokens do not depend on characters far behind them. A prefix is tokenized, then a prefix of twice the length; if both
begin with the same tokens, the shorter one is enough. The cost is then independent of the length of the text. White
space is an exception: a special token may include any number of spaces before it, so a prefix never ends in white
space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["beginning", "beginnings"]

# Assumed characters of a token on average; English has four.
_CHARS = 16
# Texts of at most this many characters for each requested token are tokenized whole.
_LONG = 4 * _CHARS
# Further tokens that both prefixes must have in common.
_MARGIN = 32
# For a text of one very long word, further attempts cost more than the whole text.
_DOUBLINGS = 4


def beginnings(texts: Sequence[Any], max_tokens: int, encode: Callable[[str], Sequence[int]]) -> list[Any]:
    """Return the texts, of long ones a prefix that has more tokens than fit.

    Args:
        texts: texts; lists of words are returned as they are.
        max_tokens: number of tokens that fit.
        encode: ids of a text, without special tokens.
    """
    limit = _LONG * (max_tokens + 1)
    # One token more than fits, so that the row still records a truncation.
    return [beginning(t, max_tokens + 1, encode) if isinstance(t, str) and len(t) > limit else t for t in texts]


def beginning(text: str, tokens: int, encode: Callable[[str], Sequence[int]]) -> str:
    """Return a prefix of ``text`` with the same first ``tokens`` tokens as the whole text.

    Args:
        text: the whole text.
        tokens: number of requested tokens.
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
