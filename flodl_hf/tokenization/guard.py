"""Calls into the tokenizers library whose every failure comes back as a ``TokenizerError``.

Decides: how a failure is explained (which text, which position, why) and which tokenizer definitions are
refused because they would exhaust memory. Leaves to others: what to do with the tokens.
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

__all__ = ["MAX_GROWTH", "check_text", "check_texts", "growth", "guarded"]

# Most normalized characters that one character of text may become: the longest expansion in Unicode NFKC is
# 18.
MAX_GROWTH = 64


@contextmanager
def guarded(where: str, remedy: str, texts: Sequence[Any] = (), pairs: Sequence[Any] | None = None) -> Iterator[None]:
    """Turn whatever the block raises into a ``TokenizerError`` that says where and what to do.

    A panic in the Rust code does not derive from ``Exception``, so ``except Exception`` would let it through.

    Args:
        where: what was being done, for the message.
        remedy: what the reader can do.
        texts: inputs, examined only after a failure, to name the one at fault.
        pairs: second texts, likewise.
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
            f"{where}: the tokenizers library failed: {printable(reason, 300)}; expected what it can use; {remedy}",
            where=where,
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


def check_text(text: Any, where: str) -> None:
    """Raise ``TokenizerError`` if ``text`` is not a string, or holds half of a surrogate pair."""
    if not isinstance(text, str):
        raise TokenizerError(
            f"{where}: found {type(text).__name__}, expected str; decode bytes, and drop or fill missing values first",
            where=where,
            found=type(text).__name__,
            expected="str",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise TokenizerError(
            f"{where}: character {error.start} is the lone surrogate U+{code:04X}, which stands for no "
            "character; expected text that can be encoded; "
            "repair the decoding that made it, or replace it: "
            "text.encode('utf-8', 'replace').decode('utf-8')",
            where=where,
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
        # there at most doubles a text, which is no danger and is what honest definitions do.
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
