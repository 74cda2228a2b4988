"""The console line of an epoch, and its texts for durations and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Each epoch has this weight relative to the next one, so the estimate follows a change of speed in a few epochs.
_DECAY = 0.7


@dataclass(frozen=True)
class EpochRecord:
    """One epoch.

    Attributes:
        epoch: counted from 0.
        duration_s: seconds it took.
        metrics: names and values, in the given order.
        pace_s: seconds since the previous epoch ended, work between epochs included.
    """

    epoch: int
    duration_s: float
    metrics: dict[str, float]
    pace_s: float


def eta_s(records: Sequence[EpochRecord], total_epochs: int) -> float | None:
    """Return the seconds left at the recent speed; None before the first epoch and after the last."""
    left = total_epochs - records[-1].epoch - 1 if records else 0
    if left <= 0:
        return None
    weights = [_DECAY**age for age in range(len(records))]
    pace = math.fsum(w * r.pace_s for w, r in zip(weights, reversed(records), strict=True))
    return pace / math.fsum(weights) * left


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
