"""The store of runs: one record for each run, from which open pages are kept up to date, and the page.

The page is served, or written as one file that opens offline. It consists of ``page/page.html``, ``page/monitor.css``
and the scripts of `SCRIPTS`. A file contains them and the data; its policy allows exactly this style and this script by
their hashes. The script inserts text by ``textContent`` only, so names may be any text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from flodl.monitor.record import RunRecord, as_text
from flodl.monitor.series import MAX_POINTS

MAX_MESSAGES = 400
"""Messages that are kept; a page that is further behind receives all runs again."""
MAX_TOTAL_POINTS = 40_000
"""Points of all curves together in the first message to a page."""
SCRIPTS = ("words", "record", "chart", "charts", "panels", "lanes", "model", "page")


class RunStore:
    """Records by id.

    Args:
        kind: ``"live"`` for runs of this process, ``"folder"`` for runs read from files.

    Attributes:
        control: whether the page may send commands.
        records: records by id, in the order in which runs began.
        num_readers: number of open pages.
        is_closed: whether the streams of all pages have ended or end after their next message.
    """

    def __init__(self, kind: str = "live") -> None:
        self.kind, self.control = kind, False
        self.records: dict[str, RunRecord] = {}
        self.num_readers, self.is_closed = 0, False
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque(maxlen=MAX_MESSAGES)
        self._num_messages = 0

    def add(self, record: RunRecord) -> None:
        """Add a record, replacing one with the same id."""
        with self._changed:
            self.records[record.id] = record

    def fold(self, record: RunRecord, delta: Mapping[str, Any]) -> str:
        """Add a delta to a record, send it to open pages, and return it as JSON."""
        text = as_text(delta)
        with self._changed:
            record.fold(delta)
            self._messages.append(_message("delta", '{"run":' + as_text(record.id) + "," + text[1:]))
            self._num_messages += 1
            self._changed.notify_all()
        return text

    def stream(self, heartbeat_s: float) -> Generator[bytes, None, None]:
        """Yield messages for one page until `close`: all runs first; empty bytes after a time without a message."""
        number = -MAX_MESSAGES - 1
        with self._changed:
            self.num_readers += 1
        try:
            while not self.is_closed or number != self._num_messages:
                with self._changed:
                    if number == self._num_messages and not self.is_closed:
                        self._changed.wait(heartbeat_s)
                    kept, missed = list(self._messages), self._num_messages - number
                    number = self._num_messages
                    lost = missed > len(kept)
                    text = _message("all", self.to_json()) if lost else b"".join(kept[len(kept) - missed :])
                yield text
        finally:
            with self._changed:
                self.num_readers -= 1

    def close(self) -> None:
        """End the streams of all pages after the messages until now."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def to_json(self) -> str:
        """Return all runs as the JSON text that a page begins with."""
        with self._changed:
            records = list(self.records.values())
            curves = sum(len(record.series) for record in records)
            most = max(60, min(MAX_POINTS, MAX_TOTAL_POINTS // max(1, curves)))
            head = as_text({"kind": self.kind, "control": self.control, "now": round(time.time(), 3)})
            return f'{head[:-1]},"runs":[{",".join(record.snapshot_text(most) for record in records)}]}}'

    def page(self, title: str) -> str:
        """Return the page with all runs as one file that opens offline; ``title`` is the title of the window."""
        style, script = asset("monitor.css"), asset("monitor.js")
        policy = (
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
        )
        head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
        data = self.to_json().replace("<", "\\u003c")  # so that no text ends the block; the JSON is in ASCII
        body = f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>'
        return _page(title, head, body)


def served_page() -> str:
    """Return the page that the server sends."""
    return _page("flodl", '<link rel="stylesheet" href="/monitor.css">\n<script src="/monitor.js" defer></script>', "")


def _page(title: str, head: str, body: str) -> str:
    page = asset("page.html")
    for mark, text in (("<!-- title -->", html.escape(title)), ("<!-- head -->", head), ("<!-- body -->", body)):
        page = page.replace(mark, text, 1)
    return page


@cache
def asset(name: str) -> str:
    """Return a file of the page; ``monitor.js`` consists of all scripts."""
    folder = files("flodl.monitor").joinpath("page")
    if name == "monitor.js":
        parts = [folder.joinpath(f"{part}.js").read_text(encoding="utf-8") for part in SCRIPTS]
        return '"use strict";\n' + "\n".join(parts)
    return folder.joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _message(event: str, text: str) -> bytes:
    return f"event: {event}\ndata: {text}\n\n".encode()
