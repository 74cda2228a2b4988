"""Weights cut into shards, one on each rank, by torch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

This module decides which modules are gathered together (the numbered layers of a model, and the rest), makes gradients
sums instead of means, and converts between tensors and their shards. A rank stores its shard of weights, gradients and
optimiser state; a layer is complete on a rank while the rank computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flodl.checkpoint.stored_rows import StoredRows
from flodl.distributed.average import model_tensors
from flodl.distributed.group import Ranks
from flodl.errors import TrainError
from flodl.nested import map_leaves


def shard_model(model: nn.Module, ranks: Ranks, products: torch.dtype | None = None) -> None:
    """Cut the parameters of a model into a shard for each rank, in place, and move them to the ranks' devices.

    Args:
        model: equal on all ranks, in host memory; it is moved layer by layer. Its attribute ``forward_methods`` lists
            further methods that are passes of the model. Its attribute ``dtype_in_shards`` is the dtype of floating
            parameters, so that the pages of a file in half precision are never converted as a whole.
        ranks: at least two.
        products: dtype of matrix products under autocast; None without. Frozen matrices of `torch.nn.Linear` that are
            stored in this dtype stay so, because each product would cast them back: a shard takes half the memory, and
            gathering a layer sends half as much, with the same numbers.

    Raises:
        TrainError: the model has no parameters.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    if not any(True for _ in model.parameters()):
        raise TrainError("shard: the model has no parameters; expected some to cut into a shard for each rank.")
    root = _root(model)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    dtype: torch.dtype | None = getattr(model, "dtype_in_shards", None)
    kept = _fixed_matrices(model, products)
    for module in [*_layers(root), root]:
        before = _cast(module, dtype, kept)
        # Also for the root; otherwise an evaluation would replace its parameters, which the optimiser refers to.
        sharded: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        # Sums over ranks, which the step divides by the count of all ranks.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        for parameter, value in before:
            parameter.data = value
    for name in ("forward", *getattr(root, "forward_methods", ())):
        setattr(root, name, partial(_without_views, getattr(root, name)))
        if name != "forward":
            register_fsdp_forward_method(root, name)
    model.to(ranks.device)


def _fixed_matrices(model: nn.Module, dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Return the frozen weights of this dtype that only linear layers use."""
    fixed: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            alone = isinstance(module, nn.Linear) and name == "weight"
            (fixed if alone and parameter.dtype == dtype and not parameter.requires_grad else others).add(parameter)
    return fixed - others


def _cast(
    module: nn.Module, dtype: torch.dtype | None, excluded: set[nn.Parameter]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Cast the floating parameters of a module that are no shards yet, in place, so that tied weights stay tied.

    Args:
        excluded: parameters that are not cast.

    Returns:
        The parameters with their previous data, which the caller restores: a reference elsewhere would keep the copy.
    """
    whole_yet = [p for p in module.parameters() if p.is_floating_point() and not hasattr(p, "full_tensor")]
    before = [(p, p.data) for p in whole_yet if dtype is not None and p.dtype != dtype and p not in excluded]
    for parameter, value in before:
        parameter.data = value.to(dtype)
    return before


def _without_views(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Return the result of ``call`` with views cloned: torch warns of each view that a sharded pass returns."""
    return map_leaves(
        call(*args, **named),
        lambda part: part.clone() if isinstance(part, Tensor) and part._is_view() else part,
        lambda part: isinstance(part, Mapping),
    )


def _root(model: nn.Module) -> nn.Module:
    """Return the innermost module that contains all parameters, without its wrappers."""
    inside = [child for child in model.children() if any(True for _ in child.parameters())]
    own = any(True for _ in model.parameters(recurse=False))
    return _root(inside[0]) if len(inside) == 1 and not own and _is_callable(inside[0]) else model


def _is_callable(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model: numbered children, if there are several."""
    children = dict(module.named_children())
    numbered = [child for name, child in children.items() if name.isdecimal() and any(True for _ in child.parameters())]
    if len(numbered) > 1 and all(map(_is_callable, numbered)):
        yield from dict.fromkeys(numbered)
        return
    for child in children.values():
        yield from _layers(child)


@torch.no_grad()
def spread(model: nn.Module, ranks: Ranks) -> None:
    """Copy rank 0's numbers to every rank, tensor by tensor; equal tensors are not written."""
    for tensor in model_tensors(model):
        given = tensor.detach().clone()
        ranks.copy_from(0, [given])
        if not torch.equal(given, tensor):
            tensor.copy_(given)


def is_sharded(model: nn.Module) -> bool:
    """Return True if a model's weights are shards."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; a tensor that is no shard is returned unchanged."""
    sharded: Any = tensor
    return sharded.to_local() if hasattr(tensor, "full_tensor") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the shards of all ranks, which all call this; one that is no shard is returned unchanged."""
    sharded: Any = tensor
    return sharded.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _part(tensor: Any, value: Tensor | StoredRows) -> Tensor:
    """Return the rows of a full value that belong to this rank's shard; only these rows of a stored value are read."""
    rows = -(-value.shape[0] // tensor.device_mesh.size())
    first = tensor.device_mesh.get_local_rank() * rows
    return value[first : first + rows]


@torch.no_grad()
def put(tensor: Tensor, value: Tensor | StoredRows) -> None:
    """Copy a full value into a tensor, or its rows into this rank's shard."""
    local(tensor).copy_(_part(tensor, value) if hasattr(tensor, "full_tensor") else value[...])


def like(parameter: Tensor, value: Tensor | StoredRows) -> Tensor:
    """Return a full value of a parameter's shape, cut and placed like the parameter."""
    sharded: Any = parameter
    if not hasattr(parameter, "full_tensor") or value.shape != parameter.shape:
        return value[...]
    from torch.distributed.tensor import DTensor

    part = _part(sharded, value).clone().to(parameter.device)
    return DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def whole_parts(tensors: Mapping[str, Mapping[str, Any]], mark: str) -> dict[str, Any]:
    """Return tensors joined from the shards that ranks saved; stored tensors are not read.

    Args:
        tensors: tensors of a checkpoint, by file.
        mark: prefix of the names of shards in the files ``rank-0``, ``rank-1``, ...; removed from the result.
    """
    files = sorted((name for name in tensors if name.startswith("rank-")), key=lambda name: int(name.split("-")[1]))
    found: dict[str, list[Any]] = {}
    for file in files:
        for name, tensor in tensors[file].items():
            if name.startswith(mark):
                found.setdefault(name.removeprefix(mark), []).append(tensor)
    return {name: parts[0] if parts[0].dim() == 0 else _joined(parts) for name, parts in found.items()}


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0].joined(parts[1:])
