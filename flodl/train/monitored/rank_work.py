"""What each rank spends its time on, told to whoever looks on twice a second.

Steps that the host waits for are timed by its clock; of others the device's own times come with `StepDone`. Ranks that
this process started send what they did to it; under another launcher they leave it in the store that all of them share,
and the first rank takes it from there.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Any

import torch

from flodl.train.callback import Callback
from flodl.train.events import EvalDone, RankWork, StepDone, Synced

__all__ = ["TellWork", "in_few"]

EVERY_S = 0.5
MOST_SPANS = 6
Span = tuple[str, float, float]


class TellWork(Callback):
    """Tells of the work of each rank."""

    def on_train_begin(self, trainer: Any) -> None:
        """Begin to listen."""
        self._spans: list[Span] = []
        self._end = -math.inf
        self._told = time.monotonic()
        self._begun: float | None = None
        self._number = 0
        self._read = [0] * trainer.ranks.world
        self._shares = trainer.policy.shares_gradients and not trainer.ranks.solo
        self._undo = trainer.events.subscribe(self._note, StepDone, Synced, EvalDone)
        self._trainer = trainer
        self._waited = False

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        """Look at the clock."""
        self._begun = time.monotonic()

    def on_step_end(self, trainer: Any, result: Any) -> None:
        """Note a step that is over."""
        self._waited = result.outcome is None
        if self._waited and self._begun is not None:
            now = time.monotonic()
            computed = min(now, self._begun + result.compute_ms / 1e3)
            if self._shares:
                self._add("compute", self._begun, computed)
                self._add("sync", computed, now)
            else:
                # Local steps meet before they end, and tell of it themselves.
                self._add("compute", self._begun, now if trainer.ranks.solo else computed)
        self._tell()

    def on_evaluate(self, trainer: Any, metrics: Any) -> None:
        """Tell of it now: it may have taken long."""
        self._tell()

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """Tell of what is left of the epoch."""
        self._tell(at_once=True)

    def close(self, trainer: Any) -> None:
        """Tell of what is left."""
        if hasattr(self, "_undo"):
            with contextlib.suppress(Exception):  # the store may be gone with another rank
                self._tell(at_once=True)
            self._undo()

    def _note(self, event: Any) -> None:
        if isinstance(event, EvalDone):
            self._add("evaluation", event.at_s - event.wall_ms / 1e3, event.at_s)
        elif isinstance(event, Synced):
            begin = event.at_s - event.sync_ms / 1e3
            self._add("wait", begin, begin + event.wait_ms / 1e3)
            self._add("sync", begin + event.wait_ms / 1e3, event.at_s)
        elif not self._waited:
            self._add("compute", event.at_s - event.compute_ms / 1e3, event.at_s)

    def _add(self, kind: str, begin: float, end: float) -> None:
        """Add a span by the monotonic clock; what overlaps the one before is cut."""
        begin = max(begin, self._end)
        if end > begin:
            self._spans.append((kind, begin, end))
            self._end = end

    def _tell(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self._told < EVERY_S and not at_once:
            return
        self._told = now
        if self._spans:
            shift = time.time() - now
            spans = tuple((kind, begin + shift, end + shift) for kind, begin, end in in_few(self._spans))
            self._spans = []
            self._send(RankWork(rank=self._trainer.ranks.rank, of=self._trainer.ranks.rank, spans=spans,
                                device=_device_name(self._trainer.ranks.device)))  # fmt: skip
        self._take_from_others()

    def _send(self, work: RankWork) -> None:
        ranks = self._trainer.ranks
        if ranks.rank == 0:
            self._trainer.events.emit(work)
        elif ranks.pipe is not None:
            ranks.pipe.send(("event", work))
        elif ranks.store is not None:
            self._number += 1
            ranks.store.set(self._key(ranks.rank, self._number), json.dumps([work.device, work.spans]))

    def _take_from_others(self) -> None:
        ranks = self._trainer.ranks
        if ranks.rank != 0 or ranks.pipe is not None or ranks.store is None:
            return
        for rank in range(1, ranks.world):
            while ranks.store.check([key := self._key(rank, self._read[rank] + 1)]):
                device, spans = json.loads(ranks.store.get(key))
                self._read[rank] += 1
                ranks.store.delete_key(key)
                whole = tuple((kind, begin, end) for kind, begin, end in spans)
                self._trainer.events.emit(RankWork(rank=0, of=rank, spans=whole, device=device))

    def _key(self, rank: int, number: int) -> str:
        return f"work/{self._trainer.ranks.attempt}/{rank}/{number}"


def in_few(spans: list[Span]) -> list[Span]:
    """Return spans that say as much of each kind, where there are many: neighbours of one kind become one.

    What lies between them is left at the end of the stretch, so that the sums stay what they are.
    """
    if len(spans) <= MOST_SPANS:
        return spans
    sums: dict[str, float] = {}
    for kind, begin, end in spans:
        sums[kind] = sums.get(kind, 0.0) + end - begin
    found, at = [], spans[0][1]
    for kind, seconds in sums.items():
        found.append((kind, at, at + seconds))
        at += seconds
    return found


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device}, {torch.cuda.get_device_name(device)}"
