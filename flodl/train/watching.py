"""What is watched inside of a model, collected in each forward pass under dotted names.

A name is a path in the tree of graphs: of a tag, of a group's member, of a scalar that was recorded in a graph, or of
a module whose output is watched. Here is decided what is read after a forward pass; what becomes of it is decided by
whoever asked (`flodl.train`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from flodl.errors import GraphError, GraphPathError
from flodl.graph.core import GraphCore
from flodl.graph.tree import Part, named_graphs, parts_at
from flodl.monitor import collect
from flodl.monitor.collect import Pair, Reduce, Seen, reduce_named
from flodl.monitor.observer import observer_of
from flodl.train.step.tensor_sums import TensorSums

__all__ = ["Watching"]


class Watching:
    """Collects what is watched in one model.

    Args:
        model: a graph, or a module with or without graphs inside.
        wanted: what to watch besides what its graphs watch already: paths, each with a reduction if not the mean
            (``"encoder.features:norm"``). Paths lead to tags and tag groups, which give their values, and to nodes,
            sub-graphs and modules, which give their output. Ranges such as ``layers.0-3`` stand for each of theirs.

    Raises:
        GraphError: a reduction that does not exist.
        GraphPathError: a path that leads nowhere.
    """

    def __init__(self, model: nn.Module, wanted: Sequence[str] = ()) -> None:
        self.model = model
        self._undo: list[Callable[[], Any]] = []
        self._seen = Seen()
        self._before: Seen | None = None
        self._inside = False
        self._sums: TensorSums | None = None
        for text in wanted:
            self._watch(text)
        self.refresh()

    # ---- what is watched -----------------------------------------------------------------------------

    def _watch(self, text: str) -> None:
        path, colon, how = text.partition(":")
        reduce = reduce_named(how, f"watch {text!r}") if colon else Reduce.MEAN
        for part in parts_at(self.model, path):
            self._watch_part(part, reduce)

    def _watch_part(self, part: Part, how: Reduce) -> None:
        if part.tag is not None and part.owner is not None and not _by_module(part):
            owner, tag = part.owner, part.tag
            new = tag not in owner.watched
            before = list(observer_of(owner).reductions.get(tag, ())) or ([] if new else [Reduce.MEAN])
            observer_of(owner).reductions[tag] = before
            if how not in before:
                observer_of(owner).watch(tag, reduce=how)
                self._undo.append(partial(observer_of(owner).reductions[tag].remove, how))
            if new:
                self._undo.append(partial(owner.unwatch, tag))
            return
        if part.module is None:
            raise GraphPathError(f"watch: {part.path!r} names nothing that has a value", path=part.path, segment="")
        name = value_name(part.path, how)
        self._undo.append(part.module.register_forward_hook(partial(_see_output, name, how)).remove)

    def close(self) -> None:
        """Watch no more than the graphs did before."""
        while self._undo:
            self._undo.pop()()

    def refresh(self) -> None:
        """Note that the model, or what is watched in it, may have changed."""
        self._graphs = named_graphs(self.model)
        self._owners = {id(graph): name for name, graph in self._graphs}
        self._tags: list[tuple[str, GraphCore, list[tuple[str, str, Reduce]]]] = []
        for name, graph in self._graphs:
            prefix = f"{name}." if name else ""
            tags = sorted(graph.watched)
            observer = graph._observer
            asked = observer.reductions if observer is not None else {}
            ways = {tag: asked.get(tag) or [Reduce.MEAN] for tag in tags}
            named = [(tag, prefix + value_name(tag, how), how) for tag in tags for how in ways[tag]]
            if named:
                self._tags.append((name, graph, named))
        place = next((p.device for p in self.model.parameters()), None) if self._tags or self._undo else None
        if place is not None and place.type == "cuda" and (self._sums is None or self._sums.device != place):
            self._sums = TensorSums.of(place)

    def signature(self) -> tuple[Any, ...]:
        """Return what a captured step depends on: the names of what is collected."""
        return tuple((id(graph), tuple(graph.watched)) for _, graph in named_graphs(self.model))

    # ---- one forward pass ----------------------------------------------------------------------------

    def __enter__(self) -> Watching:
        """Collect from now on what this thread computes."""
        for _, graph, _ in self._tags:
            graph._captured = {}  # what an earlier call left is no value of this one
        self._seen = Seen(self._owners, self._sums)
        before = collect.hear(self._seen)
        self._before, self._inside = self._before if self._inside else before, True
        return self

    def __exit__(self, *error: object) -> None:
        """Collect no more; once more does nothing."""
        if self._inside:
            collect.hear(self._before)
            self._inside, self._before = False, None

    def take(self) -> dict[str, Pair]:
        """Return what was told or watched inside, by name, as sums and weights."""
        seen, self._seen = self._seen, Seen()
        told = seen.names()
        for _, graph, tags in self._tags:
            captured = graph._captured
            for tag, name, how in tags:
                value = captured.get(tag)
                if name not in told and isinstance(value, (Tensor, float, int)):
                    _add(seen, name, value, how)
            graph._captured = {tag: v.detach() if isinstance(v, Tensor) else v for tag, v in captured.items()}
        return seen.pack()

    def holding(self) -> Callable[[], object] | None:
        """Return what puts the present values of tags back, so that they can be asked for after a replay."""
        if not self._tags:
            return None
        kept = [(graph, graph._captured) for _, graph, _ in self._tags]

        def put() -> None:
            for graph, captured in kept:
                graph._captured = captured

        return put

    # ---- after an epoch ------------------------------------------------------------------------------

    def hand_back_all(self, epochs: Sequence[Mapping[str, float]]) -> None:
        """Give the observers of graphs their values of epochs that lie behind, unless they have any."""
        owners = [observer_of(graph) for _, graph in self._graphs]
        if any(observer.trends() for observer in owners):
            return
        for values in epochs:
            self.hand_back(values.items())
            for observer in owners:
                observer.flush_local()

    def hand_back(self, values: Iterable[tuple[str, float]]) -> None:
        """Give the observers of graphs their values of an epoch."""
        owners = sorted(self._graphs, key=lambda pair: -len(pair[0]))
        for name, value in values:
            for prefix, graph in owners:
                if not prefix or name.startswith(f"{prefix}."):
                    observer_of(graph).put(name[len(prefix) + 1 :] if prefix else name, value)
                    break


def _by_module(part: Part) -> bool:
    """Return whether a tag's value is the output of one module that nothing else calls in the graph.

    Then it is read where it is made, and its memory is free for what comes next; a tag keeps it until the step is over.
    """
    owner, tag = part.owner, part.tag
    if owner is None or tag is None or part.module is None or tag in owner.watched:
        return False
    return sum(owner._modules.get(node.name) is part.module for node in owner.plan.calls) == 1


def value_name(path: str, how: Reduce) -> str:
    """Return what a watched value is called."""
    return path if how is Reduce.MEAN else f"{path}:{how}"


def _see_output(name: str, how: Reduce, module: nn.Module, args: Any, output: Any) -> None:
    seen = collect.seeing()
    if seen is None:
        return
    value = output
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, (Tensor, float, int)):
        raise GraphError(
            f"watch {name!r}: the output of {type(module).__name__} is a {type(output).__name__}; expected a tensor, "
            "or a tuple that begins with one. Watch a tag, or call flodl.monitor.log in the module.",
            tag=name,
        )
    _add(seen, name, value, how)


def _add(seen: Seen, name: str, value: Tensor | float, how: Reduce) -> None:
    if not isinstance(value, Tensor):
        seen.add(name, float(value))
    elif value.numel():
        seen.add_tensor(name, value, how)
