"""What is known of one run, built from small JSON objects ("deltas") and handed on as one of them.

One form serves everything: a line of the file on disk, a message to a page, and the whole of a run so far are
deltas. `RunRecord.fold` takes one in, `RunRecord.snapshot` gives one that makes the same record from nothing. All of
it is bounded, however long the run is.

A delta has any of these keys:

* ``id``, ``name``, ``began`` (Unix time): which run this is.
* ``t``: seconds since ``began``.
* ``session``: the run begins, or goes on from this step; what lies behind it is forgotten.
* ``facts``: by section (``run``, ``recipe``, ``data``, ``model``, ``hardware``), what does not change.
* ``p``: points by curve, see `flodl.monitor.series`; ``stride``: values in a point by curve.
* ``state``: step, epoch, total steps, status, seconds left.
* ``log``: ``[t, step, level, text]``.
* ``epochs``: rows of the table of epochs.
* ``lanes``: by rank, see `flodl.monitor.lanes`.
* ``model``: the architecture as a tree; ``heat``: figures by path of the tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from flodl.monitor.lanes import Lanes
from flodl.monitor.series import MOST_POINTS, Series

__all__ = ["MOST_EPOCHS", "MOST_LINES", "MOST_SERIES", "RunRecord"]

MOST_LINES = 400
"""Lines of the log that are kept; the first fifty always, then the newest."""
FIRST_LINES = 50
MOST_EPOCHS = 1000
MOST_SERIES = 300
"""Curves of a run; further names are counted and told once."""
MOST_TEXT = 4000


class RunRecord:
    """One run.

    Attributes:
        id: its name among others, of letters and digits.
        name: what people call it.
        began: Unix time of its first delta.
        facts: by section.
        series: curves by name.
        state: where it is now.
        log: ``[t, step, level, text]``.
        epochs: rows of the table.
        lanes: what each rank did when.
        model: the architecture; None where nobody described it.
        heat: figures by kind (``time``, ``gradient``) and path.
    """

    def __init__(self, id: str = "", name: str = "") -> None:
        self.id, self.name = id, name
        self.began = 0.0
        self.t = 0.0
        self.facts: dict[str, dict[str, Any]] = {}
        self.series: dict[str, Series] = {}
        self.state: dict[str, Any] = {}
        self.log: list[list[Any]] = []
        self.lines_left_out = 0
        self.epochs: list[dict[str, Any]] = []
        self.lanes = Lanes()
        self.model: Any = None
        self.heat: dict[str, Any] = {}
        self.refused: set[str] = set()

    # ---- taking in -----------------------------------------------------------------------------------

    def fold(self, delta: Mapping[str, Any]) -> None:
        """Take in a delta; keys and shapes that are not known are passed over."""
        self.id = _text(delta.get("id"), 80) or self.id
        self.name = _text(delta.get("name"), 200) or self.name
        self.began = _number(delta.get("began"), self.began)
        self.t = max(self.t, _number(delta.get("t"), 0.0))
        session = _mapping(delta.get("session"))
        if session:
            self._begin(int(_number(session.get("step"), 0)))
        for section, values in _mapping(delta.get("facts")).items():
            self.facts.setdefault(str(section), {}).update(_mapping(values))
        strides = _mapping(delta.get("stride"))
        for name, points in _mapping(delta.get("p")).items():
            series = self._curve(str(name), int(_number(strides.get(name), 1)))
            for point in points if series is not None and isinstance(points, list) else ():
                if _is_point(point):
                    series.add(point)  # pyright: ignore[reportOptionalMemberAccess]
        self.state.update(_mapping(delta.get("state")))
        for line in _list(delta.get("log")):
            if isinstance(line, list) and len(line) == 4:
                self._note([line[0], line[1], _text(line[2], 20), _text(line[3], MOST_TEXT)])
        self.lines_left_out += int(_number(delta.get("left_out"), 0))
        self.epochs += [row for row in _list(delta.get("epochs")) if isinstance(row, dict)]
        del self.epochs[:-MOST_EPOCHS]
        self.lanes.fold(_mapping(delta.get("lanes")))
        if delta.get("model") is not None:
            self.model = delta["model"]
        for kind, figures in _mapping(delta.get("heat")).items():
            self.heat[str(kind)] = figures

    def _begin(self, step: int) -> None:
        for series in self.series.values():
            series.cut(step)
        self.epochs = [row for row in self.epochs if _number(row.get("step"), 0) <= step]

    def _curve(self, name: str, stride: int) -> Series | None:
        if name not in self.series:
            if len(self.series) >= MOST_SERIES or len(name) > 300:
                self.refused.add(name[:300]) if len(self.refused) < 20 else None
                return None
            self.series[name] = Series(stride=max(1, stride))
        return self.series[name]

    def _note(self, line: list[Any]) -> None:
        self.log.append(line)
        if len(self.log) > MOST_LINES:
            del self.log[FIRST_LINES]
            self.lines_left_out += 1

    # ---- handing on ----------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return a delta that makes this record from nothing."""
        return json.loads(self.snapshot_text())

    def snapshot_text(self) -> str:
        """Return `snapshot` as JSON."""
        return "".join(self.snapshot_parts())

    def snapshot_parts(self, most: int = MOST_POINTS) -> Iterator[str]:
        """Yield `snapshot_text` in pieces, none of which takes long, so that other threads get their turn.

        Args:
            most: points of a curve; longer ones are thinned.
        """
        curves = {name: _thinned(series, most) for name, series in list(self.series.items())}
        head = {
            "id": self.id, "name": self.name, "began": self.began, "t": round(self.t, 2), "facts": self.facts,
            "state": self.state, "log": self.log, "left_out": self.lines_left_out, "model": self.model,
            "heat": self.heat, "stride": {name: s.stride for name, s in curves.items() if s.stride > 1},
        }  # fmt: skip
        yield as_text(head)[:-1]
        yield ',"epochs":' + as_text(self.epochs)
        yield ',"lanes":' + as_text(self.lanes.to_dict())
        yield ',"p":{'
        for place, (name, series) in enumerate(curves.items()):
            yield ("," if place else "") + as_text(name) + ":" + as_text(series.packed())
        yield "}}"


def _thinned(series: Series, most: int) -> Series:
    if len(series) <= most:
        return series
    thin = Series(most, series.stride)
    for point in series.points:
        thin.add(point)
    return thin


def as_text(value: Any) -> str:
    """Return JSON on one line, in ASCII; what is not finite becomes null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any, most: int) -> str:
    return value[:most] if isinstance(value, str) else ""


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value else default


def _is_point(point: Any) -> bool:
    if not isinstance(point, list) or len(point) not in (4, 7):
        return False
    sure = [*point[:3], *point[6:]]
    maybe = point[3:6]
    return all(_is_number(v) for v in sure) and all(v is None or _is_number(v) for v in maybe)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value - value == 0
