"""Figures that colour a picture: what they measure, how they add up, and the colour and words of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Heat", "bytes_in_words", "colour_of", "time_in_words"]

_COLOURS = ((0x27, 0xAE, 0x60), (0xF3, 0x9C, 0x12), (0xE7, 0x4C, 0x3C))


@dataclass(frozen=True)
class Heat:
    """One figure for each part of a model.

    Attributes:
        kind: ``time`` (seconds), ``memory`` (bytes), ``gradient`` (norms), or any other word.
        values: figures by dotted path of a part.
        whole: the figure of the whole, where it is more than that of its parts.
    """

    kind: str
    values: Mapping[str, float] = field(default_factory=dict)
    whole: float | None = None

    @property
    def title(self) -> str:
        """What is measured."""
        named = {"time": "Forward", "memory": "Memory that stays until backward", "gradient": "Gradient norm"}
        return named.get(self.kind, self.kind)

    def together(self, values: Iterable[float]) -> float:
        """Return the figure of several parts together: norms by their squares, all others by their sum."""
        if self.kind == "gradient":
            return math.sqrt(math.fsum(value * value for value in values))
        return math.fsum(values)

    def words(self, value: float) -> str:
        """Return a figure with its unit."""
        if self.kind == "time":
            return time_in_words(value)
        return bytes_in_words(value) if self.kind == "memory" else f"{value:.3g}"


def colour_of(share: float) -> str:
    """Return green at 0, yellow at a half, red at 1."""
    half, part = (0, 2 * share) if share < 0.5 else (1, 2 * share - 1)
    mixed = (round(a + (b - a) * part) for a, b in zip(_COLOURS[half], _COLOURS[half + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def time_in_words(seconds: float) -> str:
    """Return microseconds below a thousandth of a second, else milliseconds."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def bytes_in_words(count: float) -> str:
    """Return a number of bytes with its unit of 1024."""
    for unit in ("B", "KB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"
