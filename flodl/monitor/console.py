"""The console line of an epoch, and its texts for durations and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping


def duration_text(seconds: float) -> str:
    """Return ``420ms``, ``1s``, ``12.5s``, ``4m 32s`` or ``3h 12m``, rounded down; a dash if negative."""
    if not 0 <= seconds < math.inf:
        return "—"
    if seconds < 1:
        return f"{int(seconds * 1000)}ms"
    if seconds < 60:
        return f"{int(seconds * 10) / 10:g}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def metric_text(value: float) -> str:
    """Return ``0``, ``1.00e-4`` below a thousandth, four decimals below a hundred, otherwise two."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 0.001:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.2f}"


def console_line(
    epoch: int,
    total: int,
    metrics: Mapping[str, float],
    duration_s: float | None,
    left_s: float | None,
    usage: str = "",
) -> str:
    """Return the line of an epoch (from 0): number, metrics, ``[duration  ETA left]``, memory and load."""
    parts = [f"  epoch {epoch + 1:>{len(str(total))}}/{total}"]
    parts += [f"{_printable(name)}={metric_text(value)}" for name, value in metrics.items()]
    if duration_s is not None:
        rest = "" if left_s is None else f"  ETA {duration_text(left_s)}"
        parts.append(f"[{duration_text(duration_s)}{rest}]")
    return "  ".join([*parts, *([usage] if usage else [])])


def _printable(name: str) -> str:
    """Replace characters that could break the line or control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
