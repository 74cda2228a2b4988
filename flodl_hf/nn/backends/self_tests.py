"""Small cases of a layer, to see whether a device's kernels give what torch's operations give: see `kernels.trust`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flodl_hf.nn.attention import SelfAttention, attend
from flodl_hf.nn.backends.cuda import CudaTable, SplitTable
from flodl_hf.nn.backends.cuda_training import TrainingTable
from flodl_hf.nn.buckets import Buffer, bucket_of
from flodl_hf.nn.layers import GELUS, TORCH, EncoderLayer, FeedForward, Order
from flodl_hf.nn.layout import Packed
from flodl_hf.nn.positions import PairedRotary, Rotary, SlopedBias

TEXTS = (37, 5, 1, 70, 12)
# Of a layer from float64's result; float32's own is some 5e-7.
SPLIT_BOUND = 4e-6
# With one that fills whole blocks.
TRAINED = (150, 37, 5, 1, 12)

Turns = Literal["wide", "stepwise", "neighbours", "neighbours, values too"]


@dataclass(frozen=True)
class LayerSizes:
    """Compile-time constants of a layer's kernels, other than dtypes.

    Attributes:
        width: of a state.
        heads: of attention.
        inner: width between the projections of the feed-forward part.
        activation: between them.
        gated: whether the feed-forward part has a gate.
        order: "post" or "pre".
        bias: whether projections have biases.
        window: of attention; None for none.
        kv_heads: heads of keys and values; None for ``heads``.
        turns: how rotary positions are rounded: once ("wide") or after each operation, as they are where neighbours
            turn rather than halves; None without them.
        distances: whether scores are added something by distance.
        dropout: whether anything is dropped.
    """

    width: int = 128
    heads: int = 2
    inner: int = 512
    activation: str = "gelu"
    gated: bool = False
    order: Order = "post"
    bias: bool = True
    window: int | None = None
    kv_heads: int | None = None
    turns: Turns | None = None
    distances: bool = False
    dropout: bool = False


def small_layer(
    device: torch.device, sizes: LayerSizes, p: float = 0.0, texts: Sequence[int] = TEXTS
) -> tuple[EncoderLayer, Tensor, Callable[[], Packed], int]:
    """Return a layer with drawn weights, states, what makes a bucketed layout of a few texts, and their tokens."""

    lengths = np.array(texts)
    buffer = Buffer(bucket_of(lengths))
    buffer.write(np.zeros(int(lengths.sum()), np.int32), None, lengths)
    draw = torch.Generator().manual_seed(0)
    rotary = None if sizes.turns is None else Rotary(sizes.width // sizes.heads, widened=sizes.turns == "wide")
    if sizes.turns in ("neighbours", "neighbours, values too"):
        rotary = PairedRotary(sizes.width // sizes.heads, max(texts), values=sizes.turns != "neighbours")
    attention = SelfAttention(
        sizes.width, sizes.heads, p, p, bias=sizes.bias, window=sizes.window, kv_heads=sizes.kv_heads, rotary=rotary
    )
    feed_forward = FeedForward(sizes.width, sizes.inner, sizes.activation, p, gated=sizes.gated, bias=sizes.bias)
    one, two = (nn.LayerNorm(sizes.width, bias=sizes.bias) for _ in range(2))
    layer = EncoderLayer(attention, feed_forward, one, two, order=sizes.order)
    for parameter in layer.parameters():
        # Scores and states of one size whatever the widths: where attention is nearly sure, rounding shows most.
        std = 0.1 if parameter.ndim == 1 else 1.1 * parameter.shape[1] ** -0.5
        nn.init.normal_(parameter, std=std, generator=draw)
    for norm in (layer.attention_norm, layer.feed_forward_norm):
        norm.weight.data += 1.0  # type: ignore[operator]
    states = torch.randn(buffer.bucket.tokens, sizes.width, generator=draw).to(device)

    def layout() -> Packed:
        return buffer.on(buffer.packed.to(device))[2]

    return layer.to(device), states, layout, int(lengths.sum())


def prediction(device: torch.device, dtype: torch.dtype, sizes: LayerSizes) -> tuple[float, str]:
    """Compare a layer by the table of a dtype with the same layer by torch.

    Half precision by `CudaTable` is compared with float32, and float32 by `SplitTable` with float64.
    """
    layer, states, layout, real = small_layer(device, sizes)
    given: dict[str, Any] = {"bias": SlopedBias(sizes.heads)(states, layout())} if sizes.distances else {}
    split = dtype == torch.float32
    table = SplitTable(fewest=1) if split else CudaTable(kernels=True, distances=sizes.distances)
    exact = torch.float64 if split else torch.float32
    with torch.no_grad():
        right = deepcopy(layer).to(exact)(states.to(exact), layout=layout(), **given)[:real]
        layer = layer.to(dtype).eval()
        table.join(layer)
        layer.table = table
        found = layer(states.to(dtype), layout=layout(), **given)[:real]
    return _distance(found, right), "a layer's result"


def training(device: torch.device, dtype: torch.dtype, sizes: LayerSizes) -> tuple[float, str]:
    """Compare results and gradients of two layers in a row by `TrainingTable` with torch's in float32.

    Where something is dropped, what drops runs too, and infinity is returned where it gives numbers that are none.
    """

    table = TrainingTable(dtype)
    layer, states, layout, real = small_layer(device, sizes, texts=TRAINED)
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).to(device)
    direction[real:] = 0.0
    if sizes.dropout:
        dropping, _, _, _ = small_layer(device, sizes, p=0.1, texts=TRAINED)
        dropping.table = table
        with torch.enable_grad(), torch.autocast(device.type, dtype):
            found = dropping(states.clone().requires_grad_(), layout=layout())
        found.backward(direction)
        grads = [p.grad for p in dropping.parameters() if p.grad is not None]
        if not all(bool(torch.isfinite(grad).all()) for grad in [found.detach(), *grads]):
            return float("inf"), "dropout's gradient"

    def all_of(fused: bool) -> Iterator[tuple[str, Tensor]]:
        given = states.clone().requires_grad_()
        layer.table = table if fused else TORCH
        where = layout()
        with torch.enable_grad(), torch.autocast(device.type, dtype, enabled=fused):
            if fused and table.begin(layer, given, layout(), {}) is not table:
                raise RuntimeError("the kernels do not take the layer")
            # Two layers, so that the values passed between layers are tested too.
            found = layer(layer(given, layout=where), layout=where)
        yield "the result", found.detach()[:real]
        # Weights do not depend on a constant added to all keys, so that bias has a gradient of rounding errors.
        named = [(name, p) for name, p in layer.named_parameters() if name != "attention.key.bias"]
        grads = torch.autograd.grad(found, [given, *(p for _, p in named)], direction)
        yield "the gradient of the states", grads[0]
        yield from ((f"the gradient of {name}", grad) for (name, _), grad in zip(named, grads[1:], strict=True))

    pairs = zip(all_of(True), all_of(False), strict=True)
    return max((_distance(a, b), name) for (name, a), (_, b) in pairs)


def buckets(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int]) -> tuple[float, str]:
    """Compare attention over concatenated texts, padded to a bucket, with plain products in float32."""

    heads, width = sizes
    lengths = np.array([*TEXTS, 150])
    buffer = Buffer(bucket_of(lengths))
    buffer.write(np.zeros(int(lengths.sum()), np.int32), None, lengths)
    layout = buffer.on(buffer.packed.to(device))[2]
    real = int(lengths.sum())
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(buffer.bucket.tokens, heads * width, generator=draw).to(device) for _ in range(3)]
    with torch.no_grad():
        plain = Packed.of(lengths.tolist(), device)
        q, k, v = (x[:real] for x in parts)
        right = attend(q, k, v, plain, num_heads=heads, implementation="eager")
        q, k, v = (x.to(dtype) for x in parts)
        found = attend(q, k, v, layout, num_heads=heads)[:real]
    return _distance(found, right), "attention in buckets"


def _distance(result: Tensor, right: Tensor) -> float:
    result, right = result.detach().to(right.dtype), right.detach()
    return float((result - right).norm() / right.norm().clamp(min=1e-6))


def multiply(device: torch.device, dtype: torch.dtype, tokens: int, sizes: LayerSizes) -> None:
    """Compute the products of a layer once, on uninitialised memory, so that their kernels are loaded.

    Args:
        device: a CUDA device.
        dtype: of states and weights.
        tokens: of a batch.
        sizes: of the layer.
    """
    width, inner = sizes.width, sizes.inner
    for wide, high in ((width, 3 * width), (width, width), (width, inner), (inner, width)):
        weight = torch.empty(high, wide, dtype=dtype, device=device)
        bias = weight.new_empty(high) if sizes.bias else None
        states = weight.new_empty(tokens, wide)
        if dtype == torch.float32:
            from flodl_hf.nn.kernels.split_products import products, split

            products(split(states), split(weight, weight=True))
        elif high == inner and bias is not None and sizes.activation in GELUS and dtype == torch.bfloat16:
            torch.ops.aten._addmm_activation(bias, states, weight.t(), use_gelu=True)
        else:
            nn.functional.linear(states, weight, bias)
