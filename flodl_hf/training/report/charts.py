"""Charts as SVG: colours from the style of the page, for light and dark. Tables show
the same values.

Each chart has a title for screen readers, and marks have tooltips. Texts are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["bars", "heat_map", "line_chart", "scatter", "stacked_bars"]

WIDE, HIGH = 460, 240
LEFT, RIGHT, TOP, LOW = 46, 12, 10, 34
MOST_POINTS = 2000


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    across: str,
    up: str,
    x: tuple[float, float] | None = None,
    y: tuple[float, float] | None = None,
    diagonal: bool = False,
    dots: bool = False,
) -> str:
    """Return lines through points, at most eight, with colours and a legend.

    Args:
        lines: mapping of names to points; points that are not finite leave a gap.
        title: description of the chart, for screen readers.
        across: label of the horizontal axis.
        up: label of the vertical axis.
        x: ends of the horizontal axis; None for the range of the points.
        y: ends of the vertical axis.
        diagonal: draw the line on which both are equal.
        dots: mark the points.
    """
    shown = {
        name: [point for point in points if all(map(math.isfinite, point))] for name, points in list(lines.items())[:8]
    }
    shown = {name: points for name, points in shown.items() if points}
    if not shown:
        return ""
    everything = [point for points in shown.values() for point in points]
    axes = _Axes(
        x or (min(p[0] for p in everything), max(p[0] for p in everything)),
        y or (min(p[1] for p in everything), max(p[1] for p in everything)),
    )
    parts = [axes.drawn(across, up)]
    if diagonal:
        (x0, y0), (x1, y1) = axes.place(0, 0), axes.place(1, 1)
        parts.append(f'<line class="faint" x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke-dasharray="4 3"/>')
    for number, (name, points) in enumerate(shown.items()):
        step = max(1, -(-len(points) // MOST_POINTS))
        places = [axes.place(*point) for point in points[::step]]
        path = " ".join(f"{a},{b}" for a, b in places)
        parts.append(f'<polyline class="line c{number}" points="{path}"><title>{escape(name)}</title></polyline>')
        if dots:
            for (a, b), (px, py) in zip(places, points[::step], strict=True):
                parts.append(
                    f'<circle class="dot c{number}" cx="{a}" cy="{b}" r="3"><title>{escape(name)}: {across} {px:.4g}, '
                    f"{up} {py:.4g}</title></circle>"
                )
    names = list(shown) if len(shown) > 1 else []
    return _svg(parts, title, WIDE, HIGH) + _key(names)


def bars(values: Mapping[str, float], *, title: str, across: str, up: str) -> str:
    """Return vertical bars, such as a histogram; about six of them have labels.

    Args:
        values: mapping of names to heights, in order.
        title: description of the chart.
        across: label of the names.
        up: label of the heights.
    """
    if not values or max(values.values()) <= 0:
        return ""
    axes = _Axes((0, len(values)), (0, max(values.values())))
    parts = [axes.drawn(across, up, numbers=False)]
    named = max(1, len(values) // 6)
    for number, (name, value) in enumerate(values.items()):
        (x0, y0), (x1, y1) = axes.place(number, value), axes.place(number + 1, 0)
        parts.append(
            f'<rect class="bar" x="{x0 + 0.5:.1f}" y="{y0}" width="{max(0.5, x1 - x0 - 1):.1f}" height="{y1 - y0:.1f}">'
            f"<title>{escape(name)}: {value:,.6g}</title></rect>"
        )
        if number % named == 0:
            parts.append(_text(round((x0 + x1) / 2, 1), HIGH - LOW + 13, name, "middle"))
    return _svg(parts, title, WIDE, HIGH)


def stacked_bars(rows: Mapping[str, Mapping[str, int]], *, title: str) -> str:
    """Return one bar across for each row, cut into named parts in proportion.

    Args:
        rows: counts by part, by row.
        title: description of the chart.
    """
    rows = {name: parts for name, parts in list(rows.items())[:30] if sum(parts.values())}
    if not rows:
        return ""
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    most = max(sum(parts.values()) for parts in rows.values())
    left, line = 110, 24
    drawn = []
    for number, (row, parts) in enumerate(rows.items()):
        at, y = float(left), number * line + 4
        drawn.append(_text(left - 6, y + 14, row if len(row) <= 16 else row[:15] + "…", "end"))
        for part in names:
            count = parts.get(part, 0)
            wide = (WIDE - left - RIGHT) * count / most
            if count:
                drawn.append(
                    f'<rect class="part c{names.index(part)}" x="{at:.1f}" y="{y}" width="{wide:.1f}" '
                    f'height="{line - 6}">'
                    f"<title>{escape(row)}, {escape(part)}: {count:,}</title></rect>"
                )
                at += wide
    return _svg(drawn, title, WIDE, len(rows) * line + 6) + _key(names)


def heat_map(table: Sequence[Sequence[int]], names: Sequence[str], *, title: str) -> str:
    """Return counts as a square of cells, the darker the larger their share of the row.

    Args:
        table: ``(truth, predicted)``.
        names: of the classes.
        title: description of the chart.
    """
    if not names:
        return ""
    cell = max(22, min(64, 420 // len(names)))
    left, top = 120, 16
    size = cell * len(names)
    parts = [_text(left + size / 2, 11, "read as", "middle")]
    for i, row in enumerate(table):
        total = sum(row) or 1
        parts.append(_text(left - 6, top + i * cell + cell / 2 + 4, _short(names[i]), "end"))
        for j, count in enumerate(row):
            share = count / total
            x, y = left + j * cell, top + i * cell
            what = f"{names[i]} read as {names[j]}: {count:,}, {share:.1%} of {names[i]}"
            parts.append(
                f'<rect class="cell{" right" if i == j else ""}" x="{x}" y="{y}" width="{cell - 1}" '
                f'height="{cell - 1}" fill-opacity="{share:.3f}"><title>{escape(what)}</title></rect>'
            )
            if cell >= 30 and count:
                parts.append(
                    _text(x + cell / 2, y + cell / 2 + 4, f"{count:,}", "middle", "on" if share > 0.55 else "")
                )
    for j, name in enumerate(names):
        x, y = left + j * cell + cell / 2, top + size + 10
        parts.append(
            f'<text class="label" transform="translate({x:.1f} {y}) rotate(-40)" text-anchor="end">'
            f"{escape(_short(name))}</text>"
        )
    return _svg(parts, title, left + size + 10, top + size + 70)


def scatter(points: Sequence[tuple[float, float]], *, title: str, across: str, up: str) -> str:
    """Return points, with the line on which both axes are equal; axes are the same."""
    kept = [point for point in points if all(map(math.isfinite, point))]
    if not kept:
        return ""
    kept = kept[:: max(1, len(kept) // MOST_POINTS)]
    ends = (min(min(p) for p in kept), max(max(p) for p in kept))
    axes = _Axes(ends, ends)
    (x0, y0), (x1, y1) = axes.place(ends[0], ends[0]), axes.place(ends[1], ends[1])
    parts = [axes.drawn(across, up)]
    parts.append(f'<line class="faint" x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke-dasharray="4 3"/>')
    for point in kept:
        a, b = axes.place(*point)
        parts.append(f'<circle class="dot c0 faded" cx="{a}" cy="{b}" r="2.5"/>')
    return _svg(parts, title, WIDE, HIGH)


class _Axes:
    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = _widened(x), _widened(y)

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            round(LEFT + across * (WIDE - LEFT - RIGHT), 1),
            round(HIGH - LOW - up * (HIGH - LOW - TOP), 1),
        )

    def drawn(self, across: str, up: str, *, numbers: bool = True) -> str:
        parts = []
        for value in _round_values(self.y):
            _, y = self.place(self.x[0], value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(_text(LEFT - 5, y + 4, f"{value:.4g}", "end"))
        if numbers:
            for value in _round_values(self.x):
                x, _ = self.place(value, self.y[0])
                parts.append(_text(x, HIGH - LOW + 13, f"{value:,.5g}", "middle"))
        parts.append(_text((LEFT + WIDE - RIGHT) / 2, HIGH - 5, across, "middle", "axis"))
        parts.append(
            f'<text class="label axis" transform="translate(11 {(HIGH - LOW) / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(up)}</text>"
        )
        return "".join(parts)


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _round_values(ends: tuple[float, float], about: int = 4) -> list[float]:
    """Return some round numbers between two ends: steps of 1, 2 or 5 times a power of ten."""
    span = ends[1] - ends[0]
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= about + 0.5)
    first = math.ceil(ends[0] / step - 1e-9)
    return [round(step * k, 12) for k in range(first, math.floor(ends[1] / step + 1e-9) + 1)]


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text class="label {kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], title: str, wide: float, high: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _key(names: Sequence[str]) -> str:
    if not names:
        return ""
    entries = "".join(
        f'<li><span class="swatch c{number}"></span>{escape(name)}</li>' for number, name in enumerate(names)
    )
    return f'<ul class="key">{entries}</ul>'
