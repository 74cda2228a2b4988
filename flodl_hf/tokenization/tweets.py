"""Normalization of tweets as BERTweet was trained with: user names, addresses and emojis become words.

The patterns of NLTK's tweet tokenizer are used, as in transformers. Emojis become words if the package emoji is
installed, as in transformers.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from html.entities import name2codepoint

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from .python_words import Part, Words, located

_EMOTICON = r"""
    (?:[<>]?[:;=8][\-o\*\']?[\)\]\(\[dDpP/\:\}\{@\|\\]
      |[\)\]\(\[dDpP/\:\}\{@\|\\][\-o\*\']?[:;=8][<>]?
      |<3)"""
_NESTED = r"\([^\s()]*?\([^\s()]+\)[^\s()]*?\)"
# In the middle one character at a time, so that an address without a valid end does not take exponential time.
_URL = rf"""
    (?:https?:(?:/{{1,3}}|[a-z0-9%])|[a-z0-9.\-]+[.](?:[a-z]{{2,13}})/)
    (?:[^\s()<>{{}}\[\]]|{_NESTED}|\([^\s]+?\))+
    (?:{_NESTED}|\([^\s]+?\)|[^\s`!()\[\]{{}};:'".,<>?«»“”‘’])
    |(?:(?<!@)[a-z0-9]+(?:[.\-][a-z0-9]+)*[.](?:[a-z]{{2,13}})\b/?(?!@))"""
_WORDS = (
    _URL,
    r"(?:(?:\+?[01][\ *\-.\)]*)?(?:[\(]?\d{3}[\ *\-.\)]*)?\d{3}[\ *\-.\)]*\d{4})",  # telephone numbers
    _EMOTICON,
    r"<[^>\s]+>",
    r"[\-]+>|<[\-]+",
    r"(?:@[\w_]+)",
    r"(?:\#+[\w_]+[\w\'_\-]*[\w_]+)",
    r"[\w.+-]+@[\w-]+\.(?:[\w-]\.?)+[\w-]",
    r"(?:[^\W\d_](?:[^\W\d_]|['\-_])+[^\W\d_])",
    r"(?:[+\-]?\d+[,/.:-]\d+[+\-]?)",
    r"(?:[\w_]+)",
    r"(?:\.(?:\s*\.){1,})",
    r"(?:\S)",
)
# Word characters of Oniguruma include marks, as in the package regex, which also includes joiners.
_JOINERS = r"\x{200c}\x{200d}"
_PATTERN = "|".join(_WORDS).replace(r"[\w", rf"[\w{_JOINERS}").replace(r"[^\W\d_]", rf"[[^\W\d_]{_JOINERS}]")
_WORD = Split(Regex(f"(?ix){_PATTERN}"), "removed", invert=True)
_REPEATED = re.compile(r"([^a-zA-Z0-9])\1{3,}")
_ENTITY = re.compile(r"&(#?(x?))([^&;\s]+);")
_PUNCTUATION = {"’": "'", "…": "..."}
_CONTRACTIONS = (
    ("cannot ", "can not "), ("n't ", " n't "), ("n 't ", " n't "), ("ca n't", "can't"), ("ai n't", "ain't"),
    *((f"'{end} ", f" '{end} ") for end in ("m", "re", "s", "ll", "d", "ve")),
    (" p . m .", "  p.m."), (" p . m ", " p.m "), (" a . m .", " a.m."), (" a . m ", " a.m "),
)  # fmt: skip


def _entity(match: re.Match[str]) -> str:
    number: int | None
    if match[1]:
        try:
            number = int(match[3], 16 if match[2] else 10)
            if 0x80 <= number <= 0x9F:
                return bytes((number,)).decode("cp1252")
        except ValueError:
            number = None
    else:
        number = name2codepoint.get(match[3])
    try:
        return "" if number is None else chr(number)
    except (ValueError, OverflowError):
        return ""


@cache
def _emoji() -> Callable[[str], str] | None:
    try:
        return importlib.import_module("emoji").demojize
    except ImportError:
        warnings.warn(
            "the package emoji is not installed, so emojis are not converted into words; "
            "install it with: pip install emoji",
            UserWarning,
            stacklevel=2,
        )
        return None


def _word(token: str) -> str:
    if token.startswith("@"):
        return "@USER"
    if token.lower().startswith(("http", "www")):
        return "HTTPURL"
    if len(token) > 1:
        return token
    if token in _PUNCTUATION:
        return _PUNCTUATION[token]
    demojize = _emoji()
    return token if demojize is None else demojize(token)


def normalize_tweet(text: str) -> str:
    """Return a tweet with its words separated by spaces and its user names, addresses and emojis replaced."""
    for old, new in _PUNCTUATION.items():
        text = text.replace(old, new)
    text = _REPEATED.sub(r"\1\1\1", _ENTITY.sub(_entity, text))
    text = " ".join(_word(token) for token, _ in _WORD.pre_tokenize_str(text))
    for old, new in _CONTRACTIONS:
        text = text.replace(old, new)
    return " ".join(text.split())


def normalized_words(words: Words, normalize: Callable[[str], str]) -> Words:
    """Return a function that splits a normalized text into parts, with their places in the original text."""

    def split(text: str) -> Iterator[Part]:
        for word, start, stop in located(normalize(text).split(), text):
            for part, first, last in words(word):
                same = text[start:stop] == word
                yield (part, start + first, start + last) if same else (part, start, stop)

    return split
