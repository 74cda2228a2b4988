"""A timeline as a page that needs nothing but itself: a lane for each rank, curves of the machine's state, tables.

The picture is drawn here, so the page has no script at all, and its policy allows none. Steps that are too short to be
seen one by one are drawn together; what the pointer rests on says what it is.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping, Sequence
from string import Template
from typing import Any

__all__ = ["timeline_page"]

KINDS = ("step", "sync", "evaluation", "save", "epoch", "decision")
LANE, GAP, CURVE, LEFT = 22, 8, 64, 150
WIDTH = 1600
FINEST = 1 / 2000
"""Part of the whole that is drawn as one: about a pixel."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5b6472; --line: #d9dce1; --paper: #fff; --lane: #f2f4f7;
  --step: #2f6fb7; --sync: #d98324; --evaluation: #3f9a58; --save: #8a5cc2; --epoch: #5b6472; --decision: #c23b5a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaee; --soft: #9aa3b2; --line: #3a3f48; --paper: #15181d;
  --lane: #1e232b; --step: #6ea8e6; --sync: #f0a95a; --evaluation: #6cc886; --save: #b793e6; --epoch: #9aa3b2;
  --decision: #f07a94; } }
body { margin: 0; padding: 1rem; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .5rem; } h2 { font-size: 1rem; margin: 1.25rem 0 .4rem; }
.wide { overflow-x: auto; } .picture { border: 1px solid var(--line); border-radius: 6px; }
.picture svg { display: block; min-width: 900px; width: 100%; height: auto; }
text { fill: var(--ink); font-size: 13px; } .soft { fill: var(--soft); } .lane { fill: var(--lane); }
.grid { stroke: var(--line); } .curve { fill: none; stroke: var(--step); stroke-width: 1.5; }
.step { fill: var(--step); } .sync { fill: var(--sync); } .evaluation { fill: var(--evaluation); }
.save { fill: var(--save); } .epoch { fill: var(--epoch); } .decision { fill: var(--decision); }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem .8rem .15rem 0;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }
ul svg { width: 12px; height: 12px; }
"""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '$style_hash'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Timeline</title>
<style>$style</style>
</head>
<body>
<h1>Timeline: $headline</h1>
<ul>$kinds</ul>
<div class="wide picture" tabindex="0" role="region" aria-label="The picture; scroll sideways where it is wide">$picture
</div>
<h2>Ranks</h2><div class="wide">$ranks</div>
<h2>Idle for half a second or longer</h2><div class="wide">$gaps</div>
<h2>The machine</h2><div class="wide">$machine</div>
</body>
</html>
""")

Spans = Sequence[Mapping[str, Any]]


def timeline_page(
    spans: Spans, samples: Spans, gaps: Spans, busy: Mapping[int, float], summary: Mapping[str, Any]
) -> str:
    """Return the page of a timeline; arguments are what `flodl.distributed.timeline.Timeline` has and gives."""
    whole = max([*(span["end_ms"] for span in spans), *(sample["at_ms"] for sample in samples), 1.0])
    ranks = sorted({span["rank"] for span in spans})
    counts = ((len(ranks), "rank"), (summary["syncs"], "meeting"))
    headline = ", ".join([_time(whole), *(f"{count} {what}{'s' * (count != 1)}" for count, what in counts)])
    about = [
        [str(rank), f"{100 * busy.get(rank, 0.0):.1f} %", _count(spans, rank, "step"), _count(spans, rank, "sync")]
        for rank in ranks
    ]
    idle = [[str(gap["rank"]), _time(gap["begin_ms"]), _time(gap["length_ms"]), str(gap["cause"])] for gap in gaps]
    still = {name: f"{100 * share:.0f} % of samples" for name, share in summary["idle"].items()}
    machine = [
        [name, _figure(name, mean), _figure(name, summary["most"][name]), still.get(name, "")]
        for name, mean in summary["means"].items()
    ]
    return _PAGE.substitute(
        style=_STYLE,
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode(),
        headline=html.escape(headline),
        kinds="".join(map(_key, KINDS)),
        picture=_picture(spans, samples, ranks, whole, headline),
        ranks=_table(["rank", "computed", "steps", "meetings"], about),
        gaps=_table(["rank", "from", "for", "beside"], idle[:200]),
        machine=_table(["figure", "mean", "most", "below 5 %"], machine),
    )


def _key(kind: str) -> str:
    return f'<li><svg viewBox="0 0 12 12" aria-hidden="true"><rect class="{kind}" width="12" height="12"/></svg> {kind}'


def _count(spans: Spans, rank: int, kind: str) -> str:
    return f"{sum(span['rank'] == rank and span['kind'] == kind for span in spans):,}"


# ---- the picture -----------------------------------------------------------------------------------------


def _picture(spans: Spans, samples: Spans, ranks: Sequence[int], whole: float, headline: str) -> str:
    names = sorted({name for sample in samples for name in sample} - {"rank", "at_ms"})
    height = 30 + len(ranks) * (LANE + GAP) + len(names) * (CURVE + GAP)
    scale = (WIDTH - LEFT - 10) / whole
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(headline, quote=True)}">',
        *_axis(whole, scale, height),
    ]
    y = 26
    for rank in ranks:
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{LANE}"/>')
        parts.append(f'<text x="4" y="{y + 16}">rank {rank}</text>')
        for kind in KINDS:
            own = [span for span in spans if span["rank"] == rank and span["kind"] == kind]
            parts += [_rectangle(kind, group, y, scale) for group in _together(own, whole * FINEST)]
        y += LANE + GAP
    for name in names:
        parts += _curve(name, samples, y, scale)
        y += CURVE + GAP
    return "".join([*parts, "</svg>"])


def _axis(whole: float, scale: float, height: int) -> Iterator[str]:
    for part in range(9):
        at = whole * part / 8
        x = LEFT + at * scale
        anchor = {0: "start", 8: "end"}.get(part, "middle")
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{height}"/>'
        yield f'<text class="soft" x="{x:.1f}" y="13" text-anchor="{anchor}">{_time(at)}</text>'


def _together(spans: Spans, finest: float) -> Iterator[list[Mapping[str, Any]]]:
    """Yield spans of one kind that are drawn as one, since less than can be seen lies between them."""
    group: list[Mapping[str, Any]] = []
    for span in sorted(spans, key=lambda span: span["begin_ms"]):
        apart = bool(group) and span["begin_ms"] - group[-1]["end_ms"] > finest
        if apart or (group and span["end_ms"] - group[0]["begin_ms"] > 40 * finest):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _rectangle(kind: str, group: Spans, y: int, scale: float) -> str:
    first, last = group[0], group[-1]
    begin, end = first["begin_ms"], max(span["end_ms"] for span in group)
    steps = f"step {first['step']}" if len(group) == 1 else f"steps {first['step']} to {last['step']}"
    said = f"{kind}, {steps}: {_time(begin)} to {_time(end)}"
    if kind == "sync":
        said += f", {_time(sum(span.get('wait_ms', 0.0) for span in group))} of it waiting"
    wide = max((end - begin) * scale, 3.0 if kind == "decision" else 1.0)
    top, tall = (y, LANE) if kind != "save" else (y + LANE - 5, 5)  # saving goes on beside the rest
    return (
        f'<rect class="{kind}" x="{LEFT + begin * scale:.2f}" y="{top}" width="{wide:.2f}" '
        f'height="{tall}"><title>{html.escape(said)}</title></rect>'
    )


def _curve(name: str, samples: Spans, y: int, scale: float) -> list[str]:
    points = [(max(sample["at_ms"], 0.0), sample[name]) for sample in samples if name in sample]
    most = max((value for _, value in points), default=0.0)
    top = 100.0 if name.endswith(("/util", "/cpu")) else most or 1.0
    path = " ".join(
        f"{LEFT + at * scale:.1f},{y + CURVE - 4 - min(max(value / top, 0.0), 1.0) * (CURVE - 8):.1f}"
        for at, value in points[:: max(1, len(points) // WIDTH)]
    )
    return [
        f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{CURVE}"/>',
        f'<text x="4" y="{y + 20}">{html.escape(name)}</text>',
        f'<text class="soft" x="4" y="{y + 38}">most {html.escape(_figure(name, most))}</text>',
        f'<polyline class="curve" points="{path}"><title>{html.escape(name)}</title></polyline>',
    ]


# ---- words -----------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "<p>nothing</p>"
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _time(ms: float) -> str:
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1e3
    return f"{seconds:.2f} s" if seconds < 60 else f"{int(seconds // 60)}:{seconds % 60:04.1f} min"


def _figure(name: str, value: float) -> str:
    last = name.rpartition("/")[2]
    if last in ("ram", "process", "memory", "reserved"):
        return f"{value / (1 << 30):.2f} GiB"
    unit = {"cpu": " %", "util": " %", "power": " W", "temperature": " \N{DEGREE SIGN}C"}.get(last, "")
    return f"{value:.1f}{unit}"
