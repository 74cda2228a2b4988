"""Rules over the whole chain: names, keyword arguments, cycles, nested labels.

Faults that only the place of a step shows are found while wiring; nothing is ever raised here, the faults
are returned for `build()` to raise together.
"""

from __future__ import annotations

import keyword
from functools import cache

from torch import nn

from flodl.errors import nearest
from flodl.graph.core import labelled_children
from flodl.graph.nodes import Fault, check_forward
from flodl.graph.wire import Draft, DraftNode

__all__ = ["check_graph"]


def check_graph(draft: Draft) -> list[Fault]:
    """Return the faults of a wired chain."""
    return [*_names(draft), *_keywords(draft), *_cycles(draft), *_labels(draft), *_internals(draft)]


def _at(node: DraftNode, problem: str) -> Fault:
    return Fault(node.position, node.verb.rstrip("_"), node.id, problem)


def _names(draft: Draft) -> list[Fault]:
    faults: list[Fault] = []
    owners: dict[str, DraftNode] = {}
    for node in draft.nodes:
        name = node.name
        if node.module is None:
            continue
        if not isinstance(name, str) or not name or "." in name:
            faults.append(_at(node, f"the name {name!r} has to be a non-empty string without dots"))
        elif keyword.iskeyword(name):
            faults.append(_at(node, f"the name {name!r} is a word of Python, which torch.export cannot write"))
        elif name in owners:
            faults.append(_at(node, f"the name {name!r} belongs to {owners[name].id} already"))
        elif name in _reserved():
            faults.append(_at(node, f"the name {name!r} is an attribute of every graph; give another with name="))
        else:
            other = draft.tags.get(name)
            if other is not None and other != node.index:
                faults.append(_at(node, f"the name {name!r} is the tag of {draft.nodes[other].id}"))
            owners[name] = node
    for declared in draft.inputs:
        if not declared.name.isidentifier() or keyword.iskeyword(declared.name):
            faults.append(_at(draft.nodes[declared.node], f"{declared.name!r} cannot be an argument's name"))
    return faults


@cache
def _reserved() -> frozenset[str]:
    from flodl.graph.graph import Graph

    return frozenset(dir(Graph)) | frozenset(vars(nn.Module())) | Graph.RESERVED


def _keywords(draft: Draft) -> list[Fault]:
    faults: list[Fault] = []
    for node in draft.nodes:
        if node.module is None:
            continue
        names = tuple(r.keyword for r in node.references)
        wrong = [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]
        for name in wrong:
            faults.append(_at(node, f"{name!r} cannot be a keyword argument; rename it: using(word={name!r})"))
        valid = tuple(name for name in names if name not in wrong)
        faults.extend(_at(node, problem) for problem in check_forward(node.module, valid, len(node.inputs)))
    return faults


def _cycles(draft: Draft) -> list[Fault]:
    reads = {n.index: {*n.inputs, *(r.source for r in n.references)} for n in draft.nodes}
    done: set[int] = set()
    while ready := [i for i, sources in reads.items() if i not in done and sources <= done]:
        done.update(ready)
    faults: list[Fault] = []
    for node in draft.nodes:
        # Of the nodes left over, only those that feed on a later value by reference have closed a circle.
        late = [
            r.tag for r in node.references if node.index not in done and r.source >= node.index and r.source not in done
        ]
        for tag in late:
            faults.append(
                _at(
                    node,
                    f"{tag!r} is computed from this node; to read its value of the previous call, "
                    f"put using({tag!r}) before tag({tag!r})",
                )
            )
    assert faults or len(done) == len(draft.nodes), "only references can close a circle"
    return faults


def _labels(draft: Draft) -> list[Fault]:
    faults: list[Fault] = []
    seen: dict[str, tuple[DraftNode, nn.Module]] = {}
    for node in draft.nodes:
        if node.module is None:
            continue
        for label, graph in labelled_children(node.module):
            if "." in label:
                faults.append(_at(node, f"holds a graph labelled {label!r}; a label within a tree cannot hold a dot"))
            first, same = seen.setdefault(label, (node, graph))
            if same is not graph:
                faults.append(_at(node, f"holds a graph labelled {label!r}, and so does {first.id}; label each anew"))
            tagged = draft.tags.get(label)
            if tagged is not None and tagged != node.index:
                faults.append(
                    _at(
                        node,
                        f"holds a graph labelled {label!r}, which is the tag of {draft.nodes[tagged].id}",
                    )
                )
    return faults


def _internals(draft: Draft) -> list[Fault]:
    return [
        Fault(position, "internal", "", f"no step tags {tag!r}{nearest(str(tag), draft.tags)}")
        for tag, position in draft.internal.items()
        if tag not in draft.tags and tag not in draft.groups
    ]
