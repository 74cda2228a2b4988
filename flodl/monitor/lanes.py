"""What each rank did when: time in bins that double as the run grows, meetings, and the longest gaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["KINDS", "Lanes"]

KINDS = ("compute", "sync", "wait", "evaluation")
"""What a rank's time is spent on; what is left of a bin is idle."""
MOST_BINS = 400
MOST_MEETINGS = 400
MOST_GAPS = 40
MOST_RANKS = 1024
FIRST_BIN_S = 0.5
GAP_S = 0.5


class Lanes:
    """The lanes of a run.

    A delta has, by rank: ``spans`` of ``[kind, from, to]`` (seconds of the run) in their order, ``share`` (its part of
    the samples of late), ``end`` (seconds at which the rank was lost) and ``about`` (its device). For all ranks
    together ``meetings``, seconds at which parameters were averaged, come under the key ``all``.

    Attributes:
        bin_s: seconds of a bin.
        ranks: by rank: ``bins`` (seconds of each kind), ``share``, ``gaps``, ``end``, ``about``.
        meetings: seconds at which ranks met.
    """

    def __init__(self) -> None:
        self.bin_s = FIRST_BIN_S
        self.ranks: dict[str, dict[str, Any]] = {}
        self.meetings: list[float] = []
        self._last: dict[str, float] = {}

    def fold(self, delta: Mapping[str, Any]) -> None:
        """Take in what was done since."""
        if "bin_s" in delta:  # all lanes as `to_dict` gave them
            self.bin_s, self.ranks = delta["bin_s"], {str(rank): dict(lane) for rank, lane in delta["ranks"].items()}
            self.meetings = list(delta["meetings"])
            return
        for rank, given in delta.items():
            if rank == "all":
                self._meet([float(t) for t in given.get("meetings", ())])
                continue
            if rank not in self.ranks:
                if len(self.ranks) >= MOST_RANKS:
                    continue
                self.ranks[rank] = {"bins": [], "share": None, "gaps": [], "end": None, "about": ""}
            lane = self.ranks[rank]
            for kind, begin, end in given.get("spans", ()):
                if kind in KINDS and 0 <= begin <= end:
                    self._put(rank, lane, kind, float(begin), float(end))
            lane.update({key: given[key] for key in ("share", "end", "about") if key in given})

    def to_dict(self) -> dict[str, Any]:
        """Return all lanes as JSON values."""
        return {"bin_s": self.bin_s, "ranks": self.ranks, "meetings": self.meetings} if self.ranks else {}

    def _put(self, rank: str, lane: dict[str, Any], kind: str, begin: float, end: float) -> None:
        last = self._last.get(rank)
        if last is not None and begin - last >= GAP_S:
            gaps = lane["gaps"]
            gaps.append([round(last, 2), round(begin, 2)])
            if len(gaps) > MOST_GAPS:
                gaps.remove(min(gaps, key=lambda gap: gap[1] - gap[0]))
        self._last[rank] = max(end, last or 0.0)
        while end >= MOST_BINS * self.bin_s:
            self._double()
        place = KINDS.index(kind)
        bins = lane["bins"]
        first, final = int(begin / self.bin_s), int(end / self.bin_s)
        while len(bins) <= final:
            bins.append([0.0] * len(KINDS))
        for i in range(first, final + 1):
            part = min(end, (i + 1) * self.bin_s) - max(begin, i * self.bin_s)
            bins[i][place] = round(bins[i][place] + max(0.0, part), 4)

    def _double(self) -> None:
        self.bin_s *= 2
        for lane in self.ranks.values():
            bins = lane["bins"]
            if len(bins) % 2:
                bins.append([0.0] * len(KINDS))
            lane["bins"] = [
                [round(a + b, 4) for a, b in zip(bins[i], bins[i + 1], strict=True)] for i in range(0, len(bins), 2)
            ]

    def _meet(self, times: list[float]) -> None:
        self.meetings += [round(t, 2) for t in times]
        while len(self.meetings) > MOST_MEETINGS:
            self.meetings = self.meetings[::2]  # every other one still shows how often
