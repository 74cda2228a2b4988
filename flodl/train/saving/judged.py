"""Which checkpoint is the best: the figure that decides, and the checkpoints of a folder in its order."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

from flodl.train.saving.reading import list_checkpoints, read_manifest

__all__ = ["judged", "signed"]


def signed(metric: str, figures: Mapping[str, float]) -> float | None:
    """Return the figure that decides, greater where better; None where there is none, or it is no number.

    Args:
        metric: its name, ``-`` before it where less is better.
    """
    value = figures.get(metric.lstrip("-"))
    if value is None or math.isnan(value):
        return None
    return -value if metric.startswith("-") else value


def judged(folder: str | os.PathLike[str], metric: str) -> list[tuple[float, int, Path]]:
    """Return value (greater is better), step and path of the checkpoints with figures, the best first.

    The earliest comes first on ties. Those whose manifest cannot be read are left out.
    """
    found = []
    for path in list_checkpoints(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            manifest = read_manifest(path)
            value = signed(metric, manifest["metrics"])
            if value is not None:
                found.append((value, int(manifest["step"]), path))
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))
