"""A curve as an SVG that stands in any page: no script, no style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["curve_svg"]

WIDE, HIGH, LEFT, LOW = 480, 160, 48, 20
MOST = 400
"""Most points that are drawn; of more, each is the mean of its neighbours."""


def curve_svg(values: Sequence[float], *, marks: Mapping[int, str] | None = None, title: str = "loss") -> str:
    """Return the curve of a value at each step from 1, with its least and largest at the side.

    Args:
        values: one for each step; what is not finite leaves a gap.
        marks: words for steps, at which a line stands.
        title: what is drawn.
    """
    group = max(1, -(-len(values) // MOST))
    points: list[tuple[float, float]] = []
    for first in range(0, len(values), group):
        part = [value for value in values[first : first + group] if math.isfinite(value)]
        if part:
            points.append((first + (len(values[first : first + group]) + 1) / 2, math.fsum(part) / len(part)))
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    spread, last = (high - low) or 1.0, max(2, len(values))

    def place(step: float, value: float) -> str:
        x = LEFT + (WIDE - LEFT - 8) * (step - 1) / (last - 1)
        return f"{x:.1f},{8 + (HIGH - LOW - 8) * (high - value) / spread:.1f}"

    small = 'font-size="10" font-family="sans-serif" fill="#666"'
    line = " ".join(place(x, y) for x, y in points)
    drawn = [
        f'<polyline fill="none" stroke="#4a90d9" stroke-width="1.5" points="{line}"/>',
        f'<text x="2" y="14" {small}>{high:.4g}</text>',
        f'<text x="2" y="{HIGH - LOW}" {small}>{low:.4g}</text>',
        f'<text x="{LEFT}" y="{HIGH - 4}" {small}>{escape(title)}, steps 1 to {len(values):,}</text>',
    ]
    for step, words in (marks or {}).items():
        x = place(step, low).partition(",")[0]
        drawn.append(
            f'<line x1="{x}" x2="{x}" y1="8" y2="{HIGH - LOW}" stroke="#d98e4a" stroke-dasharray="3 2">'
            f"<title>{escape(words)}</title></line>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" '
        f'role="img">{"".join(drawn)}</svg>'
    )
