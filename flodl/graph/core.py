"""What runs: a checked plan, the modules it calls, and the forward pass generated from it.

Everything else that is done with a graph (paths, pictures, files, observation) is written against this class, and
`flodl.graph.graph` puts it all together into the class that users hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, cast
from weakref import WeakValueDictionary

from torch import Tensor, nn

from flodl.errors import GraphError
from flodl.graph.children import ChildTable
from flodl.graph.nodes import Plan
from flodl.graph.protocol import call_inside, offered
from flodl.graph.source import compile_forward, forward_source

__all__ = ["GraphCore", "graph_of", "labelled_children", "nearest_graphs"]


class GraphCore(nn.Module):
    """An `nn.Module` whose forward pass was generated from its plan, with the values it keeps between calls.

    Children are named by ``name=``, else by tag, else by node id, so ``state_dict()`` reads
    ``<node name>.<leaf>``.
    """

    RESERVED: ClassVar[frozenset[str]] = frozenset(
        {"_plan", "_steps", "_watched", "_memory", "_captured", "_variants", "_observer", "_composed"}
        | {"_step_count", "_epoch_count", "_source_config"}
    )

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
        for child in graph.tree_children().values():
            child._composed = True
        return graph

    def _set_up(self, plan: Plan, modules: dict[str, Any]) -> None:
        self._plan = plan
        self._watched: frozenset[str] = frozenset()
        self._memory: list[Any] = [None] * len(plan.memory)
        self._captured: dict[str, Any] = {}
        self._variants: dict[frozenset[str], Callable[..., Any]] = {}
        # Whoever observes this graph, see `flodl.monitor`; copies and pickles start without one.
        self._observer: Any = None
        self._composed = False
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

    def forward_multi(self, inputs: Sequence[Any]) -> Any:
        """Return the result for all inputs given in order, the entry first.

        Raises:
            GraphError: when their number is not the number of declared inputs.
        """
        expected = len(self._plan.inputs)
        if len(inputs) != expected:
            names = ", ".join(i.name for i in self._plan.inputs)
            raise GraphError(f"graph call: expected {expected} inputs ({names}), got {len(inputs)}", expected=expected)
        return self(*inputs)

    def source(self, *outputs: str) -> str:
        """Return the generated forward pass as Python source, or its variant that gives ``outputs`` too."""
        return forward_source(self._plan, outputs)

    # values on request

    def watch(self, *tags: str) -> Self:
        """Keep the values of tags (or groups) from the next call on, for `tagged`, and so their memory alive.

        Raises:
            GraphError: when there is no such tag.
        """
        members = [m for tag in tags for m in self._plan.groups.get(tag, (tag,))]
        for member in members:
            self._plan.require_value(member, "watch")
        self._watched |= frozenset(members)
        return self

    def unwatch(self, *tags: str) -> Self:
        """Stop keeping the values of tags, or of all when none is named, and let go of those kept."""
        gone = {m for tag in tags for m in self._plan.groups.get(tag, (tag,))} if tags else set(self._watched)
        self._watched -= gone
        self._captured = {tag: value for tag, value in self._captured.items() if tag not in gone}
        return self

    @property
    def watched(self) -> frozenset[str]:
        """Tags whose values are kept."""
        return self._watched

    def tagged(self, tag: str) -> Any:
        """Return the value that a watched tag had in the last call, or None when there was none.

        Raises:
            GraphError: when there is no such tag.
        """
        self._plan.require_value(tag, "tagged")
        return self._captured.get(tag)

    # memory across calls

    def has_state(self) -> bool:
        """Return whether a reference reads a value of the previous call."""
        return bool(self._plan.memory)

    def reset_state(self) -> None:
        """Forget kept values, here and in the modules inside that offer `reset`."""
        self._memory[:] = [None] * len(self._memory)
        call_inside(self, "reset")

    def reset(self) -> None:
        """Do what `reset_state` does; loops call this on their bodies."""
        self.reset_state()

    def detach_state(self) -> None:
        """Cut the history of kept values, here and in the modules inside that offer `detach_state`."""
        self._memory[:] = [_detached(value) for value in self._memory]
        self._captured = {tag: _detached(value) for tag, value in self._captured.items()}
        call_inside(self, "detach_state")

    def end_sequence(self) -> None:
        """Close a sequence: forget kept values."""
        self.reset_state()

    # what the graph is

    @property
    def plan(self) -> Plan:
        """Nodes, order, tags and inputs."""
        return self._plan

    @property
    def label(self) -> str | None:
        """The name in a tree of graphs."""
        return self._plan.label

    def as_graph(self) -> Self:
        """Return the graph itself; wrappers return the graph they hold."""
        return self

    def tag_names(self) -> list[str]:
        """Return the tags in the order they were given."""
        return list(self._plan.tags)

    def internal_tags(self) -> list[str]:
        """Return the tags that parents cannot reach."""
        return sorted(self._plan.internal)

    def tree_children(self) -> dict[str, Self]:
        """Return the labelled graphs directly inside, by label."""
        found = {label: graph for child in self.children() for label, graph in labelled_children(child)}
        return cast("dict[str, Self]", found)

    def child_graph(self, label: str) -> Self | None:
        """Return the child with this label, or None."""
        return self.tree_children().get(label)

    def is_composed(self) -> bool:
        """Return whether this graph was built into another."""
        return self._composed

    # what nn.Module asks for

    def extra_repr(self) -> str:
        """Return the label and the inputs."""
        inputs = ", ".join(i.name for i in self._plan.inputs)
        return f"label={self.label!r}, inputs=({inputs})" if self.label else f"inputs=({inputs})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The text of the forward pass is generated anew from the plan, so no file ever holds code. Kept values
        # lose their history, which belongs to the run that made them and could be neither copied nor pickled.
        state = dict(self.__dict__)
        state.pop("_steps")
        # Who has a graph computed another way for a while means that graph, not its copies.
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

    def _replicate_for_data_parallel(self) -> Self:
        replica = super()._replicate_for_data_parallel()  # pyright: ignore[reportAttributeAccessIssue]
        replica._adopt(dict(replica._modules))
        replica._memory = list(self._memory)
        return replica


def graph_of(module: nn.Module) -> GraphCore | None:
    """Return the graph that a module is or wraps, or None."""
    wrapped = offered(module, "as_graph")
    return None if wrapped is None else wrapped()


def nearest_graphs(module: nn.Module) -> list[GraphCore]:
    """Return the outermost graphs at or below a module."""
    found: list[GraphCore] = []
    _find_nearest(module, found)
    return found


def _find_nearest(module: nn.Module, found: list[GraphCore]) -> None:
    # Trees are walked at each end of an epoch, so this goes by the dict that holds the children.
    graph = graph_of(module)
    if graph is not None:
        found.append(graph)
        return
    if module._modules:
        for child in dict.fromkeys(module._modules.values()):
            if child is not None:
                _find_nearest(child, found)


def labelled_children(module: nn.Module) -> Iterator[tuple[str, GraphCore]]:
    """Yield label and graph of the outermost graphs at or below a module, where they have a label."""
    for graph in nearest_graphs(module):
        if graph.label is not None:
            yield graph.label, graph


_classes: WeakValueDictionary[tuple[type, str], type[Any]] = WeakValueDictionary()


def _bare(base: type[Any], plan: Plan) -> Any:
    """Return a graph whose class has the forward pass of ``plan``, and nothing else yet."""
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
