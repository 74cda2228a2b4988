"""The compiled character replacements inside a sentencepiece model, checked and looked up.

The layout is four bytes with the size of a double-array trie, the trie (32-bit units as the Darts-clone
library packs them), and the replacements, each ended by a zero byte.

Decides: which tables are damaged, and what one table replaces.
Leaves to others: applying a table to text.
"""

from __future__ import annotations

import struct

from flodl_hf.errors import TokenizerError

__all__ = ["CharsMap", "longest_replacement"]

# The longest replacement in nmt_nfkc is the 33 bytes of U+FDFA.
_MAX_REPLACEMENT = 256


def longest_replacement(data: bytes) -> int:
    """Return the bytes of the longest replacement in a table, 0 if the table is empty or damaged."""
    if len(data) < 4:
        return 0
    (size,) = struct.unpack_from("<I", data)
    return max(map(len, data[4 + size :].split(b"\0")), default=0)


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
            f"{self._where}: character map: {what}; the file is damaged; fetch it again",
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
