"""Graphs inside of a model that a trainer runs: their steps and epochs are ended, what they remember is looked after.

A graph with a forward reference reads what its last call left. The history of that is cut before each call, since the
step that made it is over; evaluation has a memory of its own; and a checkpoint holds the memory too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from flodl.graph.graph import Graph
from flodl.graph.protocol import offered

__all__ = ["GraphSteps"]


class GraphSteps:
    """The graphs of one model.

    Args:
        model: a graph, or a module that has graphs inside; without any nothing is done here.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._graphs: list[Graph] = []
        self._keeping: list[Graph] = []
        self.refresh()

    def refresh(self) -> None:
        """Note that the model, or what is watched in it, may have changed."""
        self._graphs = list(_outermost(self.model))
        self._keeping = [graph for graph in self._graphs if _keeps(graph)]

    @property
    def remembers(self) -> bool:
        """Whether a call depends on the one before."""
        return any(part.has_state() for graph in self._graphs for part in graph.modules() if isinstance(part, Graph))

    def cut(self) -> None:
        """Cut the history of what is remembered; the values stay."""
        for graph in self._keeping:
            graph.detach_state()

    def end_step(self) -> None:
        """Close a step in every graph."""
        for graph in self._graphs:
            if graph in self._keeping or (graph._observer is not None and graph._observer.profiling()):
                graph.end_step()
            else:
                graph._step_count += 1

    def end_epoch(self) -> None:
        """Close an epoch in every graph."""
        for graph in self._graphs:
            graph.end_epoch()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Have graphs remember nothing at first, and what they remembered before afterwards."""
        held = [(graph, list(graph._memory)) for _, graph in self._inside()]
        for graph, memory in held:
            graph._memory[:] = [None] * len(memory)
        try:
            yield
        finally:
            for graph, memory in held:
                graph._memory[:] = memory

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of what is remembered, by place."""
        return {
            f"{name}/{i}": value.detach().clone()
            for name, graph in self._inside()
            for i, value in enumerate(graph._memory)
            if isinstance(value, Tensor)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Remember what `tensors` gave, on the devices of the graphs' parameters."""
        for name, graph in self._inside():
            place = next((p.device for p in graph.parameters()), None)
            for i in range(len(graph._memory)):
                value = tensors.get(f"{name}/{i}")
                graph._memory[i] = None if value is None else value.clone().to(place)

    def _inside(self) -> Iterator[tuple[str, Graph]]:
        for name, module in self.model.named_modules():
            if isinstance(module, Graph) and module.has_state():
                yield name, module


def _outermost(module: nn.Module) -> Iterator[Graph]:
    if isinstance(module, Graph):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _keeps(module: nn.Module) -> bool:
    """Return whether a module, or one inside of it, keeps values from one call to the next."""
    # Values of watched tags lose their history where they are collected.
    own = module.has_state() if isinstance(module, Graph) else offered(module, "detach_state") is not None
    return own or any(_keeps(child) for child in module._modules.values() if child is not None)
