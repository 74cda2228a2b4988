"""Watching a training run: a console line an epoch, a history, and files made from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from time import monotonic
from typing import Protocol, TextIO

from flodl.errors import TrainError
from flodl.files import write_atomically
from flodl.monitor.console import EpochRecord, console_line, eta_s, eta_text
from flodl.observe.export import csv_text, number_text
from flodl.observe.page import curves_page
from flodl.observe.words import metric_text

__all__ = ["EpochRecord", "Monitor"]


class Measured(Protocol):
    """Anything with metrics of its latest epoch, such as a graph."""

    def latest_metrics(self) -> Iterable[tuple[str, float]]:
        """Return names and values in order."""
        ...


Metrics = Mapping[str, float] | Iterable[tuple[str, float]] | Measured


class Monitor:
    """The record of a run: prints an epoch when told of it, and keeps all of them for files.

    Args:
        total_epochs: how many epochs are planned.
        stream: where lines go; standard output when None.
        quiet: print nothing.
    """

    def __init__(self, total_epochs: int, *, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.total_epochs = total_epochs
        self._stream = stream
        self._quiet = quiet
        self._records: list[EpochRecord] = []
        self._lines: list[str] = []
        self._began = self._seen = monotonic()
        self._page: str | None = None

    def log(self, epoch: int, duration_s: float, metrics: Metrics) -> EpochRecord:
        """Record and print one epoch, and return its record.

        Args:
            epoch: its number, the first being 0.
            duration_s: seconds it took.
            metrics: a dictionary, ``(name, value)`` pairs, or a graph, whose latest metrics are taken;
                the graph is not flushed.

        Raises:
            TrainError: the epoch is negative or the duration is no number of seconds.
        """
        if epoch < 0 or not duration_s >= 0:
            raise TrainError(
                f"monitor: epoch {epoch} of {duration_s} s, expected an epoch from 0 and seconds from 0",
                epoch=epoch,
                duration_s=duration_s,
            )
        now = monotonic()
        # Time between epochs (evaluation, saving) belongs to the pace; what came before the first is set-up.
        pace = max(duration_s, now - self._seen) if self._records else duration_s
        self._seen = now
        record = EpochRecord(epoch, duration_s, _named(metrics), pace)
        self._records.append(record)
        self._say(console_line(record, self.total_epochs, eta_s(self._records, self.total_epochs)))
        return record

    def history(self) -> list[EpochRecord]:
        """Return every epoch recorded, in the order of the calls."""
        return list(self._records)

    def eta(self) -> float | None:
        """Return the seconds left, recent epochs weighing more; None before the first and after the last."""
        return eta_s(self._records, self.total_epochs)

    def finish(self) -> None:
        """Print the closing line, and write the page that ``save_html`` asked for."""
        metrics = self._records[-1].metrics if self._records else {}
        listed = ", ".join(f"{name}: {metric_text(value)}" for name, value in metrics.items())
        took = eta_text(monotonic() - self._began)
        self._say(f"training complete in {took}" + (f"  | {listed}" if listed else ""))
        if self._page is not None:
            write_atomically(self._page, [self.page().encode()])

    def save_html(self, path: str | PathLike[str]) -> None:
        """Have ``finish`` write a page with the curves; it opens from disk without a server."""
        self._page = fspath(path)

    def page(self) -> str:
        """Return that page as it is now."""
        columns: dict[str, list[float | None]] = {name: [] for name in self._names()}
        for record in self._records:
            for name, values in columns.items():
                values.append(record.metrics.get(name))
        took = eta_text(math.fsum(record.duration_s for record in self._records))
        subtitle = f"{len(self._records)} of {self.total_epochs} epochs in {took}"
        return curves_page("Training", columns, subtitle=subtitle)

    def write_log(self, path: str | PathLike[str]) -> None:
        """Write the lines printed so far, with a heading."""
        text = "\n".join([f"training log, {self.total_epochs} epochs planned", *self._lines, ""])
        write_atomically(path, [text.encode()])

    def export_csv(self, path: str | PathLike[str]) -> None:
        """Write one row an epoch, with a column for every metric that any epoch had; no epochs, no file.

        A metric that an epoch lacks, or whose value is not finite, is left blank.
        """
        if not self._records:
            return
        names = self._names()
        rows = [["epoch", "duration_s", *names]]
        for record in self._records:
            values = [number_text(record.metrics.get(name, math.nan)) for name in names]
            rows.append([str(record.epoch + 1), f"{record.duration_s:.3f}", *values])
        write_atomically(path, [csv_text(rows)])

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for record in self._records for name in record.metrics))

    def _say(self, line: str) -> None:
        self._lines.append(line)
        if not self._quiet:
            print(line, file=self._stream or sys.stdout, flush=True)


def _named(metrics: Metrics) -> dict[str, float]:
    if isinstance(metrics, Mapping):
        pairs = metrics.items()
    elif hasattr(metrics, "latest_metrics"):
        pairs = metrics.latest_metrics()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        pairs = metrics
    return {name: float(value) for name, value in pairs}  # pyright: ignore[reportGeneralTypeIssues]
