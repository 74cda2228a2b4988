"""Activity of each rank over time: seconds by kind in bins that double as a run grows, and synchronisations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = ("compute", "sync", "wait", "evaluation")
"""Kinds of activity; the rest of a bin is idle time."""
MAX_BINS = MAX_MEETINGS = 400
MAX_RANKS = 1024
FIRST_BIN_S = 0.5


class Lanes:
    """The lanes of a run.

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
