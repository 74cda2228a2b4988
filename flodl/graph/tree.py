"""Dotted paths into a tree of graphs: what they mean, and what can be done at their end.

A path is read segment by segment. Within a graph a segment is, in this order, the label of a child graph, a
tag, or the name of a node; within a plain module it is the name of a child module. ``layers.0-5`` names the
children ``0`` to ``5``. Private tags are seen only by the graph that owns them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from flodl.errors import GraphPathError, nearest
from flodl.graph.core import GraphCore, graph_of

__all__ = [
    "PathKind",
    "Target",
    "named_tensors",
    "resolve",
    "resolve_one",
    "set_frozen",
    "subgraph",
    "target_module",
    "target_parameters",
]


class PathKind(StrEnum):
    """What stands at the end of a path."""

    SUBGRAPH = "subgraph"
    TAG = "tag"
    MODULE = "module"


@dataclass(frozen=True)
class Target:
    """The end of a path.

    Attributes:
        path: the path that led here, ranges resolved.
        kind: a graph, a tagged value, or a plain module.
        owner: the graph in which the last graph-level segment was found.
        segment: the last segment.
        module: the module there; None where a tag names a value that no module made alone.
    """

    path: str
    kind: PathKind
    owner: GraphCore
    segment: str
    module: nn.Module | None

    @property
    def graph(self) -> GraphCore | None:
        """The graph that the module is or wraps."""
        return None if self.module is None else graph_of(self.module)


def resolve(graph: GraphCore, path: str) -> list[Target]:
    """Return what a path names; several targets where it holds a range.

    Raises:
        GraphPathError: naming the failing segment, where it was looked for, and the whole path.
    """
    segments = path.split(".")
    if not all(segments):
        raise GraphPathError(
            f"path {path!r}: a segment is empty; write names joined by single dots", path=path, segment=""
        )
    start = Target("", PathKind.SUBGRAPH, graph, "", graph)
    found = [start]
    for depth, segment in enumerate(segments):
        found = [after for before in found for after in _descend(before, segment, path, depth)]
    return found


def resolve_one(graph: GraphCore, path: str) -> Target:
    """Return the one thing that a path names.

    Raises:
        GraphPathError: as `resolve`, and when the path holds a range.
    """
    found = resolve(graph, path)
    if len(found) != 1:
        raise GraphPathError(f"path {path!r} names {len(found)} things; name one", path=path, segment=path)
    return found[0]


def subgraph(graph: GraphCore, path: str) -> GraphCore:
    """Return the graph at a path.

    Raises:
        GraphPathError: when the path leads nowhere, or to something that is not a graph.
    """
    target = resolve_one(graph, path)
    if target.kind is not PathKind.SUBGRAPH or target.graph is None:
        raise GraphPathError(f"path {path!r} names a {target.kind}, not a graph", path=path, segment=target.segment)
    return target.graph


def target_parameters(target: Target) -> list[nn.Parameter]:
    """Return the parameters at a target, tied ones once.

    Raises:
        GraphPathError: when the target is a value that no module made alone, such as a sum.
    """
    return list(target_module(target).parameters())


def named_tensors(targets: list[Target], kind: str) -> dict[str, Tensor]:
    """Return parameters or buffers at targets, by name.

    A graph's names are its own, as a checkpoint of it alone has them; a tag or module puts its segment in
    front. With several targets each name begins with its whole path.

    Args:
        targets: where to look.
        kind: ``parameters`` or ``buffers``.
    """
    found: dict[str, Tensor] = {}
    for target in targets:
        holder = target_module(target)
        prefix = target.path if len(targets) > 1 else "" if target.kind is PathKind.SUBGRAPH else target.segment
        tensors = holder.named_parameters(prefix) if kind == "parameters" else holder.named_buffers(prefix)
        found.update(tensors)
    return found


def set_frozen(targets: list[Target], frozen: bool) -> None:
    """Switch gradients off or on for every parameter at the targets."""
    parameters = [p for target in targets for p in target_parameters(target)]
    for parameter in parameters:
        parameter.requires_grad_(not frozen)


def target_module(target: Target) -> nn.Module:
    """Return the module at a target, or raise as `target_parameters` does."""
    if target.module is None:
        node = target.owner.plan.nodes[target.owner.plan.tags[target.segment]]
        raise GraphPathError(
            f"path {target.path!r}: the tag {target.segment!r} names the value of {node.id} (made by "
            f"{node.verb}), which holds no module; name the module, as in also(module, name=...), and use that",
            path=target.path,
            segment=target.segment,
        )
    return target.module


def _descend(at: Target, segment: str, path: str, depth: int) -> list[Target]:
    graph = at.graph
    here = f"{at.path}.{segment}" if at.path else segment
    if graph is None:
        if at.module is None:
            raise GraphPathError(
                f"path {path!r}: {at.segment!r} is a value without a module, so nothing lies below it",
                path=path,
                segment=segment,
            )
        children = dict(at.module.named_children())
        if segment in children:
            return [_module_target(here, at.owner, segment, children[segment])]
        return _range_or_raise(at, segment, path, list(children))

    labels = graph.tree_children()
    if segment in labels:
        return [Target(here, PathKind.SUBGRAPH, graph, segment, labels[segment])]
    plan = graph.plan
    if segment in plan.tags:
        if depth > 0 and segment in plan.internal:
            raise GraphPathError(
                f"path {path!r}: {segment!r} is internal to {_called(graph)} and out of reach of parents; "
                "ask the graph that owns it",
                path=path,
                segment=segment,
            )
        node = plan.nodes[plan.tags[segment]]
        return [Target(here, PathKind.TAG, graph, segment, graph._modules[node.name] if node.name else None)]
    module = graph._modules.get(segment)
    if module is not None:
        return [_module_target(here, graph, segment, module)]
    visible = [t for t in plan.tags if depth == 0 or t not in plan.internal]
    return _range_or_raise(at, segment, path, list(dict.fromkeys([*labels, *visible, *graph._modules])))


def _module_target(path: str, owner: GraphCore, segment: str, module: nn.Module) -> Target:
    kind = PathKind.MODULE if graph_of(module) is None else PathKind.SUBGRAPH
    return Target(path, kind, owner, segment, module)


def _range_or_raise(at: Target, segment: str, path: str, known: list[str]) -> list[Target]:
    match = re.fullmatch(r"(\d+)-(\d+)", segment)
    # Bounded by what exists, so that an absurd range is refused before it is counted out.
    if match and int(match[1]) <= int(match[2]) and match[1] in known and match[2] in known:
        parent = at.module
        assert parent is not None
        made: list[Target] = []
        for number in range(int(match[1]), int(match[2]) + 1):
            made += _descend(at, str(number), path, 1)
        return made
    where = _called(at.graph) if at.graph is not None else f"module {at.path!r} ({type(at.module).__name__})"
    listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    raise GraphPathError(
        f"path {path!r}: {where} has no {segment!r}{nearest(segment, known)}; it has {listed or 'nothing'}",
        path=path,
        segment=segment,
        candidates=known,
    )


def _called(graph: GraphCore) -> str:
    return f"the graph {graph.label!r}" if graph.label is not None else "the graph"
