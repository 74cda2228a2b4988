"""Calls into the tokenizers library that raise ``TokenizerError`` for every failure.

Also refuses definitions that would exhaust memory.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flodl.errors import printable
from flodl_hf.errors import TokenizerError

from .charsmap import longest_replacement

# Most normalized characters that one character of text may become: the longest expansion in Unicode NFKC is
# 18.
MAX_GROWTH = 64


@contextmanager
def translated_errors(
    operation: str, remedy: str, texts: Sequence[Any] = (), pairs: Sequence[Any] | None = None
) -> Iterator[None]:
    """Convert every error of the block into a ``TokenizerError`` with its place and a remedy.

    A panic in the Rust code does not derive from ``Exception``, so ``except Exception`` would let it through.

    Args:
        operation: the operation or file, for messages.
        remedy: advice in the message.
        texts: inputs, checked only after a failure, to report the invalid one.
        pairs: second texts, checked in the same way.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError):
        raise
    except BaseException as cause:
        check_texts(texts, "text")
        if pairs is not None:
            check_texts(pairs, "second text")
        reason = str(cause) or type(cause).__name__
        raise TokenizerError(
            f"{operation}: the tokenizers library failed: {printable(reason, 300)}; expected valid input; {remedy}",
            where=operation,
            reason=reason,
        ) from (cause if isinstance(cause, Exception) else None)


def check_texts(texts: Sequence[Any], kind: str) -> None:
    """Raise for the first of ``texts`` that is neither a valid string nor a sequence of valid strings."""
    for index, text in enumerate(texts):
        if isinstance(text, (list, tuple)):
            for number, word in enumerate(text):
                check_text(word, f"{kind} {index}, word {number}")
        else:
            check_text(text, f"{kind} {index}")


def check_text(text: Any, name: str) -> None:
    """Raise ``TokenizerError`` if ``text`` is not a string, or contains half of a surrogate pair."""
    if not isinstance(text, str):
        raise TokenizerError(
            f"{name}: found {type(text).__name__}, expected str; decode bytes, and drop or fill missing values first",
            where=name,
            found=type(text).__name__,
            expected="str",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise TokenizerError(
            f"{name}: character {error.start} is the lone surrogate U+{code:04X}, which is no character; expected text "
            "that can be encoded; repair the decoding that made it, or replace it: text.encode('utf-8', "
            "'replace').decode('utf-8')",
            where=name,
            position=error.start,
            found=f"U+{code:04X}",
        ) from None


def growth(normalizer: Any) -> int:
    """Return an upper bound of the characters that one character becomes under a serialized normalizer.

    Args:
        normalizer: the ``normalizer`` part of a tokenizer definition, as JSON text or as parsed.
    """
    if isinstance(normalizer, (str, bytes)):
        normalizer = json.loads(normalizer)
    if not isinstance(normalizer, dict):
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        bound = 1
        for part in normalizer.get("normalizers") or ():
            bound *= growth(part)
        return bound
    if kind == "Replace":
        content = len(str(normalizer.get("content", "")))
        pattern = normalizer.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        if literal:
            return max(1, -(-content // len(literal)))
        # A regular expression or an empty pattern may match between any two characters. One character put
        # there at most doubles a text, as in valid definitions.
        return 1 if content <= 1 else content + 1
    if kind == "Precompiled":
        try:
            table = b64decode(normalizer.get("precompiled_charsmap") or "", validate=True)
        except (ValueError, TypeError):
            return 1
        return max(1, longest_replacement(table))
    if kind == "Prepend":
        # Once for each text, so only a long one counts.
        return max(1, len(str(normalizer.get("prepend", ""))) // 8)
    return 1
