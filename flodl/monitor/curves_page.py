"""A page with curves that needs nothing but itself: no server, no network, no text turned into code.

Style and script are the files ``curves.css`` and ``curves.js`` beside this one. The page's policy allows
exactly these two by their hashes; the data is an inert JSON block, and the script writes it by
``textContent`` only, so a metric's name can be any text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from string import Template

__all__ = ["curves_page"]

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src '$style_hash'; script-src '$script_hash'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1><p>$subtitle</p></header>
<main id="curves"></main>
<div id="table"></div>
<script type="application/json" id="data">$data</script>
<script>$script</script>
</body>
</html>
""")


def curves_page(title: str, series: Mapping[str, Sequence[float | None]], *, subtitle: str = "") -> str:
    """Return an HTML page with one curve for each series over the epochs from 1, and a table of the values.

    Args:
        title: heading; any text.
        series: values by metric; None and what is not finite leave a gap.
        subtitle: a line below the heading.
    """
    data = [
        {"name": name, "values": [v if v is not None and math.isfinite(v) else None for v in values]}
        for name, values in series.items()
    ]
    style, script = _asset("curves.css"), _asset("curves.js")
    return _PAGE.substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        style=style,
        script=script,
        style_hash=_digest(style),
        script_hash=_digest(script),
        # Without "<" no text can end the block; the JSON means the same.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )


@cache
def _asset(name: str) -> str:
    return files("flodl.monitor").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
