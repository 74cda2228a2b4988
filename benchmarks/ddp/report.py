"""The tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["curves", "modes", "scaling"]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _spread(value: tuple[float, float] | None, digits: int, scale: float = 1.0) -> str:
    if value is None:
        return "–"
    mean, deviation = value
    shown = f"{mean * scale:.{digits}f}"
    return shown if not deviation else f"{shown} ± {deviation * scale:.{digits}f}"


def modes(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of modes: quality, time, meetings, idleness, shares."""
    unequal = any("at_most" in row for row in rows)
    titles = ["model", "mode", "train loss", "held-out loss", "accuracy %", "published %", "seconds", "× solo"]
    titles += ["× solo from epoch 2", "at most"] if unequal else []
    titles += ["syncs", "sync ms", "idle % by rank", "idle % by cause", "GPU use %", "anchor", "shares %"]
    body = []
    for row in rows:
        digits = 5 if row["loss"][0] < 0.1 else 4
        line = [row["model"], row["mode"], _spread(row["loss"], digits), _spread(row["eval_loss"], digits)]
        published = row.get("reference")
        line += [_spread(row["figure"], 2, 100), "–" if published is None else f"{100 * published:.2f}"]
        line += [f"{row['seconds']:.2f}"]
        line += [f"{row['speed']:.2f}" if row["speed"] else "–"]
        if unequal:
            line += [f"{row['later']:.2f}" if row["later"] else "–"]
            line += [f"{row['at_most']:.2f}" if "at_most" in row and row["mode"] != "solo" else "–"]
        line += [str(row["syncs"]), "–" if row["mean_sync_ms"] is None else f"{row['mean_sync_ms']:.1f}"]
        line += [" / ".join(f"{100 * part:.0f}" for part in row["idle"])]
        line += [" / ".join(map(_causes, row.get("idle_shares", {}).values())) or "–"]
        line += [" / ".join(f"{use:.0f}" for use in row.get("device_use", {}).values()) or "–"]
        line += ["–" if row["anchor"] is None else str(row["anchor"])]
        line += [" / ".join(f"{100 * part:.0f}" for part in row["share"])]
        body.append(line)
    return _table(titles, body)


def _causes(shares: dict[str, float]) -> str:
    """Return the idle time of a rank by cause, such as ``sync 3, epoch boundary 1``."""
    return ", ".join(f"{cause} {100 * share:.0f}" for cause, share in shares.items()) or "none"


def curves(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of curves that should be equal."""
    titles = ["model", "steps", "global batch", "first loss", "last loss, one rank", "last loss, Sync"]
    titles += ["largest relative difference"]
    body = [
        [
            row["model"], str(row["steps"]), str(row["batch"]), f"{row['first_loss']:.6f}",
            f"{row['last_loss']:.6f}", f"{row['last_loss_sync']:.6f}", f"{row['largest_relative_difference']:.1e}",
        ]
        for row in rows
    ]  # fmt: skip
    return _table(titles, body)


def scaling(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of weak scaling."""
    titles = ["model", "precision", "batch per rank", "ranks", "samples/s", "× one rank", "efficiency %"]
    body = [
        [
            row["model"], row["precision"], str(row["batch"]), str(row["ranks"]),
            f"{row['samples_per_s']:.0f}", f"{row['scaling']:.2f}", f"{100 * row['efficiency']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return _table(titles, body)
