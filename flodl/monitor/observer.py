"""The observer of a graph: values of its tags and of anything else, a step at a time, an epoch at a time.

Decides what is collected from where and how the tree of graphs is walked. Formulas over histories are
in `trend`, timings in `profile`, files in `export`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from torch import Tensor

from flodl.errors import GraphError, GraphPathError, nearest
from flodl.graph.core import GraphCore
from flodl.graph.tree import PathKind, part_at, subgraph
from flodl.monitor import export
from flodl.monitor.collect import Reduce, one_value, reduce_named, reduced, seeing
from flodl.monitor.history import Series
from flodl.monitor.profile import Profile, Profiler
from flodl.monitor.trend import Trend, TrendGroup

__all__ = ["Observer", "observer_of"]

Names = str | Iterable[str]


class Observer:
    """Buffers, histories and timings of one graph; reached as ``graph.observe``.

    Values collected in an epoch wait in a buffer for each name; ``flush`` moves their mean to the
    history, which ``trend`` reads. Methods take names one by one or in lists, and a tag group stands
    for its members.

    Args:
        graph: the graph to observe.
    """

    def __init__(self, graph: GraphCore) -> None:
        self._graph = graph
        self._metrics = Series()
        self._timings = Series()
        self._profiler: Profiler | None = None
        self._flush_count = 0
        self.reductions: dict[str, list[Reduce]] = {}

    # what a trainer collects by itself

    def watch(self, *tags: Names, reduce: Reduce | str = Reduce.MEAN) -> None:
        """Watch tags, which a trainer collects in each step: each tensor reduced to one value.

        ``graph.watch(tag)`` does the same with means. The value of a tag is called by its name, that of another
        reduction than the mean ``tag:norm`` and so on.

        Raises:
            GraphError: the graph has no such tag.
        """
        how = reduce_named(reduce, "watch")
        names = self._expanded(tags)
        self._graph.watch(*names)
        for name in names:
            self.reductions.setdefault(name, []).append(how)

    def put(self, name: str, value: float) -> None:
        """Have ``value`` be the metric ``name`` of this epoch, in place of what was recorded for it here."""
        self._metrics.put(name, value)

    def _take(self, tag: str, value: float | Tensor) -> None:
        """Take in one value; in a step of a trainer the trainer does, which knows other ranks and recorded steps."""
        seen = seeing()
        owner = None if seen is None else seen.owners.get(id(self._graph))
        if seen is None or owner is None:
            self._metrics.add(tag, value)
        else:
            seen.add(f"{owner}.{tag}" if owner else tag, one_value(value, f"record {tag!r}", tag))

    # one step

    def record(self, tag: str, values: Iterable[float | Tensor]) -> None:
        """Append values to the buffer of ``tag``, which may be any name."""
        for value in values:
            self._take(tag, value)

    def record_scalar(self, tag: str, value: float | Tensor) -> None:
        """Append one value to the buffer of ``tag``, which may be any name.

        Raises:
            GraphError: a tensor that does not hold exactly one element.
        """
        self._take(tag, value)

    def collect(self, *tags: Names) -> None:
        """Append the values that tags had in the last call of the graph.

        A tag is watched from the first time it is named here, or by ``graph.watch``; one that has no
        value yet is passed over.

        Raises:
            GraphError: the graph has no such tag, or its value is not one number.
        """
        for tag, value in self._values(tags, "collect"):
            if isinstance(value, Tensor) and value.numel() != 1:
                raise GraphError(
                    f"collect: tag {tag!r} has shape {tuple(value.shape)}, expected one value; "
                    f"use collect_with({tag!r}, Reduce.MEAN)",
                    tag=tag,
                )
            self._take(tag, value)

    def collect_with(self, *tags_and_reduce: Names | Reduce, reduce: Reduce | str | None = None) -> None:
        """Append the values that tags had in the last call, each tensor reduced to one value.

        Args:
            *tags_and_reduce: tags or lists of tags; a ``Reduce`` may stand last.
            reduce: how, when it does not stand last.

        Raises:
            GraphError: no reduction was given, a tag is unknown, or a tensor has no elements.
        """
        tags = [item for item in tags_and_reduce if not isinstance(item, Reduce)]
        given = [item for item in tags_and_reduce if isinstance(item, Reduce)]
        given += [] if reduce is None else [reduce_named(reduce)]
        if len(given) != 1:
            raise GraphError(f"collect_with: {len(given)} reductions given, expected one, such as Reduce.MEAN")
        for tag, value in self._values(tags, "collect_with"):
            if isinstance(value, Tensor):
                if not value.numel():
                    shape = tuple(value.shape)
                    raise GraphError(f"collect_with: tag {tag!r} has shape {shape} and so no elements", tag=tag)
                value = reduced(value, given[0])
            self._take(tag, value)

    def collected(self, tag: str) -> list[float]:
        """Return the buffer of ``tag``: what came since the last flush."""
        return self._metrics.buffer(tag)

    def record_at(self, path: str, value: float | Tensor) -> None:
        """Append a value to a metric of a sub-graph; the last segment is any name.

        Raises:
            GraphPathError: what stands before the last dot is not a graph.
        """
        owner, name = self._owner(path)
        owner.record_scalar(name, value)

    def collect_at(self, *paths: Names) -> None:
        """Do what ``collect`` does for tags anywhere in the tree; each value goes to its graph's observer.

        Raises:
            GraphPathError: a path does not lead to a tag, or to one hidden from here.
        """
        targets = [(path, part_at(self._graph, path)) for path in _flat(paths)]
        for path, target in targets:
            if target.kind is not PathKind.TAG:
                raise GraphPathError(
                    f"collect_at: path {path!r} names a {target.kind}, expected a tag",
                    path=path,
                    segment=target.segment,
                )
        for _, target in targets:
            observer_of(target.owner).collect(target.segment)

    # one epoch

    def flush(self, *tags: Names) -> None:
        """Move the mean of each buffer to its history: here those named or all, in labelled children all."""
        self.flush_local(*tags)
        for child in self._graph.tree_children().values():
            observer_of(child).flush()

    def end_epoch(self) -> None:
        """Do what ``flush`` and ``flush_timings`` do."""
        self.flush_local()
        self._timings.flush()
        for child in self._graph.tree_children().values():
            observer_of(child).end_epoch()

    def flush_local(self, *tags: Names) -> None:
        """Do what ``flush`` does, here only."""
        self._flush_count += self._metrics.flush(self._expanded(tags) if tags else None)

    def flush_count(self) -> int:
        """Return how many flushes moved something."""
        return self._flush_count

    def flush_times_s(self) -> list[float]:
        """Return when those flushes happened, in seconds since the first recorded value."""
        return self._metrics.flush_times_s()

    def latest_metrics(self) -> list[tuple[str, float]]:
        """Return ``(name, newest value)``: own ones as first recorded, then children's as ``label.name``."""
        found = self.latest_metrics_local()
        for label, child in self._graph.tree_children().items():
            found += [(f"{label}.{name}", value) for name, value in observer_of(child).latest_metrics()]
        return found

    def latest_metrics_local(self) -> list[tuple[str, float]]:
        """Return ``(name, newest value)`` of this graph alone."""
        return [(name, self.trend(name).latest()) for name in self._metrics.names()]

    def trend(self, tag: str) -> Trend:
        """Return the history of a metric; empty when it has none."""
        return _trend(self._metrics, tag)

    def trends(self, *tags: Names) -> TrendGroup:
        """Return the histories of several metrics; of all when none is named."""
        names = self._expanded(tags) if tags else self._metrics.names()
        return TrendGroup([self.trend(name) for name in names])

    def trend_at(self, path: str) -> Trend:
        """Return the history of a metric of a sub-graph.

        Raises:
            GraphPathError: what stands before the last dot is not a graph.
        """
        owner, name = self._owner(path)
        return owner.trend(name)

    def reset_trend(self, *tags: Names) -> None:
        """Forget histories; all when none is named."""
        self._metrics.reset(self._expanded(tags) if tags else None)

    def eta(self, total: int) -> float:
        """Return the seconds until ``total`` flushes at the mean pace so far; 0.0 before the first."""
        done = self._flush_count
        return self._metrics.elapsed_s() / done * max(total - done, 0) if done else 0.0

    # timings

    def enable_profiling(self) -> None:
        """Time every node of the graph from the next call on."""
        if self._profiler is None:
            self._profiler = Profiler(self._graph)

    def disable_profiling(self) -> None:
        """Stop timing; the timings collected so far stay."""
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None

    def profiling(self) -> bool:
        """Return whether nodes are timed."""
        return self._profiler is not None

    def profile(self) -> Profile | None:
        """Return where the time of the last call went, or None when none was timed."""
        return None if self._profiler is None else self._profiler.profile()

    def timing(self, tag: str) -> float:
        """Return the seconds of a node in the last call, by tag, child name or id; 0.0 when not timed."""
        profile = self.profile()
        return 0.0 if profile is None else profile.seconds(tag)

    def collect_timings(self) -> None:
        """Append the timings of the last call to their buffers: each node, and ``total``."""
        profile = self.profile()
        if profile is not None:
            for node in profile.nodes:
                self._timings.add(node.key, node.seconds)
            self._timings.add("total", profile.total_s)

    def flush_timings(self) -> None:
        """Move the mean of each timing to its history, here and in labelled children."""
        self._timings.flush()
        for child in self._graph.tree_children().values():
            observer_of(child).flush_timings()

    def timing_trend(self, tag: str) -> Trend:
        """Return the history of a node's seconds, by tag or else by node id; ``total`` for the call."""
        return _trend(self._timings, tag)

    def timing_trends(self, *tags: Names) -> TrendGroup:
        """Return the histories of several timings; of all when none is named."""
        names = self._expanded(tags) if tags else self._timings.names()
        return TrendGroup([self.timing_trend(name) for name in names])

    def reset_timing_trend(self, *tags: Names) -> None:
        """Forget the histories of timings; all when none is named."""
        self._timings.reset(self._expanded(tags) if tags else None)

    # files

    def export_trends(self, path: str | PathLike[str], *tags: Names) -> None:
        """Write histories as CSV: ``epoch`` from 1, then a column for each metric.

        Raises:
            GraphError: there is nothing to write.
        """
        export.write_csv(path, self.trends(*tags))

    def export_timing_trends(self, path: str | PathLike[str], *tags: Names) -> None:
        """Write the histories of timings, in seconds, as CSV."""
        export.write_csv(path, self.timing_trends(*tags))

    def plot_html(self, path: str | PathLike[str], *tags: Names) -> None:
        """Write a page with the curves of the histories; it needs nothing else to be seen.

        Raises:
            GraphError: there is nothing to draw.
        """
        export.write_html(path, self._graph.label or "Metrics", self.trends(*tags))

    def plot_timings_html(self, path: str | PathLike[str], *tags: Names) -> None:
        """Write a page with the curves of the timings, in seconds."""
        title = f"{self._graph.label}: timings" if self._graph.label else "Timings"
        export.write_html(path, title, self.timing_trends(*tags))

    def write_log(self, path: str | PathLike[str], total: int, *tags: Names) -> None:
        """Write one line for each epoch: its metrics, how long it took, and how long the rest would.

        Raises:
            GraphError: there is nothing to write.
        """
        export.write_log(path, self.trends(*tags), self.flush_times_s(), total)

    # names

    def _expanded(self, names: Sequence[Names]) -> list[str]:
        groups = self._graph.plan.groups
        return [member for name in _flat(names) for member in groups.get(name, (name,))]

    def _values(self, tags: Sequence[Names], verb: str) -> list[tuple[str, Any]]:
        """Return the present values of tags, those without one left out."""
        names = self._expanded(tags)
        known = self._graph.plan.tags
        for name in names:
            if name not in known:
                raise GraphError(f"{verb}: the graph has no tag {name!r}{nearest(name, known)}", tag=name)
        self._graph.watch(*names)
        found = [(name, self._graph.tagged(name)) for name in names]
        for name, value in found:
            if value is not None and not isinstance(value, Tensor | int | float):
                raise GraphError(
                    f"{verb}: tag {name!r} holds a {type(value).__name__}, expected a tensor or a number",
                    tag=name,
                )
        return [(name, value) for name, value in found if value is not None]

    def _owner(self, path: str) -> tuple[Observer, str]:
        prefix, _, name = path.rpartition(".")
        if not name:
            raise GraphPathError(f"path {path!r} has an empty last segment", path=path, segment=name)
        return (observer_of(subgraph(self._graph, prefix)) if prefix else self), name


def observer_of(graph: GraphCore) -> Observer:
    """Return the observer of a graph, made when first asked for."""
    if graph._observer is None:
        graph._observer = Observer(graph)
    return graph._observer


def _trend(series: Series, name: str) -> Trend:
    history = series.history(name)
    return Trend(history.values(), name, history)


def _flat(names: Iterable[Any]) -> list[str]:
    return [one for name in names for one in ([name] if isinstance(name, str) else name)]
