"""`FlowBuilder`: verbs that record their arguments, and `build()`, which checks the whole chain.

`wire` turns verbs into nodes and `source` generates the forward pass. Faults that only the order of the verbs shows are
found in `wire`, faults of the whole chain here: names, keyword arguments, order of execution, nested labels.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Any, Literal

from torch import nn

from flodl.errors import GraphBuildError, nearest
from flodl.graph.core import labelled_children
from flodl.graph.graph import Graph
from flodl.graph.nodes import Fault, Input, Node, Plan, VerbCall, check_forward
from flodl.graph.wire import Draft

_ABSENT = object()

Step = nn.Module | Callable[..., Any]
"""A module or function in a chain."""


class FlowBuilder:
    """Builds a `Graph` from a chain of verbs.

    A chain has a current stream, which the next module reads, and a target, which `using` feeds. Every verb returns
    the builder. `build()` reports all faults together. A verb that takes a module also takes a function.

    Args:
        first: the first module; without it the graph starts with its input.
        entry: name of the graph's first argument.
        name: child name of the first module.

    Example:
        >>> graph = FlowBuilder(nn.Linear(4, 8)).through(nn.GELU()).also(nn.Linear(8, 8)).tag("mixed").build()
    """

    def __init__(self, first: Step | None = None, *, entry: str = "input", name: str | None = None) -> None:
        self._entry = entry
        self._steps: list[VerbCall] = []
        self._record("from_", module=first, name=name)

    @classmethod
    def from_(cls, first: Step, *, entry: str = "input", name: str | None = None) -> FlowBuilder:
        """Return a builder that starts with ``first``."""
        return cls(first, entry=entry, name=name)

    def through(self, module: Step, *, name: str | None = None) -> FlowBuilder:
        """Apply ``module`` to the stream; its output becomes the stream."""
        return self._record("through", module=module, name=name)

    def fork(self, module: Step, *, name: str | None = None) -> FlowBuilder:
        """Apply ``module`` to the stream, which stays unchanged; a directly following `tag` names the output."""
        return self._record("fork", module=module, name=name)

    def also(self, module: Step, *, name: str | None = None) -> FlowBuilder:
        """Add ``module(stream)`` to the stream, a residual; `using` feeds the module, `tag` names the sum."""
        return self._record("also", module=module, name=name)

    def also_with(
        self, skip: Step, main: Step, *, name: str | None = None, skip_name: str | None = None
    ) -> FlowBuilder:
        """Replace the stream by ``skip(stream) + main(stream)``; `using` feeds ``main``."""
        return self._record("also_with", skip=skip, main=main, name=name, skip_name=skip_name)

    def split(self, *modules: Step | Iterable[Step], names: Sequence[str] | None = None) -> FlowBuilder:
        """Apply each module to the stream and open one stream for each output; `using` feeds all modules."""
        return self._record("split", modules=_flat(modules), names=names)

    def merge(
        self, how: Literal["add", "mean", "concat"] | Step = "add", *, dim: int = -1, name: str | None = None
    ) -> FlowBuilder:
        """Close the open streams into one.

        Args:
            how: ``"add"``, ``"mean"`` (the sum times one over the number of streams), ``"concat"``, or a function or
                module that is called with all streams in order, such as ``torch.maximum``.
            dim: the dimension of ``"concat"``.
            name: child name of a function or module.
        """
        return self._record("merge", how=how, dim=dim, name=name)

    def tag(self, name: str) -> FlowBuilder:
        """Name the stream, or the output of a directly preceding fork."""
        return self._record("tag", tag=name)

    def tag_group(self, name: str) -> FlowBuilder:
        """Tag the open streams ``name_0``, ``name_1``, ..., members of the group ``name``."""
        return self._record("tag_group", tag=name)

    def input(self, *names: str | Iterable[str], default: Any = _ABSENT) -> FlowBuilder:
        """Declare further arguments of the graph, which `using` can read; the stream stays unchanged.

        Args:
            names: one name or several.
            default: None or a plain constant, which makes the argument optional.
        """
        return self._record(
            "input",
            names=_flat(names),
            required=default is _ABSENT,
            default=None if default is _ABSENT else default,
        )

    def using(self, *tags: str | Iterable[str], **renamed: str) -> FlowBuilder:
        """Pass tagged values to the last module as keyword arguments.

        ``using("ctx")`` passes the value tagged ``ctx`` as ``ctx=``; ``using(mask="attention_mask")`` passes
        the value tagged ``attention_mask`` as ``mask=``. A tag later in the chain provides its value of the
        *previous* call; in the first call, zeros with the shape of the module's input.
        """
        pairs = [(t, t) for t in _flat(tags)] + list(renamed.items())
        return self._record("using", pairs=tuple(pairs))

    def loop_body(self, body: Step, *, name: str | None = None) -> LoopVerb:
        """Start a loop over ``body``; close it with ``for_n``, ``while_cond`` or ``until_cond``."""
        self._record("loop_body", body=body, name=name)
        return LoopVerb(self)

    def gate(self, router: Step, *experts: Step | Iterable[Step], name: str | None = None) -> FlowBuilder:
        """Sum the outputs of all experts with the weights ``router(stream)``; `using` feeds the router."""
        return self._record("gate", router=router, modules=_flat(experts), name=name)

    def switch(self, router: Step, *branches: Step | Iterable[Step], name: str | None = None) -> FlowBuilder:
        """Run the branch with the index ``router(stream)``; `using` feeds the router."""
        return self._record("switch", router=router, modules=_flat(branches), name=name)

    def map(self, body: Step, *, name: str | None = None) -> MapVerb:
        """Start applying ``body`` to parts of a value; close it with ``each``, ``over`` or ``slices``."""
        self._record("map", body=body, name=name)
        return MapVerb(self)

    def label(self, name: str) -> FlowBuilder:
        """Name the graph for paths, the monitor and pictures; the label is not part of its hash."""
        return self._record("label", label=name)

    def internal(self, *tags: str) -> FlowBuilder:
        """Hide tags from parent graphs, like tags that start with an underscore."""
        return self._record("internal", tags=tags)

    def build(self) -> Graph:
        """Return the graph.

        Raises:
            GraphBuildError: the chain has faults, all listed in ``.faults``.
        """
        draft = Draft(self._steps, self._entry)
        order, missing = _order(draft.nodes)
        found = [*_names(draft), *_keywords(draft), *_cycles(draft, missing), *_labels(draft), *_internals(draft)]
        faults = sorted([*draft.faults, *found], key=lambda fault: fault.position)
        if faults:
            listed = "\n".join(f"  - {fault}" for fault in faults)
            count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
            raise GraphBuildError(f"the graph cannot be built, {count}:\n{listed}", faults=faults)
        modules = {draft.nodes[index].name: module for index, module in draft.modules.items()}
        return Graph.from_plan(draft.plan(order), modules)

    def _record(self, verb: str, **args: Any) -> FlowBuilder:
        self._steps.append(VerbCall(len(self._steps) + 1, verb, args))
        return self


class _OpenVerb:
    """An open loop or map. Other verbs are recorded, and `build` reports that it was not closed."""

    def __init__(self, flow: FlowBuilder) -> None:
        self._flow = flow

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._flow, name)


class LoopVerb(_OpenVerb):
    """An open loop."""

    def for_n(self, count: int) -> FlowBuilder:
        """Apply the body exactly ``count`` times."""
        return self._flow._record("for_n", count=count)

    def while_cond(self, condition: Step, max_iterations: int) -> FlowBuilder:
        """Apply the body until ``condition(state)`` is positive before it: 0 to ``max_iterations`` times."""
        return self._flow._record("while_cond", condition=condition, count=max_iterations)

    def until_cond(self, condition: Step, max_iterations: int) -> FlowBuilder:
        """Apply the body until ``condition(state)`` is positive after it: 1 to ``max_iterations`` times."""
        return self._flow._record("until_cond", condition=condition, count=max_iterations)


class MapVerb(_OpenVerb):
    """An open map."""

    _batched = False

    def batched(self) -> MapVerb:
        """Apply the body once to the whole value, if it treats rows independently."""
        self._batched = True
        return self

    def each(self) -> FlowBuilder:
        """Apply the body to each row of the stream, and concatenate the outputs."""
        return self._flow._record("each", batched=self._batched)

    def over(self, tag: str) -> FlowBuilder:
        """Apply the body to every row of a tagged value; the result becomes the stream."""
        return self._flow._record("over", tag=tag, batched=self._batched)

    def slices(self, count: int) -> FlowBuilder:
        """Apply the body to ``count`` equal slices of the last dimension."""
        return self._flow._record("slices", count=count)


def _flat(items: Iterable[Any]) -> tuple[Any, ...]:
    """Return the items of all arguments: ``f(a, b)`` and ``f([a, b])`` are equal."""
    found: list[Any] = []
    for item in items:
        is_list = isinstance(item, nn.ModuleList) or not isinstance(item, (str, nn.Module))
        found.extend(item if is_list and isinstance(item, Iterable) else [item])
    return tuple(found)


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
    entry = Plan((Node(0, "input", "entry", role="entry"),), (0,), (Input("input", 0),), 0)
    return frozenset(dir(Graph)) | frozenset(vars(Graph.from_plan(entry, {})))


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
