"""Graphs as pictures: DOT text for Graphviz, and SVG without it.

Decides what a node says and looks like, and which lines join the nodes; where things lie in the SVG is
decided in `layers`. Every text is escaped, so a tag or a class may have any name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING

from torch import nn

from flodl.files import write_atomically
from flodl.graph.core import GraphCore
from flodl.graph.layers import Box, Layout, lay_out
from flodl.graph.nodes import Node

if TYPE_CHECKING:
    from flodl.observe import Profile

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
}
_HEAT = ((0x27, 0xAE, 0x60), (0xF3, 0x9C, 0x12), (0xE7, 0x4C, 0x3C))
_USING, _STATE = "#2e86c1", "#e67e22"


@dataclass(frozen=True)
class _Shape:
    """One node as it is drawn."""

    index: int
    level: int
    lines: tuple[str, ...]
    shape: str
    fill: str


@dataclass(frozen=True)
class _Line:
    """One line between two nodes: ``kind`` is ``data``, ``using`` or ``state``."""

    source: int
    target: int
    kind: str
    label: str = ""


def dot(graph: GraphCore, profile: Profile | None = None) -> str:
    """Return the graph as DOT text, one cluster a level.

    Args:
        graph: the graph.
        profile: times to show and to colour the nodes by, green for fast to red for the slowest.
    """
    out = ["digraph {", "  rankdir=TB;", '  node [style=filled, fontname="sans-serif", fontsize=11];']
    if profile is not None:
        out.append(f"  label={_quoted(_title(profile))};")
    shapes = _shapes(graph, profile)
    for level in sorted({shape.level for shape in shapes}):
        out.append(f"  subgraph cluster_{level} {{")
        out.append(f'    label={_quoted(_level_title(level, profile))}; style=dashed; color="#bfc9ca";')
        for shape in shapes:
            if shape.level == level:
                text = _quoted("\n".join(shape.lines))
                out.append(f'    n{shape.index} [label={text}, shape={shape.shape}, fillcolor="{shape.fill}"];')
        out.append("  }")
    for line in _lines(graph):
        style = {
            "data": "",
            "using": f' [style=dashed, color="{_USING}", label={_quoted(line.label)}]',
            "state": f' [style=dotted, color="{_STATE}", label={_quoted(line.label)}, constraint=false]',
        }[line.kind]
        out.append(f"  n{line.source} -> n{line.target}{style};")
    return "\n".join([*out, "}", ""])


def svg(graph: GraphCore, profile: Profile | None = None, path: str | PathLike[str] | None = None) -> str:
    """Return the graph as an SVG picture, inputs above, made without Graphviz.

    Args:
        graph: the graph.
        profile: times to show and to colour the nodes by, green for fast to red for the slowest.
        path: a file to write the picture to as well.
    """
    picture = _svg_text(graph, profile)
    if path is not None:
        write_atomically(path, [picture.encode()])
    return picture


def _svg_text(graph: GraphCore, profile: Profile | None) -> str:
    shapes = _shapes(graph, profile)
    lines = _lines(graph)
    boxes = {shape.index: _box(shape) for shape in shapes}
    joints = [(line.source, line.target) for line in lines if line.kind != "state"]
    layout = lay_out(boxes, joints)
    looped = [line for line in lines if line.kind == "state"]
    # Room on the right for the lines that lead back and for their names.
    margin = 24 * len(looped) + max((7 * len(line.label) for line in looped), default=0)
    title = graph.label or "graph"
    if profile is not None:
        title = f"{title}. {_title(profile)}"
    width, height = layout.width + 90 + margin, layout.height + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="-80 -30 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="12">',
        f"<title>{_safe(title)}</title>",
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L10 5L0 10z" fill="context-stroke"/></marker></defs>',
        f'<text x="-70" y="-12" font-weight="bold">{_safe(title)}</text>',
    ]
    for level, (top, bottom) in layout.rows.items():
        for row, text in enumerate(_level_title(level, profile).split("  ")):
            y = (top + bottom) / 2 + 14 * row
            out.append(f'<text x="-70" y="{y:.0f}" fill="#85929e" font-size="10">{_safe(text)}</text>')
    out += [_drawn_line(line, layout) for line in lines if line.kind != "state"]
    out += [_drawn_state(line, layout, layout.width - 10 + 24 * i) for i, line in enumerate(looped)]
    out += [_drawn_shape(shape, layout.boxes[shape.index]) for shape in shapes]
    return "\n".join([*out, "</svg>", ""])


# what is drawn


def _shapes(graph: GraphCore, profile: Profile | None) -> list[_Shape]:
    plan = graph.plan
    entries = {given.node: given.name for given in plan.inputs}
    seconds = {} if profile is None else {node.id: node.seconds for node in profile.nodes}
    slowest = max(seconds.values(), default=0.0)
    shapes: list[_Shape] = []
    for node in plan.nodes:
        module = getattr(graph, node.name) if node.name else None
        lines = [entries.get(node.index) or node.id.rpartition("_")[0] or node.id]
        label = getattr(module, "label", None)
        if isinstance(label, str):
            lines[0] += f" {label}"
        # An input's name is its tag.
        tags = [f"#{tag}" for tag in node.tags if tag != lines[0]]
        if tags:
            lines.append(" ".join(tags))
        if node.id in seconds:
            lines.append(_time(seconds[node.id]))
        count = 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
        if count:
            lines.append(f"[{_count(count)} params]")
        shape, fill = _LOOKS[_look(node, module, node.index in entries, node.index == plan.output)]
        if profile is not None and node.id in seconds:
            fill = _heat(seconds[node.id] / slowest if slowest else 0.0)
        shapes.append(_Shape(node.index, node.level, tuple(lines), shape, fill))
    return shapes


def _lines(graph: GraphCore) -> list[_Line]:
    plan = graph.plan
    lines: list[_Line] = []
    for node in plan.nodes:
        lines += [_Line(source, node.index, "data") for source in node.inputs]
        lines += [_Line(given.source, node.index, "using", given.tag) for given in node.references]
        if node.kind == "state_read":
            lines.append(_Line(plan.tags[node.mode], node.index, "state", node.mode))
    return lines


def _look(node: Node, module: nn.Module | None, is_input: bool, is_output: bool) -> str:
    if is_input or is_output:
        return "both" if is_input and is_output else "input" if is_input else "output"
    if node.kind in _LOOKS:
        return node.kind
    home = type(module).__module__
    if home == "torch.nn.modules.activation":
        return "activation"
    return "norm" if "norm" in node.kind else "other"


def _title(profile: Profile) -> str:
    return f"Forward: {_time(profile.total_s)}"


def _level_title(level: int, profile: Profile | None) -> str:
    for timed in profile.levels if profile is not None else ():
        if timed.index == level:
            return f"level {level}  {_time(timed.sum_s)}  x{timed.parallelism:.1f}"
    return f"level {level}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _count(number: int) -> str:
    if number < 1000:
        return str(number)
    return f"{number / 1e3:.1f}K" if number < 1_000_000 else f"{number / 1e6:.1f}M"


def _heat(share: float) -> str:
    """Return green at 0, yellow at a half, red at 1."""
    half, part = (0, 2 * share) if share < 0.5 else (1, 2 * share - 1)
    mixed = (round(a + (b - a) * part) for a, b in zip(_HEAT[half], _HEAT[half + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


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


def _box(shape: _Shape) -> Box:
    # 7 units a character is the width of a 12-unit sans-serif; slanted shapes need more room around it.
    width = max(7.0 * len(line) for line in shape.lines) + 24
    height = 16.0 * len(shape.lines) + 14
    if shape.shape == "diamond":
        width, height = width * 1.5, height * 1.6
    elif shape.shape in ("circle", "ellipse"):
        width, height = width * 1.3, height * 1.35
    elif shape.shape in ("house", "invhouse", "parallelogram", "doubleoctagon", "box3d"):
        width, height = width + 24, height + 10
    return Box(shape.level, max(width, 50.0), height)


def _drawn_shape(shape: _Shape, box: Box) -> str:
    x, y, w, h = box.x - box.width / 2, box.y - box.height / 2, box.width, box.height
    paint = f'fill="{shape.fill}" stroke="#566573"'
    if shape.shape in ("circle", "ellipse"):
        form = f'<ellipse cx="{box.x:.1f}" cy="{box.y:.1f}" rx="{w / 2:.1f}" ry="{h / 2:.1f}" {paint}/>'
    else:
        form = "".join(
            f'<polygon points="{_points([(x + w * px, y + h * py) for px, py in outline])}" {paint}/>'
            for outline in _OUTLINES[shape.shape]
        )
    first = box.y - 8 * (len(shape.lines) - 1) + 4
    texts = "".join(
        f'<text x="{box.x:.1f}" y="{first + 16 * i:.1f}">{_safe(line)}</text>' for i, line in enumerate(shape.lines)
    )
    return f'<g>{form}<g text-anchor="middle" fill="#1b2631">{texts}</g></g>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


_OCTAGON = ((0.15, 0), (0.85, 0), (1, 0.3), (1, 0.7), (0.85, 1), (0.15, 1), (0, 0.7), (0, 0.3))
_OUTLINES: dict[str, tuple[Sequence[tuple[float, float]], ...]] = {
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


def _drawn_line(line: _Line, layout: Layout) -> str:
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


def _drawn_state(line: _Line, layout: Layout, x: float) -> str:
    """Draw a line back from the writer to the reader, outside the rows on the right."""
    source, target = layout.boxes[line.source], layout.boxes[line.target]
    x0, x1 = source.x + source.width / 2, target.x + target.width / 2
    path = f"M{x0:.1f} {source.y:.1f}L{x:.1f} {source.y:.1f}L{x:.1f} {target.y:.1f}L{x1:.1f} {target.y:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{_STATE}" stroke-dasharray="2 3" marker-end="url(#arrow)"/>'
        f'<text x="{x1 + 6:.1f}" y="{target.y - 4:.1f}" fill="{_STATE}" font-size="10">'
        f"{_safe(line.label)}</text>"
    )
