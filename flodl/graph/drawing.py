"""What a picture of a graph shows: boxes with their texts and colours, lines between them, boxes inside of boxes.

A sub-graph or any other module is one box unless it is opened; equal neighbours are one box with their number. How it
is written is decided in `draw`, where things lie in `layers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from flodl.errors import GraphError, nearest
from flodl.graph.core import GraphCore, graph_of
from flodl.graph.heat import Heat
from flodl.graph.inside import children_of, joined
from flodl.graph.nodes import Node
from flodl.graph.repeats import Run, runs_of

__all__ = ["Drawing", "Line", "Shape", "drawing_of"]

PORT = -1
"""The place where values come into a block from outside."""


@dataclass(frozen=True)
class Shape:
    """One box.

    Attributes:
        index: its number within the drawing.
        level: its row.
        lines: what stands in it.
        look: what it is.
        paths: the parts that it stands for.
        value: its figure, where there is one.
        inside: what is drawn in it, where it is opened.
    """

    index: int
    level: int
    lines: tuple[str, ...]
    look: str
    paths: tuple[str, ...] = ()
    value: float | None = None
    inside: Drawing | None = None


@dataclass(frozen=True)
class Line:
    """One line between two boxes: ``kind`` is ``data``, ``using`` or ``state``."""

    source: int
    target: int
    kind: str
    label: str = ""


@dataclass(frozen=True)
class Drawing:
    """Boxes and lines of one graph.

    Attributes:
        shapes: the boxes.
        lines: the lines.
        entry: the box at which lines from outside arrive.
        exit: the box at which lines to outside begin.
        plain: whether every node has a box of its own.
    """

    shapes: tuple[Shape, ...]
    lines: tuple[Line, ...]
    entry: int
    exit: int
    plain: bool = True

    def closed(self) -> Iterable[Shape]:
        """Yield the boxes that are not opened, at any depth."""
        for shape in self.shapes:
            if shape.inside is None:
                yield shape
            else:
                yield from shape.inside.closed()


@dataclass
class _Asked:
    """What the caller wants, and which of it was found."""

    open: tuple[str, ...]
    all: bool
    fold: bool
    heat: Heat | None
    seen: set[str] = field(default_factory=set)

    def names(self, path: str) -> bool:
        """Return whether the caller named a part, or something inside of it."""
        return any(wish == path or wish.startswith(path + ".") for wish in self.open)

    def opens(self, path: str) -> bool:
        self.seen.add(path)
        return self.all or self.names(path)


def drawing_of(
    graph: GraphCore, *, open: Sequence[str] | bool = (), fold: bool = True, heat: Heat | None = None
) -> Drawing:
    """Return what is drawn of a graph.

    Args:
        graph: the graph.
        open: paths of parts whose inside is shown; True for every sub-graph.
        fold: whether equal neighbours are one box.
        heat: figures that are written into the boxes.

    Raises:
        GraphError: a path names nothing that can be opened.
    """
    wishes = () if isinstance(open, bool) else (open,) if isinstance(open, str) else tuple(open)
    asked = _Asked(wishes, open is True, fold, heat)
    drawn = _graph(graph, "", asked)
    for wish in wishes:
        if wish not in asked.seen:
            raise GraphError(
                f"picture: nothing with an inside is at {wish!r}{nearest(wish, sorted(asked.seen))}; "
                "expected the path of a part as named_modules() has it",
                path=wish,
                known=sorted(asked.seen),
            )
    return drawn


def _graph(graph: GraphCore, path: str, asked: _Asked) -> Drawing:
    plan = graph.plan
    entries = {given.node: given.name for given in plan.inputs}
    runs = runs_of(graph) if asked.fold else []
    runs = [run for run in runs if not any(_wished(graph, path, asked, i) for block in run.blocks for i in block)]
    # Which box stands for a node; only the last block of a run is read by others, and is drawn as the first.
    stands = {node.index: node.index for node in plan.nodes}
    for run in runs:
        for block in run.blocks:
            stands |= dict.fromkeys(block, run.blocks[0][0])
    folded = {run.blocks[0][0]: run for run in runs}
    shapes: list[Shape] = []
    for node in plan.nodes:
        if stands[node.index] != node.index:
            continue
        run = folded.get(node.index)
        if run is not None and len(run.blocks[0]) > 1:
            shapes.append(_block(graph, path, run, asked))
            continue
        alike = [plan.nodes[b[0]] for b in run.blocks] if run is not None else [node]
        is_output = any(one.index == plan.output for one in alike)
        shapes.append(_shape(graph, path, alike, asked, entries.get(node.index), is_output))
    lines = tuple(dict.fromkeys(_joined_lines(graph, stands)))
    if runs:
        shapes = _levelled(shapes, lines)
    plain = not runs and all(shape.inside is None for shape in shapes)
    return Drawing(tuple(shapes), lines, stands[plan.inputs[0].node], stands[plan.output], plain)


def _wished(graph: GraphCore, path: str, asked: _Asked, index: int) -> bool:
    """Return whether the caller named a node, or a part of it, to be opened."""
    name = graph.plan.nodes[index].name
    return bool(name) and asked.names(joined(path, name))


def _shape(
    graph: GraphCore, path: str, alike: Sequence[Node], asked: _Asked, entry: str | None, is_output: bool
) -> Shape:
    node = alike[0]
    modules = [getattr(graph, one.name) for one in alike if one.name]
    module = modules[0] if modules else None
    first = entry or node.id.rpartition("_")[0] or node.id
    label = getattr(module, "label", None)
    lines = [f"{first} {label}" if isinstance(label, str) else first]
    if len(alike) > 1:
        lines[0] += f"  ×{len(alike)}"
    tags = _tags(alike, first)
    if tags:
        lines.append(tags)
    paths = tuple(joined(path, one.name) for one in alike if one.name)
    look = _look(node, module, entry is not None, is_output)
    inside = None
    if module is not None and len(alike) == 1 and any(True for _ in children_of(module)):
        inside = _inside(module, paths[0], asked)
    return _finished(node.index, node.level, lines, look, paths, modules, asked, inside)


def _finished(
    index: int,
    level: int,
    lines: list[str],
    look: str,
    paths: tuple[str, ...],
    modules: Sequence[nn.Module],
    asked: _Asked,
    inside: Drawing | None,
) -> Shape:
    heat, value = asked.heat, None
    if heat is not None:
        found = [heat.values[path] for path in dict.fromkeys(paths) if path in heat.values]
        if found:
            value = heat.together(found)
            lines.append(heat.words(value))
    if inside is None and len(modules) == 1:
        held = _held(modules[0])
        if held:
            lines.append(held)
    count = sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
    if count:
        lines.append(f"[{_count(count)} params]")
    return Shape(index, level, tuple(lines), look, paths, value, inside)


def _inside(module: nn.Module, path: str, asked: _Asked) -> Drawing | None:
    """Return what is in a module that the caller wants opened."""
    graph = graph_of(module)
    opens = asked.opens(path)
    if not opens or (graph is None and asked.all):
        return None
    return _parts(module, path, asked) if graph is None else _graph(graph, path, asked)


def _parts(module: nn.Module, path: str, asked: _Asked) -> Drawing:
    """Return the modules inside of one that is no graph, joined by lines where they are known to follow each other."""
    runs: list[list[tuple[str, nn.Module]]] = []
    for name, child in children_of(module):
        wished = any(w == joined(path, name) or w.startswith(joined(path, name) + ".") for w in asked.open)
        if (
            asked.fold
            and not wished
            and runs
            and _same(runs[-1][-1], (name, child))
            and runs[-1][0][0] not in asked.open
        ):
            runs[-1].append((name, child))
        else:
            runs.append([(name, child)])
    in_row = isinstance(module, nn.Sequential)
    shapes: list[Shape] = []
    for place, run in enumerate(runs):
        names, modules = [name for name, _ in run], [child for _, child in run]
        kind = type(modules[0]).__name__.lower()
        word = kind if kind == names[0] else f"{names[0]} {kind}" if len(run) == 1 else f"{kind}  ×{len(run)}"
        lines = [word] if len(run) == 1 else [word, f"{names[0]} … {names[-1]}"]
        paths = tuple(joined(path, name) for name in names)
        inside = None
        if len(run) == 1 and any(True for _ in children_of(modules[0])):
            inside = _inside(modules[0], paths[0], asked)
        look = _look_of(modules[0], kind)
        shapes.append(_finished(place, place if in_row else 0, lines, look, paths, modules, asked, inside))
    lines_ = tuple(Line(i, i + 1, "data") for i in range(len(shapes) - 1)) if in_row else ()
    return Drawing(tuple(shapes), lines_, 0, len(shapes) - 1, plain=False)


def _block(graph: GraphCore, path: str, run: Run, asked: _Asked) -> Shape:
    """Return a box that shows the first of several equal blocks, with their number and the figures of all."""
    plan, first = graph.plan, run.blocks[0]
    shapes: list[Shape] = []
    for place in range(len(first)):
        alike = [plan.nodes[block[place]] for block in run.blocks]
        shape = _shape(graph, path, alike, asked, None, False)
        words = (shape.lines[0].partition("  ×")[0], *shape.lines[1:])
        shapes.append(replace(shape, lines=words))
    own = set(first)
    lines: list[Line] = []
    for index in first:
        node = plan.nodes[index]
        lines += [Line(i if i in own else PORT, index, "data") for i in node.inputs]
        lines += [Line(given.source, index, "using", given.tag) for given in node.references if given.source in own]
    shapes = _levelled([Shape(PORT, 0, (), "port"), *shapes], lines)
    inside = Drawing(tuple(shapes), tuple(dict.fromkeys(lines)), PORT, first[-1], plain=False)
    paths = tuple(path for shape in shapes for path in shape.paths)
    values = [shape.value for shape in shapes if shape.value is not None]
    value = asked.heat.together(values) if asked.heat is not None and values else None
    title = [f"×{len(run.blocks)}"]
    if value is not None and asked.heat is not None:
        title.append(asked.heat.words(value))
    return Shape(first[0], plan.nodes[first[0]].level, tuple(title), "group", paths, value, inside)


def _joined_lines(graph: GraphCore, stands: Mapping[int, int]) -> Iterable[Line]:
    plan = graph.plan
    for node in plan.nodes:
        target = stands[node.index]
        # What a run's blocks read of each other is drawn in the box, if at all.
        for source in node.inputs:
            if stands[source] != target:
                yield Line(stands[source], target, "data")
        for given in node.references:
            if stands[given.source] != target:
                yield Line(stands[given.source], target, "using", given.tag)
        if node.kind == "state_read":
            yield Line(stands[plan.tags[node.mode]], node.index, "state", node.mode)


def _levelled(shapes: Sequence[Shape], lines: Iterable[Line]) -> list[Shape]:
    """Return the boxes in rows, each below all that it reads."""
    reads: dict[int, set[int]] = {shape.index: set() for shape in shapes}
    for line in lines:
        if line.kind != "state":
            reads[line.target].add(line.source)
    rows: dict[int, int] = {}
    waiting = list(reads)
    while waiting:
        ready = [i for i in waiting if all(source in rows for source in reads[i])]
        assert ready, "the lines of a plan lead forwards"
        for i in ready:
            rows[i] = max((rows[source] + 1 for source in reads[i]), default=0)
        waiting = [i for i in waiting if i not in rows]
    return [replace(shape, level=rows[shape.index]) for shape in shapes]


# what stands in a box


def _tags(alike: Sequence[Node], first: str) -> str:
    # An input's name is its tag.
    own = [f"#{tag}" for tag in alike[0].tags if tag != first]
    if len(alike) == 1 or not own:
        return " ".join(own)
    last = [f"#{tag}" for tag in alike[-1].tags]
    return f"{own[0]} … {last[0]}" if last else own[0]


def _held(module: nn.Module) -> str:
    """Return what a box that holds equal modules holds: 12 × encoderlayer."""
    children = [*children_of(module)]
    if len(children) < 2 or graph_of(module) is not None or not all(_same(children[0], one) for one in children[1:]):
        return ""
    return f"{len(children)} × {type(children[0][1]).__name__.lower()}"


def _same(one: tuple[str, nn.Module], other: tuple[str, nn.Module]) -> bool:
    """Return whether two modules are equal but for values, and numbers in their names."""
    names = [re.sub(r"[0-9]+", "#", name) for name, _ in (one, other)]
    shapes = [[(key, tuple(p.shape)) for key, p in module.named_parameters()] for _, module in (one, other)]
    return names[0] == names[1] and type(one[1]) is type(other[1]) and shapes[0] == shapes[1]


_KINDS = ("state_read", "add", "merge", "map", "loop", "gate", "switch")


def _look(node: Node, module: nn.Module | None, is_input: bool, is_output: bool) -> str:
    if is_input or is_output:
        return "both" if is_input and is_output else "input" if is_input else "output"
    return node.kind if node.kind in _KINDS else _look_of(module, node.kind)


def _look_of(module: nn.Module | None, kind: str) -> str:
    if type(module).__module__ == "torch.nn.modules.activation":
        return "activation"
    return "norm" if "norm" in kind else "other"


def _count(number: int) -> str:
    if number < 1000:
        return str(number)
    return f"{number / 1e3:.1f}K" if number < 1_000_000 else f"{number / 1e6:.1f}M"
