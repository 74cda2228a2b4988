"""From a checked draft to a plan: the order of execution and the level of every node."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from flodl.graph.nodes import Node, Plan
from flodl.graph.wire import Draft

__all__ = ["make_plan"]


def make_plan(draft: Draft) -> Plan:
    """Return the plan of a draft without faults.

    A node runs as soon as all that it reads is there; of several, the one recorded first.
    """
    reads = {n.index: {*n.inputs, *(r.source for r in n.references)} for n in draft.nodes}
    readers: dict[int, list[int]] = {i: [] for i in reads}
    for index, sources in reads.items():
        for source in sources:
            readers[source].append(index)
    missing = {index: len(sources) for index, sources in reads.items()}
    ready = [index for index, count in missing.items() if count == 0]
    heapify(ready)
    order: list[int] = []
    levels = dict.fromkeys(reads, 0)
    while ready:
        index = heappop(ready)
        order.append(index)
        for reader in readers[index]:
            levels[reader] = max(levels[reader], levels[index] + 1)
            missing[reader] -= 1
            if missing[reader] == 0:
                heappush(ready, reader)
    assert len(order) == len(draft.nodes), "a draft with a cycle is refused before it is planned"

    internal = {
        t for tag in draft.internal for t in (*draft.groups.get(tag, ()), *([tag] if tag in draft.tags else ()))
    }
    internal |= {tag for tag in draft.tags if tag.startswith("_")}
    return Plan(
        nodes=tuple(
            Node(
                index=n.index,
                id=n.id,
                kind=n.kind,
                name=n.name,
                inputs=tuple(n.inputs),
                references=tuple(n.references),
                tags=tuple(n.tags),
                position=n.position,
                verb=n.verb.rstrip("_"),
                mode=n.mode,
                level=levels[n.index],
            )
            for n in draft.nodes
        ),
        order=tuple(order),
        inputs=tuple(draft.inputs),
        output=draft.output,
        tags=dict(draft.tags),
        groups=dict(draft.groups),
        memory=tuple(draft.memory),
        internal=frozenset(internal),
        label=draft.label,
    )
