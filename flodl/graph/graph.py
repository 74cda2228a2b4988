"""The graph as users hold it: an ordinary `nn.Module` whose forward pass was generated from its plan.

What a path means is decided in `tree`, what the source looks like in `source`, what is measured in
`flodl.observe`, and how files look in `flodl.checkpoint`; the methods here only lead there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from flodl.errors import GraphError, GraphPathError
from flodl.graph import saving, summary, traces, tree
from flodl.graph.capture import require_value, run_captured
from flodl.graph.children import ChildTable
from flodl.graph.fingerprint import structural_hash
from flodl.graph.nodes import Plan
from flodl.graph.protocol import call_inside
from flodl.graph.source import compile_forward, forward_source
from flodl.graph.tree import PathKind

if TYPE_CHECKING:
    from flodl.checkpoint import LoadReport
    from flodl.observe import Observer, Trend, TrendGroup

__all__ = ["Graph"]


class Graph(nn.Module):
    """A built graph. Make one by `FlowBuilder`, not by calling this class.

    Call it as ``graph(x)``, with further declared inputs in order or by name: ``graph(x, mask=m)``. With
    ``outputs=["tag", "child.tag"]`` it returns ``(result, {"tag": value, ...})``. Values pass through
    untouched, whatever they are.

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
    def from_plan(cls, plan: Plan, modules: Mapping[str, nn.Module]) -> Graph:
        """Return the graph of a checked plan.

        Args:
            plan: nodes and their order.
            modules: child modules by node name.
        """
        graph = _bare(plan)
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
        self._observer: Observer | None = None
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

    def _observed_forward(self, outputs: Sequence[str] | None, *inputs: Any) -> Any:
        return run_captured(self, outputs, inputs)

    def source(self, *outputs: str) -> str:
        """Return the generated forward pass as Python source, or its variant that gives ``outputs`` too."""
        return forward_source(self._plan, outputs)

    # values on request

    def watch(self, *tags: str) -> Graph:
        """Keep the values of tags (or groups) from the next call on, for `tagged`, and so their memory alive.

        Raises:
            GraphError: when there is no such tag.
        """
        members = [m for tag in tags for m in self._plan.groups.get(tag, (tag,))]
        for member in members:
            require_value(self._plan, member, "watch")
        self._watched |= frozenset(members)
        return self

    def unwatch(self, *tags: str) -> Graph:
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
        require_value(self._plan, tag, "tagged")
        return self._captured.get(tag)

    def tagged_at(self, path: str) -> Any:
        """Return what `tagged` of the graph that owns the tag returns.

        Raises:
            GraphPathError: when the path is bad or names a graph.
        """
        target = tree.resolve_one(self, path)
        if target.kind is not PathKind.TAG:
            raise GraphPathError(f"path {path!r} names a {target.kind}, not a tag", path=path, segment=target.segment)
        return target.owner.tagged(target.segment)

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

    def end_step(self) -> None:
        """Close a training step: cut histories, count it, and collect timings when profiling."""
        self.detach_state()
        self._step_count += 1
        if self._observer is not None and self._observer.profiling():
            self._observer.collect_timings()

    def end_sequence(self) -> None:
        """Close a sequence: forget kept values."""
        self.reset_state()

    def end_epoch(self) -> None:
        """Close an epoch: flush observations and timings, and count it."""
        self.observe.flush()
        self.observe.flush_timings()
        self._epoch_count += 1

    def step_count(self) -> int:
        """Return how often `end_step` was called."""
        return self._step_count

    def epoch_count(self) -> int:
        """Return how often `end_epoch` was called."""
        return self._epoch_count

    # what the graph is

    @property
    def plan(self) -> Plan:
        """Nodes, order, tags and inputs."""
        return self._plan

    @property
    def label(self) -> str | None:
        """The name in a tree of graphs."""
        return self._plan.label

    def as_graph(self) -> Graph:
        """Return the graph itself; wrappers return the graph they hold."""
        return self

    def tag_names(self) -> list[str]:
        """Return the tags in the order they were given."""
        return list(self._plan.tags)

    def internal_tags(self) -> list[str]:
        """Return the tags that parents cannot reach."""
        return sorted(self._plan.internal)

    def structural_hash(self) -> str:
        """Return the SHA-256 of the structure, 64 hex digits; neither weights nor label are in it."""
        return structural_hash(self)

    def short_hash(self) -> str:
        """Return the first 8 digits of the structural hash."""
        return self.structural_hash()[:8]

    def traces(self, name: str) -> list[Tensor]:
        """Return what a loop left under ``name``: the tag of a loop whose body traces, or a published name.

        Raises:
            GraphError: when the name means two things, or nothing.
        """
        return traces.read(self, name)

    def traces_named(self, name: str) -> list[Tensor]:
        """Return the trace that a loop body published as ``name``."""
        return traces.read_named(self, name)

    def traces_by_node(self, node_id: str) -> list[Tensor]:
        """Return what the body's ``trace()`` left in the loop with this node id."""
        return traces.read_node(self, node_id)

    def last_trace(self, name: str) -> Tensor | None:
        """Return the last element of a trace, or None when it is empty."""
        found = self.traces(name)
        return found[-1] if found else None

    # the tree

    def tree_children(self) -> dict[str, Graph]:
        """Return the labelled graphs directly inside, by label."""
        return {label: graph for child in self.children() for label, graph in tree.labelled_children(child)}

    def child_graph(self, label: str) -> Graph | None:
        """Return the child with this label, or None."""
        return self.tree_children().get(label)

    def is_composed(self) -> bool:
        """Return whether this graph was built into another."""
        return self._composed

    def subgraph(self, path: str) -> Graph:
        """Return the graph at a path.

        Raises:
            GraphPathError: when the path leads nowhere, or to something that is not a graph.
        """
        target = tree.resolve_one(self, path)
        if target.kind is not PathKind.SUBGRAPH or target.graph is None:
            raise GraphPathError(f"path {path!r} names a {target.kind}, not a graph", path=path, segment=target.segment)
        return target.graph

    def validate_path(self, path: str) -> PathKind:
        """Return what a path names.

        Raises:
            GraphPathError: when it names nothing.
        """
        return tree.resolve(self, path)[0].kind

    def parameters_at(self, *paths: str) -> list[nn.Parameter]:
        """Return the parameters at the paths, each once."""
        return list({id(p): p for target in self._targets(paths) for p in tree.target_parameters(target)}.values())

    def named_parameters_at(self, path: str) -> dict[str, Tensor]:
        """Return parameters by name: a graph's in its own namespace, a tag's as ``tag.leaf``."""
        return tree.named_tensors(tree.resolve(self, path), "parameters")

    def named_buffers_at(self, path: str) -> dict[str, Tensor]:
        """Return buffers by name, as `named_parameters_at` does."""
        return tree.named_tensors(tree.resolve(self, path), "buffers")

    def freeze(self, *paths: str) -> None:
        """Stop gradients for every parameter at the paths; nothing is changed when one of them is wrong."""
        tree.set_frozen(self._targets(paths), True)

    def thaw(self, *paths: str) -> None:
        """Let gradients flow again for every parameter at the paths."""
        tree.set_frozen(self._targets(paths), False)

    def is_frozen(self, path: str) -> bool:
        """Return whether there are parameters at the path and none of them takes gradients."""
        found = [p for t in tree.resolve(self, path) if t.module is not None for p in t.module.parameters()]
        return bool(found) and not any(p.requires_grad for p in found)

    def set_training_at(self, path: str, mode: bool) -> None:
        """Switch train or eval mode at a path only; a later ``train()`` of the whole graph overrides it."""
        for module in [tree.target_module(target) for target in tree.resolve(self, path)]:
            module.train(mode)

    def set_training(self, mode: bool) -> None:
        """Switch train or eval mode of the whole graph."""
        self.train(mode)

    def set_device(self, device: torch.device | str) -> None:
        """Move the whole graph."""
        self.to(device)

    def tree_summary(self) -> str:
        """Return the tree as indented text: label, hash, counts, tags."""
        return summary.tree_summary(self)

    def param_summary(self) -> str:
        """Return a table of parameter elements, for each child and the rest, trainable and frozen."""
        return summary.param_summary(self)

    # files

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and buffers with the structural hash; the format follows the file's ending."""
        saving.save(self, path)

    def load_checkpoint(self, path: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> LoadReport:
        """Copy a checkpoint into this graph and return what was loaded, skipped and missing.

        Raises:
            CheckpointError: made for another structure, or NaN or infinite unless allowed; nothing is copied.
        """
        return saving.load(self, path, allow_nonfinite=allow_nonfinite)

    def load_subgraph_checkpoint(self, path: str, file: str | os.PathLike[str]) -> LoadReport:
        """Copy a checkpoint of a graph saved alone into the sub-graph at ``path``.

        Raises:
            GraphPathError: when the path is not a graph.
            CheckpointError: when the file was made for another structure; then nothing is copied.
        """
        return saving.load(self.subgraph(path), file)

    def set_source_config(self, config: str) -> None:
        """Remember a configuration (JSON text) that `save_checkpoint` writes beside the file."""
        self._source_config = config

    def source_config(self) -> str | None:
        """Return the remembered configuration."""
        return self._source_config

    def clear_source_config(self) -> None:
        """Forget the remembered configuration."""
        self._source_config = None

    # observation: the graph only forwards to its observer

    @property
    def observe(self) -> Observer:
        """The observer of this graph, made when first asked for; copies and pickles start without one."""
        if self._observer is None:
            from flodl.observe import Observer

            self._observer = Observer(self)
        return self._observer

    def record(self, tag: str, values: Iterable[float | Tensor]) -> None:
        """Append values that are no outputs of the graph to the buffer of ``tag``."""
        self.observe.record(tag, values)

    def record_scalar(self, tag: str, value: float) -> None:
        """Append a value that is no output of the graph, such as a loss, to the buffer of ``tag``."""
        self.observe.record_scalar(tag, value)

    def collect(self, *tags: Any) -> None:
        """Append the scalar values of tags to their buffers; what is named here is watched from then on."""
        self.observe.collect(*tags)

    def collect_with(self, *tags_and_reduce: Any, reduce: Any = None) -> None:
        """Append values of tags, reduced to one number by ``reduce``, to their buffers."""
        self.observe.collect_with(*tags_and_reduce, reduce=reduce)

    def flush(self, *tags: Any) -> None:
        """Move the mean of each buffer to its history, here and in labelled children."""
        self.observe.flush(*tags)

    def trend(self, tag: str) -> Trend:
        """Return the history of one metric."""
        return self.observe.trend(tag)

    def trends(self, *tags: Any) -> TrendGroup:
        """Return the histories of several metrics, groups opened."""
        return self.observe.trends(*tags)

    def latest_metrics(self) -> list[tuple[str, float]]:
        """Return the last value of each metric: own ones, then those of children as ``label.metric``."""
        return self.observe.latest_metrics()

    def record_at(self, path: str, value: float) -> None:
        """Append a value to a metric of a sub-graph; the last segment is the metric's name."""
        self.observe.record_at(path, value)

    def collect_at(self, *paths: Any) -> None:
        """Do what `collect` does for tags anywhere in the tree."""
        self.observe.collect_at(*paths)

    def trend_at(self, path: str) -> Trend:
        """Return the history of a metric of a sub-graph."""
        return self.observe.trend_at(path)

    # pictures

    def dot(self, *, profiled: bool = False) -> str:
        """Return the graph as DOT text; ``profiled`` shows the times of the last call, when it was profiled."""
        from flodl.graph import draw

        return draw.dot(self, self.observe.profile() if profiled else None)

    def svg(self, path: str | os.PathLike[str] | None = None, *, profiled: bool = False) -> str:
        """Return the graph as an SVG picture, and write it when a path is given."""
        from flodl.graph import draw

        return draw.svg(self, self.observe.profile() if profiled else None, path)

    _repr_html_ = svg

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
        return _bare, (self._plan,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adopt(dict(state["_modules"]))

    def _replicate_for_data_parallel(self) -> Graph:
        replica = super()._replicate_for_data_parallel()  # pyright: ignore[reportAttributeAccessIssue]
        replica._adopt(dict(replica._modules))
        replica._memory = list(self._memory)
        return replica

    def _targets(self, paths: tuple[str, ...]) -> list[tree.Target]:
        return [target for path in paths for target in tree.resolve(self, path)]


_classes: WeakValueDictionary[str, type[Graph]] = WeakValueDictionary()


def _bare(plan: Plan) -> Graph:
    """Return a graph whose class has the forward pass of ``plan``, and nothing else yet."""
    source = forward_source(plan)
    kind = _classes.get(source)
    if kind is None:
        body = {
            "forward": compile_forward(source),
            "_forward_captured": compile_forward(forward_source(plan, plan.names)),
            "__module__": __name__,
            "__doc__": Graph.__doc__,
        }
        kind = _classes[source] = type("Graph", (Graph,), body)
    return kind.__new__(kind)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
