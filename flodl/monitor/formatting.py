"""Durations and metrics as short texts, for consoles and logs."""

from __future__ import annotations

import math

__all__ = ["duration_text", "metric_text"]


def duration_text(seconds: float) -> str:
    """Return ``123ms`` below a second, ``1.2s`` below a minute, else ``2m05s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s"


def metric_text(value: float) -> str:
    """Return ``0``, ``1.00e-4`` below a thousandth, four decimals below a hundred, else two."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 0.001:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.2f}"
