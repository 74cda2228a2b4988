"""Pictures of graphs and other modules: DOT text for Graphviz, and SVG drawn here in rows.

All text is escaped, so that a tag or a class may have any name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from torch import nn

from flodl.errors import GraphError, nearest
from flodl.graph.core import graph_of
from flodl.graph.nodes import Node, Plan
from flodl.graph.tree import children_of, joined

# Graphviz shape and fill for each kind of box.
_STYLES = {
    "input": ("invhouse", "#aed6f1"),
    "output": ("house", "#a9dfbf"),
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
# Attributes of each kind of line in DOT and in SVG.
_LINES = {
    "data": ("", 'stroke="#566573"'),
    "using": ('style=dashed, color="#2e86c1"', 'stroke="#2e86c1" stroke-dasharray="6 3"'),
    "state": ('style=dotted, color="#e67e22", constraint=false', 'stroke="#e67e22" stroke-dasharray="2 3"'),
}
_COLD, _WARM, _HOT = (0x27, 0xAE, 0x60), (0xF3, 0x9C, 0x12), (0xE7, 0x4C, 0x3C)
_TITLES = {"time": "Forward", "memory": "Memory kept until backward", "gradient": "Gradient norm"}
_GAP, _ROW_GAP, _LANE = 26.0, 40.0, 14.0


@dataclass(frozen=True)
class Heat:
    """One measurement for each part of a model.

    Attributes:
        kind: ``time`` (seconds), ``memory`` (bytes), ``gradient`` (norms), or any other word.
        values: measurements by dotted path.
        whole: the measurement of the whole model, if it is more than the sum of its parts.
    """

    kind: str
    values: Mapping[str, float] = field(default_factory=dict)
    whole: float | None = None

    @property
    def title(self) -> str:
        """Name of the measurement, with the value of the whole model if known."""
        title = _TITLES.get(self.kind, self.kind)
        return title if self.whole is None else f"{title}: {self.text(self.whole)}"

    def total(self, values: Iterable[float]) -> float:
        """Return the measurement of several parts: the norm of norms, the sum of all else."""
        if self.kind == "gradient":
            return math.hypot(*values)
        return math.fsum(values)

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if self.kind == "time":
            return f"{value * 1e6:.0f} µs" if value < 1e-3 else f"{value * 1e3:.2f} ms"
        if self.kind != "memory":
            return f"{value:.3g}"
        power = min(int(math.log(max(value, 1), 1024)), 3)
        return f"{value / 1024**power:.{min(power, 1)}f} {('B', 'KB', 'MB', 'GB')[power]}"


@dataclass(frozen=True)
class _Box:
    """A node, several equal nodes in a row, or a module.

    Attributes:
        row: rows are counted from the inputs.
        kind: a key of `_STYLES`.
        text: lines of text.
        paths: the modules that the box stands for.
        value: their measurement, if any.
        inside: the drawing inside the box, if it is open.
    """

    row: int
    kind: str
    text: tuple[str, ...]
    paths: tuple[str, ...] = ()
    value: float | None = None
    inside: _Drawing | None = None


@dataclass(frozen=True)
class _Line:
    """A line between two boxes; ``kind`` is ``data``, ``using`` or ``state``."""

    source: int
    target: int
    kind: str
    label: str = ""


@dataclass(frozen=True)
class _Drawing:
    """Boxes by number and lines; lines from outside end at box 0, lines to outside start at ``exit``."""

    boxes: dict[int, _Box]
    lines: list[_Line]
    exit: int


def dot(model: nn.Module, *, heat: Heat | None = None, open: Sequence[str] | bool = (), fold: bool = True) -> str:
    """Return a picture as DOT text.

    Args:
        model: a graph, or any other module.
        heat: measurements that colour the boxes, green for the smallest to red for the largest.
        open: paths of modules to draw with their contents; True for every sub-graph.
        fold: draw equal neighbours as one box with their number.

    Raises:
        GraphError: a path in ``open`` is not a module with children.
    """
    drawer = _Drawer(heat, open, fold)
    drawing = drawer.draw(model)
    out = ["digraph {", "  rankdir=TB; compound=true;"]
    out.append('  fontname="sans-serif"; node [style=filled, fontname="sans-serif", fontsize=11];')
    out += _dot_drawing(drawing, drawer.largest, "n", "  ")
    if heat is not None:
        out += ["  subgraph cluster_legend {", f"    label={_quoted(heat.title)};"]
        for i, (colour, text) in enumerate(_legend(heat, drawer.largest)):
            out.append(f'    legend_{i} [label={_quoted(text)}, shape=box, fillcolor="{colour}"];')
        out.append("  }")
    return "\n".join([*out, "}", ""])


def svg(model: nn.Module, *, heat: Heat | None = None, open: Sequence[str] | bool = (), fold: bool = True) -> str:
    """Return a picture as SVG text, inputs above; arguments and errors as for `dot`."""
    drawer = _Drawer(heat, open, fold)
    drawing = drawer.draw(model)
    drawn, width, height = _svg_drawing(drawing, drawer.largest)
    title = str(getattr(model, "label", None) or type(model).__name__)
    if heat is not None:
        title += f". {heat.title}"
        for i, (colour, text) in enumerate(_legend(heat, drawer.largest)):
            drawn.append(f'<rect x="{10 + 90 * i}" y="{height + 8:.0f}" width="12" height="12" fill="{colour}"/>')
            drawn.append(f'<text x="{28 + 90 * i}" y="{height + 18:.0f}">{_escaped(text)}</text>')
        width, height = max(width, 290.0), height + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height + 30:.0f}" '
        f'viewBox="0 -30 {width:.0f} {height + 30:.0f}" font-family="sans-serif" font-size="12">\n'
        f"<title>{_escaped(title)}</title>\n"
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L10 5L0 10z" fill="context-stroke"/></marker></defs>\n'
        f'<text x="10" y="-12" font-weight="bold">{_escaped(title)}</text>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


class _Drawer:
    """Turns a model into boxes and lines."""

    def __init__(self, heat: Heat | None, open: Sequence[str] | bool, fold: bool) -> None:
        self.heat, self.fold, self.open_all = heat, fold, open is True
        self.open = () if isinstance(open, bool) else (open,) if isinstance(open, str) else tuple(open)
        self.seen: set[str] = set()
        self.largest = 0.0

    def draw(self, model: nn.Module) -> _Drawing:
        drawing = self._drawing(model, "")
        for path in self.open:
            if path not in self.seen:
                raise GraphError(
                    f"picture: {path!r} is not a module with children{nearest(path, sorted(self.seen))}. "
                    "Use a path of named_modules().",
                    path=path,
                    known=sorted(self.seen),
                )
        return drawing

    def _drawing(self, module: nn.Module, path: str) -> _Drawing:
        graph = graph_of(module)
        plan = _plan_of_children(module) if graph is None else graph.plan
        groups = self._groups(module, plan, path)
        first = {node.index: group[0].index for group in groups for node in group}
        inputs = {declared.node: declared.name for declared in plan.inputs}
        rows = {level: row for row, level in enumerate(sorted({group[0].level for group in groups}))}
        boxes = {}
        for group in groups:
            node, members = group[0], [(joined(path, one.name), getattr(module, one.name)) for one in group if one.name]
            kind = node.kind if node.kind in _STYLES else _kind_of(members[0][1] if members else None)
            if graph is not None and plan.output in [one.index for one in group]:
                kind = "output"
            title = inputs.get(node.index) or node.id.rpartition("_")[0] or node.id
            kind = "input" if node.index in inputs else kind
            tags = [one.tags[0] for one in (group[0], group[-1]) if one.tags and one.tags[0] != title]
            boxes[node.index] = self._box(rows[node.level], kind, title, list(dict.fromkeys(tags)), members)
        lines: list[_Line] = []
        for node in plan.nodes:
            lines += [_Line(first[source], first[node.index], "data") for source in node.inputs]
            lines += [_Line(first[r.source], first[node.index], "using", r.tag) for r in node.references]
            if node.kind == "state_read":
                lines.append(_Line(first[plan.tags[node.mode]], first[node.index], "state", node.mode))
        if graph is None and not isinstance(module, nn.Sequential):
            lines = []  # the order of the children is unknown
        lines = [line for line in dict.fromkeys(lines) if line.source != line.target or line.kind == "state"]
        return _Drawing(boxes, lines, first.get(plan.output, 0))

    def _groups(self, module: nn.Module, plan: Plan, path: str) -> list[list[Node]]:
        """Return the nodes of a plan, with consecutive equal nodes in one group."""
        reads = Counter(source for node in plan.nodes for source in node.sources)
        reads.update(plan.tags[tag] for tag in plan.memory)
        groups: dict[int, list[Node]] = {}
        for node in (plan.nodes[index] for index in plan.order):
            before = node.inputs[0] if len(node.inputs) == 1 else -1
            is_next = reads[before] == 1 and before in groups and self._alike(module, path, groups[before][-1], node)
            group = groups.pop(before) if is_next else []
            groups[node.index] = [*group, node]
        return list(groups.values())

    def _alike(self, module: nn.Module, path: str, one: Node, other: Node) -> bool:
        """Whether two nodes are drawn as one box: of one class and shape, and neither is open."""
        named = one.name and other.name and bool(one.tags) == bool(other.tags) and one.references == other.references
        if not self.fold or not named or any(self._is_open(joined(path, node.name)) for node in (one, other)):
            return False
        members = [getattr(module, node.name) for node in (one, other)]
        shapes = [[(name, tuple(p.shape)) for name, p in member.named_parameters()] for member in members]
        return type(members[0]) is type(members[1]) and shapes[0] == shapes[1]

    def _box(self, row: int, kind: str, title: str, tags: list[str], members: list[tuple[str, nn.Module]]) -> _Box:
        label = getattr(members[0][1], "label", None) if members else None
        title += f" {label}" if isinstance(label, str) else ""
        text = [f"{title}  ×{len(members)}" if len(members) > 1 else title]
        text += [" … ".join(f"#{tag}" for tag in tags)] if tags else []
        paths, value, inside = tuple(path for path, _ in members), None, None
        if self.heat is not None:
            found = [self.heat.values[path] for path in dict.fromkeys(paths) if path in self.heat.values]
            if found:
                value = self.heat.total(found)
                text.append(self.heat.text(value))
        if len(members) == 1 and any(True for _ in children_of(members[0][1])):
            path, member = members[0]
            self.seen.add(path)
            if self._is_open(path) or (self.open_all and graph_of(member) is not None):
                inside = self._drawing(member, path)
        if inside is None and value is not None:
            self.largest = max(self.largest, value)
        parameters = {id(p): p.numel() for _, member in members for p in member.parameters()}
        if parameters:
            text.append(f"[{_short(sum(parameters.values()))} params]")
        return _Box(row, kind, tuple(text), paths, value, inside)

    def _is_open(self, path: str) -> bool:
        return any(wanted == path or wanted.startswith(path + ".") for wanted in self.open)


def _plan_of_children(module: nn.Module) -> Plan:
    """Return a plan in which the children of a module follow one another."""
    in_rows = isinstance(module, nn.Sequential)
    nodes = []
    for i, (name, child) in enumerate(children_of(module)):
        kind = type(child).__name__.lower()
        inputs = (i - 1,) if i else ()
        nodes.append(Node(i, kind, kind, name, inputs, tags=(name,), level=i if in_rows else 0))
    return Plan(tuple(nodes), tuple(range(len(nodes))), (), len(nodes) - 1)


def _fill(box: _Box, largest: float) -> str:
    if box.value is None:
        return _STYLES[box.kind][1]
    return _colour(box.value / largest if largest else 0.0)


def _colour(share: float) -> str:
    low, high, part = (_COLD, _WARM, 2 * share) if share < 0.5 else (_WARM, _HOT, 2 * share - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True))


def _legend(heat: Heat, largest: float) -> list[tuple[str, str]]:
    return [(_colour(share), heat.text(share * largest)) for share in (0.0, 0.5, 1.0)]


# DOT


def _dot_drawing(drawing: _Drawing, largest: float, prefix: str, indent: str) -> list[str]:
    out: list[str] = []
    for index, box in drawing.boxes.items():
        name = f"{prefix}{index}"
        if box.inside is None:
            text = _quoted("\n".join(box.text))
            out.append(
                f'{indent}{name} [label={text}, shape={_STYLES[box.kind][0]}, fillcolor="{_fill(box, largest)}"];'
            )
        else:
            out += [f"{indent}subgraph cluster_{name} {{", f"{indent}  label={_quoted('  '.join(box.text))};"]
            out += [*_dot_drawing(box.inside, largest, f"{name}_", indent + "  "), f"{indent}}}"]
    for line in drawing.lines:
        source, tail = _dot_end(drawing, line.source, prefix, "ltail")
        target, head = _dot_end(drawing, line.target, prefix, "lhead")
        label = f"label={_quoted(line.label)}" if line.label else ""
        style = ", ".join(part for part in (_LINES[line.kind][0], label, tail, head) if part)
        out.append(f"{indent}{source} -> {target}" + (f" [{style}];" if style else ";"))
    return out


def _dot_end(drawing: _Drawing, index: int, prefix: str, side: str) -> tuple[str, str]:
    """Return the node where a line ends, and the attribute that cuts the line at the edge of an open box."""
    name, inside = f"{prefix}{index}", drawing.boxes[index].inside
    cut = f"{side}=cluster_{name}" if inside is not None else ""
    while inside is not None:
        index = inside.exit if side == "ltail" else 0
        name, inside = f"{name}_{index}", inside.boxes[index].inside
    return name, cut


# SVG


def _svg_drawing(drawing: _Drawing, largest: float) -> tuple[list[str], float, float]:
    """Return the elements of a drawing with its width and height; its corner is at 0, 0."""
    inside = {i: _svg_drawing(box.inside, largest) for i, box in drawing.boxes.items() if box.inside is not None}
    sizes: dict[int, tuple[float, float]] = {}
    rows: dict[int, list[int]] = {}
    for i, box in drawing.boxes.items():
        # A character of the font is about 7 units wide.
        width, height = max(7.0 * max(map(len, box.text)) + 24, 50.0), 16.0 * len(box.text) + 14
        if i in inside:
            width, height = max(width, inside[i][1] + 12), height + inside[i][2]
        sizes[i] = width, height
        rows.setdefault(box.row, []).append(i)
    widths = {row: sum(sizes[i][0] + _GAP for i in members) - _GAP for row, members in rows.items()}
    middle, top = max(widths.values(), default=0.0) / 2 + 10, 10.0
    places: dict[int, tuple[float, float]] = {}
    for row in sorted(rows):
        left, height = middle - widths[row] / 2, max(sizes[i][1] for i in rows[row])
        for i in rows[row]:
            places[i] = left, top + (height - sizes[i][1]) / 2
            left += sizes[i][0] + _GAP
        top += height + _ROW_GAP
    out: list[str] = []
    edge = 2 * middle
    for line in drawing.lines:
        skips = drawing.boxes[line.target].row - drawing.boxes[line.source].row != 1
        edge += _LANE if skips else 0.0
        out.append(_svg_line(line, places, sizes, edge if skips else None))
    longest = max((7.0 * len(line.label) for line in drawing.lines), default=0.0)
    for i, box in drawing.boxes.items():
        out += _svg_box(box, places[i], sizes[i], largest, inside.get(i))
    return out, edge + 10 + longest, top - _ROW_GAP + 10


def _svg_line(line: _Line, places: dict[int, Any], sizes: dict[int, Any], lane: float | None) -> str:
    """Draw a line down to the next row, or, if it skips rows or leads back, along a lane on the right."""
    (x0, y0), (w0, h0) = places[line.source], sizes[line.source]
    (x1, y1), (w1, h1) = places[line.target], sizes[line.target]
    if lane is None:
        start, end, bottom, half = x0 + w0 / 2, x1 + w1 / 2, y0 + h0, (y0 + h0 + y1) / 2
        path = f"M{start:.1f} {bottom:.1f}C{start:.1f} {half:.1f} {end:.1f} {half:.1f} {end:.1f} {y1:.1f}"
        x, y = (start + end) / 2 + 4, half
    else:
        down, up = y0 + h0 * 0.7, y1 + h1 * 0.3
        path = f"M{x0 + w0:.1f} {down:.1f}H{lane:.1f}V{up:.1f}H{x1 + w1:.1f}"
        x, y = lane + 4, (down + up) / 2
    label = f'<text x="{x:.1f}" y="{y:.1f}" font-size="10">{_escaped(line.label)}</text>' if line.label else ""
    return f'<path d="{path}" fill="none" {_LINES[line.kind][1]} marker-end="url(#arrow)"/>{label}'


def _svg_box(box: _Box, corner: Any, size: Any, largest: float, inside: Any) -> list[str]:
    (x, y), (width, height) = corner, size
    text = "".join(
        f'<text x="{x + width / 2:.1f}" y="{y + 19 + 16 * i:.1f}">{_escaped(line)}</text>'
        for i, line in enumerate(box.text)
    )
    hint = f"<title>{_escaped(', '.join(box.paths[:8]))}</title>" if box.paths else ""
    fill = "#f8f9f9" if inside else _fill(box, largest)
    radius = {"box": 2.0, "circle": height / 2, "ellipse": height / 2}.get(_STYLES[box.kind][0], 8.0)
    out = [
        f'<g text-anchor="middle">{hint}<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius:.0f}" fill="{fill}" stroke="#566573"/>{text}</g>'
    ]
    if inside is not None:
        out += [f'<g transform="translate({x + 6:.1f} {y + 16 * len(box.text) + 10:.1f})">', *inside[0], "</g>"]
    return out


# text


def _kind_of(module: nn.Module | None) -> str:
    if type(module).__module__ == "torch.nn.modules.activation":
        return "activation"
    return "norm" if "norm" in type(module).__name__.lower() else "other"


def _short(number: int) -> str:
    if number < 1000:
        return str(number)
    return f"{number / 1e3:.1f}K" if number < 1_000_000 else f"{number / 1e6:.1f}M"


def _printable(text: str) -> str:
    """Replace control characters and lone surrogates, which neither DOT nor XML can contain."""
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _quoted(text: str) -> str:
    escaped = _printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _escaped(text: str) -> str:
    return escape(_printable(text))
