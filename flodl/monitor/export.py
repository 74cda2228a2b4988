"""Records and histories as CSV, as a page, and as the lines of a console or a log."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flodl.errors import GraphError
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


def rows_of_trends(trends: Iterable[Trend]) -> list[dict[str, Any]]:
    """Return one row for each epoch: ``epoch`` from 1, and the values by name.

    Raises:
        GraphError: no history has a value.
    """
    rows: list[dict[str, Any]] = []
    for trend in trends:
        for epoch, value in trend.by_epoch().items():
            rows += [{"epoch": number + 1} for number in range(len(rows), epoch + 1)]
            rows[epoch][trend.name] = value
    if not rows:
        raise GraphError("trends: found no epoch to write. Record or collect values, then flush.")
    return rows


def page_of_rows(rows: Iterable[Mapping[str, Any]], title: str) -> str:
    """Return a page with the curves of rows with an ``epoch``."""
    store, record = RunStore(), RunRecord("trends", title)
    store.add(record)
    for row in rows:
        epoch = row["epoch"]
        finite = {name: value if math.isfinite(value) else None for name, value in row.items() if name != "epoch"}
        points = {f"train/{name}": [[epoch, epoch, 0.0, value]] for name, value in finite.items()}
        record.fold({"p": points, "state": {"status": "finished"}})
    return store.page(title)


def log_of_rows(rows: Iterable[Mapping[str, Any]], total: int, times_s: Sequence[float]) -> str:
    """Return the console line of each row; ``times_s`` are the seconds at which epochs ended."""
    text, begin, rows = "", 0.0, list(rows)
    total = max(total, len(rows))
    for (epoch, row), end in zip(enumerate(rows), times_s, strict=False):
        metrics = {name: value for name, value in row.items() if name != "epoch"}
        text += console_line(epoch, total, metrics, end - begin, end / (epoch + 1) * (total - epoch - 1) or None) + "\n"
        begin = end
    return text


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.8f}" if math.isfinite(value) else ""


def duration_text(seconds: float) -> str:
    """Return ``420ms``, ``1s``, ``12.5s``, ``4m 32s`` or ``3h 12m``, rounded down; a dash if negative."""
    if not 0 <= seconds < math.inf:
        return "—"
    if seconds < 1:
        return f"{int(seconds * 1000)}ms"
    if seconds < 60:
        return f"{int(seconds * 10) / 10:g}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def metric_text(value: float) -> str:
    """Return ``0``, ``1.00e-4`` below a thousandth, four decimals below a hundred, otherwise two."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 0.001:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.2f}"


def console_line(
    epoch: int,
    total: int,
    metrics: Mapping[str, float],
    duration_s: float | None,
    left_s: float | None,
    usage: str = "",
) -> str:
    """Return the line of an epoch (from 0): number, metrics, ``[duration  ETA left]``, memory and load."""
    parts = [f"  epoch {epoch + 1:>{len(str(total))}}/{total}"]
    parts += [f"{_printable(name)}={metric_text(value)}" for name, value in metrics.items()]
    if duration_s is not None:
        rest = "" if left_s is None else f"  ETA {duration_text(left_s)}"
        parts.append(f"[{duration_text(duration_s)}{rest}]")
    return "  ".join([*parts, *([usage] if usage else [])])


def _printable(name: str) -> str:
    """Replace characters that could break the line or control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
