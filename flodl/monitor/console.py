"""What the monitor keeps of an epoch, and how it reads on one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flodl.monitor.formatting import metric_text

__all__ = ["EpochRecord", "console_line", "eta_s", "eta_text"]

# An epoch counts this much of the one after it, so the estimate follows a change of pace in a few epochs.
_FADE = 0.7


@dataclass(frozen=True)
class EpochRecord:
    """One epoch.

    Attributes:
        epoch: counted from 0.
        duration_s: seconds it took, as the caller measured them.
        metrics: values by name, in the order given.
        pace_s: seconds from the epoch before to this one, work between them included.
    """

    epoch: int
    duration_s: float
    metrics: dict[str, float]
    pace_s: float


def eta_s(records: Sequence[EpochRecord], total_epochs: int) -> float | None:
    """Return the seconds left at the recent pace, or None before the first epoch and after the last."""
    if not records:
        return None
    left = total_epochs - records[-1].epoch - 1
    if left <= 0:
        return None
    weights = [_FADE**age for age in range(len(records))]
    pace = math.fsum(w * r.pace_s for w, r in zip(weights, reversed(records), strict=True))
    return pace / math.fsum(weights) * left


def eta_text(seconds: float) -> str:
    """Return ``420ms``, ``1s``, ``12.5s``, ``4m 32s`` or ``3h 12m``, rounded down; a dash when negative."""
    if seconds < 0 or math.isnan(seconds):
        return "—"
    if seconds < 1:
        return f"{int(seconds * 1000)}ms"
    if seconds < 60:
        tenths = int(seconds * 10)
        return f"{tenths // 10}s" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10}s"
    if seconds < 3600:
        return f"{int(seconds) // 60}m {int(seconds) % 60:02d}s"
    if math.isinf(seconds):
        return "—"
    return f"{int(seconds) // 3600}h {int(seconds) % 3600 // 60:02d}m"


def console_line(record: EpochRecord, total_epochs: int, eta: float | None) -> str:
    """Return the line of an epoch: its number from 1, its metrics, ``[duration  ETA x]``."""
    width = len(str(total_epochs))
    parts = [f"  epoch {record.epoch + 1:>{width}}/{total_epochs}"]
    parts += [f"{_plain(name)}={metric_text(value)}" for name, value in record.metrics.items()]
    rest = "" if eta is None else f"  ETA {eta_text(eta)}"
    return "  ".join([*parts, f"[{eta_text(record.duration_s)}{rest}]"])


def _plain(name: str) -> str:
    """Keep a name from breaking its line or steering the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
