"""The records of a graph: recorded verbs, nodes, faults and the plan; and how a graph calls its modules.

Records contain no modules and no tensors, so a plan can be copied, pickled, hashed and drawn without its weights.

Modules may have optional methods. They are looked up on the *class*, so that a parameter or child called ``step`` or
``reset`` is not mistaken for a method:

    reset()                       clear kept values (before a loop's first iteration and in reset_state)
    detach_state()                detach kept values
    step(x, emit, **references)   one loop iteration that publishes traces
    structural_hash()             a hash of the module's structure
    check_keywords(keywords)      faults in the keyword arguments of `using`
    flodl_name                    prefix of its node ids
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from flodl.errors import GraphError, nearest


@dataclass(frozen=True)
class VerbCall:
    """One recorded call of a verb.

    Attributes:
        position: position in the chain; the first module has position 1.
        verb: name of the method.
        args: arguments by parameter name.
    """

    position: int
    verb: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """One fault in a chain.

    Attributes:
        position: position of the step in the chain, 0 if the fault belongs to no step.
        verb: name of the method.
        node: id of the node, or an empty string.
        problem: description with the expected value.
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
        tag: tag of the value.
        source: index of the node that provides the value.
    """

    keyword: str
    tag: str
    source: int


@dataclass(frozen=True)
class Input:
    """One argument of the graph.

    Attributes:
        name: its keyword; also its tag, except for the entry.
        node: index of its node.
        required: whether calls must pass it.
        default: its value if it is not passed.
    """

    name: str
    node: int
    required: bool = True
    default: bool | int | float | str | None = None


@dataclass
class Node:
    """One node of a graph; constant once the graph is built.

    Attributes:
        index: index in the order of recording.
        id: kind and counter, such as ``linear_1``; unique in its graph.
        kind: ``entry``, ``input``, ``identity``, ``state_read``, ``add``, ``merge``, ``loop``, ``gate``,
            ``switch``, ``map``, or the lower-case class name of the module.
        name: name of the child module; empty for a node without a module.
        inputs: indices of the nodes that it reads, in order.
        references: values that it receives as keyword arguments.
        tags: tags of its output.
        position: position of the step that created it.
        verb: the verb that created it.
        mode: ``add``, ``mean``, or ``concat`` and a dimension for a merge, the tag for a ``state_read``.
        level: distance from the entry.
        role: ``module`` for a node with a module, else the kind; set when the graph is built.
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
    role: str = ""

    @property
    def sources(self) -> tuple[int, ...]:
        """Indices of all nodes that it reads."""
        return (*self.inputs, *(reference.source for reference in self.references))


@dataclass(frozen=True)
class Plan:
    """A checked graph without its modules, from which the forward pass is generated.

    Attributes:
        nodes: every node, by index.
        order: indices in the order of execution.
        inputs: the arguments of the graph, the entry first.
        output: index of the returned node.
        tags: node index of each tag.
        groups: member tags of each tag group.
        memory: tags with a value that is kept for the next call, in slot order.
        internal: tags hidden from parents.
        label: name of the graph in a tree of graphs, or None.
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
        # A plan never changes, so copies of a graph share it.
        return self

    @property
    def calls(self) -> tuple[Node, ...]:
        """Nodes with a module, in the order of execution."""
        return tuple(self.nodes[i] for i in self.order if self.nodes[i].name)

    @property
    def names(self) -> frozenset[str]:
        """The names of all values: tags and names of modules."""
        return frozenset(self.tags) | {node.name for node in self.nodes if node.name}

    def value_of(self, name: str) -> int | None:
        """Return the index of the node with this tag or name, or None."""
        found = [node.index for node in self.nodes if node.name == name] if name else []
        return self.tags.get(name, found[0] if found else None)

    def require_value(self, name: str, verb: str) -> None:
        """Raise if no value of this graph has this name.

        Raises:
            GraphError: with the verb and the nearest name.
        """
        if self.value_of(name) is None:
            known = [*self.tags, *(node.name for node in self.calls)]
            raise GraphError(f"{verb}: the graph has no tag {name!r}{nearest(name, known)}", tag=name, known=known)


def check_forward(module: nn.Module, keywords: tuple[str, ...], streams: int = 1) -> list[str]:
    """Return why a call ``module(x, **keywords)`` would fail; empty if it would be accepted.

    A module may check itself by a method ``check_keywords(keywords) -> list[str]``, as loops, gates, switches and
    maps do.

    Args:
        module: the called module.
        keywords: names of the keyword arguments.
        streams: number of positional arguments.
    """
    own = getattr(type(module), "check_keywords", None)
    if own is not None and streams == 1:
        return own(module, keywords)
    function, owner = module.forward, type(module).__name__
    if isinstance(module, Function):
        function, owner = module.function, module.flodl_name
    return check_callable(function, owner, ("x",) * streams, keywords, hooked=bool(module._forward_pre_hooks))


def check_callable(
    function: Any, owner: str, leading: tuple[str, ...], keywords: tuple[str, ...], *, hooked: bool = False
) -> list[str]:
    """Return why ``function(*leading, **keywords)`` is not a valid call.

    Args:
        function: the called function.
        owner: its name in messages.
        leading: placeholders for the positional arguments.
        keywords: names of the keyword arguments.
        hooked: whether hooks may add arguments, so that missing ones are accepted.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    known = [keyword for keyword in keywords if takes_any or kinds.get(keyword) in named]
    problems = [
        f"forward of {owner} does not accept the keyword {keyword!r}: {owner}{signature}"
        for keyword in keywords
        if keyword not in known
    ]
    try:
        bind = signature.bind_partial if hooked else signature.bind
        bind(*leading, **dict.fromkeys(known))
    except TypeError as error:
        call = ", ".join([*leading, *(f"{keyword}=..." for keyword in keywords)])
        problems.append(f"{owner}{signature} would be called with ({call}): {error}")
    return problems


def offered(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a bound method if the module's class defines it, else None."""
    return getattr(module, name) if callable(getattr(type(module), name, None)) else None


def call_inside(module: nn.Module, name: str) -> None:
    """Call the method ``name`` of the nearest modules below that define it."""
    for child in module.children():
        method = offered(child, name)
        if method is not None:
            method()
        else:
            call_inside(child, name)


class Function(nn.Module):
    """Calls a function; `FlowBuilder` creates one for each callable that is not an ``nn.Module``.

    Args:
        function: called with the stream, for `merge` with all streams, and with the keyword arguments of `using`. A
            graph can be pickled only if its functions can: an importable function can, a lambda cannot.

    Attributes:
        flodl_name: the name of the function, prefix of the node id.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        plain = function
        while isinstance(plain, partial):
            plain = plain.func
        self.flodl_name = getattr(plain, "__name__", type(plain).__name__).strip("<>")

    def forward(self, *values: Any, **named: Any) -> Any:
        """Return ``function(*values, **named)``."""
        return self.function(*values, **named)

    def structure(self) -> str:
        """Return the identity of the function for structural hashes."""
        return _identity(self.function)


def _identity(function: Any) -> str:
    if isinstance(function, partial):
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(function.keywords.items()))
        return f"partial({_identity(function.func)}, {function.args!r}, {named})"
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{named.__module__}.{named.__qualname__}"
    code = getattr(function, "__code__", None)
    if code is None or "<" not in name:
        return name
    # Lambdas and local functions share their names, so their bytecode identifies them.
    constants = [value for value in code.co_consts if isinstance(value, (bool, int, float, str, tuple, type(None)))]
    parts = repr((code.co_code, constants, code.co_names)).encode()
    return f"{name} {hashlib.sha256(parts).hexdigest()}"
