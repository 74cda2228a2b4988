"""Records and histories as CSV, as a page, and as a log."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from os import PathLike

from flodl.errors import GraphError
from flodl.files import write_atomically
from flodl.monitor.archive import archive_page
from flodl.monitor.console import EpochRecord, console_line
from flodl.monitor.record import RunRecord
from flodl.monitor.store import RunStore
from flodl.monitor.trend import Trend


def csv_text(rows: Iterable[Sequence[object]]) -> bytes:
    """Return rows as UTF-8 CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def csv_of_epochs(epochs: Sequence[EpochRecord]) -> bytes:
    """Return one row for each epoch, with a column for each metric of any epoch."""
    names = list(dict.fromkeys(name for record in epochs for name in record.metrics))
    rows: list[list[str]] = [["epoch", "duration_s", *names]]
    for record in epochs:
        values = [_number(record.metrics.get(name, math.nan)) for name in names]
        rows.append([str(record.epoch + 1), f"{record.duration_s:.3f}", *values])
    return csv_text(rows)


def csv_of_record(record: RunRecord) -> bytes:
    """Return one row for each point of each curve: step, mean and range of its values."""
    rows: list[list[object]] = [["curve", "step", "epoch", "seconds", "value", "low", "high", "values"]]
    for name, series in record.series.items():
        for step, epoch, t, mean, low, high, count in series.points:
            numbers = ["" if value is None else f"{value:.8g}" for value in (mean, low, high)]
            rows.append([name, step, f"{epoch:.4f}", f"{t:.3f}", *numbers, count])
    return csv_text(rows)


def write_trends(
    path: str | PathLike[str],
    kind: str,
    trends: Iterable[Trend],
    *,
    title: str = "",
    times_s: Sequence[float] = (),
    total: int = 0,
) -> None:
    """Write histories to a file.

    Args:
        path: the file.
        kind: ``"csv"``: ``epoch`` from 1 and a column for each history, blank where it has no finite value;
            ``"html"``: a page with their curves; ``"log"``: a line for each epoch.
        trends: the histories.
        title: title of the page.
        times_s: seconds at which epochs ended; used by ``log``.
        total: number of planned epochs; used by ``log``.

    Raises:
        GraphError: no history has a value.
    """
    columns = [(trend.name, trend.by_epoch()) for trend in trends]
    num_epochs = max((max(values, default=-1) for _, values in columns), default=-1) + 1
    if not num_epochs:
        raise GraphError(
            f"{path}: nothing to write, the metrics {[name for name, _ in columns]} have no epoch. "
            "Record or collect values, then flush."
        )
    if kind == "html":
        store, record = RunStore(), RunRecord("trends", title)
        store.add(record)
        for name, values in columns:
            points = [[e + 1, e + 1, 0.0, v if math.isfinite(v) else None] for e, v in values.items()]
            record.fold({"p": {f"train/{name}": points}, "state": {"status": "finished"}})
        data = archive_page(store.to_json(), title).encode()
    elif kind == "csv":
        rows = [[str(e + 1), *(_number(v.get(e, math.nan)) for _, v in columns)] for e in range(num_epochs)]
        data = csv_text([["epoch", *(name for name, _ in columns)], *rows])
    else:
        lines, ends = [], [0.0, *times_s]
        for epoch in range(num_epochs):
            metrics = {name: values[epoch] for name, values in columns if epoch in values}
            took = ends[epoch + 1] - ends[epoch] if epoch < len(times_s) else None
            left = ends[epoch + 1] / (epoch + 1) * (total - epoch - 1) if took is not None else 0.0
            lines.append(console_line(epoch, max(total, num_epochs), metrics, took, left or None) + "\n")
        data = "".join(lines).encode()
    write_atomically(path, [data])


def _number(value: float) -> str:
    return f"{value:.8f}" if math.isfinite(value) else ""
