"""Rules over the whole chain: names, keyword arguments, order of execution, nested labels.

Nothing is raised here; `build()` raises all faults together.
"""

from __future__ import annotations

import keyword
from functools import cache
from heapq import heapify, heappop, heappush

from torch import nn

from flodl.errors import nearest
from flodl.graph.core import labelled_children
from flodl.graph.nodes import Fault, Node, check_forward
from flodl.graph.wire import Draft


def check_graph(draft: Draft) -> tuple[list[int], list[Fault]]:
    """Return the order of execution of a wired chain and its faults; the nodes get their levels."""
    order, missing = _order(draft.nodes)
    return order, [*_names(draft), *_keywords(draft), *_cycles(draft, missing), *_labels(draft), *_internals(draft)]


def _at(node: Node, problem: str) -> Fault:
    return Fault(node.position, node.verb, node.id, problem)


def _order(nodes: list[Node]) -> tuple[list[int], set[int]]:
    """Return the order of execution, and the nodes that cannot run because of a cycle.

    A node runs as soon as all its inputs exist; of several such nodes, the one recorded first.
    """
    readers: dict[int, list[Node]] = {node.index: [] for node in nodes}
    missing: dict[int, int] = {}
    for node, sources in [(node, set(node.sources)) for node in nodes]:
        missing[node.index] = len(sources)
        for source in sources:
            readers[source].append(node)
    ready = [index for index, count in missing.items() if count == 0]
    heapify(ready)
    order: list[int] = []
    while ready:
        index = heappop(ready)
        order.append(index)
        for reader in readers[index]:
            reader.level = max(reader.level, nodes[index].level + 1)
            missing[reader.index] -= 1
            if missing[reader.index] == 0:
                heappush(ready, reader.index)
    return order, missing.keys() - set(order)


def _names(draft: Draft) -> list[Fault]:
    faults: list[Fault] = []
    owners: dict[str, Node] = {}
    for index in draft.modules:
        node, name = draft.nodes[index], draft.nodes[index].name
        if not isinstance(name, str) or not name or "." in name:
            faults.append(_at(node, f"found name {name!r}, expected a non-empty string without dots"))
        elif keyword.iskeyword(name):
            faults.append(_at(node, f"the name {name!r} is a keyword of Python, which torch.export cannot write"))
        elif name in owners:
            faults.append(_at(node, f"the name {name!r} belongs to {owners[name].id} already"))
        elif name in _reserved():
            faults.append(_at(node, f"the name {name!r} is an attribute of every graph. Give another with name="))
        else:
            other = draft.tags.get(name, index)
            if other != index:
                faults.append(_at(node, f"the name {name!r} is the tag of {draft.nodes[other].id}"))
            owners[name] = node
    for declared in draft.inputs:
        if not declared.name.isidentifier() or keyword.iskeyword(declared.name):
            faults.append(_at(draft.nodes[declared.node], f"found input {declared.name!r}, expected an argument name"))
    return faults


@cache
def _reserved() -> frozenset[str]:
    from flodl.graph.graph import Graph

    return frozenset(dir(Graph)) | frozenset(vars(nn.Module())) | Graph.RESERVED


def _keywords(draft: Draft) -> list[Fault]:
    faults: list[Fault] = []
    for index, module in draft.modules.items():
        node = draft.nodes[index]
        names = [r.keyword for r in node.references]
        wrong = [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]
        for name in wrong:
            faults.append(_at(node, f"{name!r} is not a keyword argument; rename it: using(word={name!r})"))
        valid = tuple(name for name in names if name not in wrong)
        faults.extend(_at(node, problem) for problem in check_forward(module, valid, len(node.inputs)))
    return faults


def _cycles(draft: Draft, missing: set[int]) -> list[Fault]:
    # Of the nodes that cannot run, only nodes with a reference to a later value close a cycle.
    return [
        _at(
            node,
            f"{r.tag!r} is computed from this node. To read its value of the previous call, "
            f"put using({r.tag!r}) before tag({r.tag!r})",
        )
        for node in draft.nodes
        for r in node.references
        if node.index in missing and r.source in missing and r.source >= node.index
    ]


def _labels(draft: Draft) -> list[Fault]:
    faults: list[Fault] = []
    seen: dict[str, tuple[Node, nn.Module]] = {}
    for index, module in draft.modules.items():
        node = draft.nodes[index]
        for label, graph in labelled_children(module):
            first, same = seen.setdefault(label, (node, graph))
            tagged = draft.tags.get(label, index)
            problem = ""
            if "." in label:
                problem = "expected a label without a dot"
            elif same is not graph:
                problem = f"and so does {first.id}. Labels must be unique"
            elif tagged != index:
                problem = f"which is the tag of {draft.nodes[tagged].id}"
            if problem:
                faults.append(_at(node, f"contains a graph labelled {label!r}, {problem}"))
    return faults


def _internals(draft: Draft) -> list[Fault]:
    return [
        Fault(position, "internal", "", f"no step tags {tag!r}{nearest(tag, draft.tags)}")
        for tag, position in draft.internal.items()
        if tag not in draft.tags and tag not in draft.groups
    ]
