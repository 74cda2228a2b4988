"""Tensors of a file that contain several of ours: one matrix for query, key and value, or for gate and up.

A key row names a part by ``[j/n]`` behind the module: ``attn.Wqkv[0/3]`` is the first of three equal parts along the
first axis; ``in_proj[0/3 of 12]`` the first of three in each of twelve groups, one a head. From there on a part has a
name like any tensor, ``attn.Wqkv[0/3].weight``, until a file is written. Pure bookkeeping and views.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.adapter_layers import AdaptedLinear, hooked, joined_products

_MARK = re.compile(r"\[(\d+)/(\d+)(?: of (\d+))?\]")


@dataclass(frozen=True)
class Part:
    """The parts of a name with a mark.

    Attributes:
        whole: the name of the tensor that contains it.
        index: which part, from 0.
        count: how many there are.
        groups: in how many groups of rows they alternate.
        mark: the mark as written in the name.
    """

    whole: str
    index: int
    count: int
    groups: int
    mark: str


def part_of(name: str) -> Part | None:
    """Return the part that a name describes; None for a whole tensor."""
    found = _MARK.search(name)
    if found is None:
        return None
    index, count, groups = found.groups()
    return Part(name[: found.start()] + name[found.end() :], int(index), int(count), int(groups or 1), found[0])


def named_part(whole: str, like: str) -> str:
    """Return the name of the part of a stored tensor that corresponds to ``like`` in its whole."""
    part = part_of(like)
    assert part is not None
    module, _, leaf = whole.rpartition(".")
    return f"{module}{part.mark}.{leaf}"


def split(whole: Tensor, part: Part) -> Tensor:
    """Return one part of a tensor; a view where parts do not alternate."""
    if part.groups == 1:
        return whole.chunk(part.count)[part.index]
    rows = whole.shape[0] // (part.groups * part.count)
    return whole.view(part.groups, part.count, rows, *whole.shape[1:])[:, part.index].reshape(-1, *whole.shape[1:])


def join(parts: Sequence[Tensor], groups: int = 1) -> Tensor:
    """Return the tensor that joins these parts, in order; a view if they are adjacent in memory already."""
    if groups > 1:
        grouped = [part.view(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).view(-1, *parts[0].shape[1:])
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _side_by_side(parts):
        first = parts[0]
        return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
    return torch.cat(tuple(parts))


def _side_by_side(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    if any(type(part) not in (Tensor, torch.nn.Parameter) or not part.is_contiguous() for part in parts):
        return False
    if first.device.type == "meta":
        return False
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == storage and part.dtype == first.dtype
        if not same or part.storage_offset() != place:
            return False
        place += part.numel()
    return True


def parts_from(values: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors by name, with parts cut out of the whole tensors.

    Args:
        values: by stored name.
        names: stored names and names of parts.
    """
    marked = {name: part_of(name) for name in names}
    return {name: values[name] if part is None else split(values[part.whole], part) for name, part in marked.items()}


def joined(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by stored name, parts joined; a whole takes the position of its first part."""
    found: dict[str, Any] = {}
    groups: dict[str, dict[int, Any]] = {}
    for name, value in tensors.items():
        part = part_of(name)
        if part is None:
            found[name] = value
            continue
        held = groups.setdefault(part.whole, {})
        held[part.index] = value
        if len(held) < part.count:
            found.setdefault(part.whole, None)
            continue
        with torch.no_grad():
            found[part.whole] = join([held[index] for index in range(part.count)], part.groups)
    return found


def as_whole(name: str) -> str:
    """Return the name of the stored tensor that contains ``name``."""
    part = part_of(name)
    return name if part is None else part.whole


def products(hidden: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Return several projections of the same states, by one product as references with one matrix compute them.

    The sums of one product and of several round differently, in the states' gradient at least. A projection that is
    more than a linear layer, or that has hooks, is called by itself.
    """
    adapted = are_all(AdaptedLinear, linears)
    if not adapted and not are_all(nn.Linear, linears):
        return tuple(linear(hidden) for linear in linears)
    weights: list[Any] = [linear.weight for linear in linears]
    biases: list[Any] = [linear.bias for linear in linears if linear.bias is not None]
    out = F.linear(hidden, join(weights), join(biases) if biases else None)
    if adapted:
        out = joined_products(hidden, out, linears)
    return out.split([len(weight) for weight in weights], -1)


def products_by_head(hidden: Tensor, num_heads: int, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Return projections ``(..., heads, width)`` as references with one matrix interleaved by head do, biases separate.

    Args:
        hidden: states.
        num_heads: in how many groups the rows of the matrix alternate.
        *linears: the projections, with or without biases.
    """
    adapted = are_all(AdaptedLinear, linears)
    if not adapted and not are_all(nn.Linear, linears):
        return tuple(linear(hidden).unflatten(-1, (num_heads, -1)) for linear in linears)
    by_turns = partial(join, groups=num_heads)
    out = F.linear(hidden, by_turns([linear.weight for linear in linears]))
    if adapted:
        out = joined_products(hidden, out, linears, by_turns, bias_apart=True)
    by_head = out.unflatten(-1, (num_heads, len(linears), -1)).unbind(-2)
    shifts = [None if linear.bias is None else linear.bias.view(num_heads, -1) for linear in linears]
    return tuple(x if b is None else x + b for x, b in zip(by_head, shifts, strict=True))


def joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Return the bias of one product for several projections, zeros for those without; None if none has one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat([
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ])  # fmt: skip


def are_all(kind: type[nn.Module], modules: Iterable[nn.Module]) -> bool:
    """Return whether modules are of one class and have no hooks, so that their products may be joined."""
    return all(type(module) is kind and not hooked(module) for module in modules)
