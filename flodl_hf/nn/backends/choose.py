"""Which table runs each layer of a graph: chosen for a graph that predicts, and for a model while it trains.

Layers that a table lacks keep torch's operations, and the reason is recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flodl.graph import Graph
from flodl_hf.nn.attention import SelfAttention
from flodl_hf.nn.backends.cuda import WIDEST_SPLIT, CudaTable, SplitTable, norm_kind
from flodl_hf.nn.backends.cuda_training import TrainingTable
from flodl_hf.nn.backends.self_tests import SPLIT_BOUND, LayerSizes, Turns, prediction, training
from flodl_hf.nn.disentangled.attention import DisentangledAttention
from flodl_hf.nn.encoder import FirstToken
from flodl_hf.nn.kernels.self_test import trusted
from flodl_hf.nn.layers import TORCH, EncoderLayer, FeedForward, Table
from flodl_hf.nn.positions import RelativeBias, Rotary, SlopedBias


def layers_of(graph: nn.Module) -> Iterator[tuple[str, EncoderLayer]]:
    """Yield every encoder layer with its path; one that repeats comes once."""
    yield from ((name, module) for name, module in graph.named_modules() if isinstance(module, EncoderLayer))


def arrange_cuda(graph: nn.Module, *, split: bool = False) -> dict[str, str]:
    """Have a graph's layers run by the table of a CUDA device, in place; return why where not, by path.

    Args:
        graph: for prediction alone, on its device, in the dtype that it is to compute in.
        split: in float32, compute products in parts, for which copies of the weights are kept.
    """
    first = next(graph.parameters())
    sizes = prediction_sizes(graph)
    if first.dtype == torch.float32:
        held = split and splits(first.device, sizes) and _has_room(graph, first.device)
        table = SplitTable() if held else CudaTable(kernels=False)
    else:
        half = first.dtype in (torch.float16, torch.bfloat16)
        held = half and all(trusted("prediction", first.device, first.dtype, each, prediction) for each in sizes)
        table = CudaTable(kernels=held, distances=any(each.distances for each in sizes))
    lacking = arrange(graph, table)
    for _, layer in layers_of(graph):
        if layer.table is table:
            table.join(layer)
    table.follow(layer for _, layer in layers_of(graph))
    return lacking


def splits(device: torch.device, sizes: Iterable[LayerSizes], *, rehearse: bool = False) -> bool:
    """Return whether a device computes float32 products in parts as exactly as they have to be.

    Args:
        device: a CUDA device.
        sizes: of the layers.
        rehearse: see `flodl_hf.nn.kernels.self_test.trusted`.
    """
    asked = list(sizes) or [LayerSizes()]
    if any(each.width > WIDEST_SPLIT or each.inner > WIDEST_SPLIT for each in asked):
        return False
    kind = "float32 products in parts"
    return all(
        trusted(kind, device, torch.float32, each, prediction, rehearse=rehearse, bound=SPLIT_BOUND) for each in asked
    )


def _has_room(graph: nn.Module, device: torch.device) -> bool:
    """Return whether half of the device's free memory is enough for the parts of all weights."""
    if device.type != "cuda":
        return True
    layers = {id(p): p for _, layer in layers_of(graph) for p in layer.parameters() if p.ndim == 2}
    parts = sum(3 * 2 * p.numel() for p in layers.values())
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if 2 * parts <= free:
        return True
    warnings.warn(
        f"prediction on {device} in float32: products are computed whole, which is slower: their parts would need "
        f"{parts / 2**30:.1f} GiB in addition to the weights, and {free / 2**30:.1f} GiB are free. precision='bf16' "
        "needs none.",
        stacklevel=2,
    )
    return False


def prediction_sizes(graph: nn.Module) -> set[LayerSizes]:
    """Return the compile-time constants of the kernels of a prepared graph."""
    distances = any(isinstance(module, RelativeBias | SlopedBias) for module in graph.modules())
    found = {sizes_of(layer) for _, layer in layers_of(graph)}
    return {replace(sizes, distances=distances) for sizes in found if sizes is not None}


def sizes_of(layer: EncoderLayer) -> LayerSizes | None:
    """Return the compile-time constants of a layer's kernels; None for parts without such kernels."""
    attention: Any = layer.attention
    feed_forward: Any = layer.feed_forward
    if type(attention) is not SelfAttention or type(feed_forward) is not FeedForward:
        return None
    width = attention.query.in_features
    if norm_kind(layer.feed_forward_norm) is None:
        return None
    dropped = [m.p for m in layer.modules() if isinstance(m, nn.Dropout)]
    return LayerSizes(
        width=width,
        heads=attention.num_heads,
        inner=feed_forward.up.out_features,
        activation=feed_forward.activation.name,
        gated=feed_forward.gate is not None,
        order=layer.order,
        bias=feed_forward.up.bias is not None,
        window=attention.window,
        kv_heads=None if attention.kv_heads == attention.num_heads else attention.kv_heads,
        turns=_turns(attention.rotary),
        dropout=any(dropped) or attention.attention_dropout > 0,
    )


def _turns(rotary: Rotary | None) -> Turns | None:
    if rotary is None:
        return None
    if not rotary.halves:
        return "neighbours, values too" if rotary.values else "neighbours"
    return "wide" if rotary.widened else "stepwise"


def arrange(graph: nn.Module, table: Table) -> dict[str, str]:
    """Have a graph's layers run by a table, in place; return why where not, by path.

    The last layer finishes first tokens alone, where a classifier reads no others and the table runs it.

    Args:
        graph: for prediction alone; its parameters are read at the first use.
        table: of a processor or a CUDA device.
    """
    lacking: dict[str, str] = {}
    for path, layer in layers_of(graph):
        reason = table.lacks(layer)
        layer.table = TORCH if reason else table
        if reason:
            lacking[path] = reason
            continue
        if isinstance(layer.attention, DisentangledAttention):
            # Parts without reference bits use the faster implementation, and fixed weights project positions once.
            layer.attention.keeps_positions = True
            if layer.attention.implementation == "sdpa":
                layer.attention.implementation = "fast"
    encoder = dict(graph.named_children()).get("encoder", nn.Module())
    last = alone_last(graph, dict(encoder.named_children()).get("layers"))
    if last is not None:
        finish_first_tokens(graph, last)
    return lacking


def alone_last(graph: nn.Module, layers: nn.Module | None) -> EncoderLayer | None:
    """Return the last of a graph's layers where it could finish first tokens alone; None where others are read.

    Args:
        graph: with all its parts but perhaps the layers.
        layers: the stack of its layers.
    """
    parts = dict(graph.named_children())
    if "head" not in parts or "relation" in parts:  # beside which a head reads every token
        return None
    reader = parts.get("pooler", parts["head"])
    if not isinstance(layers, Graph) or not isinstance(dict(reader.named_children()).get("first"), FirstToken):
        return None
    last = next(reversed(list(layers.children())), None)
    alone = list(layers.children()).count(last) == 1  # type: ignore[arg-type]
    # A layer that computes more than `EncoderLayer` does needs its other tokens.
    return last if type(last) is EncoderLayer and alone else None


def finish_first_tokens(graph: nn.Module, last: EncoderLayer) -> None:
    """Let a last layer finish first tokens alone, if a table runs it that can.

    Args:
        graph: the graph; its pooler or head then takes the selected tokens.
        last: what `alone_last` found, or a shadow of it.
    """
    if last.table is TORCH:
        return
    parts = dict(graph.named_children())
    last.first_only = True
    parts.get("pooler", parts["head"]).first = FirstToken(taken=True)


# ---- training --------------------------------------------------------------------------------------------


def arrange_training(
    graph: nn.Module, dtype: torch.dtype, *, anywhere: bool = False
) -> tuple[Callable[[], None], dict[str, str]]:
    """Have the layers of a model run by the table of training steps; return what undoes it, and why where not, by path.

    A layer keeps its modules, parameters and names. Nothing changes where there is no CUDA device.

    Args:
        graph: of a model, on its device.
        dtype: of autocast: bfloat16 or float16.
        anywhere: on other devices too, for Triton's interpreter.
    """
    device = next(graph.parameters()).device
    if device.type != "cuda" and not anywhere:
        return lambda: None, {path: f"the device is a {device.type}" for path, _ in layers_of(graph)}
    table = TrainingTable(dtype)
    lacking = {path: table.lacks(layer) for path, layer in layers_of(graph)}
    chosen = [layer for path, layer in layers_of(graph) if lacking[path] is None and layer.table is TORCH]
    sizes = dict.fromkeys(found for layer in chosen if (found := sizes_of(layer)) is not None)
    if not all(trusted("training", device, dtype, each, training) for each in sizes):
        return lambda: None, dict.fromkeys(lacking, "the kernels are not trusted on this device")
    for layer in chosen:
        layer.table = table

    def undo() -> None:
        for layer in chosen:
            layer.table = TORCH

    return undo, {path: reason for path, reason in lacking.items() if reason}
