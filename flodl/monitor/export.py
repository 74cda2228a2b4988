"""Histories as files: CSV, a page with curves, a log."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from os import PathLike

from flodl.errors import GraphError
from flodl.files import write_atomically
from flodl.monitor.curves_page import curves_page
from flodl.monitor.formatting import duration_text, metric_text
from flodl.monitor.trend import Trend

__all__ = ["csv_text", "number_text", "write_csv", "write_html", "write_log"]


def write_csv(path: str | PathLike[str], trends: Iterable[Trend]) -> None:
    """Write ``epoch`` from 1 and a column for each trend; blank where it has no finite value.

    Raises:
        GraphError: there are no values.
    """
    columns = _filled(trends, path)
    cells = [trend.by_epoch() for trend in columns]
    rows = [
        [str(epoch + 1), *(number_text(cell.get(epoch, math.nan)) for cell in cells)]
        for epoch in range(_num_epochs(columns))
    ]
    write_atomically(path, [csv_text([["epoch", *(trend.name for trend in columns)], *rows])])


def write_html(path: str | PathLike[str], title: str, trends: Iterable[Trend]) -> None:
    """Write a page with one curve for each trend.

    Raises:
        GraphError: there are no values.
    """
    columns = _filled(trends, path)
    epochs = range(_num_epochs(columns))
    page = curves_page(title, {t.name: [t.by_epoch().get(epoch) for epoch in epochs] for t in columns})
    write_atomically(path, [page.encode()])


def write_log(path: str | PathLike[str], trends: Iterable[Trend], flush_times_s: Sequence[float], total: int) -> None:
    """Write one line for each epoch.

    Raises:
        GraphError: there are no values.
    """
    columns = _filled(trends, path)
    lines: list[str] = []
    cells = [(trend.name, trend.by_epoch()) for trend in columns]
    for epoch in range(_num_epochs(columns)):
        parts = [f"epoch {epoch + 1:>{len(str(total))}}"]
        parts += [f"{name}={metric_text(cell[epoch])}" for name, cell in cells if epoch in cell]
        if epoch < len(flush_times_s):
            end = flush_times_s[epoch]
            begin = flush_times_s[epoch - 1] if epoch else 0.0
            left = total - epoch - 1
            rest = f"  ETA {duration_text(end / (epoch + 1) * left)}" if left > 0 else ""
            parts.append(f"[{duration_text(end - begin)}{rest}]")
        lines.append("  ".join(parts) + "\n")
    write_atomically(path, ["".join(lines).encode()])


def number_text(value: float) -> str:
    """Return eight decimals, or an empty text for what is not finite: many readers of CSV trip over it."""
    return f"{value:.8f}" if math.isfinite(value) else ""


def csv_text(rows: Iterable[Sequence[str]]) -> bytes:
    """Return the rows as UTF-8 CSV with plain newlines."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _num_epochs(columns: list[Trend]) -> int:
    return max(max(trend.by_epoch(), default=-1) for trend in columns) + 1


def _filled(trends: Iterable[Trend], path: str | PathLike[str]) -> list[Trend]:
    columns = list(trends)
    if not any(map(len, columns)):
        raise GraphError(
            f"{path}: nothing to write; the metrics {[t.name for t in columns]} have no epoch yet. "
            "Record or collect values, then flush."
        )
    return columns
