"""The graph that predicts: a shadow of the model's graph, fused and cast, remade when the model changes.

A shadow is a copy of the modules that shares every parameter and buffer, so a model keeps its own graph, with
its own names, for training, export and parity, while prediction runs another arrangement of the same weights.

Weights are cast, and each layer is run by the device's table of operations (`flodl_hf.tables`).

A change of the model is noticed by identity, version counter and address of each tensor, and by the modules
that hold them. Code that writes weights behind torch's back (a replayed CUDA graph does) has to say so, by
``torch.autograd.graph.increment_version(parameters)`` or by `forget`.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.adapters.lora import folded
from flodl_hf.runtime.precision import Precision, check_precision, dtype_of

if TYPE_CHECKING:
    from flodl_hf.graph_model import GraphModel

__all__ = ["Prepared", "Stamp", "forget", "prepared", "shadow"]

# A user compares two precisions at most; each may hold a copy of the weights.
_KEPT = 2
_PLACE = "_prepared_graphs"


def shadow(graph: Graph) -> Graph:
    """Return a copy of the graph's modules, in evaluation mode, that shares every parameter and buffer."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors(graph)}
    found = _double(graph, memo)
    found.eval()
    return found


def _double(module: Any, memo: dict[int, Any]) -> Any:
    """Return what ``copy.deepcopy`` does; in a quarter of its time where modules have no ways of their own."""
    if id(module) in memo:
        return memo[id(module)]
    kind = type(module)
    # A graph's way to be pickled makes its class anew of its plan, and it has that class already.
    whole = isinstance(module, Graph)
    if not whole and not _copied_by_state(kind):
        return copy.deepcopy(module, memo)
    found = memo[id(module)] = object.__new__(kind)
    state: dict[str, Any] = {}
    for name, value in (module.__reduce__()[2] if whole else module.__getstate__()).items():
        if name == "_modules":
            state[name] = {child: None if part is None else _double(part, memo) for child, part in value.items()}
        elif name in ("_parameters", "_buffers"):
            state[name] = dict(value)
        elif type(value) in _PLAIN:
            state[name] = value
        elif type(value) in _TABLES and not value:
            state[name] = type(value)()
        else:
            state[name] = copy.deepcopy(value, memo)
    found.__setstate__(state)
    return found


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_TABLES = (dict, OrderedDict, set, list)


_WAYS = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__slots__")


@cache
def _copied_by_state(kind: type) -> bool:
    """Return whether a kind of module is copied as `nn.Module` is, by no way of its own."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return not any(way in vars(base) for base in own for way in _WAYS)


def _tensors(graph: nn.Module) -> Iterator[Tensor]:
    for module in graph.modules():
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def prepared(model: GraphModel, precision: Precision | None = None) -> Graph:
    """Return the graph that predicts for the model; made once and kept until the model changes.

    Args:
        model: whose weights.
        precision: see `Precision`; None fuses and keeps the weights' own dtype.

    Raises:
        PredictError: the precision is unknown or the device lacks it.
    """
    return holder(model).get(model.graph, precision).graph


def forget(model: GraphModel) -> None:
    """Drop what was prepared, after weights were written in a way that torch does not count."""
    model.__dict__.pop(_PLACE, None)


class Stamp:
    """What a graph looked like: which modules, which tensors, where they lie and how often they were written.

    Args:
        graph: the graph to remember.

    Attributes:
        tensors: its parameters and buffers.
    """

    def __init__(self, graph: nn.Module) -> None:
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
        self._ways = [(m.__dict__, m.__dict__["implementation"]) for m in modules if "implementation" in m.__dict__]

    def _now(self) -> Iterator[Tensor | None]:
        return chain.from_iterable(map(dict.values, self._tables))  # type: ignore[arg-type]

    def _below(self) -> list[tuple[nn.Module | None, ...]]:
        return list(map(tuple, map(dict.values, self._branches)))  # type: ignore[arg-type]

    def holds(self) -> bool:
        """Return whether nothing has changed since; takes microseconds, because every prediction asks."""
        return (
            all(map(is_, chain(self._now(), (None,)), chain(self._held, (None,))))
            and list(map(_version, self._counted)) == self._versions
            and list(map(_address, self.tensors)) == self._places
            and self._below() == self._children
            and all(table.get("implementation") == seen for table, seen in self._ways)
        )


_address = Tensor.data_ptr
_version: Callable[[Tensor], int] = attrgetter("_version")


class Prepared:
    """A prepared graph and what it was made of.

    Attributes:
        graph: the shadow, fused and cast.
        device: where it is.
        lacking: why torch's operations run a layer, by its path, where another table does not.
        bucketed: whether batches are brought to a few shapes, which a device's kernels must be trusted with.
        precision: what was asked for.
        stamp: the source when it was made.
        recorded: what the engine keeps with it: captured passes, staging buffers; gone when it is.
    """

    def __init__(self, source: Graph, precision: Precision | None, device: torch.device) -> None:
        self.precision = precision
        self.stamp = Stamp(source)
        self.graph, self.lacking = _make(source, precision, device)
        self.device = device
        self.bucketed = device.type == "cuda" and precision != "exact" and _trusts_buckets(self.graph)
        self.recorded: dict[Any, Any] = {}
        read = {tensor.data_ptr() for tensor in _tensors(self.graph)}
        self._lent = [tensor for tensor in self.stamp.tensors if tensor.data_ptr() in read]
        self._places = list(map(_address, self._lent))

    def sound(self) -> bool:
        """Return whether all memory that the graph reads is still its own, though what lies there may be stale.

        Much cheaper than `Stamp.holds` where weights were cast, and enough to run the graph without harm.
        """
        return list(map(_address, self._lent)) == self._places


class _Holder:
    """The prepared graphs of one model, safe to ask from several threads; never copied nor pickled with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[Precision | None, torch.device | None], Prepared] = {}

    def get(
        self, graph: Graph, precision: Precision | None, device: torch.device | None = None, *, unchecked: bool = False
    ) -> Prepared:
        """Return the prepared graph for a device; None is where the graph is.

        ``unchecked`` may give a stale one, if it can be run; the caller asks its stamp before results are believed.
        """
        key = (precision, device)
        found = self._made.get(key)
        if unchecked and found is not None and found.sound():
            return found
        if found is not None and found.stamp.holds():
            return found
        with self._lock:
            found = self._made.get(key)
            if found is not None and found.stamp.holds():
                return found
            # What is stale or long unused goes first: there may be no room for more copies.
            recent = [precision, *dict.fromkeys(other for other, _ in reversed(self._made) if other != precision)][
                :_KEPT
            ]
            self._made = {k: made for k, made in self._made.items() if k[0] in recent and made.stamp.holds()}
            home = next(graph.parameters()).device
            self._made[key] = made = Prepared(graph, precision, device or home)
            return made

    def __deepcopy__(self, memo: Any) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Holder, ()


def holder(model: GraphModel) -> _Holder:
    """Return the place where a model keeps its prepared graphs."""
    return model.__dict__.setdefault(_PLACE, _Holder())


def _make(source: Graph, precision: Precision | None, device: torch.device) -> tuple[Graph, dict[str, str]]:
    check_precision(precision, device)
    graph = shadow(source)
    if device != next(source.parameters()).device:
        _convert(graph, lambda tensor: tensor.to(device))
    lacking: dict[str, str] = {}
    if precision == "exact":
        return graph, lacking
    # From here on products are of one weight each, whatever it was made of.
    folded(graph)
    dtype = dtype_of(precision)
    if dtype is not None:
        _convert(graph, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    if device.type == "cpu":
        from flodl_hf.runtime.cpu import prepare_cpu

        lacking = prepare_cpu(graph, precision)
    elif device.type == "cuda":
        from flodl_hf.tables.arrange import arrange_cuda

        lacking = arrange_cuda(graph)
    if lacking:
        warnings.warn(told(lacking), stacklevel=2)
    return graph, lacking


def _trusts_buckets(graph: Graph) -> bool:
    """Return whether a device attends in buckets as it does without: kernels that no other way of running needs."""
    from flodl_hf.attention import SelfAttention
    from flodl_hf.kernels.trust import trusted
    from flodl_hf.tables.arrange import layers_of
    from flodl_hf.tables.trials import buckets

    first = next(graph.parameters())
    attentions = [layer.attention for _, layer in layers_of(graph) if type(layer.attention) is SelfAttention]
    sizes = {(part.num_heads, part.query.in_features // part.num_heads) for part in attentions}
    return all(trusted("buckets", first.device, first.dtype, each, buckets) for each in sizes)


def told(lacking: dict[str, str]) -> str:
    """Return a sentence about layers that torch's operations run, by reason."""
    reasons = dict.fromkeys(lacking.values())
    parts = [f"{reason} ({', '.join([p for p in lacking if lacking[p] == reason][:3])})" for reason in reasons]
    count = "1 layer runs" if len(lacking) == 1 else f"{len(lacking)} layers run"
    return (
        f"prediction: {count} on torch's own operations, more slowly: {'; '.join(parts[:4])}. "
        "model.explain() says what runs where."
    )


def _convert(graph: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Give the shadow changed parameters and buffers; tied ones stay tied, and the source keeps its own."""
    changed: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module in graph.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in changed:
                    found = change(parameter.detach())
                    same = found.data_ptr() == parameter.data_ptr() and found.dtype == parameter.dtype
                    changed[id(parameter)] = parameter if same else nn.Parameter(found, requires_grad=False)
                module._parameters[name] = changed[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = change(buffer)
