"""Charts as SVG: colours from the style of the page, for light and dark. Tables show the same values.

Each chart has a title for screen readers, and marks have tooltips. Texts are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDE, HIGH = 460, 240
LEFT, RIGHT, TOP, LOW = 46, 12, 10, 34
MOST_POINTS = 2000

Point = tuple[float, float]


def line_chart(
    lines: Mapping[str, Sequence[Point]], *, title: str, across: str, up: str, x: Point | None = None,
    y: Point | None = None, diagonal: bool = False, dots: bool = False,
) -> str:  # fmt: skip
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
    kept = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in list(lines.items())[:8]}
    kept = {name: points[:: max(1, -(-len(points) // MOST_POINTS))] for name, points in kept.items() if points}
    if not kept:
        return ""
    columns = list(zip(*(point for points in kept.values() for point in points), strict=True))
    ends = [given or (min(values), max(values)) for given, values in zip((x, y), columns, strict=True)]
    parts, place = _axes(ends[0], ends[1], across, up)
    if diagonal:
        (x0, y0), (x1, y1) = (place(end, end) for end in ends[0])
        parts.append(f'<line class="faint" x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke-dasharray="4 3"/>')
    for number, (name, points) in enumerate(kept.items()):
        places = [place(*point) for point in points]
        path = " ".join(f"{a},{b}" for a, b in places)
        parts.append(f'<polyline class="line c{number}" points="{path}"><title>{escape(name)}</title></polyline>')
        for (a, b), (px, py) in zip(places, points, strict=True) if dots else ():
            told = f"{escape(name)}: {across} {px:.4g}, {up} {py:.4g}"
            parts.append(f'<circle class="dot c{number}" cx="{a}" cy="{b}" r="3"><title>{told}</title></circle>')
    legend = "".join(f'<li><span class="swatch c{n}"></span>{escape(name)}</li>' for n, name in enumerate(kept))
    return _svg(parts, title, WIDE, HIGH) + (f'<ul class="key">{legend}</ul>' if len(kept) > 1 else "")


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
    parts, place = _axes((0, len(values)), (0, max(values.values())), across, up, numbers=False)
    for number, (name, value) in enumerate(values.items()):
        (x0, y0), (x1, y1) = place(number, value), place(number + 1, 0)
        parts.append(
            f'<rect class="bar" x="{x0 + 0.5:.1f}" y="{y0}" width="{max(0.5, x1 - x0 - 1):.1f}" height="{y1 - y0:.1f}">'
            f"<title>{escape(name)}: {value:,.6g}</title></rect>"
        )
        if number % max(1, len(values) // 6) == 0:
            parts.append(_text((x0 + x1) / 2, HIGH - LOW + 13, name, "middle"))
    return _svg(parts, title, WIDE, HIGH)


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
    left, top, size = 120, 16, cell * len(names)
    short = [name if len(name) <= 18 else name[:17] + "…" for name in names]
    parts = [_text(left + size / 2, 11, "predicted", "middle")]
    for i, row in enumerate(table):
        y = top + i * cell
        parts.append(_text(left - 6, y + cell / 2 + 4, short[i], "end"))
        for j, count in enumerate(row):
            share, x = count / (sum(row) or 1), left + j * cell
            what = f"{names[i]} predicted as {names[j]}: {count:,}, {share:.1%} of {names[i]}"
            parts.append(
                f'<rect class="cell{" right" if i == j else ""}" x="{x}" y="{y}" width="{cell - 1}" '
                f'height="{cell - 1}" fill-opacity="{share:.3f}"><title>{escape(what)}</title></rect>'
            )
            if cell >= 30 and count:
                kind = "on" if share > 0.55 else ""
                parts.append(_text(x + cell / 2, y + cell / 2 + 4, f"{count:,}", "middle", kind))
        at = f"translate({left + i * cell + cell / 2:.1f} {top + size + 10}) rotate(-40)"
        parts.append(f'<text class="label" transform="{at}" text-anchor="end">{escape(short[i])}</text>')
    return _svg(parts, title, left + size + 10, top + size + 70)


def _axes(
    x: Point, y: Point, across: str, up: str, *, numbers: bool = True
) -> tuple[list[str], Callable[[float, float], Point]]:
    """Return the drawn axes, and the function that returns the place of a point."""
    (x0, x1), (y0, y1) = ((a, b) if b > a else (a - 0.5, b + 0.5) for a, b in (x, y))

    def place(a: float, b: float) -> Point:
        right, rise = (a - x0) / (x1 - x0), (b - y0) / (y1 - y0)
        return round(LEFT + right * (WIDE - LEFT - RIGHT), 1), round(HIGH - LOW - rise * (HIGH - LOW - TOP), 1)

    parts = []
    for value in _round_values(y0, y1):
        at = place(x0, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(_text(LEFT - 5, at + 4, f"{value:.4g}", "end"))
    for value in _round_values(x0, x1) if numbers else ():
        parts.append(_text(place(value, y0)[0], HIGH - LOW + 13, f"{value:,.5g}", "middle"))
    parts.append(_text((LEFT + WIDE - RIGHT) / 2, HIGH - 5, across, "middle", "axis"))
    turned = f"translate(11 {(HIGH - LOW) / 2}) rotate(-90)"
    parts.append(f'<text class="label axis" transform="{turned}" text-anchor="middle">{escape(up)}</text>')
    return parts, place


def _round_values(low: float, high: float, about: int = 4) -> list[float]:
    """Return some round numbers between two ends: steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= about + 0.5)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text class="label {kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], title: str, wide: float, high: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )
