"""Records and histories as CSV, as a page, and as a log."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from flodl.errors import GraphError
from flodl.files import write_atomically
from flodl.monitor.archive import archive_page
from flodl.monitor.console import console_line
from flodl.monitor.record import RunRecord
from flodl.monitor.store import RunStore
from flodl.monitor.trend import Trend


def csv_text(rows: Iterable[Sequence[object]]) -> bytes:
    """Return rows as UTF-8 CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def csv_of_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return one line for each row, with a column for each key of any row; blank without a finite value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text([names, *([_cell(row.get(name)) for name in names] for row in rows)])


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
    known = {trend.name: trend.by_epoch() for trend in trends}
    num_epochs = max((max(values, default=-1) for values in known.values()), default=-1) + 1
    if not num_epochs:
        raise GraphError(
            f"{path}: nothing to write, the metrics {list(known)} have no epoch. Record or collect values, then flush."
        )
    epochs = [{name: values.get(e) for name, values in known.items()} for e in range(num_epochs)]
    if kind == "html":
        store, record = RunStore(), RunRecord("trends", title)
        store.add(record)
        for name, values in known.items():
            points = [[e + 1, e + 1, 0.0, v if math.isfinite(v) else None] for e, v in values.items()]
            record.fold({"p": {f"train/{name}": points}, "state": {"status": "finished"}})
        data = archive_page(store.to_json(), title).encode()
    elif kind == "csv":
        data = csv_of_rows([{"epoch": epoch + 1, **values} for epoch, values in enumerate(epochs)])
    else:
        lines, ends = [], [0.0, *times_s]
        for epoch, values in enumerate(epochs):
            took = ends[epoch + 1] - ends[epoch] if epoch < len(times_s) else None
            left = ends[epoch + 1] / (epoch + 1) * (total - epoch - 1) if took is not None else 0.0
            metrics = {name: value for name, value in values.items() if value is not None}
            lines.append(console_line(epoch, max(total, num_epochs), metrics, took, left or None) + "\n")
        data = "".join(lines).encode()
    write_atomically(path, [data])


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.8f}" if math.isfinite(value) else ""
