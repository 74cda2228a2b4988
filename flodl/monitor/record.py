"""The record of one run, which the page, CSV files, the archive and the record file read.

A record is built from JSON objects ("deltas"): a line of the file on disk, a message to a page, and a whole record are
deltas. `RunRecord.fold` adds one; `RunRecord.snapshot` returns one that reproduces the record. The size of a record is
bounded. A delta has any of these keys:

* ``id``, ``name``, ``began`` (Unix time): identity of the run.
* ``t``: seconds since ``began``.
* ``session``: the run starts or resumes after this step; later values are removed.
* ``facts``: constants by section (``run``, ``recipe``, ``data``, ``model``, ``hardware``).
* ``p``: points by curve, see `flodl.monitor.series`; ``stride``: values in a point by curve.
* ``state``: step, epoch, total steps, status, seconds left.
* ``log``: ``[t, step, level, text]``; ``left_out``: number of removed lines.
* ``epochs``: rows of the table of epochs.
* ``lanes``: by rank, see `Lanes`.
* ``model``: the architecture as a tree; ``heat``: values by path of the tree; ``picture``: the architecture as SVG.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from flodl.monitor.series import MAX_POINTS, Series

MAX_LINES, FIRST_LINES = 400, 50
"""Lines of the log: the first ones and the newest ones are kept."""
MAX_EPOCHS = 1000
MAX_SERIES = 300
MAX_TEXT = 4000
KINDS = ("compute", "sync", "wait", "evaluation")
"""Kinds of activity; the rest of a bin is idle time."""
MAX_BINS = MAX_MEETINGS = 400
MAX_RANKS = 1024
FIRST_BIN_S = 0.5


class Lanes:
    """Activity of each rank over time: seconds by kind in bins that double as a run grows, and synchronisations.

    A delta has, by rank: ``spans`` of ``[kind, begin, end]`` in order (seconds of the run), ``share`` (its part of the
    samples), ``end`` (seconds at which the rank was lost) and ``about`` (its device). The key ``all`` has ``meetings``:
    seconds at which parameters were averaged.

    Attributes:
        bin_s: seconds of a bin.
        ranks: by rank: ``bins`` (seconds of each kind), ``share``, ``end``, ``about``.
        meetings: seconds at which ranks synchronised.
    """

    def __init__(self, bin_s: float = FIRST_BIN_S) -> None:
        self.bin_s = bin_s
        self.ranks: dict[str, dict[str, Any]] = {}
        self.meetings: list[float] = []

    def fold(self, delta: Mapping[str, Any]) -> None:
        """Add a delta, or replace all lanes by the result of `to_dict`."""
        if "bin_s" in delta:
            self.bin_s, self.ranks = delta["bin_s"], {str(rank): dict(lane) for rank, lane in delta["ranks"].items()}
            self.meetings = list(delta["meetings"])
            return
        for rank, given in delta.items():
            if rank == "all":
                self.meetings += [round(float(t), 2) for t in given.get("meetings", ())]
                while len(self.meetings) > MAX_MEETINGS:
                    self.meetings = self.meetings[::2]
            elif rank in self.ranks or len(self.ranks) < MAX_RANKS:
                empty = {"bins": [], "share": None, "end": None, "about": ""}
                lane = self.ranks.setdefault(rank, empty)
                for kind, begin, end in given.get("spans", ()):
                    if kind in KINDS and 0 <= begin <= end:
                        self._add(lane, KINDS.index(kind), float(begin), float(end))
                lane.update({key: given[key] for key in ("share", "end", "about") if key in given})

    def to_dict(self) -> dict[str, Any]:
        """Return all lanes as JSON values."""
        return {"bin_s": self.bin_s, "ranks": self.ranks, "meetings": self.meetings} if self.ranks else {}

    def _add(self, lane: dict[str, Any], kind: int, begin: float, end: float) -> None:
        while end >= MAX_BINS * self.bin_s:
            self._double()
        bins, final = lane["bins"], int(end / self.bin_s)
        bins += [[0.0] * len(KINDS) for _ in range(final + 1 - len(bins))]
        for i in range(int(begin / self.bin_s), final + 1):
            seconds = min(end, (i + 1) * self.bin_s) - max(begin, i * self.bin_s)
            bins[i][kind] = round(bins[i][kind] + max(0.0, seconds), 4)

    def _double(self) -> None:
        self.bin_s *= 2
        for lane in self.ranks.values():
            bins = lane["bins"] + [[0.0] * len(KINDS)] * (len(lane["bins"]) % 2)
            pairs = zip(bins[::2], bins[1::2], strict=True)
            lane["bins"] = [[round(a + b, 4) for a, b in zip(*pair, strict=True)] for pair in pairs]


class RunRecord:
    """One run.

    Attributes:
        id: unique name of letters and digits.
        name: name for people.
        began: Unix time of its first delta.
        t: seconds from there to the newest delta.
        facts: constants by section.
        series: curves and their names.
        state: current step, epoch, status and so on.
        log: ``[t, step, level, text]``.
        epochs: rows of the table of epochs.
        lanes: activity of each rank over time.
        model: the architecture as a tree, or None.
        heat: values by kind (``time``, ``gradient``, ``memory``) and path.
        picture: the architecture as SVG text.
    """

    def __init__(self, id: str = "", name: str = "", began: float = 0.0) -> None:
        self.id, self.name, self.began, self.t = id, name, began, 0.0
        self.facts: dict[str, dict[str, Any]] = {}
        self.series: dict[str, Series] = {}
        self.state: dict[str, Any] = {}
        self.log: list[list[Any]] = []
        self.lines_left_out = 0
        self.epochs: list[dict[str, Any]] = []
        self.lanes = Lanes()
        self.model: Any = None
        self.heat: dict[str, Any] = {}
        self.picture = ""

    def fold(self, delta: Mapping[str, Any]) -> None:
        """Add a delta; unknown keys and values of an unexpected shape are ignored."""
        for key in sorted(delta, key=lambda key: key != "session"):
            value = delta[key]
            # A record file may be from another program.
            with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError, IndexError):
                if key in ("id", "name", "picture"):
                    setattr(self, key, "" + value[: None if key == "picture" else 200] or getattr(self, key))
                elif key == "began":
                    self.began = value + 0.0
                elif key == "t":
                    self.t = max(self.t, value + 0.0)
                elif key == "p":
                    self._add_points(value, delta.get("stride") or {})
                elif key == "model":
                    self.model = value if value is not None else self.model
                elif key == "left_out":
                    self.lines_left_out += int(value)
                elif key in ("state", "heat"):
                    getattr(self, key).update(value.items())
                elif key == "lanes":
                    self.lanes.fold(value)
                elif hasattr(self, f"_fold_{key}"):
                    getattr(self, f"_fold_{key}")(value)

    def _fold_session(self, session: Mapping[str, Any]) -> None:
        step = session.get("step", 0)
        for series in self.series.values():
            series.cut(step)
        self.epochs = [row for row in self.epochs if row.get("step", 0) <= step]

    def _fold_facts(self, facts: Mapping[str, Any]) -> None:
        for section, values in facts.items():
            self.facts.setdefault(section, {}).update(values.items())

    def _fold_epochs(self, rows: Any) -> None:
        self.epochs += [row for row in rows if isinstance(row, dict)]
        del self.epochs[:-MAX_EPOCHS]

    def _fold_log(self, lines: Any) -> None:
        for t, step, level, text in lines:
            self.log.append([t, step, level[:20], text[:MAX_TEXT]])
            if len(self.log) > MAX_LINES:
                del self.log[FIRST_LINES]
                self.lines_left_out += 1

    def _add_points(self, curves: Mapping[str, Any], strides: Mapping[str, Any]) -> None:
        for name, points in curves.items():
            if name not in self.series and (len(self.series) >= MAX_SERIES or len(name) > 300):
                continue
            if all(len(p) in (4, 7) and all(map(_is_value, p)) and None not in p[:3] for p in points):
                series = self.series.setdefault(name, Series(stride=max(1, int(strides.get(name, 1)))))
                for point in points:
                    series.add(point)

    def snapshot(self) -> dict[str, Any]:
        """Return a delta that reproduces this record."""
        return json.loads(self.snapshot_text())

    def snapshot_text(self, max_points: int = MAX_POINTS) -> str:
        """Return `snapshot` as JSON, with at most so many points of a curve."""
        curves = {name: series.thinned(max_points) for name, series in self.series.items()}
        # Curves are encoded one by one: a long call of the encoder would delay other threads.
        points = ",".join(as_text(name) + ":" + as_text(series.packed()) for name, series in curves.items())
        head = as_text(
            {
                "id": self.id, "name": self.name, "began": self.began, "t": round(self.t, 2), "facts": self.facts,
                "state": self.state, "log": self.log, "left_out": self.lines_left_out, "model": self.model,
                "heat": self.heat, "picture": self.picture, "epochs": self.epochs, "lanes": self.lanes.to_dict(),
                "stride": {name: series.stride for name, series in curves.items() if series.stride > 1},
            }
        )  # fmt: skip
        return f'{head[:-1]},"p":{{{points}}}}}'


def as_text(value: Any) -> str:
    """Return JSON on one line, in ASCII, with null for numbers that are not finite."""
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


def _is_value(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and value - value == 0)
