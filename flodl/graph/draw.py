"""Graphs as pictures: DOT text for Graphviz, and SVG by Graphviz where it is installed, by our own rows where not.

What stands in a picture is decided in `drawing`, where things lie in our own SVG in `layers`; here it is written. Every
text is escaped, so a tag or a class may have any name.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING

from flodl.errors import GraphError
from flodl.files import write_atomically
from flodl.graph.core import GraphCore
from flodl.graph.drawing import Drawing, Line, Shape, drawing_of
from flodl.graph.heat import Heat, colour_of, time_in_words
from flodl.graph.layers import Box, Layout, lay_out

if TYPE_CHECKING:
    from flodl.monitor.profile import Profile

__all__ = ["dot", "svg"]

# Graphviz shape and fill by what a node is.
_LOOKS = {
    "input": ("invhouse", "#aed6f1"),
    "output": ("house", "#a9dfbf"),
    "both": ("doubleoctagon", "#a9dfbf"),
    "state_read": ("diamond", "#f9e79f"),
    "add": ("circle", "#d5dbdb"),
    "merge": ("circle", "#d5dbdb"),
    "map": ("parallelogram", "#a9cce3"),
    "loop": ("box3d", "#d7bde2"),
    "gate": ("diamond", "#f5cba7"),
    "switch": ("diamond", "#f5cba7"),
    "activation": ("ellipse", "#fdebd0"),
    "norm": ("box", "#d5f5e3"),
    "other": ("box", "#eaecee"),
    "port": ("circle", "#566573"),
    "group": ("box", "#f8f9f9"),
}
_USING, _STATE, _INK, _SOFT = "#2e86c1", "#e67e22", "#566573", "#85929e"
PATIENCE_S = 60.0
"""How long Graphviz may take for a picture."""


@dataclass(frozen=True)
class _Look:
    """How boxes are coloured and titled.

    Attributes:
        heat: figures, or None for colours by kind.
        most: the largest figure of a box.
        profile: times of levels, where the drawing has the levels of the graph.
    """

    heat: Heat | None
    most: float
    profile: Profile | None

    def fill(self, shape: Shape) -> str:
        if self.heat is None or shape.value is None:
            return _LOOKS[shape.look][1]
        return colour_of(shape.value / self.most if self.most else 0.0)

    def title(self) -> str:
        heat = self.heat
        if heat is None:
            return ""
        return f"{heat.title}: {heat.words(heat.whole)}" if heat.whole is not None else heat.title

    def level(self, level: int) -> str:
        for timed in self.profile.levels if self.profile is not None else ():
            if timed.index == level:
                return f"level {level}  {time_in_words(timed.sum_s)}  x{timed.parallelism:.1f}"
        return f"level {level}"

    def scale(self) -> list[tuple[str, str]]:
        """Return colours with their words, from nothing to the most."""
        heat = self.heat
        return [] if heat is None else [(colour_of(part), heat.words(part * self.most)) for part in (0.0, 0.5, 1.0)]


def dot(
    graph: GraphCore,
    profile: Profile | None = None,
    *,
    heat: Heat | None = None,
    open: Sequence[str] | bool = (),
    fold: bool = True,
) -> str:
    """Return the graph as DOT text, one cluster a level.

    Args:
        graph: the graph.
        profile: times to show and to colour the nodes by, green for fast to red for the slowest.
        heat: other figures to show and to colour by, see `flodl.monitor.paintat`.
        open: paths of parts whose inside is shown; True for every sub-graph.
        fold: whether equal neighbours are one box with their number.

    Raises:
        GraphError: a path of ``open`` names nothing that has an inside.
    """
    drawing, look = _seen(graph, profile, heat, open, fold)
    out = ["digraph {", "  rankdir=TB;", "  compound=true;"]
    out.append('  fontname="sans-serif"; node [style=filled, fontname="sans-serif", fontsize=11];')
    if look.heat is not None:
        out.append(f"  label={_quoted(look.title())};")
    out += _dot_drawing(drawing, look, "n", "  ")
    scale = look.scale()
    if scale:
        out.append("  subgraph cluster_legend {")
        out.append(f'    label={_quoted(look.heat.title if look.heat else "")}; color="#bfc9ca";')
        for place, (colour, words) in enumerate(scale):
            out.append(
                f'    legend_{place} [label={_quoted(words)}, shape=box, color="{colour}", fillcolor="{colour}"];'
            )
        out.append("  }")
    return "\n".join([*out, "}", ""])


def svg(
    graph: GraphCore,
    profile: Profile | None = None,
    path: str | PathLike[str] | None = None,
    *,
    heat: Heat | None = None,
    open: Sequence[str] | bool = (),
    fold: bool = True,
    layout: str = "auto",
) -> str:
    """Return the graph as an SVG picture, inputs above.

    Args:
        graph: the graph.
        profile: times to show and to colour the nodes by, green for fast to red for the slowest.
        path: a file to write the picture to as well.
        heat: other figures to show and to colour by, see `flodl.monitor.paintat`.
        open: paths of parts whose inside is shown; True for every sub-graph.
        fold: whether equal neighbours are one box with their number.
        layout: ``graphviz``, ``own`` (which needs no program), or ``auto`` for Graphviz where it is installed.

    Raises:
        GraphError: a path of ``open`` names nothing that has an inside, or Graphviz was asked for and cannot draw.
    """
    if layout not in ("auto", "graphviz", "own"):
        raise GraphError(f"svg: layout={layout!r}; expected auto, graphviz or own", layout=layout)
    picture = None
    if layout != "own":
        picture = _by_graphviz(dot(graph, profile, heat=heat, open=open, fold=fold), asked=layout == "graphviz")
    if picture is None:
        picture = _svg_text(graph, *_seen(graph, profile, heat, open, fold))
    if path is not None:
        write_atomically(path, [picture.encode()])
    return picture


def _seen(
    graph: GraphCore, profile: Profile | None, heat: Heat | None, open: Sequence[str] | bool, fold: bool
) -> tuple[Drawing, _Look]:
    if profile is not None and heat is not None:
        raise GraphError("picture: a profile and a heat were given; expected one of them, since a box has one colour")
    if profile is not None:
        seconds: dict[str, float] = {}
        for node in profile.nodes:
            seconds[node.name] = seconds.get(node.name, 0.0) + node.seconds
        heat = Heat("time", seconds, profile.total_s)
    drawing = drawing_of(graph, open=open, fold=fold, heat=heat)
    most = max((shape.value for shape in drawing.closed() if shape.value is not None), default=0.0)
    return drawing, _Look(heat, most, profile if drawing.plain else None)


def _by_graphviz(text: str, *, asked: bool) -> str | None:
    """Return Graphviz's picture; None where it is not installed or fails, unless it was asked for."""
    program = shutil.which("dot")
    problem = "the program dot is not installed; install Graphviz, or use layout='own'"
    if program is not None:
        try:
            done = subprocess.run([program, "-Tsvg"], input=text.encode(), capture_output=True, timeout=PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired) as fault:
            problem = f"{type(fault).__name__}: {fault}"
        else:
            found = done.stdout.decode("utf-8", "replace")
            begin = found.find("<svg")
            if done.returncode == 0 and begin >= 0:
                return found[begin:]
            problem = done.stderr.decode("utf-8", "replace").strip()[:500] or f"it ended with {done.returncode}"
    if asked:
        raise GraphError(f"svg: Graphviz cannot draw: {problem}", program=program)
    return None


# DOT


def _dot_drawing(drawing: Drawing, look: _Look, prefix: str, indent: str) -> list[str]:
    out: list[str] = []
    is_whole = prefix == "n"
    for level in sorted({shape.level for shape in drawing.shapes}):
        if is_whole:
            out.append(f"{indent}subgraph cluster_{level} {{")
            out.append(f'{indent}  label={_quoted(look.level(level))}; style=dashed; color="#bfc9ca";')
        for shape in drawing.shapes:
            if shape.level == level:
                out += _dot_shape(shape, look, prefix, indent + "  ")
        if is_whole:
            out.append(f"{indent}}}")
    opened = {shape.index: shape for shape in drawing.shapes if shape.inside is not None}
    for line in drawing.lines:
        source, tail = _dot_end(opened.get(line.source), f"{prefix}{_word(line.source)}", "ltail", last=True)
        target, head = _dot_end(opened.get(line.target), f"{prefix}{_word(line.target)}", "lhead", last=False)
        style = {
            "data": [],
            "using": ["style=dashed", f'color="{_USING}"', f"label={_quoted(line.label)}"],
            "state": ["style=dotted", f'color="{_STATE}"', f"label={_quoted(line.label)}", "constraint=false"],
        }[line.kind]
        style += [*tail, *head]
        out.append(f"{indent}{source} -> {target}" + (f" [{', '.join(style)}];" if style else ";"))
    return out


def _dot_shape(shape: Shape, look: _Look, prefix: str, indent: str) -> list[str]:
    own = f"{prefix}{_word(shape.index)}"
    if shape.inside is not None:
        text = _quoted("  ".join(shape.lines))
        return [
            f"{indent}subgraph cluster_{own} {{",
            f'{indent}  label={text}; style="rounded,filled"; fillcolor="#f8f9f9"; color="#566573";',
            *_dot_drawing(shape.inside, look, f"{own}_", indent + "  "),
            f"{indent}}}",
        ]
    if shape.look == "port":
        return [f"{indent}{own} [label={_quoted('')}, shape=point];"]
    form = _LOOKS[shape.look][0]
    text = _quoted("\n".join(shape.lines))
    return [f'{indent}{own} [label={text}, shape={form}, fillcolor="{look.fill(shape)}"];']


def _dot_end(shape: Shape | None, own: str, side: str, *, last: bool) -> tuple[str, list[str]]:
    """Return the node at which a line ends, inside of an opened box where it leads to one, and how it is cut there."""
    if shape is None:
        return own, []
    cut, name = [f"{side}=cluster_{own}"], own
    while shape is not None and shape.inside is not None:
        index = shape.inside.exit if last else shape.inside.entry
        name = f"{name}_{_word(index)}"
        shape = next((one for one in shape.inside.shapes if one.index == index), None)
    return name, cut


def _word(index: int) -> str:
    return "in" if index < 0 else str(index)


# SVG


def _svg_text(graph: GraphCore, drawing: Drawing, look: _Look) -> str:
    inner = _placed(drawing, look)
    scale = look.scale()
    title = graph.label or "graph"
    if look.heat is not None:
        title = f"{title}. {look.title()}"
    width, height = max(inner.width + 90, 330.0 if scale else 0.0), inner.height + 30 + (44 if scale else 0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="-80 -30 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="12">',
        f"<title>{_safe(title)}</title>",
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L10 5L0 10z" fill="context-stroke"/></marker></defs>',
        f'<text x="-70" y="-12" font-weight="bold">{_safe(title)}</text>',
    ]
    for level, (top, bottom) in inner.layout.rows.items():
        for row, text in enumerate(look.level(level).split("  ")):
            y = (top + bottom) / 2 + 14 * row
            out.append(f'<text x="-70" y="{y:.0f}" fill="{_SOFT}" font-size="10">{_safe(text)}</text>')
    out += inner.drawn
    if scale:
        out += _legend(scale, look.heat.title if look.heat else "", inner.height)
    return "\n".join([*out, "</svg>", ""])


def _legend(scale: Sequence[tuple[str, str]], title: str, top: float) -> list[str]:
    stops = "".join(f'<stop offset="{place / 2}" stop-color="{colour}"/>' for place, (colour, _) in enumerate(scale))
    words = "".join(
        f'<text x="{-70 + 140 * place}" y="{top + 36:.0f}" text-anchor="{anchor}">{_safe(text)}</text>'
        for place, ((_, text), anchor) in enumerate(zip(scale, ("start", "middle", "end"), strict=True))
    )
    return [
        f'<defs><linearGradient id="heat">{stops}</linearGradient></defs>',
        f'<g font-size="10" fill="{_SOFT}"><text x="-70" y="{top + 4:.0f}">{_safe(title)}</text>'
        f'<rect x="-70" y="{top + 10:.0f}" width="280" height="12" fill="url(#heat)"/>{words}</g>',
    ]


@dataclass(frozen=True)
class _Placed:
    """A drawing with its places, written from its own corner."""

    layout: Layout
    drawn: list[str]
    width: float
    height: float


def _placed(drawing: Drawing, look: _Look) -> _Placed:
    within = {shape.index: _placed(shape.inside, look) for shape in drawing.shapes if shape.inside is not None}
    boxes = {shape.index: _box(shape, within.get(shape.index)) for shape in drawing.shapes}
    layout = lay_out(boxes, [(line.source, line.target) for line in drawing.lines if line.kind != "state"])
    looped = [line for line in drawing.lines if line.kind == "state"]
    # Room on the right for the lines that lead back and for their names.
    margin = 24 * len(looped) + max((7 * len(line.label) for line in looped), default=0)
    out = [_drawn_line(line, layout) for line in drawing.lines if line.kind != "state"]
    out += [_drawn_state(line, layout, layout.width - 10 + 24 * i) for i, line in enumerate(looped)]
    for shape in drawing.shapes:
        box, inner = layout.boxes[shape.index], within.get(shape.index)
        out += [_drawn_shape(shape, box, look.fill(shape))] if inner is None else _drawn_group(shape, box, inner)
    return _Placed(layout, out, layout.width + margin, layout.height)


def _drawn_group(shape: Shape, box: Box, inner: _Placed) -> list[str]:
    x, y = box.x - box.width / 2, box.y - box.height / 2
    texts = "".join(
        f'<text x="{x + 10:.1f}" y="{y + 17 + 16 * i:.1f}">{_safe(line)}</text>' for i, line in enumerate(shape.lines)
    )
    top = y + 16 * len(shape.lines) + 10
    return [
        f'<g>{_hint(shape)}<rect x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="8" '
        f'fill="#f8f9f9" stroke="{_INK}" stroke-dasharray="4 3"/><g fill="#1b2631">{texts}</g></g>',
        f'<g transform="translate({x + 6:.1f} {top:.1f})">',
        *inner.drawn,
        "</g>",
    ]


# how it is written


def _clean(text: str) -> str:
    """Return the text without what neither DOT nor XML can hold: control characters and lone surrogates."""
    bad = "\N{REPLACEMENT CHARACTER}"
    return "".join(c if c == "\n" or (c.isprintable() or c == "\u00a0") else bad for c in text)


def _quoted(text: str) -> str:
    escaped = _clean(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _safe(text: str) -> str:
    return escape(_clean(text))


def _hint(shape: Shape) -> str:
    """Return what a pointer that rests on a box is told."""
    return f"<title>{_safe(', '.join(shape.paths[:8]))}</title>" if shape.paths else ""


def _box(shape: Shape, inner: _Placed | None) -> Box:
    # 7 units a character is the width of a 12-unit sans-serif; slanted shapes need more room around it.
    width = max((7.0 * len(line) for line in shape.lines), default=0.0) + 24
    height = 16.0 * len(shape.lines) + 14
    if inner is not None:
        return Box(shape.level, max(width, inner.width + 12), height + inner.height - 24)
    if shape.look == "port":
        return Box(shape.level, 8.0, 8.0)
    form = _LOOKS[shape.look][0]
    if form == "diamond":
        width, height = width * 1.5, height * 1.6
    elif form in ("circle", "ellipse"):
        width, height = width * 1.3, height * 1.35
    elif form in ("house", "invhouse", "parallelogram", "doubleoctagon", "box3d"):
        width, height = width + 24, height + 10
    return Box(shape.level, max(width, 50.0), height)


def _drawn_shape(shape: Shape, box: Box, fill: str) -> str:
    x, y, w, h = box.x - box.width / 2, box.y - box.height / 2, box.width, box.height
    paint, form = f'fill="{fill}" stroke="{_INK}"', _LOOKS[shape.look][0]
    if form in ("circle", "ellipse"):
        drawn = f'<ellipse cx="{box.x:.1f}" cy="{box.y:.1f}" rx="{w / 2:.1f}" ry="{h / 2:.1f}" {paint}/>'
    else:
        drawn = "".join(
            f'<polygon points="{_points([(x + w * px, y + h * py) for px, py in outline])}" {paint}/>'
            for outline in _OUTLINES[form]
        )
    first = box.y - 8 * (len(shape.lines) - 1) + 4
    texts = "".join(
        f'<text x="{box.x:.1f}" y="{first + 16 * i:.1f}">{_safe(line)}</text>' for i, line in enumerate(shape.lines)
    )
    return f'<g>{_hint(shape)}{drawn}<g text-anchor="middle" fill="#1b2631">{texts}</g></g>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


_OCTAGON = ((0.15, 0), (0.85, 0), (1, 0.3), (1, 0.7), (0.85, 1), (0.15, 1), (0, 0.7), (0, 0.3))
_OUTLINES: Mapping[str, tuple[Sequence[tuple[float, float]], ...]] = {
    "box": (((0, 0), (1, 0), (1, 1), (0, 1)),),
    "box3d": (
        ((0.04, 0), (1, 0), (1, 0.85), (0.96, 1), (0, 1), (0, 0.15)),
        ((0, 0.15), (0.96, 0.15), (0.96, 1), (0, 1)),
    ),
    "house": (((0.5, 0), (1, 0.25), (1, 1), (0, 1), (0, 0.25)),),
    "invhouse": (((0, 0), (1, 0), (1, 0.75), (0.5, 1), (0, 0.75)),),
    "diamond": (((0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)),),
    "parallelogram": (((0.1, 0), (1, 0), (0.9, 1), (0, 1)),),
    "doubleoctagon": (_OCTAGON, [(0.5 + (x - 0.5) * 0.94, 0.5 + (y - 0.5) * 0.9) for x, y in _OCTAGON]),
}


def _drawn_line(line: Line, layout: Layout) -> str:
    points = layout.route(line.source, line.target)
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        path += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    if line.kind == "data":
        return f'<path d="{path}" fill="none" stroke="#566573" marker-end="url(#arrow)"/>'
    x, y = points[len(points) // 2]
    return (
        f'<path d="{path}" fill="none" stroke="{_USING}" stroke-dasharray="6 3" marker-end="url(#arrow)"/>'
        f'<text x="{x + 4:.1f}" y="{y - 10:.1f}" fill="{_USING}" font-size="10">{_safe(line.label)}</text>'
    )


def _drawn_state(line: Line, layout: Layout, x: float) -> str:
    """Draw a line back from the writer to the reader, outside the rows on the right."""
    source, target = layout.boxes[line.source], layout.boxes[line.target]
    x0, x1 = source.x + source.width / 2, target.x + target.width / 2
    path = f"M{x0:.1f} {source.y:.1f}L{x:.1f} {source.y:.1f}L{x:.1f} {target.y:.1f}L{x1:.1f} {target.y:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{_STATE}" stroke-dasharray="2 3" marker-end="url(#arrow)"/>'
        f'<text x="{x1 + 6:.1f}" y="{target.y - 4:.1f}" fill="{_STATE}" font-size="10">'
        f"{_safe(line.label)}</text>"
    )
