"""Dotted paths into a tree of graphs and modules.

A path is read segment by segment. In a graph a segment is, in this order, the label of a child graph, a tag, a tag
group, or the name of a node; in any other module it is the name of a child. ``layers.0-5`` stands for the children
``0`` to ``5``. Internal tags are visible only to the graph that owns them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from torch import nn

from flodl.errors import GraphPathError, nearest
from flodl.graph.core import GraphCore, graph_of, nearest_graphs

MAX_DEPTH = 6
"""Levels below the model that `modules_of` returns."""


class PathKind(StrEnum):
    """The kind of a path."""

    SUBGRAPH = "subgraph"
    TAG = "tag"
    MODULE = "module"


@dataclass(frozen=True)
class Part:
    """One thing that a path names.

    Attributes:
        path: the path to it, ranges and groups resolved.
        kind: a graph, a tagged value, or another module.
        owner: the graph that contains the last graph-level segment; None in a model without graphs.
        segment: the last segment.
        module: the module; None for a tag on a value that is not the output of one module.
    """

    path: str
    kind: PathKind
    owner: GraphCore | None
    segment: str
    module: nn.Module | None

    @property
    def tag(self) -> str | None:
        """The tag that the path names, if any."""
        return self.segment if self.kind is PathKind.TAG else None


def path_fault(path: str, segment: str, problem: str, **details: Any) -> GraphPathError:
    """Return the error for a segment of a path."""
    return GraphPathError(f"path {path!r}: {problem}", path=path, segment=segment, **details)


def parts_at(model: nn.Module, path: str) -> list[Part]:
    """Return the part at a path; several if it contains a range or names a tag group.

    A path begins in the model's only outermost graph, in the one of several that its first segments name, or in the
    model itself.

    Raises:
        GraphPathError: it names nothing. The error has the failing segment, the known names and the whole path.
    """
    if not all(path.split(".")):
        raise path_fault(path, "", "found an empty segment. Join names by single dots.")
    fault: GraphPathError | None = None
    for prefix, start in _starts(model, path):
        found = [Part("", PathKind.MODULE if graph_of(start) is None else PathKind.SUBGRAPH, None, "", start)]
        try:
            for depth, segment in enumerate(path.removeprefix(prefix).split(".")):
                found = [part for at in found for part in _descend(at, segment, path, depth)]
        except GraphPathError as error:
            fault = fault or error
        else:
            return [replace(part, path=prefix + part.path) for part in found]
    assert fault is not None
    raise fault


def part_at(model: nn.Module, path: str) -> Part:
    """Return the one thing that a path names.

    Raises:
        GraphPathError: as `parts_at`, and if the path names several.
    """
    found = parts_at(model, path)
    if len(found) != 1:
        raise GraphPathError(f"path {path!r} names {len(found)} parts, expected one", path=path, segment=path)
    return found[0]


def subgraph(graph: nn.Module, path: str) -> GraphCore:
    """Return the graph at a path.

    Raises:
        GraphPathError: the path names nothing, or something that is not a graph.
    """
    part = part_at(graph, path)
    found = None if part.module is None or part.kind is not PathKind.SUBGRAPH else graph_of(part.module)
    if found is None:
        raise GraphPathError(f"path {path!r} names a {part.kind}, expected a graph", path=path, segment=part.segment)
    return found


def module_at(part: Part) -> nn.Module:
    """Return the module of a part.

    Raises:
        GraphPathError: the part is a value that is not the output of one module, such as a sum.
    """
    if part.module is None:
        problem = "the tag names a value that is not the output of one module. "
        problem += "Name the module, as in also(module, name=...), and use that."
        raise path_fault(part.path, part.segment, problem)
    return part.module


def parameters_at(model: nn.Module, path: str) -> dict[str, nn.Parameter]:
    """Return the parameters at a path with their names in ``model``.

    Raises:
        GraphPathError: the path names nothing, or nothing with parameters.
    """
    wanted = {id(p) for part in parts_at(model, path) if part.module is not None for p in part.module.parameters()}
    if not wanted:
        raise path_fault(path, path, "found no parameters. Name a trainable part.")
    return {name: p for name, p in model.named_parameters() if id(p) in wanted}


def named_graphs(model: nn.Module) -> list[tuple[str, GraphCore]]:
    """Return all graphs of a model by path: labels, and names of modules for graphs without one.

    A model's only outermost graph has the empty path.
    """
    roots = _roots(model)
    found: dict[int, tuple[str, GraphCore]] = {}
    for name, graph in roots.items():
        for path, inner in _below(graph, "" if len(roots) == 1 else name):
            found.setdefault(id(inner), (path, inner))
    return list(found.values())


def _below(graph: GraphCore, path: str) -> Iterator[tuple[str, GraphCore]]:
    yield path, graph
    for name, child in graph._modules.items():
        for below, inner in nearest_graphs(child, name) if child is not None else ():
            step = inner.label or below
            yield from _below(inner, f"{path}.{step}" if path else step)


def _roots(model: nn.Module) -> dict[str, GraphCore]:
    return {graph.label or name: graph for name, graph in nearest_graphs(model)}


def _starts(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in which a path may begin, each with the prefix of the path that names it."""
    roots = _roots(model)
    if len(roots) == 1:
        yield "", next(iter(roots.values()))
    yield from ((f"{name}.", graph) for name, graph in roots.items() if len(roots) > 1 and path.startswith(f"{name}."))
    if graph_of(model) is None:
        yield "", model


def _descend(at: Part, segment: str, path: str, depth: int) -> list[Part]:
    here = f"{at.path}.{segment}" if at.path else segment
    if at.module is None:
        raise path_fault(path, segment, f"{at.segment!r} is a value without a module, so it has no {segment!r}")
    graph = graph_of(at.module)
    if graph is None:
        children = dict(at.module.named_children())
        if segment in children:
            return [_module_part(here, at.owner, segment, children[segment])]
        return _range(at, segment, path, list(children))

    labels, plan = graph.tree_children(), graph.plan
    if segment in labels:
        return [Part(here, PathKind.SUBGRAPH, graph, segment, labels[segment])]
    if depth > 0 and segment in plan.internal:
        raise path_fault(path, segment, f"{segment!r} is internal to {_describe(at, graph)}. Use that graph itself.")
    if segment in plan.tags:
        name = plan.nodes[plan.tags[segment]].name
        return [Part(here, PathKind.TAG, graph, segment, graph._modules[name] if name else None)]
    if segment in plan.groups:
        return [part for member in plan.groups[segment] for part in _descend(at, member, path, depth)]
    module = graph._modules.get(segment)
    if module is not None:
        return [_module_part(here, graph, segment, module)]
    visible = [tag for tag in (*plan.tags, *plan.groups) if depth == 0 or tag not in plan.internal]
    return _range(at, segment, path, list(dict.fromkeys([*labels, *visible, *graph._modules])))


def _module_part(path: str, owner: GraphCore | None, segment: str, module: nn.Module) -> Part:
    kind = PathKind.MODULE if graph_of(module) is None else PathKind.SUBGRAPH
    return Part(path, kind, owner, segment, module)


def _range(at: Part, segment: str, path: str, known: list[str]) -> list[Part]:
    match = re.fullmatch(r"(\d+)-(\d+)", segment)
    # Both ends must exist, so that an absurd range is refused before it is expanded.
    if match and int(match[1]) <= int(match[2]) and match[1] in known and match[2] in known:
        numbers = range(int(match[1]), int(match[2]) + 1)
        return [part for number in numbers for part in _descend(at, str(number), path, 1)]
    assert at.module is not None
    listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    problem = f"{_describe(at, graph_of(at.module))} has no {segment!r}{nearest(segment, known)}"
    raise path_fault(path, segment, f"{problem}; expected one of {listed or 'nothing'}", candidates=known)


def _describe(at: Part, graph: GraphCore | None) -> str:
    if graph is not None:
        return f"the graph {graph.label!r}" if graph.label is not None else "the graph"
    return f"module {at.path!r} ({type(at.module).__name__})" if at.path else f"the {type(at.module).__name__}"


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield direct children with their names, in the order of a graph's plan."""
    if isinstance(module, GraphCore):
        for name in dict.fromkeys(node.name for node in module.plan.nodes if node.name):
            yield name, getattr(module, name)
        return
    yield from module.named_children()


def modules_of(model: nn.Module, path: str = "", depth: int = 0) -> list[tuple[str, nn.Module]]:
    """Return the modules inside a model by path, down to `MAX_DEPTH`."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in children_of(model) if depth < MAX_DEPTH else ():
        below = joined(path, name)
        found += [(below, child), *modules_of(child, below, depth + 1)]
    return found


def joined(path: str, name: str) -> str:
    """Return a path that is one segment longer."""
    return f"{path}.{name}" if path else name
