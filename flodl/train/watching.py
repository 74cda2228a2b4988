"""Values watched inside a model, collected in each forward pass under dotted names.

A name is a path in the tree of graphs: of a tag, of a member of a tag group, of a scalar recorded in a graph, or of a
module whose output is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from flodl.errors import GraphError, GraphPathError
from flodl.graph.core import GraphCore
from flodl.graph.tree import Part, named_graphs, parts_at
from flodl.monitor.collect import Collector, Pair, Reduce, current_collector, reduce_named, set_collector
from flodl.monitor.observer import observer_of


class Watching:
    """Collects watched values of one model.

    Args:
        model: a graph, or a module with or without graphs inside.
        wanted: paths to watch in addition to the watched tags of its graphs, each with a reduction if not the mean
            (``"encoder.features:norm"``). A tag or tag group is watched by its value; a node, sub-graph or module by
            its output. A range such as ``layers.0-3`` stands for each of its members.

    Attributes:
        idle: collects logged values if nothing is watched; None otherwise.

    Raises:
        GraphError: an unknown reduction.
        GraphPathError: an unknown path.
    """

    def __init__(self, model: nn.Module, wanted: Sequence[str] = ()) -> None:
        self.model = model
        self._undo: list[Callable[[], Any]] = []
        self._collector = Collector()
        self._before: Collector | None = None
        self._is_inside = False
        for text in wanted:
            path, colon, how = text.partition(":")
            reduce = reduce_named(how, f"watch {text!r}") if colon else Reduce.MEAN
            for part in parts_at(model, path):
                self._watch(part, reduce)
        self.refresh()

    def _watch(self, part: Part, how: Reduce) -> None:
        if part.tag is not None and part.owner is not None and not _is_output_of_module(part):
            owner, tag = part.owner, part.tag
            observer, is_new = observer_of(owner), tag not in owner.watched
            before = list(observer.reductions.get(tag, ())) or ([] if is_new else [Reduce.MEAN])
            observer.reductions[tag] = before
            if how not in before:
                observer.watch(tag, reduce=how)
                self._undo.append(partial(observer.reductions[tag].remove, how))
            if is_new:
                self._undo.append(partial(owner.unwatch, tag))
            return
        if part.module is None:
            raise GraphPathError(f"watch: {part.path!r} has no value", path=part.path, segment="")
        hook = partial(_collect_output, _value_name(part.path, how), how)
        self._undo.append(part.module.register_forward_hook(hook).remove)

    def close(self) -> None:
        """Stop watching values added here."""
        while self._undo:
            self._undo.pop()()

    def refresh(self) -> None:
        """Update after a change of the model or of its watched tags."""
        self._graphs = named_graphs(self.model)
        self._owners = {id(graph): name for name, graph in self._graphs}
        self._tags: list[tuple[GraphCore, list[tuple[str, str, Reduce]]]] = []
        for name, graph in self._graphs:
            prefix = f"{name}." if name else ""
            reductions = {} if graph._observer is None else graph._observer.reductions
            ways = [(tag, how) for tag in sorted(graph.watched) for how in reductions.get(tag) or [Reduce.MEAN]]
            if ways:
                self._tags.append((graph, [(tag, prefix + _value_name(tag, how), how) for tag, how in ways]))
        self.idle = None if self._tags or self._undo else Collector(self._owners)

    def signature(self) -> tuple[Any, ...]:
        """Return a value that differs if other values are watched; a captured step depends on it."""
        return tuple((id(graph), tuple(graph.watched)) for _, graph in named_graphs(self.model))

    # ---- one forward pass ----------------------------------------------------------------------------

    def __enter__(self) -> Watching:
        """Collect from now on in this thread."""
        for graph, _ in self._tags:
            graph._captured = {}  # values of an earlier call
        self._collector = Collector(self._owners)
        before = set_collector(self._collector)
        self._before, self._is_inside = self._before if self._is_inside else before, True
        return self

    def __exit__(self, *error: object) -> None:
        """Stop collecting; may be called twice."""
        if self._is_inside:
            set_collector(self._before)
            self._is_inside, self._before = False, None

    def take(self) -> dict[str, Pair]:
        """Return names, sums and weights of the collected values."""
        collector, self._collector = self._collector, Collector()
        reported = set(collector.pairs)
        for graph, tags in self._tags:
            captured = graph._captured
            for tag, name, how in tags:
                value = captured.get(tag)
                if name not in reported and isinstance(value, (Tensor, float, int)):
                    _add(collector, name, value, how)
            graph._captured = {tag: v.detach() if isinstance(v, Tensor) else v for tag, v in captured.items()}
        return collector.pack()

    def take_idle(self) -> dict[str, Pair]:
        """Return names, sums and weights of values logged while nothing was watched."""
        assert self.idle is not None
        collector, self.idle = self.idle, Collector(self._owners)
        return collector.pack()

    def holding(self) -> Callable[[], object] | None:
        """Return a function that restores the present values of tags after a replay; None without watched tags."""
        kept = [(graph, graph._captured) for graph, _ in self._tags]

        def restore() -> None:
            for graph, captured in kept:
                graph._captured = captured

        return restore if kept else None

    # ---- after an epoch ------------------------------------------------------------------------------

    def hand_back(self, values: Mapping[str, float]) -> None:
        """Store the values of an epoch in the observers of their graphs."""
        owners = sorted(self._graphs, key=lambda pair: -len(pair[0]))
        for name, value in values.items():
            for prefix, graph in owners:
                if not prefix or name.startswith(f"{prefix}."):
                    observer_of(graph).replace(name[len(prefix) + 1 :] if prefix else name, value)
                    break

    def hand_back_all(self, epochs: Iterable[Mapping[str, float]]) -> None:
        """Store the values of earlier epochs in the observers of graphs, unless these have a history."""
        observers = [observer_of(graph) for _, graph in self._graphs]
        if not any(observer.trends() for observer in observers):
            for values in epochs:
                self.hand_back(values)
                for observer in observers:
                    observer.flush_own()


def _is_output_of_module(part: Part) -> bool:
    """Return whether the value of a tag is the output of a module that the graph calls once.

    Its output is read by a hook, so its memory is free afterwards; a tag keeps its value until the step ends.
    """
    owner, tag = part.owner, part.tag
    if owner is None or tag is None or part.module is None or tag in owner.watched:
        return False
    return sum(owner._modules.get(node.name) is part.module for node in owner.plan.calls) == 1


def _value_name(path: str, how: Reduce) -> str:
    return path if how is Reduce.MEAN else f"{path}:{how}"


def _collect_output(name: str, how: Reduce, module: nn.Module, args: Any, output: Any) -> None:
    collector = current_collector()
    if collector is None:
        return
    value = output
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, (Tensor, float, int)):
        raise GraphError(
            f"watch {name!r}: the output of {type(module).__name__} is {type(output).__name__}, expected a tensor or a "
            "tuple that begins with one. Watch a tag, or call flodl.monitor.log in the module.",
            tag=name,
        )
    _add(collector, name, value, how)


def _add(collector: Collector, name: str, value: Tensor | float, how: Reduce) -> None:
    if not isinstance(value, Tensor):
        collector.add(name, float(value))
    elif value.numel():
        collector.add_tensor(name, value, how)
