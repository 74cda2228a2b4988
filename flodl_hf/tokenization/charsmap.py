"""The compiled character replacements inside a sentencepiece model, checked and looked up.

The layout is four bytes with the size of a double-array trie, the trie (32-bit units as the Darts-clone
library packs them), and the replacements, each ended by a zero byte.

Decides: which tables are damaged, and what one table replaces.
Leaves to others: applying a table to text.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator
from typing import Any

from flodl_hf.errors import TokenizerError

__all__ = ["CharsMap", "check_definition", "longest_replacement"]

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


def check_definition(data: bytes, where: str) -> None:
    """Refuse the text of a ``tokenizer.json`` with a table whose trie is announced larger than the table is.

    The tokenizers library takes the memory that is announced before it looks, and ends the process where there is
    not so much.

    Raises:
        TokenizerError: there is such a table.
    """
    tables = [match[1] for match in _TABLE.finditer(data)] if b"charsmap" in data else []
    if any(b"\\" in table for table in tables) or (b"\\u00" in data and _HIDDEN_KEY.search(data)):
        # Written so that a search of bytes does not see it; then all is read.
        try:
            tables = list(_tables(json.loads(data)))
        except (ValueError, RecursionError):
            return  # which whoever reads it says
    for table in tables:
        try:
            head = base64.b64decode(bytes(table[:8]).ljust(8, b"A"))
        except ValueError:
            continue  # the tokenizers library refuses a table that is not base64
        size = struct.unpack_from("<I", head)[0] if len(head) >= 4 else 0
        if 0 < len(table) < 8 or size > len(table):
            raise TokenizerError(
                f"{where}: precompiled_charsmap announces a trie of {size:,} bytes and has "
                f"{len(table):,} characters in all; expected a whole table; fetch the file again",
                where=where,
                found=size,
                expected=len(table),
            )


def _tables(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        table = value.get("precompiled_charsmap")
        if isinstance(table, str):
            yield table.encode("utf-8", "replace")
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _tables(part)


class CharsMap:
    """A table of replacements; the longest match at each position wins when it is applied."""

    def __init__(self, data: bytes, where: str) -> None:
        """Check the layout of ``data``.

        Args:
            data: the compiled table, empty for none.
            where: the file, for messages.

        Raises:
            TokenizerError: if the table is damaged.
        """
        self._where = where
        self._units: tuple[int, ...] = ()
        self._strings = b""
        if not data:
            return
        if len(data) < 4:
            raise self._fail("shorter than four bytes")
        (size,) = struct.unpack_from("<I", data)
        if not size or size % 4 or size > len(data) - 4:
            raise self._fail(f"the trie is announced with {size} bytes and {len(data) - 4} are left")
        self._units = struct.unpack_from(f"<{size // 4}I", data, 4)
        self._strings = data[4 + size :]
        if self._strings and not self._strings.endswith(b"\0"):
            raise self._fail("the last replacement is cut off")
        if longest_replacement(data) > _MAX_REPLACEMENT:
            raise self._fail(f"a replacement is longer than {_MAX_REPLACEMENT} bytes")

    def _fail(self, what: str) -> TokenizerError:
        return TokenizerError(
            f"{self._where}: character map: {what}; expected a whole table; fetch the file again",
            where=self._where,
            reason=what,
        )

    def __bool__(self) -> bool:
        return bool(self._units)

    def _unit(self, position: int) -> int:
        if position >= len(self._units):
            raise self._fail(f"a link points to unit {position} of {len(self._units)}")
        return self._units[position]

    def get(self, text: str) -> str | None:
        """Return what exactly ``text`` is replaced by, or ``None`` if there is no such rule."""
        if not self._units:
            return None

        def offset(unit: int) -> int:
            return (unit >> 10) << ((unit & 0x200) >> 6)

        unit = self._unit(0)
        position = offset(unit)
        for byte in text.encode("utf-8"):
            position ^= byte
            if position >= len(self._units):
                return None
            unit = self._units[position]
            if unit & 0x800000FF != byte:
                return None
            position ^= offset(unit)
        if not unit & 0x100:
            return None
        start = self._unit(position) & 0x7FFFFFFF
        stop = self._strings.find(b"\0", start)
        if stop < 0:
            raise self._fail("a replacement lies outside the table")
        try:
            return self._strings[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fail("a replacement is not UTF-8") from error
