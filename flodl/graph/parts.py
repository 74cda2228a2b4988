"""Parts of any model by dotted path: in the tree of its graph where it has one, else by the names of modules.

`flodl.graph.tree` says what a path means in a graph. Here the same paths, ranges such as ``layers.0-3`` included, are
read in models that only hold graphs, or none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from flodl.errors import GraphPathError, nearest
from flodl.graph.core import GraphCore
from flodl.graph.tree import PathKind, resolve, subgraph

__all__ = ["Part", "named_graphs", "parameters_at", "parts_at"]


@dataclass(frozen=True)
class Part:
    """One thing that a path names.

    Attributes:
        path: the path that leads here, ranges and groups resolved.
        module: the module there; None where a tag names a value that no module made alone.
        owner: the graph that has the tag.
        tag: the tag, where the path names one.
    """

    path: str
    module: nn.Module | None
    owner: GraphCore | None = None
    tag: str | None = None


def parts_at(model: nn.Module, path: str) -> list[Part]:
    """Return what a path names in a model; several parts where it holds a range, or names a group of tags.

    Raises:
        GraphPathError: it names nothing.
    """
    roots = dict(_outermost(model))
    fault: GraphPathError | None = None
    graph, rest = (next(iter(roots.values())), path) if len(roots) == 1 else _root_of(roots, path)
    if graph is not None:
        prefix = path.removesuffix(rest)
        try:
            return [Part(prefix + part.path, part.module, part.owner, part.tag) for part in _in_graph(graph, rest)]
        except GraphPathError as error:
            fault = error
    try:
        return _in_modules(model, path)
    except GraphPathError as error:
        raise (fault or error) from None


def parameters_at(model: nn.Module, path: str) -> dict[str, nn.Parameter]:
    """Return the parameters at a path by their names in ``model``, tied ones once.

    Raises:
        GraphPathError: it names nothing, or nothing with parameters.
    """
    parts = parts_at(model, path)
    wanted = {id(p) for part in parts if part.module is not None for p in part.module.parameters()}
    if not wanted:
        raise GraphPathError(
            f"path {path!r}: there are no parameters at it; name a part that learns", path=path, segment=path
        )
    return {name: p for name, p in model.named_parameters() if id(p) in wanted}


def named_graphs(model: nn.Module) -> list[tuple[str, GraphCore]]:
    """Return all graphs of a model with the path that leads to each: labels, and names of modules where none is.

    The one outermost graph of a model, which is the model itself or all that it wraps, has the empty path.
    """
    roots = list(_outermost(model))
    found: dict[int, tuple[str, GraphCore]] = {}
    for name, graph in roots:
        for path, inner in _below(graph, "" if len(roots) == 1 else name):
            found.setdefault(id(inner), (path, inner))
    return list(found.values())


def _below(graph: GraphCore, path: str) -> Iterator[tuple[str, GraphCore]]:
    yield path, graph
    inside = [found for name, child in graph.named_children() for found in _graphs_in(child, name)]
    labels = {id(child): label for label, child in graph.tree_children().items()} if inside else {}
    for name, inner in inside:
        step = labels.get(id(inner), name)
        yield from _below(inner, f"{path}.{step}" if path else step)


def _graphs_in(module: nn.Module, name: str) -> list[tuple[str, GraphCore]]:
    """Return the outermost graphs at or below a module, with their names."""
    found: list[tuple[str, GraphCore]] = []
    _find_graphs(module, name, found)
    return found


def _find_graphs(module: nn.Module, name: str, found: list[tuple[str, GraphCore]]) -> None:
    if isinstance(module, GraphCore):
        found.append((name, module))
        return
    if module._modules:
        seen: set[int] = set()
        for below, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                _find_graphs(child, f"{name}.{below}" if name else below, found)


def _outermost(model: nn.Module) -> Iterator[tuple[str, GraphCore]]:
    """Yield the outermost graphs of a model, each once, by label or module name."""
    seen: set[int] = set()
    for name, graph in _graphs_in(model, ""):
        if id(graph) not in seen:
            seen.add(id(graph))
            yield graph.label or name, graph


def _root_of(roots: dict[str, GraphCore], path: str) -> tuple[GraphCore | None, str]:
    """Return the graph that a path of a model with several graphs begins with, and the rest of it."""
    for name, graph in roots.items():
        if path.startswith(f"{name}."):
            return graph, path[len(name) + 1 :]
    return None, path


def _in_graph(graph: GraphCore, path: str) -> list[Part]:
    before, _, last = path.rpartition(".")
    owner = None
    with contextlib.suppress(GraphPathError):  # a path through modules, which have no groups
        owner = subgraph(graph, before) if before else graph
    if owner is not None and last in owner.plan.groups:
        path = f"{before}." if before else ""
        return [part for member in owner.plan.groups[last] for part in _in_graph(graph, path + member)]
    return [
        Part(t.path, t.module, t.owner, t.segment if t.kind is PathKind.TAG else None) for t in resolve(graph, path)
    ]


def _in_modules(model: nn.Module, path: str) -> list[Part]:
    found: list[tuple[str, nn.Module]] = [("", model)]
    for segment in path.split("."):
        found = [
            (f"{at}.{name}" if at else name, child)
            for at, module in found
            for name, child in _children(module, segment, at, path)
        ]
    return [Part(at, module) for at, module in found]


def _children(module: nn.Module, segment: str, at: str, path: str) -> list[tuple[str, nn.Module]]:
    children = dict(module.named_children())
    if segment in children:
        return [(segment, children[segment])]
    match = re.fullmatch(r"(\d+)-(\d+)", segment)
    if match and int(match[1]) <= int(match[2]) and match[1] in children and match[2] in children:
        names = [str(number) for number in range(int(match[1]), int(match[2]) + 1)]
        if all(name in children for name in names):
            return [(name, children[name]) for name in names]
    listed = ", ".join(list(children)[:20]) + (", ..." if len(children) > 20 else "")
    where = f"module {at!r} ({type(module).__name__})" if at else type(module).__name__
    raise GraphPathError(
        f"path {path!r}: {where} has no {segment!r}{nearest(segment, children)}; it has {listed or 'nothing'}",
        path=path,
        segment=segment,
        candidates=list(children),
    )
