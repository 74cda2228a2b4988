"""Losses of earlier runs, and whether those of now are near them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["BASELINE", "compare", "read", "save"]

BASELINE = Path(__file__).with_name("baseline.json")
"""What is compared with where no other file is named: runs on made-up data, and those that somebody adds."""


def _losses(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the training loss of each row under a name that says what was run."""
    return {
        f"{row['model']}, {row['mode']}, {row['rows']} rows, {row['epochs']} epochs of {row['batch']}": row["loss"][0]
        for row in rows
    }


def read(path: Path) -> dict[str, float]:
    """Return the losses of a file; none where it is not there."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put the losses of these rows among those of a file."""
    found = {**read(path), **{name: float(f"{loss:.6g}") for name, loss in _losses(rows).items()}}
    path.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


def compare(rows: list[dict[str, Any]], known: Mapping[str, float], tolerance: float) -> tuple[list[str], list[str]]:
    """Return what is further from the baseline than ``tolerance``, relatively, and what the baseline does not have."""
    far, strange = [], []
    for name, loss in _losses(rows).items():
        if name not in known:
            strange.append(name)
        elif not math.isfinite(loss) or abs(loss - known[name]) > tolerance * abs(known[name]):
            far.append(
                f"{name}: loss {loss:.6g}; the baseline has {known[name]:.6g}, which may differ by {tolerance:.0%}"
            )
    return far, strange
