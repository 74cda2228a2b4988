"""Reading what the loops of a graph left behind.

Collisions are looked for at every read, because which names a loop publishes is known only after it ran.
"""

from __future__ import annotations

from torch import Tensor

from flodl.errors import GraphError, nearest
from flodl.graph.core import GraphCore
from flodl.graph.loop import Loop
from flodl.graph.nodes import Node

__all__ = ["read", "read_named", "read_node"]


def read(graph: GraphCore, name: str) -> list[Tensor]:
    """Return the trace ``name``: of the loop with that tag or node name, or published under it, or else,
    where the name is another tag of the graph, of the first loop whose body has ``trace()``."""
    loops = _loops(graph)
    if not loops:
        raise GraphError(f"traces({name!r}): the graph holds no loop", trace=name)
    tagged = [loop for node, loop in loops if name in (*node.tags, node.name) and loop.legacy_traces]
    published = [(node, loop) for node, loop in loops if name in loop.named_traces]
    if tagged and published:
        raise GraphError(
            f"traces({name!r}): {name!r} is a loop with a trace and also published in {published[0][0].id}; "
            "rename one, or read by traces_named() and traces_by_node()",
            trace=name,
        )
    if tagged:
        return list(tagged[0].legacy_traces)
    if published:
        return read_named(graph, name)
    known = {tag for node, _ in loops for tag in node.tags} | {n for _, loop in loops for n in loop.named_traces}
    ran = any(loop.legacy_traces or loop.named_traces for _, loop in loops)
    if ran and graph.plan.value_of(name) is None:
        raise GraphError(f"traces: no loop left {name!r}{nearest(name, known)}; there are {sorted(known)}", trace=name)
    return next((list(loop.legacy_traces) for _, loop in loops if loop.legacy_traces), [])


def read_named(graph: GraphCore, name: str) -> list[Tensor]:
    """Return what a loop body published as ``name``; empty when none has."""
    found = [(node, loop) for node, loop in _loops(graph) if name in loop.named_traces]
    if len(found) > 1:
        listed = " and ".join(node.id for node, _ in found)
        raise GraphError(f"traces({name!r}): published in {listed}; rename one of them", trace=name)
    return list(found[0][1].named_traces[name]) if found else []


def read_node(graph: GraphCore, node_id: str) -> list[Tensor]:
    """Return what ``trace()`` left in the loop with this id or name."""
    loops = _loops(graph)
    for node, loop in loops:
        if node_id in (node.id, node.name):
            return list(loop.legacy_traces)
    known = [node.id for node, _ in loops]
    raise GraphError(
        f"traces_by_node({node_id!r}): no such loop{nearest(node_id, known)}; there are {known}", node=node_id
    )


def _loops(graph: GraphCore) -> list[tuple[Node, Loop]]:
    pairs = [(node, graph._modules[node.name]) for node in graph.plan.calls if node.kind == "loop"]
    return [(node, module) for node, module in pairs if isinstance(module, Loop)]
