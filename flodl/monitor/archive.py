"""The page: served, or as one file that opens offline.

It consists of ``page/page.html``, ``page/monitor.css`` and the scripts of `SCRIPTS`. A file contains them and the data;
its policy allows exactly this style and this script by their hashes. The script inserts text by ``textContent`` only,
so names may be any text.
"""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from importlib.resources import files

SCRIPTS = ("words", "record", "chart", "charts", "panels", "lanes", "model", "page")


def served_page() -> str:
    """Return the page that the server sends."""
    return _page("flodl", '<link rel="stylesheet" href="/monitor.css">\n<script src="/monitor.js" defer></script>', "")


def archive_page(runs: str, title: str) -> str:
    """Return the page as one file.

    Args:
        runs: JSON of `flodl.monitor.store.RunStore`.
        title: title of the window; any text.
    """
    style, script = asset("monitor.css"), asset("monitor.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    data = runs.replace("<", "\\u003c")  # so that no text ends the block; the JSON is in ASCII
    body = f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>'
    return _page(title, head, body)


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
