"""Texts for the files of these tests."""

from __future__ import annotations

WORDS = "the a cat dog sat on mat ran good bad film is was not very ada lives in paris works for acme corp".split()  # noqa: SIM905 - read as a sentence


def texts(count: int) -> list[str]:
    """Return texts of many lengths, some of which are said again."""
    return [" ".join(WORDS[(i * 7 + k * (i % 5 + 1)) % len(WORDS)] for k in range(i % 13 + 1)) for i in range(count)]
