"""The page as a file that opens offline, and a run as CSV and JSON.

The page is three files beside this one: ``page.html``, ``monitor.css`` and the scripts of ``SCRIPTS``, in this order.
The server gives them as they are; an archive holds them and the data, and its policy allows exactly these by their
hashes. The script writes text by ``textContent`` only, so a name can be any text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from flodl.monitor.console import EpochRecord
from flodl.monitor.export import csv_text, number_text
from flodl.monitor.record import RunRecord

__all__ = ["archive_page", "asset", "csv_of_epochs", "csv_of_record", "json_of", "served_page"]

SCRIPTS = ("words", "record", "chart", "charts", "panels", "lanes", "model", "page")


def served_page() -> bytes:
    """Return the page as the server gives it."""
    head = '<link rel="stylesheet" href="/monitor.css">\n<script src="/monitor.js" defer></script>'
    return _page("flodl", head, "").encode()


def archive_page(everything: str, title: str) -> str:
    """Return the page as one file.

    Args:
        everything: what a page begins with, as JSON (`flodl.monitor.live.Runs.everything`).
        title: of the window; any text.
    """
    style, script = asset("monitor.css"), asset("monitor.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    # Without "<" no text can end the block, without the two separators none can end a line; the JSON means the same.
    data = everything.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    body = f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>'
    return _page(title, head, body)


def _page(title: str, head: str, body: str) -> str:
    page = asset("page.html")
    for mark, text in (("<!-- title -->", html.escape(title)), ("<!-- head -->", head), ("<!-- body -->", body)):
        page = page.replace(mark, text, 1)
    return page


@cache
def asset(name: str) -> str:
    """Return a file of the page; ``monitor.js`` is all scripts in their order."""
    folder = files("flodl.monitor").joinpath("page")
    if name == "monitor.js":
        parts = [folder.joinpath(f"{part}.js").read_text(encoding="utf-8") for part in SCRIPTS]
        return '"use strict";\n' + "\n".join(parts)
    return folder.joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def csv_of_epochs(epochs: Sequence[EpochRecord]) -> bytes:
    """Return one row an epoch, with a column for every metric that any epoch had."""
    names = list(dict.fromkeys(name for record in epochs for name in record.metrics))
    rows = [["epoch", "duration_s", *names]]
    for record in epochs:
        values = [number_text(record.metrics.get(name, math.nan)) for name in names]
        rows.append([str(record.epoch + 1), f"{record.duration_s:.3f}", *values])
    return csv_text(rows)


def csv_of_record(record: RunRecord) -> bytes:
    """Return one row for each point of each curve: what it is, where, the mean of its values and their range."""
    rows = [["curve", "step", "epoch", "seconds", "value", "low", "high", "values"]]
    for name, series in record.series.items():
        for step, epoch, t, mean, low, high, count in series.points:
            numbers = ["" if value is None else f"{value:.8g}" for value in (mean, low, high)]
            rows.append([name, str(step), f"{epoch:.4f}", f"{t:.3f}", *numbers, str(count)])
    return csv_text(rows)


def json_of(record: RunRecord) -> bytes:
    """Return everything that is known of a run as JSON."""
    return json.dumps(record.snapshot(), indent=1, allow_nan=False).encode()
