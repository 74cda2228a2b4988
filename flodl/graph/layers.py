"""Where boxes lie when a graph is drawn in rows.

The layered method (Sugiyama, Tagawa and Toda, 1981), with the rows given: lines that pass rows get a
place of their own in each, the order within the rows is improved by the mean place of the neighbours,
then boxes are moved towards their neighbours as far as there is room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

__all__ = ["Box", "Layout", "lay_out"]

_GAP, _ROW_GAP, _SWEEPS = 26.0, 40.0, 6


@dataclass(frozen=True)
class Box:
    """A box of ``width`` by ``height`` in row ``level``; ``x``, ``y`` is its centre once it has a place."""

    level: int
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0


# A box's own key, or (source, target, level) for the place where a line passes a row.
_Key = int | tuple[int, int, int]


@dataclass(frozen=True)
class Layout:
    """Boxes with places.

    Attributes:
        boxes: by key.
        passes: where each line passes the rows between, by its ends.
        rows: top and bottom of each row that has boxes.
        width: of everything.
        height: of everything.
    """

    boxes: dict[int, Box]
    passes: dict[tuple[int, int], list[tuple[float, float]]]
    rows: dict[int, tuple[float, float]]
    width: float
    height: float

    def route(self, source: int, target: int) -> list[tuple[float, float]]:
        """Return the points of the line from the bottom of one box to the top of another."""
        above, below = self.boxes[source], self.boxes[target]
        start = (above.x, above.y + above.height / 2)
        return [start, *self.passes[source, target], (below.x, below.y - below.height / 2)]


@dataclass
class _Rows:
    items: list[list[_Key]]
    widths: dict[_Key, float]
    above: dict[_Key, list[_Key]] = field(default_factory=dict)
    below: dict[_Key, list[_Key]] = field(default_factory=dict)


def lay_out(boxes: Mapping[int, Box], lines: Iterable[tuple[int, int]]) -> Layout:
    """Return places for the boxes; each line must lead to a later row.

    Args:
        boxes: by key, in the order preferred within a row.
        lines: ``(source, target)`` pairs.
    """
    pairs = list(dict.fromkeys(lines))
    rows = _rows(boxes, pairs)
    for sweep in range(_SWEEPS):
        _reorder(rows, downwards=sweep % 2 == 0)
    x = _spread(rows)
    left = min((x[key] - rows.widths[key] / 2 for key in x), default=0.0)
    x = {key: value - left + 10 for key, value in x.items()}
    tops: dict[int, tuple[float, float]] = {}
    top = 10.0
    for level in range(len(rows.items)):
        height = max((box.height for box in boxes.values() if box.level == level), default=0.0)
        tops[level] = (top, top + height)
        top += height + _ROW_GAP
    placed = {key: replace(box, x=x[key], y=sum(tops[box.level]) / 2) for key, box in boxes.items()}
    passes = {
        (source, target): [
            point
            for level in range(boxes[source].level + 1, boxes[target].level)
            for point in (
                (x[source, target, level], tops[level][0]),
                (x[source, target, level], tops[level][1]),
            )
        ]
        for source, target in pairs
    }
    width = max((x[key] + rows.widths[key] / 2 for key in x), default=0.0) + 20
    used = {box.level for box in boxes.values()}
    return Layout(placed, passes, {k: v for k, v in tops.items() if k in used}, width, top)


def _rows(boxes: Mapping[int, Box], pairs: list[tuple[int, int]]) -> _Rows:
    depth = max((box.level for box in boxes.values()), default=-1) + 1
    rows = _Rows([[] for _ in range(depth)], {})
    for key, box in boxes.items():
        rows.items[box.level].append(key)
        rows.widths[key] = box.width
    for source, target in pairs:
        previous: _Key = source
        for level in range(boxes[source].level + 1, boxes[target].level + 1):
            place: _Key = target
            if level < boxes[target].level:
                place = (source, target, level)
                rows.items[level].append(place)
                rows.widths[place] = 8.0
            rows.below.setdefault(previous, []).append(place)
            rows.above.setdefault(place, []).append(previous)
            previous = place
    return rows


def _reorder(rows: _Rows, *, downwards: bool) -> None:
    neighbours = rows.above if downwards else rows.below
    for row in rows.items if downwards else reversed(rows.items):
        place = {key: i / max(len(r) - 1, 1) for r in rows.items for i, key in enumerate(r)}
        wanted = {
            key: sum(place[n] for n in near) / len(near) if (near := neighbours.get(key)) else place[key] for key in row
        }
        row.sort(key=wanted.__getitem__)


def _spread(rows: _Rows) -> dict[_Key, float]:
    x: dict[_Key, float] = {}
    for row in rows.items:
        at = -sum(rows.widths[key] + _GAP for key in row) / 2
        for key in row:
            x[key] = at + (rows.widths[key] + _GAP) / 2
            at += rows.widths[key] + _GAP
    for sweep in range(_SWEEPS):
        neighbours = rows.above if sweep % 2 == 0 else rows.below
        for row in rows.items if sweep % 2 == 0 else reversed(rows.items):
            _settle(row, rows.widths, {k: _mean(x, neighbours.get(k, []), x[k]) for k in row}, x)
    return x


def _mean(x: Mapping[_Key, float], keys: list[_Key], otherwise: float) -> float:
    return sum(x[key] for key in keys) / len(keys) if keys else otherwise


def _settle(row: list[_Key], widths: Mapping[_Key, float], wanted: Mapping[_Key, float], x: dict[_Key, float]) -> None:
    """Place a row as near to what is wanted as keeping order and distance allows."""
    gaps = [(widths[a] + widths[b]) / 2 + _GAP for a, b in pairwise(row)]
    offsets = list(accumulate(gaps, initial=0.0))[: len(row)]
    free = [wanted[key] - offset for key, offset in zip(row, offsets, strict=True)]
    # Without the distances the order alone must hold; the mean of the lowest rising curve above and the
    # highest below favours no side.
    above = accumulate(free, max)
    below = reversed(list(accumulate(reversed(free), min)))
    for key, offset, a, b in zip(row, offsets, above, below, strict=True):
        x[key] = offset + (a + b) / 2
