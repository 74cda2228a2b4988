"""A checked plan, the modules it calls, and the forward pass generated from it.

Paths, pictures, files and observation are written against `GraphCore`; `Graph` adds them as methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self, cast
from weakref import WeakValueDictionary

from torch import Tensor, nn

from flodl.errors import GraphError
from flodl.graph.nodes import Plan, call_inside
from flodl.graph.source import compile_forward, forward_source


class ChildTable(dict[str, Any]):
    """A dictionary of children that maintains the call list of the forward pass.

    The generated forward pass unpacks a list of modules instead of looking names up. However a child is replaced
    (attribute, `add_module`, `set_submodule`, or ``_modules[name]``), the list contains the new module at the next
    call.

    Args:
        names: names of the called children, in call order.
        children: the first children.
    """

    def __init__(self, names: Iterable[str], children: dict[str, Any]) -> None:
        super().__init__(children)
        self._names = tuple(names)
        self.steps: list[Callable[..., Any]] = [self._callable(name) for name in self._names]

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        super().__setitem__(name, module)
        self._refresh(name)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._refresh(name)

    # The methods of `dict` would bypass those above.
    pop = MutableMapping.pop  # pyright: ignore[reportAssignmentType]
    update = MutableMapping.update  # pyright: ignore[reportAssignmentType]

    def _refresh(self, name: str) -> None:
        if name in self._names:
            self.steps[self._names.index(name)] = self._callable(name)

    def _callable(self, name: str) -> Callable[..., Any]:
        module = self.get(name)
        return partial(_refuse, name) if module is None else module


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise GraphError(f"graph call: the child {name!r} was removed. Set another module in its place.", child=name)


class GraphCore(nn.Module):
    """A module with a forward pass generated from its plan.

    Children are named by ``name=``, else by tag, else by node id, so ``state_dict()`` reads
    ``<node name>.<leaf>``.
    """

    def __init__(self) -> None:
        raise GraphError("a Graph is made by FlowBuilder(...).build(), not by its class")

    @classmethod
    def from_plan(cls, plan: Plan, modules: Mapping[str, nn.Module]) -> Self:
        """Return the graph of a checked plan.

        Args:
            plan: nodes and their order.
            modules: child modules by node name.
        """
        graph = _bare(cls, plan)
        nn.Module.__init__(graph)
        graph._set_up(plan, dict(modules))
        return graph

    def _set_up(self, plan: Plan, modules: dict[str, Any]) -> None:
        self._plan = plan
        self._watched: frozenset[str] = frozenset()
        self._memory: list[Any] = [None] * len(plan.memory)
        self._captured: dict[str, Any] = {}
        self._variants: dict[frozenset[str], Callable[..., Any]] = {}
        # The observer of this graph; copies and pickles start without one.
        self._observer: Any = None
        self._step_count = 0
        self._epoch_count = 0
        self._source_config: str | None = None
        self._adopt(modules)

    def _adopt(self, modules: dict[str, Any]) -> None:
        table = ChildTable([node.name for node in self._plan.calls], modules)
        self.__dict__["_modules"] = table
        self._steps = table.steps

    # calling

    def forward(self, *inputs: Any, outputs: Sequence[str] | None = None, **named: Any) -> Any:
        """Return the last stream's value; every built graph has a generated version of this."""
        raise GraphError("this graph has no forward pass; make graphs by FlowBuilder(...).build()")

    def _forward_captured(self, *inputs: Any) -> tuple[Any, dict[str, Any]]:
        raise GraphError("this graph has no forward pass; make graphs by FlowBuilder(...).build()")

    def source(self, *outputs: str) -> str:
        """Return the generated forward pass, optionally with further ``outputs``, as Python source."""
        return forward_source(self._plan, outputs)

    # values on request

    def watch(self, *tags: str) -> Self:
        """Keep the values of tags or tag groups from the next call on.

        `tagged` returns them. They stay in memory until the next call or until `unwatch`.

        Raises:
            GraphError: the graph has no such tag.
        """
        members = [m for tag in tags for m in self._plan.groups.get(tag, (tag,))]
        for member in members:
            self._plan.require_value(member, "watch")
        self._watched |= frozenset(members)
        return self

    def unwatch(self, *tags: str) -> Self:
        """Release the values of these tags, or of all tags."""
        gone = {m for tag in tags for m in self._plan.groups.get(tag, (tag,))} if tags else set(self._watched)
        self._watched -= gone
        self._captured = {tag: value for tag, value in self._captured.items() if tag not in gone}
        return self

    @property
    def watched(self) -> frozenset[str]:
        """The watched tags."""
        return self._watched

    def tagged(self, tag: str) -> Any:
        """Return the value of a watched tag in the last call; None before the first call.

        Raises:
            GraphError: the graph has no such tag.
        """
        self._plan.require_value(tag, "tagged")
        return self._captured.get(tag)

    # memory across calls

    def has_state(self) -> bool:
        """Return whether a reference reads a value of the previous call."""
        return bool(self._plan.memory)

    def reset_state(self) -> None:
        """Clear kept values, also in modules inside that have `reset`."""
        self._memory[:] = [None] * len(self._memory)
        call_inside(self, "reset")

    reset = reset_state
    """Loops call `reset` on their bodies."""

    def detach_state(self) -> None:
        """Detach kept values, also in modules inside that have `detach_state`."""
        self._memory[:] = [_detached(value) for value in self._memory]
        self._captured = {tag: _detached(value) for tag, value in self._captured.items()}
        call_inside(self, "detach_state")

    # structure

    @property
    def plan(self) -> Plan:
        """Nodes, order, tags and inputs."""
        return self._plan

    @property
    def label(self) -> str | None:
        """Name of the graph in a tree of graphs."""
        return self._plan.label

    def tree_children(self) -> dict[str, Self]:
        """Return the labelled graphs directly inside, by label."""
        found = {label: graph for child in self.children() for label, graph in labelled_children(child)}
        return cast("dict[str, Self]", found)

    # nn.Module

    def extra_repr(self) -> str:
        """Return the label and the inputs."""
        inputs = ", ".join(i.name for i in self._plan.inputs)
        return f"label={self.label!r}, inputs=({inputs})" if self.label else f"inputs=({inputs})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The forward pass is generated again from the plan, so a pickle contains no code. Kept values are detached,
        # because tensors with a history can be neither copied nor pickled.
        state = dict(self.__dict__)
        state.pop("_steps")
        # A temporary replacement of `forward` belongs to this graph, not to its copies.
        state.pop("forward", None)
        state.update(
            _modules=dict(self._modules),
            _memory=[_detached(value) for value in self._memory],
            _captured={},
            _variants={},
            _observer=None,
        )
        return _bare, (type(self).__bases__[0], self._plan), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adopt(dict(state["_modules"]))


def graph_of(module: nn.Module) -> GraphCore | None:
    """Return a module if it is a graph, else None."""
    return module if isinstance(module, GraphCore) else None


def nearest_graphs(module: nn.Module, name: str = "") -> list[tuple[str, GraphCore]]:
    """Return the outermost graphs in a module by path; paths start with ``name``."""
    graph = graph_of(module)
    if graph is not None:
        return [(name, graph)]
    found: list[tuple[str, GraphCore]] = []
    seen: set[int] = set()
    # A walk over the dict is faster than `named_children`; trees are walked at the end of each epoch.
    for below, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            found += nearest_graphs(child, f"{name}.{below}" if name else below)
    return found


def labelled_children(module: nn.Module) -> Iterator[tuple[str, GraphCore]]:
    """Yield the labelled outermost graphs in a module with their labels."""
    for _, graph in nearest_graphs(module):
        if graph.label is not None:
            yield graph.label, graph


_classes: WeakValueDictionary[tuple[type, str], type[Any]] = WeakValueDictionary()


def _bare(base: type[Any], plan: Plan) -> Any:
    """Return a graph without attributes; its class has the forward pass of ``plan``."""
    source = forward_source(plan)
    kind: Any = _classes.get((base, source))
    if kind is None:
        body = {
            "forward": compile_forward(source),
            "_forward_captured": compile_forward(forward_source(plan, plan.names)),
            "__module__": base.__module__,
            "__doc__": base.__doc__,
        }
        kind = _classes[base, source] = type(base.__name__, (base,), body)
    return kind.__new__(kind)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
