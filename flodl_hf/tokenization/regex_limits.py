"""Regular expressions of a tokenizer definition, and a time limit for unknown ones.

A pattern can take time that grows with the square of a text, or worse, and the library has no time limit. If a
definition contains patterns that are not in published tokenizers, texts are split in a thread with a time limit.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from flodl.errors import printable
from flodl_hf.errors import TokenizerError

__all__ = ["foreign_patterns", "within_time"]

R = TypeVar("R")

PATIENCE_S = 30.0
PER_CHARACTER_S = 50e-6  # published patterns take less than a fiftieth
# Patterns of the tokenizers that transformers itself writes.
KNOWN = (" {2,}", "\\s+", "\\s", "[^\\S\\n]+", "[\\r\\n]+")


def foreign_patterns(*parts: str | bytes) -> tuple[str, ...]:
    """Return the regular expressions of parts of a definition (JSON texts) that no published tokenizer has."""
    found = (pattern for part in parts for pattern in _patterns(json.loads(part)))
    return tuple(dict.fromkeys(pattern for pattern in found if pattern not in KNOWN))


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        pattern = value.get("Regex")
        if isinstance(pattern, str):
            yield pattern
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _patterns(part)


def within_time(run: Callable[[], R], characters: int, patterns: tuple[str, ...], where: str) -> R:
    """Return ``run()``, which must release the interpreter lock.

    Args:
        run: function without arguments. If it exceeds the limit, its thread continues until the process ends.
        characters: number of characters of the texts.
        patterns: the regular expressions, for messages.
        where: the tokenizer.

    Raises:
        TokenizerError: it took too long.
    """
    result: list[R] = []
    fault: list[BaseException] = []

    def work() -> None:
        try:
            result.append(run())
        except BaseException as error:
            fault.append(error)

    limit = PATIENCE_S + PER_CHARACTER_S * characters
    thread = threading.Thread(target=work, name="flodl-hf-pattern", daemon=True)
    thread.start()
    thread.join(limit)
    if fault:
        raise fault[0]
    if result:
        return result[0]
    listed = ", ".join(printable(pattern, 80) for pattern in patterns[:3])
    raise TokenizerError(
        f"{where}: splitting {characters:,} characters took more than {limit:.0f} s by the patterns of its "
        f"tokenizer.json ({listed}), which may not end on some texts. Do not use this tokenizer unless you know "
        "who made it, or give it shorter texts.",
        where=where,
        patterns=list(patterns),
        limit_s=limit,
    )
