"""The order of checkpoints by a metric."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

from flodl.train.saving.reading import list_checkpoints, read_manifest


def signed(metric: str, figures: Mapping[str, float]) -> float | None:
    """Return the value of a metric with greater values better; None if it is missing or NaN.

    Args:
        metric: its name, with a leading ``-`` where less is better.
        figures: figures by name.
    """
    value = figures.get(metric.lstrip("-"))
    if value is None or math.isnan(value):
        return None
    return -value if metric.startswith("-") else value


def judged(folder: str | os.PathLike[str], metric: str) -> list[tuple[float, int, Path]]:
    """Return value (greater is better), step and path of the checkpoints with this metric, the best first.

    The earliest comes first on ties. Checkpoints with an unreadable manifest are skipped.
    """
    found = []
    for path in list_checkpoints(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            manifest = read_manifest(path)
            value = signed(metric, manifest["metrics"])
            if value is not None:
                found.append((value, int(manifest["step"]), path))
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))
