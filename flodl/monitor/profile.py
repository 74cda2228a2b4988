"""Where the time of a forward pass goes, node by node.

Nodes are timed by hooks on the graph's child modules: CUDA events on the current stream for work on a
CUDA device, the host clock otherwise. Additions and merges are part of the generated forward pass and
hold no module; their time is in the total only.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flodl.graph.core import GraphCore
from flodl.nested import leaves

__all__ = ["LevelTime", "NodeTime", "Profile", "Profiler"]


@dataclass(frozen=True)
class NodeTime:
    """The time of one node in one call.

    Attributes:
        id: node id.
        name: name of the child module.
        tags: tags of its output.
        level: distance from the inputs.
        seconds: time spent in the module, all calls together.
    """

    id: str
    name: str
    tags: tuple[str, ...]
    level: int
    seconds: float

    @property
    def key(self) -> str:
        """The first tag, else the node id: the name under which timings are collected."""
        return self.tags[0] if self.tags else self.id


@dataclass(frozen=True)
class LevelTime:
    """The nodes of one level together. They run one after the other.

    Attributes:
        index: the level.
        sum_s: seconds of all its nodes.
        longest_s: seconds of its slowest node: what the level would take with its nodes side by side.
        num_nodes: how many were timed.
    """

    index: int
    sum_s: float
    longest_s: float
    num_nodes: int

    @property
    def parallelism(self) -> float:
        """Sum over longest: how much faster the level could be at best with its nodes side by side."""
        return self.sum_s / self.longest_s if self.longest_s else 1.0


@dataclass(frozen=True)
class Profile:
    """The times of one call.

    Attributes:
        total_s: seconds of the whole call.
        nodes: nodes with a module that ran, in the order of the plan.
        levels: the same by level.
    """

    total_s: float
    nodes: tuple[NodeTime, ...]
    levels: tuple[LevelTime, ...]

    def seconds(self, name: str) -> float:
        """Return the seconds of a node by tag, child name or id; 0.0 when it did not run."""
        return sum(node.seconds for node in self.nodes if name in (*node.tags, node.name, node.id))


class Profiler:
    """Hooks on a graph's children, and what they measured in the last call.

    Args:
        graph: the graph to time.
    """

    def __init__(self, graph: GraphCore) -> None:
        self._graph = graph
        self._running: list[tuple[nn.Module, _Span]] = []
        self._spans: list[tuple[nn.Module, _Span]] = []
        self._total: _Span | None = None
        self._done: tuple[_Span, list[tuple[nn.Module, _Span]]] | None = None
        self._profile: Profile | None = None
        modules = {id(child): child for child in (getattr(graph, node.name) for node in graph.plan.calls)}
        self._handles = [
            graph.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            graph.register_forward_hook(self._end, with_kwargs=True),
        ]
        for module in modules.values():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def profile(self) -> Profile | None:
        """Return the times of the last finished call, waiting for the device if it is still at work."""
        if self._done is not None:
            self._profile = self._summed(*self._done)
            self._done = None
        return self._profile

    def _begin(self, graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._spans, self._running = [], []
        self._total = _Span((args, kwargs))

    def _end(self, graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._total is not None:
            self._total.stop()
            self._done = self._total, self._spans
            self._total = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A child may also be called from elsewhere; only calls inside the graph's own are timed.
        if self._total is not None:
            self._running.append((module, _Span((args, kwargs))))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # Entries above the module's own were left by an exception that somebody inside caught.
        while self._running:
            entered, span = self._running.pop()
            if entered is module:
                span.stop()
                self._spans.append((module, span))
                return

    def _summed(self, total: _Span, spans: list[tuple[nn.Module, _Span]]) -> Profile:
        spent: dict[int, list[float]] = {}
        for module, span in spans:
            spent.setdefault(id(module), []).append(span.seconds())
        calls = self._graph.plan.calls
        holders: dict[int, int] = {}
        for node in calls:
            key = id(getattr(self._graph, node.name))
            holders[key] = holders.get(key, 0) + 1
        nodes: list[NodeTime] = []
        for node in calls:
            key = id(getattr(self._graph, node.name))
            if key in spent:
                # A module that stands in several nodes is called once by each, in the order of the plan.
                seconds = sum(spent[key]) if holders[key] == 1 else spent[key].pop(0) if spent[key] else 0.0
                nodes.append(NodeTime(node.id, node.name, node.tags, node.level, seconds))
        levels = tuple(_level(index, [n.seconds for n in nodes if n.level == index]) for index in _present(nodes))
        return Profile(total.seconds(), tuple(nodes), levels)


def _present(nodes: list[NodeTime]) -> list[int]:
    return sorted({node.level for node in nodes})


def _level(index: int, seconds: list[float]) -> LevelTime:
    return LevelTime(index, sum(seconds), max(seconds), len(seconds))


class _Span:
    """A stretch of time on the device that its inputs live on."""

    def __init__(self, inputs: Any) -> None:
        device = next((t.device for t in leaves(inputs) if isinstance(t, Tensor) and t.is_cuda), None)
        self._stream = None if device is None else torch.cuda.current_stream(device)
        self._start = self._mark()
        self._stop: Any = None

    def stop(self) -> None:
        self._stop = self._mark()

    def seconds(self) -> float:
        if self._stream is None:
            return self._stop - self._start
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) / 1000

    def _mark(self) -> Any:
        if self._stream is None:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
