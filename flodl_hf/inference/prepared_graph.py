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
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, is_, methodcaller
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
    return holder(model).get(model.graph, precision).graph


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
        self._children = self._below()
        self._tables = [table for m in modules for table in (m._parameters, m._buffers) if table]
        self._held = list(self._now())
        self.tensors = [tensor for tensor in self._held if tensor is not None]
        # Tensors made in inference mode count no versions; a write to one of them is not seen.
        self._counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._places = list(map(_address, self.tensors))
        self._numbers = [cell for tensor in self.tensors if numbers and (cell := _middle(tensor)) is not None]
        self._values = list(map(_value, self._numbers))
        self._chosen = [m.__dict__ for m in modules if "implementation" in m.__dict__]
        self._ways = list(map(_way, self._chosen))

    def _now(self) -> Iterator[Tensor | None]:
        return chain.from_iterable(map(dict.values, self._tables))  # type: ignore[arg-type]

    def _below(self) -> list[tuple[nn.Module | None, ...]]:
        return list(map(tuple, map(dict.values, self._branches)))  # type: ignore[arg-type]

    def holds(self) -> bool:
        """Return whether nothing has changed since; takes microseconds, because every prediction calls it."""
        return (
            all(map(is_, chain(self._now(), (None,)), chain(self._held, (None,))))
            and list(map(_version, self._counted)) == self._versions
            and list(map(_address, self.tensors)) == self._places
            and list(map(_value, self._numbers)) == self._values
            and self._below() == self._children
            and list(map(_way, self._chosen)) == self._ways
        )


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


class _Holder:
    """The prepared graphs of one model, thread-safe; never copied nor pickled with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[Precision | None, torch.device | None, bool], Prepared] = {}

    def get(
        self,
        graph: Graph,
        precision: Precision | None,
        device: torch.device | None = None,
        *,
        unchecked: bool = False,
        on_disk: OnDisk | None = None,
    ) -> Prepared:
        """Return the prepared graph for a device; None is where the graph is.

        ``unchecked`` may return a stale one, if it can be run; the caller checks its stamp before results are used.
        """
        key = (precision, device, on_disk is not None)
        found = self._made.get(key)
        if unchecked and found is not None and found.sound():
            return found
        if found is not None and found.stamp.holds():
            return found
        with self._lock:
            found = self._made.get(key)
            if found is not None and found.stamp.holds():
                return found
            # Stale or long unused entries are evicted first: memory may be too small for more copies.
            recent = [precision, *dict.fromkeys(other for other, *_ in reversed(self._made) if other != precision)][
                :_KEPT
            ]
            self._made = {k: made for k, made in self._made.items() if k[0] in recent and made.stamp.holds()}
            home = next(graph.parameters()).device
            self._made[key] = made = Prepared(graph, precision, device or home, on_disk)
            return made

    def __deepcopy__(self, memo: Any) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Holder, ()


def holder(model: GraphModel) -> _Holder:
    """Return the place where a model keeps its prepared graphs."""
    found = model.__dict__.get(_PLACE)
    return found if found is not None else model.__dict__.setdefault(_PLACE, _Holder())


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
