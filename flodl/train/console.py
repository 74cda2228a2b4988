"""A run as it is seen by people: steps done of all, and a line for each epoch, evaluation and warning."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from flodl.progress import AFTER_S, Progress, figures_of, in_words
from flodl.train.events import (
    Decided,
    EpochMetrics,
    EvalDone,
    Observed,
    RunDone,
    RunStarted,
    Saved,
    SaveFailed,
    StepDone,
    Synced,
    Warned,
)
from flodl.verbosity import Verbosity, verbosity

__all__ = ["ShowProgress"]


class ShowProgress:
    """Subscribed to the events of a run, shows how far it is; see `flodl.progress` for where and when.

    Args:
        show: True shows it from the start, None what takes longer than a second, False nothing.
        total: steps of the whole run where the caller knows; else those of the first epoch times epochs, or the
            run's ``max_steps``.
        what: name of the run.
    """

    def __init__(self, show: bool | None = None, *, total: int | None = None, what: str = "training") -> None:
        self.show, self.total, self.what = show, total, what
        self._progress: Progress | None = None

    def __call__(self, event: Any) -> None:
        """Take in an event."""
        level = verbosity()
        if level == Verbosity.QUIET and isinstance(event, (Warned, SaveFailed)):
            told = event.message if isinstance(event, Warned) else f"step {event.step:,} was not saved: {event.reason}"
            print(f"warning: {in_words(told)}", file=sys.stderr, flush=True)
        if level >= Verbosity.TRACE:
            print(json.dumps(event.to_dict(), default=str), file=sys.stderr, flush=True)
        if isinstance(event, RunStarted):
            self.close()
            total = event.total_steps if self.total is None else self.total
            self._progress = Progress(self.what, total or None, unit="steps", done=event.step, show=self.show)
            parts = [_many(event.epochs, "epoch"), _many(total, "step")] if total else []
            parts += [f"{event.world} devices"] if event.world > 1 else []
            parts += [f"going on from step {event.step:,}"] if event.resumed_from else []
            if parts:
                self._say(f"{self.what}: {', '.join(parts)}")
            if event.world > 1:
                self._say(f"policy: {event.policy}, because {event.policy_reason}")
        elif self._progress is None:
            return
        elif isinstance(event, StepDone):
            known: dict[str, Any] = {} if math.isnan(event.loss) else {"loss": event.loss}
            self._progress.update(event.step, epoch=event.epoch + 1, **known, lr=f"{event.lr:.2e}")
        elif isinstance(event, EvalDone):
            self._say(f"step {event.step:,}: {', '.join(figures_of(_main(event.metrics)))}")
        elif isinstance(event, EpochMetrics):
            rows = event.samples / event.epoch_ms * 1e3 if event.epoch_ms else 0.0
            loss = "" if math.isnan(event.loss) else f"loss {event.loss:.4f}, "
            self._say(f"epoch {event.epoch + 1}: {loss}{rows:,.{int(rows < 10)}f} rows/s")
            for rank, figures in enumerate(event.by_rank if level >= Verbosity.DEBUG else ()):
                self._say(f"epoch {event.epoch + 1}, rank {rank}: {', '.join(figures_of(figures))}")
        elif isinstance(event, Decided):
            self._say(f"step {event.step:,}: {event.rule} ({event.reason})")
        elif isinstance(event, Warned):
            self._say(f"warning: {in_words(event.message)}", always=True)
        elif isinstance(event, SaveFailed):
            text = f"warning: the checkpoint of step {event.step:,} could not be written: {event.reason}"
            self._say(text, always=True)
        elif isinstance(event, RunDone):
            self._progress.update(event.step)
            self.close()
        elif level >= Verbosity.VERBOSE:
            self._say_more(event, level)

    def _say_more(self, event: Any, level: Verbosity) -> None:
        """Say what only those want to know who asked."""
        if isinstance(event, Saved):
            size = f"{event.bytes / (1 << 20):.1f} MiB in {event.wall_ms / 1e3:.1f} s"
            self._say(f"step {event.step:,}: checkpoint {event.path}, {size}")
        elif isinstance(event, Synced):
            batches = " + ".join(map(str, event.batches))
            self._say(f"step {event.step:,}: ranks met after {batches} batches, {event.sync_ms:.0f} ms")
        elif isinstance(event, Observed) and event.scope == "epoch" and level >= Verbosity.DEBUG:
            self._say(f"epoch {event.epoch + 1}: {', '.join(figures_of(event.values))}")

    def _say(self, text: str, *, always: bool = False) -> None:
        """Print a line; one that is not for ``always`` is left out of runs that may be over soon."""
        progress = self._progress
        if progress is not None and (self.show or always or progress.elapsed >= AFTER_S):
            progress.say(text)

    def close(self) -> None:
        """Take the display away, however the run ended."""
        if self._progress is not None:
            self._progress.close()
        self._progress = None


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _main(figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures without those of single labels, which come as ``figure/label`` or ``set/figure/label``."""
    plain = {name: value for name, value in figures.items() if "/" not in name}
    return plain or {name: value for name, value in figures.items() if name.count("/") == 1}
