"""Layers one after another from disk: each is read, computes all batches, and is let go, while the next is on its way.

Decides how passes of many batches are computed together: the part before the layers, then layer by layer all of
them, then what follows. A layer is made ready as in memory (`flodl_hf.inference.module_copies`), so its results are
bit-equal. Embeddings, pooler and head stay in memory; at most two layers do. The computation of a pass is
unchanged: it is stopped where the layers begin, and run again with their result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl.memory import available_memory
from flodl_hf.errors import PredictError
from flodl_hf.inference.module_copies import arranged, convert, shadow, tensors_of
from flodl_hf.inference.options import Precision
from flodl_hf.nn.backends.choose import alone_last, finish_first_tokens
from flodl_hf.nn.encoder import Repeated
from flodl_hf.nn.layout import Layout

if TYPE_CHECKING:
    from flodl_hf.checkpoints.weights.loaded import OnDisk

# States of all batches computed together use at most this share of free memory, and may use this much.
SHARE = 4
LEAST_BYTES = 256 << 20


class Given(NamedTuple):
    """Arguments of a pass, without the graph.

    Attributes:
        ids: token ids, as the layout has them.
        types: token types alike, or None.
        layout: positions of the tokens.
        at: chosen tokens, or None.
    """

    ids: Tensor
    types: Tensor | None
    layout: Layout
    at: Tensor | None


class _Step(NamedTuple):
    """One layer, and the names of the shared arguments that it takes."""

    layer: nn.Module
    takes: dict[str, str]


class _Reached(Exception):
    """Raised when a pass reaches the layers; contains the states and the shared arguments."""

    def __init__(self, states: Tensor, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.states, self.kwargs = states, kwargs


class _Between(nn.Module):
    """Replaces the layers: stops a pass there, or returns their result to it."""

    def __init__(self) -> None:
        super().__init__()
        self.result: Tensor | None = None

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Return the result of the layers."""
        if self.result is None:
            raise _Reached(hidden, kwargs)
        return self.result


class Layered:
    """The layers of a graph that predicts, read one after another; safe to use from several threads.

    Args:
        graph: a shadow, from which the layers are taken.
        precision: as they are to compute.
        device: where.
        on_disk: what shows the weights.

    Raises:
        PredictError: the layers are no chain.
    """

    def __init__(self, graph: Graph, precision: Precision | None, device: torch.device, on_disk: OnDisk) -> None:
        encoder = graph.get_submodule("encoder")
        layers = encoder.get_submodule("layers")
        steps = _steps_of(layers)
        if isinstance(steps, str):
            raise PredictError(f"weights='disk': {steps}. Expected a chain of layers; load with weights='memory'.")
        # A layer that is applied several times in a row is read once for all of them.
        self._turns = [list(turn) for _, turn in groupby(steps, key=lambda step: id(step.layer))]
        self._last = alone_last(graph, layers)
        self._graph, self._between = graph, _Between()
        encoder.layers = self._between
        self._precision: Precision | None = precision
        self._device, self._on_disk = device, on_disk
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()

    def results(self, passes: Iterable[tuple[Callable[..., Tensor], Given]]) -> Iterator[Tensor]:
        """Yield the result of each pass, in order.

        Args:
            passes: passes with their arguments; consumed as memory for their states becomes free.
        """
        with self._lock, ThreadPoolExecutor(1, thread_name_prefix="flodl-hf-layers") as ahead:
            room = max(LEAST_BYTES, (available_memory(self._device) or 0) // SHARE)
            coming = iter(passes)
            while group := self._opened(coming, room):
                self._through(group, ahead)
                while group:
                    work, given, states, _ = group.pop(0)
                    self._between.result = states
                    try:
                        yield work(self._graph, *given)
                    finally:
                        self._between.result = None

    def _opened(self, coming: Iterator[tuple[Callable[..., Tensor], Given]], room: int) -> list[list[Any]]:
        """Return passes stopped at the layers, with states and arguments, until their states fill the memory limit."""
        group: list[list[Any]] = []
        for work, given in coming:
            try:
                work(self._graph, *given)
            except _Reached as reached:
                group.append([work, given, reached.states, reached.kwargs])
                values = [v for v in reached.kwargs.values() if isinstance(v, Tensor)]
                room -= sum(tensor.nbytes for tensor in (reached.states, *values))
            if room <= 0:
                break
        return group

    def _through(self, group: list[list[Any]], ahead: ThreadPoolExecutor) -> None:
        """Take the states of a group through all layers, in place."""
        coming = ahead.submit(self._read, self._turns[0][0].layer)
        for place, turn in enumerate(self._turns):
            layer = coming.result()
            if self._side is not None:
                for tensor in tensors_of(layer):
                    tensor.record_stream(torch.cuda.current_stream(self._device))
            if place + 1 < len(self._turns):
                coming = ahead.submit(self._read, self._turns[place + 1][0].layer)
            if turn[0].layer is self._last:
                finish_first_tokens(self._graph, layer)  # type: ignore[arg-type]
            for step in turn:
                for one in group:
                    one[2] = layer(one[2], **{name: one[3][value] for name, value in step.takes.items()})
            del layer

    def _read(self, source: nn.Module) -> nn.Module:
        """Return a layer ready to compute, its weights in memory; in another thread than the one that computes."""
        with torch.no_grad(), torch.cuda.stream(self._side) if self._side is not None else nullcontext():
            # As in a whole graph, where all modules that compute states are at ``encoder``.
            holder = nn.ModuleDict({"encoder": shadow(source)})
            convert(holder, self._on_disk.copied)
            arranged(holder, self._precision, self._device, stays=False)
        if self._side is not None:
            self._side.synchronize()
        return holder["encoder"]


def _steps_of(layers: nn.Module) -> list[_Step] | str:
    """Return the layers in order; if they cannot be computed one by one, the reason as half a sentence."""
    if isinstance(layers, Repeated):
        return [_Step(layers[block], {"layout": "layout"}) for block in layers.schedule]
    if not isinstance(layers, Graph):
        return f"its layers are a {type(layers).__name__}, not a chain of layers"
    plan, children = layers.plan, dict(layers.named_children())
    names = {given.node: given.name for given in plan.inputs[1:]}
    steps, before = [], plan.inputs[0].node
    for index in plan.order:
        node = plan.nodes[index]
        if node.role in ("entry", "input"):
            continue
        known = all(reference.source in names for reference in node.references)
        if node.inputs != (before,) or node.role not in ("identity", "module") or not known:
            return f"its layer {node.name or node.id} reads more than the one before it"
        before = index
        if node.role == "module":
            takes = {reference.keyword: names[reference.source] for reference in node.references}
            steps.append(_Step(children[node.name], takes))
    if plan.memory or plan.output != before:
        return "more than the last of its layers is read"
    return steps
