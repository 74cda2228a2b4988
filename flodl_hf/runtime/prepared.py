"""The graph that predicts: a shadow of the model's graph, fused and cast, remade when the model changes.

A shadow is a copy of the modules that shares every parameter and buffer, so a model keeps its own graph, with
its own names, for training, export and parity, while prediction runs another arrangement of the same weights.

Modules that have a better form for prediction offer ``fused() -> nn.Module | None``; what it returns takes
their place in the shadow. Then weights are cast, and on a processor ``flodl_hf.runtime.cpu.prepare_cpu``
rearranges what is left.

A change of the model is noticed by identity, version counter and address of each tensor, and by the modules
that hold them. Code that writes weights behind torch's back (a replayed CUDA graph does) has to say so, by
``torch.autograd.graph.increment_version(parameters)`` or by `forget`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flodl_hf.runtime.precision import Precision, check_precision, dtype_of

if TYPE_CHECKING:
    from flodl.graph import Graph
    from flodl_hf.model import EncoderModel

__all__ = ["Prepared", "Stamp", "forget", "prepared", "shadow"]

# A user compares two precisions at most; each may hold a copy of the weights.
_KEPT = 2
_PLACE = "_prepared_graphs"


def shadow(graph: Graph) -> Graph:
    """Return a copy of the graph's modules, in evaluation mode, that shares every parameter and buffer."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors(graph)}
    found = copy.deepcopy(graph, memo)
    found.eval()
    return found


def _tensors(graph: nn.Module) -> Iterator[Tensor]:
    for module in graph.modules():
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def prepared(model: EncoderModel, precision: Precision | None = None) -> Graph:
    """Return the graph that predicts for the model; made once and kept until the model changes.

    Args:
        model: whose weights.
        precision: see `Precision`; None fuses and keeps the weights' own dtype.

    Raises:
        PredictError: the precision is unknown or the device lacks it.
    """
    return holder(model).get(model.graph, precision).graph


def forget(model: EncoderModel) -> None:
    """Drop what was prepared, after weights were written in a way that torch does not count."""
    model.__dict__.pop(_PLACE, None)


class Stamp:
    """What a graph looked like: which modules, which tensors, where they lie and how often they were written.

    Args:
        graph: the graph to remember.
    """

    def __init__(self, graph: nn.Module) -> None:
        modules = list(graph.modules())
        self._children = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        self._tables = [table for m in modules for table in (m._parameters, m._buffers) if table]
        self._held = list(self._now())
        self._tensors = [tensor for tensor in self._held if tensor is not None]
        # Tensors made in inference mode count no versions; a write to one of them is not seen.
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._counted]
        self._places = [tensor.data_ptr() for tensor in self._tensors]
        self._ways = [(m, m.__dict__["implementation"]) for m in modules if "implementation" in m.__dict__]

    def _now(self) -> Iterator[Tensor | None]:
        return chain.from_iterable(map(dict.values, self._tables))  # type: ignore[arg-type]

    def holds(self) -> bool:
        """Return whether nothing has changed since; takes microseconds, because every prediction asks."""
        return (
            all(map(is_, chain(self._now(), (None,)), chain(self._held, (None,))))
            and [tensor._version for tensor in self._counted] == self._versions
            and [tensor.data_ptr() for tensor in self._tensors] == self._places
            and all(tuple(table.values()) == seen for table, seen in self._children)
            and all(module.__dict__.get("implementation") == seen for module, seen in self._ways)
        )


class Prepared:
    """A prepared graph and what it was made of.

    Attributes:
        graph: the shadow, fused and cast.
        precision: what was asked for.
        stamp: the source when it was made.
        recorded: what the engine keeps with it: captured passes, staging buffers; gone when it is.
    """

    def __init__(self, source: Graph, precision: Precision | None) -> None:
        self.precision = precision
        self.stamp = Stamp(source)
        self.graph = _make(source, precision)
        self.recorded: dict[Any, Any] = {}


class _Holder:
    """The prepared graphs of one model, safe to ask from several threads; never copied nor pickled with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Precision | None, Prepared] = {}

    def get(self, graph: Graph, precision: Precision | None) -> Prepared:
        found = self._made.get(precision)
        if found is not None and found.stamp.holds():
            return found
        with self._lock:
            found = self._made.get(precision)
            if found is not None and found.stamp.holds():
                return found
            # What is stale goes first: there may be no room for two copies.
            self._made.pop(precision, None)
            while len(self._made) >= _KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[precision] = made = Prepared(graph, precision)
            return made

    def __deepcopy__(self, memo: Any) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Holder, ()


def holder(model: EncoderModel) -> _Holder:
    """Return the place where a model keeps its prepared graphs."""
    return model.__dict__.setdefault(_PLACE, _Holder())


def _make(source: Graph, precision: Precision | None) -> Graph:
    device = next(source.parameters()).device
    check_precision(precision, device)
    graph = shadow(source)
    if precision == "exact":
        return graph
    _fuse(graph)
    dtype = dtype_of(precision)
    if dtype is not None:
        _cast(graph, dtype)
    if device.type == "cpu" and find_spec("flodl_hf.runtime.cpu") is not None:
        from flodl_hf.runtime.cpu import prepare_cpu  # pyright: ignore[reportMissingImports]

        prepare_cpu(graph, precision)
    return graph


def _fuse(graph: nn.Module) -> None:
    better: dict[int, nn.Module | None] = {}
    for module in list(graph.modules()):
        for name, child in list(module._modules.items()):
            if child is None or not hasattr(child, "fused"):
                continue
            if id(child) not in better:
                better[id(child)] = child.fused()  # type: ignore[operator]
            found = better[id(child)]
            if found is not None:
                found.eval()
                setattr(module, name, found)


def _cast(graph: nn.Module, dtype: torch.dtype) -> None:
    """Give the shadow parameters of another dtype; tied ones stay tied, and the source keeps its own."""
    cast: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module in graph.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                    continue
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                module._parameters[name] = cast[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)
