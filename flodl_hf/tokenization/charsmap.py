"""The compiled character replacements inside a sentencepiece model, and checks of their layout.

The layout is four bytes with the size of a double-array trie, the trie (32-bit units as the Darts-clone library packs
them), and the replacements, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator
from typing import Any

from flodl_hf.errors import TokenizerError

_TABLE = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)')
_HIDDEN_KEY = re.compile(rb'"[a-z_]*\\u00[567][0-9a-fA-F][^"]*"\s*:')  # a key with a letter written as its number

# The longest replacement in nmt_nfkc is the 33 bytes of U+FDFA.
_MAX_REPLACEMENT = 256


def longest_replacement(data: bytes) -> int:
    """Return the bytes of the longest replacement in a table, 0 if the table is empty or damaged."""
    if len(data) < 4:
        return 0
    (size,) = struct.unpack_from("<I", data)
    return max(map(len, data[4 + size :].split(b"\0")), default=0)


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
            head = base64.b64decode(bytes(table[:8]).ljust(8, b"A"))
        except ValueError:
            continue  # the tokenizers library refuses a table that is not base64
        size = struct.unpack_from("<I", head)[0] if len(head) >= 4 else 0
        if 0 < len(table) < 8 or size > len(table):
            raise TokenizerError(
                f"{path}: precompiled_charsmap announces a trie of {size:,} bytes and has "
                f"{len(table):,} characters in all; expected a whole table; fetch the file again",
                where=path,
                found=size,
                expected=len(table),
            )


def strings_of(value: Any, key: str) -> Iterator[str]:
    """Yield the strings of a key at any depth of a JSON value."""
    if isinstance(value, dict):
        if isinstance(text := value.get(key), str):
            yield text
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from strings_of(part, key)


def check_table(data: bytes, path: str) -> None:
    """Check the layout of a table, which the tokenizers library does not.

    Args:
        data: the compiled table, empty for none.
        path: the file, for messages.

    Raises:
        TokenizerError: the table is damaged.
    """
    if not data:
        return
    size = struct.unpack_from("<I", data)[0] if len(data) >= 4 else 0
    left = len(data) - 4
    fault = None
    if left < 0:
        fault = "shorter than four bytes"
    elif not size or size % 4 or size > left:
        fault = f"the trie is announced with {size} bytes and {left} are left"
    elif size < left and data[-1]:
        fault = "the last replacement is cut off"
    elif longest_replacement(data) > _MAX_REPLACEMENT:
        fault = f"a replacement is longer than {_MAX_REPLACEMENT} bytes"
    if fault is not None:
        raise TokenizerError(
            f"{path}: character map: {fault}, expected a whole table. Fetch the file again.", where=path, reason=fault
        )
