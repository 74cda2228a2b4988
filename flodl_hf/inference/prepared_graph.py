"""The graph that predicts: a shadow of the model's graph, fused and cast, remade when the model changes.

A shadow is a copy of the modules that shares every parameter and buffer, so a model keeps its own graph, with
its own names, for training, export and parity, while prediction runs another arrangement of the same weights.

Weights are cast, and each layer is run by the device's table of operations (`flodl_hf.nn.backends`). Of weights that
stay on disk only what surrounds the layers is made ready here; layers come and go
(`flodl_hf.inference.layers_from_disk`).

A change of the model is noticed by identity, version counter and address of each tensor, and by the modules
that own them; on the CPU also by one number of each tensor, because writes to ``parameter.data`` or by NumPy
do not increase the version. Code that writes weights without torch's knowledge (a replayed CUDA graph) has to call
``torch.autograd.graph.increment_version(parameters)`` or `forget`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.inference.cpu import keeps_kernels
from flodl_hf.inference.layers_from_disk import Layered
from flodl_hf.inference.module_copies import arranged, fallback_reasons, shadow, tensors_of
from flodl_hf.inference.options import Precision

if TYPE_CHECKING:
    from flodl_hf.checkpoints.weights.loaded import OnDisk
    from flodl_hf.inference.graph_model import GraphModel

# A user compares two precisions at most; each may have a copy of the weights.
_KEPT = 2
_PLACE = "_prepared_graphs"


def prepared(model: GraphModel, precision: Precision | None = None) -> Graph:
    """Return the graph that predicts for the model; made once and kept until the model changes.

    Args:
        model: the model with the weights.
        precision: see `Precision`; None fuses and keeps the weights' own dtype.

    Raises:
        PredictError: the precision is unknown or the device lacks it.
    """
    return prepared_for(model, precision).graph


def forget(model: GraphModel) -> None:
    """Drop the prepared graphs, after weights were written in a way that torch does not count."""
    model.__dict__.pop(_PLACE, None)


class Stamp:
    """Snapshot of a graph: its modules and tensors, their addresses and version counters.

    Args:
        graph: the graph to remember.
        numbers: look at the weights' memory too; not where looking would read files.

    Attributes:
        tensors: its parameters and buffers.
    """

    def __init__(self, graph: nn.Module, *, numbers: bool = True) -> None:
        modules = list(graph.modules())
        self._branches = [m._modules for m in modules if m._modules]
        self._tables = [table for m in modules for table in (m._parameters, m._buffers) if table]
        self.tensors = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        # Tensors made in inference mode count no versions; a write to one of them is not seen.
        self._counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._numbers = [cell for tensor in self.tensors if numbers and (cell := _middle(tensor)) is not None]
        self._chosen = [m.__dict__ for m in modules if "implementation" in m.__dict__]
        self._state = self._now()

    def _now(self) -> list[list[Any]]:
        return [
            # Of kept tensors, so that no other tensor has the id of one.
            list(map(id, chain.from_iterable(map(dict.values, self._tables)))),  # type: ignore[arg-type]
            list(map(_version, self._counted)),
            list(map(_address, self.tensors)),
            list(map(_value, self._numbers)),
            list(map(tuple, map(dict.values, self._branches))),  # type: ignore[arg-type]
            list(map(_way, self._chosen)),
        ]

    def holds(self) -> bool:
        """Return whether nothing has changed since; takes microseconds, because every prediction calls it."""
        return self._now() == self._state


def _middle(tensor: Tensor) -> np.ndarray | None:
    """Return the bytes of one number of a tensor, in place; None for memory other than the CPU's.

    Most writes change every number. Not the first, which may be in a row that is never trained. The memory stays while
    it may be read, so that a thread which puts other weights there does no harm.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    number = tensor.numel() // 2 if tensor.is_contiguous() else 0
    return tensor.detach().as_strided((1,), (1,), tensor.storage_offset() + number).view(torch.uint8).numpy()


_value: Callable[[np.ndarray], bytes] = np.ndarray.tobytes
_address = Tensor.data_ptr
_version: Callable[[Tensor], int] = attrgetter("_version")
_way: Callable[[dict[str, Any]], Any] = methodcaller("get", "implementation")


class Prepared:
    """A prepared graph and its source.

    Attributes:
        graph: the shadow, fused and cast.
        device: where it is.
        lacking: why torch's operations run a layer, by its path, where another table does not.
        bucketed: whether batches are brought to a few shapes, which a device's kernels must be trusted with.
        rounded: whether counts of rows are rounded up on a processor, because kernels are kept for each.
        precision: the requested precision.
        layered: runs its layers where they are read from disk for each call; None where they are in memory.
        stamp: the source when it was made.
        recorded: the engine's state for it: captured passes, staging buffers; dropped with it.
    """

    def __init__(
        self, source: Graph, precision: Precision | None, device: torch.device, on_disk: OnDisk | None = None
    ) -> None:
        self.precision = precision
        self.stamp = Stamp(source, numbers=on_disk is None)
        self.graph = shadow(source)
        self.layered = None if on_disk is None else Layered(self.graph, precision, device, on_disk)
        self.lacking = arranged(self.graph, precision, device)
        if self.lacking:
            warnings.warn(fallback_reasons(self.lacking), stacklevel=2)
        self.device = device
        like = next(self.graph.parameters())
        self.bucketed = device.type == "cuda" and precision != "exact" and _trusts_buckets(source, like)
        self.rounded = device.type == "cpu" and precision != "exact" and keeps_kernels(self.graph, precision)
        self.recorded: dict[Any, Any] = {}
        read = {tensor.data_ptr() for tensor in tensors_of(self.graph)}
        self._lent = [tensor for tensor in self.stamp.tensors if tensor.data_ptr() in read]
        self._places = list(map(_address, self._lent))

    def sound(self) -> bool:
        """Return whether all memory that the graph reads is still its own, although its contents may be stale.

        Much cheaper than `Stamp.holds` if weights were cast, and enough to run the graph safely.
        """
        return list(map(_address, self._lent)) == self._places


class _Made:
    """The prepared graphs of one model; never copied nor pickled with it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.graphs: dict[tuple[Precision | None, torch.device | None, bool], Prepared] = {}

    def __deepcopy__(self, memo: Any) -> _Made:
        return _Made()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Made, ()


def prepared_for(
    model: GraphModel,
    precision: Precision | None,
    device: torch.device | None = None,
    *,
    unchecked: bool = False,
    on_disk: OnDisk | None = None,
) -> Prepared:
    """Return the prepared graph of a model for a device; safe to call from several threads.

    Args:
        model: the model.
        precision: see `Precision`.
        device: None is where the graph is.
        unchecked: it may be stale, if it can be run; the caller checks its stamp before results are used.
        on_disk: what shows the weights, where they stay on disk.
    """
    made: _Made = model.__dict__.get(_PLACE) or model.__dict__.setdefault(_PLACE, _Made())
    key = (precision, device, on_disk is not None)
    found = made.graphs.get(key)
    if found is not None and ((unchecked and found.sound()) or found.stamp.holds()):
        return found
    with made.lock:
        found = made.graphs.get(key)
        if found is not None and found.stamp.holds():
            return found
        # Stale or long unused entries are evicted first: memory may be too small for more copies.
        others = dict.fromkeys(other for other, *_ in reversed(made.graphs) if other != precision)
        recent = [precision, *others][:_KEPT]
        made.graphs = {k: one for k, one in made.graphs.items() if k[0] in recent and one.stamp.holds()}
        home = next(model.graph.parameters()).device
        made.graphs[key] = found = Prepared(model.graph, precision, device or home, on_disk)
        return found


def _trusts_buckets(graph: Graph, like: Tensor | None = None) -> bool:
    """Return whether a device attends in buckets as it does without: kernels that no other way of running needs.

    Args:
        graph: the graph with the layers.
        like: a tensor where they run, in the dtype that they compute in; None for one of the graph's own.
    """
    from flodl_hf.nn.attention import SelfAttention
    from flodl_hf.nn.backends.choose import layers_of
    from flodl_hf.nn.backends.self_tests import buckets
    from flodl_hf.nn.kernels.self_test import trusted

    first = next(graph.parameters()) if like is None else like
    attentions = [layer.attention for _, layer in layers_of(graph) if type(layer.attention) is SelfAttention]
    sizes = {(part.num_heads, part.query.in_features // part.num_heads) for part in attentions}
    return all(trusted("buckets", first.device, first.dtype, each, buckets) for each in sizes)
