"""Copies of modules that share every tensor, and what makes them ready to predict on a device.

Decides how a graph, or one layer of it, is prepared for a precision on a device: moved, cast, adapters folded, and run
by the device's table of operations (`flodl_hf.nn.backends`). `flodl_hf.inference.prepared_graph` decides when that is
done and how long the result is kept.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.inference.options import Precision, check_precision, dtype_of
from flodl_hf.nn.adapter_layers import folded

M = TypeVar("M", bound=nn.Module)


def shadow(graph: M) -> M:
    """Return a copy of a graph, or of any module of it, in evaluation mode, that shares every parameter and buffer."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors_of(graph)}
    found = _double(graph, memo)
    found.eval()
    return found


def _double(module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, in a quarter of ``copy.deepcopy``'s time for modules without custom copying."""
    if id(module) in memo:
        return memo[id(module)]
    kind = type(module)
    # A graph is unpickled by building its class again from its plan; here the class exists already.
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
    """Return whether a module class does not override ``nn.Module``'s ``__deepcopy__`` or ``__getstate__``."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return not any(way in vars(base) for base in own for way in _WAYS)


def tensors_of(graph: nn.Module) -> Iterator[Tensor]:
    """Yield every parameter and buffer of the modules, tied ones each time."""
    for module in graph.modules():
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def arranged(
    graph: nn.Module, precision: Precision | None, device: torch.device, *, stays: bool = True
) -> dict[str, str]:
    """Make a shadow ready to predict on a device, in place; return why torch's operations run a layer, by its path.

    Args:
        graph: a shadow, or a module with one as ``encoder``.
        precision: see `Precision`.
        device: where it is to run.
        stays: whether its weights stay on the device; copies of temporary weights would not pay off.

    Raises:
        PredictError: the precision is unknown or the device lacks it.
    """
    check_precision(precision, device)
    first = next(graph.parameters(), None)
    if first is not None and device != first.device:
        convert(graph, lambda tensor: tensor.to(device))
    if precision == "exact":
        return {}
    # From here on each product has one weight, regardless of how it was composed.
    folded(graph)
    dtype = dtype_of(precision)
    if dtype is not None:
        convert(graph, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    if device.type == "cpu":
        from flodl_hf.inference.cpu import prepare_cpu

        return prepare_cpu(graph, precision)
    if device.type == "cuda":
        from flodl_hf.nn.backends.choose import arrange_cuda

        return arrange_cuda(graph, split=stays and precision in (None, "fp32"))
    return {}


def fallback_reasons(lacking: dict[str, str]) -> str:
    """Return a sentence about layers that torch's operations run, by reason."""
    reasons = dict.fromkeys(lacking.values())
    parts = [f"{reason} ({', '.join([p for p in lacking if lacking[p] == reason][:3])})" for reason in reasons]
    count = "1 layer runs" if len(lacking) == 1 else f"{len(lacking)} layers run"
    return (
        f"prediction: {count} on torch's own operations, more slowly: {'; '.join(parts[:4])}. "
        "model.explain() lists the kernels of each layer."
    )


def convert(graph: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
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
