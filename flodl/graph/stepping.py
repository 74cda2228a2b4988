"""The graphs inside a model that a trainer runs: steps and epochs, and values kept between calls.

A graph with a forward reference reads a value of its previous call. The trainer detaches such values before each
step, isolates them during evaluation, and stores them in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from flodl.graph.core import nearest_graphs
from flodl.graph.graph import Graph


class GraphSteps:
    """The graphs of one model.

    Args:
        model: a graph, or a module with or without graphs inside.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refresh()

    def refresh(self) -> None:
        """Find the graphs again after the model or watched values changed."""
        self._graphs = [graph for _, graph in nearest_graphs(self.model) if isinstance(graph, Graph)]
        self._keeping = [graph for graph in self._graphs if _keeps(graph)]

    @property
    def remembers(self) -> bool:
        """Whether a call depends on the previous one."""
        return bool(self._stateful())

    def cut(self) -> None:
        """Detach the kept values."""
        for graph in self._keeping:
            graph.detach_state()

    def end_step(self) -> None:
        """End a step in every graph."""
        for graph in self._graphs:
            if graph in self._keeping or (graph._observer is not None and graph._observer.profiling()):
                graph.end_step()
            else:
                graph._step_count += 1

    def end_epoch(self) -> None:
        """End an epoch in every graph."""
        for graph in self._graphs:
            graph.end_epoch()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Start with empty kept values, and restore the previous ones afterwards."""
        before = [(graph, list(graph._memory)) for graph in self._stateful().values()]
        for graph, memory in before:
            graph._memory[:] = [None] * len(memory)
        try:
            yield
        finally:
            for graph, memory in before:
                graph._memory[:] = memory

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the kept values with their names."""
        return {
            f"{name}/{i}": value.detach().clone()
            for name, graph in self._stateful().items()
            for i, value in enumerate(graph._memory)
            if isinstance(value, Tensor)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`, on the devices of the graphs' parameters."""
        for name, graph in self._stateful().items():
            device = next((p.device for p in graph.parameters()), None)
            for i in range(len(graph._memory)):
                value = tensors.get(f"{name}/{i}")
                graph._memory[i] = None if value is None else value.clone().to(device)

    def _stateful(self) -> dict[str, Graph]:
        """Return the graphs with kept values by module path."""
        modules = self.model.named_modules()
        return {name: module for name, module in modules if isinstance(module, Graph) and module.has_state()}


def _keeps(module: nn.Module) -> bool:
    """Return whether a module, or a module inside it, keeps values from one call to the next."""
    # Watched values of tags are detached when they are collected.
    return any(
        part.has_state() if isinstance(part, Graph) else callable(getattr(type(part), "detach_state", None))
        for part in module.modules()
    )
