"""Values of a graph: of its tags and of any other name, by step and by epoch, and the times of its nodes.

Scalar tensors stay on their device until they are read, so recording a loss does not wait for the device; reading
copies a whole buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from os import PathLike
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from flodl.errors import GraphError, GraphPathError
from flodl.files import write_atomically
from flodl.graph.core import GraphCore
from flodl.graph.tree import part_at, subgraph
from flodl.monitor.collect import Reduce, current_collector, one_value, reduce_named, reduced
from flodl.monitor.profiler import NodeTime, Profile, Profiler
from flodl.monitor.trend import Trend, TrendGroup, mean

Names = str | Iterable[str]


class History:
    """Buffers and histories of metrics, in the order of first use.

    Attributes:
        times_s: seconds from the first value to each flush.
    """

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._buffers: dict[str, list[float | Tensor]] = {}
        self._epochs: dict[str, dict[int, float]] = {}
        self._epoch = 0
        self._started = math.nan

    def add(self, name: str, value: float | Tensor) -> None:
        """Append a value to the buffer of ``name``.

        Raises:
            GraphError: a tensor with more or fewer than one element.
        """
        value = one_value(value, f"record {name!r}", name)
        if math.isnan(self._started):
            self._started = monotonic()
        # The caller may overwrite the tensor.
        self._buffers.setdefault(name, []).append(value.clone() if isinstance(value, Tensor) else value)

    def replace(self, name: str, value: float) -> None:
        """Replace the buffer of ``name`` by one value."""
        self._buffers[name] = []
        self.add(name, value)

    def buffer(self, name: str) -> list[float]:
        """Return the values since the last flush."""
        values = self._buffers.get(name, [])
        if len(values) > 1 and all(isinstance(value, Tensor) for value in values):
            device = values[-1].device  # pyright: ignore[reportAttributeAccessIssue]
            return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]).tolist()
        return [float(value) for value in values]

    def names(self) -> list[str]:
        """Return the names that have a history."""
        return [name for name in self._buffers if self._epochs.get(name)]

    def trend(self, name: str) -> Trend:
        """Return the history of ``name``; empty if it has none."""
        epochs = self._epochs.get(name, {})
        return Trend(epochs.values(), name, epochs)

    def flush(self, names: Iterable[str] | None = None) -> None:
        """Move the mean of each buffer to its history.

        A flush of all names ends an epoch, in which a metric without values has a gap. A flush of some names adds an
        epoch to each of these.
        """
        wanted = list(self._buffers) if names is None else names
        means = {name: mean(values) for name in wanted if (values := self.buffer(name))}
        epochs = {name: max(self._epoch, max(self._epochs.get(name, ()), default=-1) + 1) for name in means}
        shared = max(epochs.values(), default=0)
        for name, value in means.items():
            self._epochs.setdefault(name, {})[shared if names is None else epochs[name]] = value
            self._buffers[name] = []
        if means:
            self.times_s.append(monotonic() - self._started)
            self._epoch = shared + 1 if names is None else self._epoch


class Observer:
    """Buffers, histories and times of one graph; available as ``graph.observe``.

    Values of an epoch are stored in a buffer for each name; ``flush`` moves their mean to the history, which ``trend``
    returns. Methods accept names one by one or in lists; a tag group stands for its members.

    Args:
        graph: the graph.

    Attributes:
        reductions: how a Trainer reduces the value of each watched tag.
    """

    def __init__(self, graph: GraphCore) -> None:
        self._graph = graph
        self._metrics, self._timings = History(), History()
        self._profiler: Profiler | None = None
        self.reductions: dict[str, list[Reduce]] = {}

    # ---- steps ---------------------------------------------------------------------------------------

    def watch(self, *tags: Names, reduce: Reduce | str = Reduce.MEAN) -> None:
        """Collect tags in each step of a Trainer, each tensor reduced to one value.

        The value has the name of the tag; with a reduction other than the mean ``tag:norm`` and so on.

        Raises:
            GraphError: the graph has no such tag.
        """
        how = reduce_named(reduce, "watch")
        names = self._expanded(tags)
        self._graph.watch(*names)
        for name in names:
            self.reductions.setdefault(name, []).append(how)

    def record(self, tag: str, values: Iterable[float | Tensor]) -> None:
        """Append values to the buffer of ``tag``, which may be any name."""
        for value in values:
            self.record_scalar(tag, value)

    def record_scalar(self, tag: str, value: float | Tensor) -> None:
        """Append one value to the buffer of ``tag``, which may be any name.

        Raises:
            GraphError: a tensor without exactly one element.
        """
        # In a step of a Trainer the value is averaged over ranks, and part of a captured step.
        collector = current_collector()
        owner = None if collector is None else collector.owners.get(id(self._graph))
        if collector is None or owner is None:
            self._metrics.add(tag, value)
        else:
            collector.add(f"{owner}.{tag}" if owner else tag, one_value(value, f"record {tag!r}", tag))

    def collect(self, *tags: Names) -> None:
        """Append the values of tags in the last call of the graph.

        A tag is watched from the first time it is collected, or from ``graph.watch``; without a value it is skipped.

        Raises:
            GraphError: the graph has no such tag, or its value is not one number.
        """
        for tag, value in self._values(tags):
            self.record_scalar(tag, value)

    def collect_with(self, *tags: Names, reduce: Reduce | str) -> None:
        """Append the values of tags in the last call, each tensor reduced to one value by ``reduce``.

        Raises:
            GraphError: the reduction or a tag is unknown, or a tensor has no elements.
        """
        how = reduce_named(reduce)
        for tag, value in self._values(tags):
            if isinstance(value, Tensor):
                if not value.numel():
                    shape = tuple(value.shape)
                    raise GraphError(f"collect_with: tag {tag!r} has shape {shape}, expected elements", tag=tag)
                value = reduced(value, how)
            self.record_scalar(tag, value)

    def collected(self, tag: str) -> list[float]:
        """Return the buffer of ``tag``."""
        return self._metrics.buffer(tag)

    def record_at(self, path: str, value: float | Tensor) -> None:
        """Append a value to a metric of a sub-graph; the last segment of the path is any name.

        Raises:
            GraphPathError: the rest of the path is not a graph.
        """
        owner, name = self._owner(path)
        owner.record_scalar(name, value)

    def collect_at(self, *paths: Names) -> None:
        """Collect tags anywhere in the tree; each value is stored in the observer of its graph.

        Raises:
            GraphPathError: a path is not a tag, or is private to a sub-graph.
        """
        targets: list[tuple[GraphCore, str]] = []
        for path in _flat(paths):
            part = part_at(self._graph, path)
            if part.owner is None or part.tag is None:
                text = f"collect_at: path {path!r} is a {part.kind}, expected a tag"
                raise GraphPathError(text, path=path, segment=part.segment)
            targets.append((part.owner, part.tag))
        for owner, tag in targets:
            observer_of(owner).collect(tag)

    # ---- epochs --------------------------------------------------------------------------------------

    def flush(self, *tags: Names) -> None:
        """Move the mean of each buffer to its history: of these tags or all, and all of labelled sub-graphs.

        Without tags, times are flushed too.
        """
        if tags:
            self._metrics.flush(self._expanded(tags))
        else:
            self.flush_own()
        for child in self._graph.tree_children().values():
            observer_of(child).flush()

    def flush_own(self) -> None:
        """Flush all metrics and times of this graph only."""
        self._metrics.flush()
        self._timings.flush()

    def replace(self, name: str, value: float) -> None:
        """Replace the values of this epoch of one metric."""
        self._metrics.replace(name, value)

    def latest_metrics(self) -> list[tuple[str, float]]:
        """Return ``(name, newest value)``; a metric of a sub-graph is ``label.name``."""
        found = [(name, self.trend(name).latest()) for name in self._metrics.names()]
        for label, child in self._graph.tree_children().items():
            found += [(f"{label}.{name}", value) for name, value in observer_of(child).latest_metrics()]
        return found

    def trend(self, tag: str) -> Trend:
        """Return the history of a metric; empty if it has none."""
        return self._metrics.trend(tag)

    def trends(self, *tags: Names) -> TrendGroup:
        """Return the histories of several metrics, by default of all."""
        return TrendGroup([self.trend(name) for name in (self._expanded(tags) if tags else self._metrics.names())])

    def trend_at(self, path: str) -> Trend:
        """Return the history of a metric of a sub-graph.

        Raises:
            GraphPathError: the path up to the last dot is not a graph.
        """
        owner, name = self._owner(path)
        return owner.trend(name)

    # ---- times ---------------------------------------------------------------------------------------

    def enable_profiling(self) -> None:
        """Measure the time of each node from the next call."""
        if self._profiler is None:
            modules = [
                ("", self._graph),
                *((node.name, getattr(self._graph, node.name)) for node in self._graph.plan.calls),
            ]
            self._profiler = Profiler(self._graph, modules, last_call=True)

    def disable_profiling(self) -> None:
        """Stop measuring; collected times remain."""
        if self._profiler is not None:
            self._profiler.end()
            self._profiler = None

    def profiling(self) -> bool:
        """Return whether the times of nodes are measured."""
        return self._profiler is not None

    def profile(self) -> Profile | None:
        """Return the times of the last call, after waiting for the device; None if it was not measured.

        Nodes that share a module have its whole time.
        """
        if self._profiler is None:
            return None
        self._profiler.wait()
        seconds = self._profiler.seconds()
        times = [
            NodeTime(node.id, node.name, node.tags, node.level, seconds[node.name])
            for node in self._graph.plan.calls
            if node.name in seconds
        ]
        return Profile(seconds[""], tuple(times)) if seconds else None

    def collect_timings(self) -> None:
        """Append the times of the last call to their buffers: of each node, and ``total``."""
        profile = self.profile()
        if profile is not None:
            for name, seconds in (*((node.key, node.seconds) for node in profile.nodes), ("total", profile.total_s)):
                self._timings.add(name, seconds)

    def timing_trend(self, tag: str) -> Trend:
        """Return the history of a node's seconds by tag, otherwise by node id; ``total`` for the whole call."""
        return self._timings.trend(tag)

    # ---- files ---------------------------------------------------------------------------------------

    def export_trends(self, path: str | PathLike[str], *tags: Names) -> None:
        """Write histories as CSV: ``epoch`` from 1, then a column for each metric.

        Raises:
            GraphError: there are no values.
        """
        from flodl.monitor.export import csv_of_rows, rows_of_trends

        write_atomically(path, [csv_of_rows(rows_of_trends(self.trends(*tags)))])

    def plot_html(self, path: str | PathLike[str], *tags: Names) -> None:
        """Write a page with the curves of the histories, which opens offline.

        Raises:
            GraphError: there are no values.
        """
        from flodl.monitor.export import page_of_rows, rows_of_trends

        title = self._graph.label or "Metrics"
        write_atomically(path, [page_of_rows(rows_of_trends(self.trends(*tags)), title).encode()])

    def write_log(self, path: str | PathLike[str], total: int, *tags: Names) -> None:
        """Write one line for each epoch of ``total``: metrics, duration and time left.

        Raises:
            GraphError: there are no values.
        """
        from flodl.monitor.export import log_of_rows, rows_of_trends

        write_atomically(path, [log_of_rows(rows_of_trends(self.trends(*tags)), total, self._metrics.times_s).encode()])

    # ---- names ---------------------------------------------------------------------------------------

    def _expanded(self, names: Sequence[Names]) -> list[str]:
        groups = self._graph.plan.groups
        return [member for name in _flat(names) for member in groups.get(name, (name,))]

    def _values(self, tags: Sequence[Names]) -> list[tuple[str, Any]]:
        """Return the values of tags that have one."""
        names = self._expanded(tags)
        self._graph.watch(*names)
        return [(name, value) for name in names if (value := self._graph.tagged(name)) is not None]

    def _owner(self, path: str) -> tuple[Observer, str]:
        prefix, _, name = path.rpartition(".")
        if not name:
            raise GraphPathError(f"path {path!r} has an empty last segment", path=path, segment=name)
        return (observer_of(subgraph(self._graph, prefix)) if prefix else self), name


def observer_of(graph: GraphCore) -> Observer:
    """Return the observer of a graph, created at the first call."""
    if graph._observer is None:
        graph._observer = Observer(graph)
    return graph._observer


def _flat(names: Iterable[Any]) -> list[str]:
    return [one for name in names for one in ([name] if isinstance(name, str) else name)]
