"""The records of a graph: recorded verbs, nodes, faults and the plan.

They contain no modules and no tensors, so a plan can be copied, pickled, hashed and drawn without its weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flodl.errors import GraphError, nearest
from flodl.graph.function import Function

__all__ = ["Fault", "Input", "Node", "Plan", "Reference", "VerbCall", "check_forward", "kind_of"]


@dataclass(frozen=True)
class VerbCall:
    """One call of a verb, as it was made.

    Attributes:
        position: place in the chain, the first module being 1.
        verb: the method's name.
        args: what was given, by name.
    """

    position: int
    verb: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """One thing that keeps a chain from becoming a graph.

    Attributes:
        position: place of the step in the chain, 0 when the fault belongs to no single step.
        verb: the method called there.
        node: id of the node concerned, or an empty string.
        problem: what was found, what was expected and what to do.
    """

    position: int
    verb: str
    node: str
    problem: str

    def __str__(self) -> str:
        where = f"step {self.position}, {self.verb}" if self.position else self.verb
        return f"{where} ({self.node}): {self.problem}" if self.node else f"{where}: {self.problem}"


@dataclass(frozen=True)
class Reference:
    """A tagged value that a node receives as a keyword argument.

    Attributes:
        keyword: name of the argument.
        tag: the tag the value carries.
        source: index of the node that provides it.
    """

    keyword: str
    tag: str
    source: int


@dataclass(frozen=True)
class Input:
    """One argument of the graph.

    Attributes:
        name: its keyword; also its tag, except for the entry.
        node: index of the node that stands for it.
        required: whether a call without it is an error.
        default: what it is when left out.
    """

    name: str
    node: int
    required: bool = True
    default: bool | int | float | str | None = None


@dataclass
class Node:
    """One place in a graph.

    Attributes:
        index: place in the order of recording.
        id: kind and counter, such as ``linear_1``; unique in its graph.
        kind: ``entry``, ``input``, ``identity``, ``state_read``, ``add``, ``merge``, ``loop``, ``gate``,
            ``switch``, ``map``, or the lower-case name of the module's class.
        name: the child module's name, or an empty string where the node holds no module.
        inputs: indices of the nodes whose values it reads, in order.
        references: values that it takes as keyword arguments.
        tags: names given to its output.
        position: the step that made it.
        verb: the verb that made it.
        mode: ``add``, ``mean``, or ``concat`` and its dimension on a merge, the tag on a ``state_read``, else empty.
        level: distance from the entry, for drawing and profiling.
    """

    index: int
    id: str
    kind: str
    name: str = ""
    inputs: tuple[int, ...] = ()
    references: tuple[Reference, ...] = ()
    tags: tuple[str, ...] = ()
    position: int = 0
    verb: str = ""
    mode: str = ""
    level: int = 0

    @property
    def sources(self) -> tuple[int, ...]:
        """Indices of all nodes whose values it reads."""
        return (*self.inputs, *(reference.source for reference in self.references))

    @property
    def role(self) -> str:
        """``module`` where a module runs, whatever its class is called, else the kind."""
        return "module" if self.name else self.kind


@dataclass(frozen=True)
class Plan:
    """A checked graph without its modules: all that is needed to generate the forward pass.

    Attributes:
        nodes: every node, by index.
        order: indices in the order of execution.
        inputs: the arguments of the graph, the entry first.
        output: index of the node whose value is returned.
        tags: tag to node index.
        groups: tag group to its member tags.
        memory: tags whose value is kept for the next call, in slot order.
        internal: tags hidden from parents.
        label: the graph's name in a tree of graphs, or None.
    """

    nodes: tuple[Node, ...]
    order: tuple[int, ...]
    inputs: tuple[Input, ...]
    output: int
    tags: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory: tuple[str, ...] = ()
    internal: frozenset[str] = frozenset()
    label: str | None = None

    def __deepcopy__(self, memo: Any) -> Plan:
        # Nothing in a plan ever changes, so copies of a graph share it.
        return self

    @property
    def calls(self) -> tuple[Node, ...]:
        """Nodes that hold a module, in the order of execution."""
        return tuple(self.nodes[i] for i in self.order if self.nodes[i].name)

    @property
    def names(self) -> frozenset[str]:
        """Every name that means a value: tags and the names of modules."""
        return frozenset(self.tags) | {node.name for node in self.nodes if node.name}

    def value_of(self, name: str) -> int | None:
        """Return the index of the node whose value a tag or a node name means, or None."""
        if name in self.tags:
            return self.tags[name]
        return next((node.index for node in self.nodes if node.name and node.name == name), None)

    def require_value(self, name: str, verb: str) -> None:
        """Raise when a name means no value of this graph.

        Args:
            name: a tag or the name of a node.
            verb: what was asked for, for the message.

        Raises:
            GraphError: naming the verb and the nearest name.
        """
        if self.value_of(name) is None:
            known = [*self.tags, *(node.name for node in self.calls)]
            raise GraphError(f"{verb}: the graph has no tag {name!r}{nearest(name, known)}", tag=name, known=known)

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Node indices grouped by their distance from the inputs."""
        depth = max((node.level for node in self.nodes), default=0)
        return tuple(tuple(i for i in self.order if self.nodes[i].level == level) for level in range(depth + 1))


def kind_of(module: nn.Module) -> str:
    """Return the prefix of a module's node id: its ``flodl_name``, else its class name in lower case."""
    given = getattr(module, "flodl_name", None)
    name = given if isinstance(given, str) else type(module).__name__
    cleaned = "".join(c if c.isalnum() else "_" for c in name.lower())
    return cleaned or "module"


def check_forward(module: nn.Module, keywords: tuple[str, ...], streams: int = 1) -> list[str]:
    """Return why a call ``module(x, **keywords)`` would fail; empty when it would be accepted.

    Args:
        module: what is called.
        keywords: names of the keyword arguments.
        streams: the number of positional arguments.

    A module may speak for itself by a method ``check_keywords(keywords) -> list[str]``, as the loop,
    the gate, the switch and the map do for what they hold.
    """
    own = getattr(type(module), "check_keywords", None)
    if own is not None and streams == 1:
        return own(module, keywords)
    function, owner = module.forward, type(module).__name__
    if isinstance(module, Function):
        function, owner = module.function, module.flodl_name
    hooked = bool(module._forward_pre_hooks)
    return check_callable(function, owner, ("x",) * streams, keywords, hooked=hooked)


def check_callable(
    function: Any, owner: str, leading: tuple[str, ...], keywords: tuple[str, ...], *, hooked: bool = False
) -> list[str]:
    """Return the reasons why ``function(*leading, **keywords)`` is not a valid call.

    Args:
        function: what will be called.
        owner: name to use in the answer.
        leading: stands for the positional arguments.
        keywords: the keyword arguments.
        hooked: True when hooks may add arguments, so that absent ones are not held against the call.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        unknown: list[str] = []
    else:
        accepted = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        unknown = [k for k in keywords if k not in accepted]
    problems = [f"forward of {owner} does not take the keyword {k!r}; it is {owner}{signature}" for k in unknown]
    try:
        if hooked:
            signature.bind_partial(*leading, **dict.fromkeys(k for k in keywords if k not in unknown))
        else:
            signature.bind(*leading, **dict.fromkeys(k for k in keywords if k not in unknown))
    except TypeError as error:
        problems.append(f"{owner}{signature} would be called with {_call(leading, keywords)}: {error}")
    return problems


def _call(leading: tuple[str, ...], keywords: tuple[str, ...]) -> str:
    return f"({', '.join([*leading, *(f'{k}=...' for k in keywords)])})"
