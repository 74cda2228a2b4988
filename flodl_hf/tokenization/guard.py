"""Checks of texts and of tokenizer definitions; errors of the tokenizers library as ``TokenizerError``.

Definitions that would exhaust memory are refused. A table of character replacements in a sentencepiece model has four
bytes with the size of a double-array trie, the trie (32-bit units as the Darts-clone library packs them), and the
replacements, each ended by a zero byte.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NoReturn

from flodl.errors import printable
from flodl_hf.errors import TokenizerError

Part = dict[str, Any]

# Most normalized characters that one character of text may become: the longest expansion in Unicode NFKC is 18.
MAX_GROWTH = 64
# The longest replacement in nmt_nfkc is the 33 bytes of U+FDFA.
_MAX_REPLACEMENT = 256
_TABLE = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)')
_HIDDEN_KEY = re.compile(rb'"[a-z_]*\\u00[567][0-9a-fA-F][^"]*"\s*:')  # a key with a letter written as its number


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
    except BaseException as cause:
        raise_translated(cause, operation, remedy, texts, pairs)


def raise_translated(
    cause: BaseException, operation: str, remedy: str, texts: Sequence[Any], pairs: Sequence[Any] | None
) -> NoReturn:
    """Raise what `translated_errors` makes of an error."""
    if isinstance(cause, (KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError)):
        raise cause
    check_texts(texts, "text")
    check_texts(pairs or (), "second text")
    reason = str(cause) or type(cause).__name__
    raise TokenizerError(
        f"{operation}: the tokenizers library failed: {printable(reason, 300)}; expected valid input; {remedy}",
        where=operation,
        reason=reason,
    ) from (cause if isinstance(cause, Exception) else None)


# Texts


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


def check_batch(texts: Any, name: str, words: bool) -> None:
    """Raise unless ``texts`` is a sequence of strings, or of lists of words: a lone string is neither."""
    if isinstance(texts, (str, bytes)) or not hasattr(texts, "__len__") or not hasattr(texts, "__getitem__"):
        raise TokenizerError(
            f"{name}: found {type(texts).__name__}, expected a list of texts; put a single text into a list",
            field=name,
            found=type(texts).__name__,
        )
    if not words and set(map(type, texts)) <= {str}:
        return
    for index, text in enumerate(texts):
        if not words:
            # The library reads two strings as a pair, and reports other types without their position.
            if not isinstance(text, str):
                check_text(text, f"{name} {index}")
        elif isinstance(text, (str, bytes)) or not isinstance(text, Sequence):
            raise TokenizerError(
                f"{name} {index}: found {type(text).__name__}, expected a list of words; "
                "split it, or leave words=False",
                field=name,
                position=index,
                found=type(text).__name__,
            )


# Definitions


def parts_of(component: Part | None) -> list[Part]:
    """Return a component of a definition and the components in it."""
    if not isinstance(component, dict):
        return []
    inside = (part for key in ("normalizers", "pretokenizers", "processors") for part in component.get(key) or ())
    return [component, *(part for inner in inside for part in parts_of(inner))]


def strings_of(value: Any, key: str) -> Iterator[str]:
    """Yield the strings of a key at any depth of a JSON value."""
    if isinstance(value, dict):
        if isinstance(text := value.get(key), str):
            yield text
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from strings_of(part, key)


def growth(normalizer: Any) -> int:
    """Return an upper bound of the characters that one character becomes under a normalizer of a definition."""
    kind = normalizer.get("type") if isinstance(normalizer, dict) else None
    if kind == "Sequence":
        return prod(map(growth, normalizer.get("normalizers") or ()))
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
        return max(1, _longest_replacement(table))
    if kind == "Prepend":
        # Once for each text, so only a long one counts.
        return max(1, len(str(normalizer.get("prepend", ""))) // 8)
    return 1


def _longest_replacement(table: bytes) -> int:
    """Return the bytes of the longest replacement in a table, 0 if the table is empty or damaged."""
    size = int.from_bytes(table[:4], "little")
    return max(map(len, table[4 + size :].split(b"\0")))


def check_definition(data: bytes, path: str) -> None:
    """Refuse the text of a ``tokenizer.json`` in which a trie is announced larger than its table.

    The tokenizers library allocates the announced memory without a check, and ends the process if there is not enough.

    Raises:
        TokenizerError: there is such a table.
    """
    tables = [match[1] for match in _TABLE.finditer(data)] if b"charsmap" in data else []
    if any(b"\\" in table for table in tables) or (b"\\u00" in data and _HIDDEN_KEY.search(data)):
        # With escapes, the search of bytes misses a table; then the whole text is parsed.
        try:
            tables = [text.encode("utf-8", "replace") for text in strings_of(json.loads(data), "precompiled_charsmap")]
        except (ValueError, RecursionError):
            return  # reported when the definition is loaded
    for table in tables:
        try:
            size = int.from_bytes(b64decode(table[:8].ljust(8, b"A"))[:4], "little")
        except ValueError:
            continue  # the tokenizers library refuses a table that is not base64
        if 0 < len(table) < 8 or size > len(table):
            raise TokenizerError(
                f"{path}: precompiled_charsmap announces a trie of {size:,} bytes and has "
                f"{len(table):,} characters in all; expected a whole table; fetch the file again",
                where=path,
                found=size,
                expected=len(table),
            )


def check_table(data: bytes, path: str) -> None:
    """Check the layout of a table of character replacements, which the tokenizers library does not.

    Args:
        data: the compiled table, empty for none.
        path: the file, for messages.

    Raises:
        TokenizerError: the table is damaged.
    """
    size, left = int.from_bytes(data[:4], "little"), len(data) - 4
    fault = None
    if left < 0:
        fault = "shorter than four bytes"
    elif not size or size % 4 or size > left:
        fault = f"the trie is announced with {size} bytes and {left} are left"
    elif size < left and data[-1]:
        fault = "the last replacement is cut off"
    elif _longest_replacement(data) > _MAX_REPLACEMENT:
        fault = f"a replacement is longer than {_MAX_REPLACEMENT} bytes"
    if data and fault is not None:
        raise TokenizerError(
            f"{path}: character map: {fault}, expected a whole table. Fetch the file again.", where=path, reason=fault
        )
