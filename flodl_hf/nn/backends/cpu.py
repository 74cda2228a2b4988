"""The table of a processor, its matrix products, and attention in bfloat16. Inference only: nothing has a gradient.

In `ProcessorTable` sums ride along with products, activations happen in place, buffers are kept. The arithmetic is the
reference's up to the order of sums. Products of weights are made at their first use, so a cast between making the table
and running a layer counts. `flodl_hf.inference.cpu` chooses one of three kinds of products; this file tests whether
torch's private operators exist.

`HalfAttention` is attention in bfloat16 with scores of float32, for processors that multiply bfloat16 quickly. torch's
fused attention is no faster there in bfloat16 than in float32. Its batched product is, but it rounds its result to
bfloat16, too coarsely for scores: a second product computes the rounding error of the first, and both together have 16
bits. Texts and tokens are rounded up as rows are (`flodl_hf.nn.buckets`); padding has no weight.

Shapes: T tokens, I features in, O features out; B texts of S tokens each, N heads of width H.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.attention import Kernel, SelfAttention, fused
from flodl_hf.nn.buckets import rounded
from flodl_hf.nn.disentangled.attention import DisentangledAttention
from flodl_hf.nn.joined_tensors import joined_bias
from flodl_hf.nn.layers import ACTIVATIONS, GELUS, FeedForward, Table, normalised, watched
from flodl_hf.nn.layers import EncoderLayer as Layer
from flodl_hf.nn.layout import Layout

# Numbers in the largest buffer that is kept between calls: 1,024 tokens of 4,096 features, twice over.
_KEPT_NUMBERS = 1 << 23
# Names of our activations that oneDNN computes in its epilogue, with its name and variant.
_EPILOGUES = {
    **{name: ("gelu", "tanh" if tanh else "none") for name, tanh in GELUS.items()},
    **{name: (name, "") for name in ("relu", "tanh", "sigmoid", "hardswish")},
    **dict.fromkeys(("silu", "swish"), ("swish", "")),
}


class Scratch(threading.local):
    """Buffers that calls of one thread use again, because fresh memory costs a page fault every 4 KB.

    A buffer's contents last until the same thread requests the same name.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return an unfilled ``(rows, columns)`` tensor."""
        numbers = rows * columns
        if numbers > _KEPT_NUMBERS:
            return torch.empty(rows, columns, dtype=dtype)
        found = self._kept.get((name, dtype))
        if found is None or found.numel() < numbers:
            found = self._kept[name, dtype] = torch.empty(numbers, dtype=dtype)
        return found[:numbers].view(rows, columns)


def activate_(x: Tensor, activation: str) -> Tensor:
    """Return the activation of ``x``, in the memory of ``x`` where that is cheaper."""
    tanh = GELUS.get(activation)
    if tanh is False:
        return torch.ops.aten.gelu_(x)
    if activation == "relu":
        return torch.relu_(x)
    if activation in ("silu", "swish"):
        return F.silu(x, inplace=True)
    if tanh and x.dtype == torch.float32:
        # 0.5 (1 + tanh u) = sigmoid(2u); torch's tanh takes three times as long as its sigmoid.
        twice = x * x
        twice.mul_(0.044715 * 1.5957691216057308).add_(1.5957691216057308).mul_(x).sigmoid_()
        return x.mul_(twice)
    return ACTIVATIONS[activation](x)


class Product:
    """``x W^T + b`` for one weight, ``(T, I)`` to ``(T, O)``."""

    def __call__(self, x: Tensor, buffer: str = "") -> Tensor:
        """Return the product, in the scratch buffer of this name if there is one."""
        raise NotImplementedError

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product plus ``other``."""
        raise NotImplementedError

    def activated(self, x: Tensor, activation: str, buffer: str) -> Tensor:
        """Return the activation of the product."""
        return activate_(self(x, buffer), activation)


class TorchLinear(Product):
    """torch's product, which is MKL's or the platform's own.

    Args:
        weight: ``(O, I)``, not copied.
        bias: ``(O,)``, or None.
        scratch: buffers for results that are requested in one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, scratch: Scratch) -> None:
        self._scratch = scratch
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self._turned = self.weight.t()

    def __call__(self, x: Tensor, buffer: str = "") -> Tensor:
        """Return the product, in the scratch buffer of this name if there is one."""
        if not buffer or self.bias is None:
            return F.linear(x, self.weight, self.bias)
        out = self._scratch.take(buffer, x.shape[0], self.weight.shape[0], x.dtype)
        return torch.addmm(self.bias, x, self._turned, out=out)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product plus ``other``."""
        # The product accumulates into the memory that the bias would have been copied to, so the sum costs nothing.
        total = other.clone() if self.bias is None else other + self.bias
        return total.addmm_(x, self._turned)


class OneDnnLinear(Product):
    """oneDNN's product with a weight in its kernels' layout, from the second use on.

    Reordering into separate memory takes as long as many products, so a single answer does not
    wait for it: the first use lets oneDNN reorder into its scratch memory and keeps nothing. Both run the same
    kernel and give the same bits, but for a lone row, which oneDNN multiplies in another way where the weight is
    not reordered; such a first use, and a build with different bits, reorders immediately.

    Args:
        weight: ``(O, I)``, float32 or bfloat16; a copy of its size is made.
        bias: ``(O,)``, or None.
        at_once: make the copy at the first use.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, at_once: bool = False) -> None:
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self._packed: Tensor | None = None
        self._lock = threading.Lock()
        self._used = at_once

    def _ready(self, x: Tensor) -> Tensor:
        """Return the weight to multiply ``x`` by: reordered, or as it is."""
        if self._packed is not None:
            return self._packed
        with self._lock:
            if self._packed is None:
                if not self._used and x.shape[0] > 1:
                    self._used = True
                    return self.weight
                self._packed = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(self.weight, None))
            return self._packed

    def __call__(self, x: Tensor, buffer: str = "") -> Tensor:
        """Return the product."""
        return torch.ops.mkldnn._linear_pointwise(x, self._ready(x), self.bias, "none", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product plus ``other``."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._ready(x), self.bias, "add")

    def activated(self, x: Tensor, activation: str, buffer: str) -> Tensor:
        """Return the activation of the product."""
        epilogue = _EPILOGUES.get(activation)
        if epilogue is None:
            return super().activated(x, activation, buffer)
        return torch.ops.mkldnn._linear_pointwise(x, self._ready(x), self.bias, epilogue[0], [], epilogue[1])


class Int8Linear(Product):
    """The product of int8 numbers: a scale for each row of the weight, and a range for each token.

    A token is ``low + step * u`` with ``u`` from 0 to 255, between its own lowest and highest number, so an answer does
    not depend on what else is in the batch. Then ``x W^T = step * (u W^T) + low * (sums of W's rows)``.

    Args:
        weight: ``(O, I)``, float32; kept as int8, a quarter of its size.
        bias: ``(O,)``, or None.
        bits: 8, or 7 for CPUs with sums of two products that saturate at 16 bits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int = 8) -> None:
        largest = 2 ** (bits - 1) - 1
        weight = weight.detach()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30) / largest
        whole = (weight / scale).round_().to(torch.int8)
        self._scale = scale.view(-1).contiguous()
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._sums = whole.sum(dim=1, dtype=torch.float32).mul_(self._scale)
        self._packed = torch.ops.onednn.qlinear_prepack(whole, None)
        self._bias = torch.zeros(weight.shape[0], dtype=torch.float32) if bias is None else bias.detach()

    def __call__(self, x: Tensor, buffer: str = "") -> Tensor:
        """Return the product."""
        return self._scaled(x, self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product plus ``other``."""
        return self._scaled(x, other + self._bias)

    def _scaled(self, x: Tensor, added: Tensor) -> Tensor:
        whole, step, low = self.quantised(x)
        out = self.multiplied(whole)
        return torch.addcmul(added, out, step, out=out).addcmul_(low, self._sums)

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(T, I)`` as unsigned bytes, and each token's step and lowest number, ``(T, 1)``."""
        # Made to shrink embedding tables: rows of bytes, each with its step and lowest number behind it, in one pass
        # in which a row stays in cache; by torch's other operations it takes nine, and four times as long.
        rows = torch.ops.quantized.embedding_bag_byte_prepack(x)
        width = x.shape[1]
        ranges = rows[:, width:].contiguous().view(torch.float32)
        return rows[:, :width], ranges[:, :1], ranges[:, 1:]

    def multiplied(self, whole: Tensor) -> Tensor:
        """Return the product of quantised tokens, the weight's scale in it and theirs not."""
        return torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, 0, self._packed, self._scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )


MakeProduct = Callable[[Tensor, Tensor | None], Product]


@cache
def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether torch has the operators `OneDnnLinear` calls and they multiply correctly."""
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    return _tried(partial(OneDnnLinear, at_once=True), dtype, bound)


@cache
def first_is_later(dtype: torch.dtype) -> bool:
    """Return whether `OneDnnLinear` gives the same bits before and after its weight is reordered."""
    numbers = torch.arange(96 * 64, dtype=torch.float32).mul_(0.37).sin_().to(dtype)
    weight, bias = numbers.view(96, 64), numbers[:96]
    with torch.inference_mode():
        for rows in (2, 7, 32):
            x = numbers[: rows * 64].view(rows, 64).contiguous()
            other = numbers[-rows * 96 :].view(rows, 96).contiguous()
            for name, *given in (("__call__", x), ("plus", x, other), ("activated", x, "gelu", "")):
                made = (OneDnnLinear(weight, bias, at_once=at_once) for at_once in (False, True))
                if not torch.equal(*(getattr(product, name)(*given) for product in made)):
                    return False
    return True


@cache
def has_int8() -> bool:
    """Return whether torch has the operators `Int8Linear` calls and they multiply correctly."""
    return _tried(partial(Int8Linear, bits=7), torch.float32, 3e-2)


@cache
def sums_in_32_bits() -> bool:
    """Return whether sums of int8 products are kept in 32 bits, rather than saturating at 16.

    Tested by running it: oneDNN may be limited to fewer features than the CPU has
    (``ONEDNN_MAX_CPU_ISA``).
    """
    if not has_int8():
        return False
    with torch.inference_mode():
        # Ones next to a zero quantise to 255, those of a weight to 127, and 255 * 127 twice exceeds 16 bits.
        product = Int8Linear(torch.ones(32, 64, dtype=torch.float32), None, bits=8)
        x = torch.ones(64, 64, dtype=torch.float32)
        x[:, -1] = 0.0
        return all(float((product(x[:rows]) - 63.0).abs().max()) < 0.5 for rows in (1, 5, 64))


def _tried(make: Callable[[Tensor, Tensor], Product], dtype: torch.dtype, bound: float) -> bool:
    # A separate generator, so that the check leaves the random state alone.
    numbers = torch.arange(24 * 16, dtype=torch.float32).mul_(0.37).sin_()
    x, weight, bias = numbers[:80].view(5, 16), numbers[: 24 * 16].view(24, 16), numbers[:24]
    wanted = F.linear(x, weight, bias)
    other = wanted.flip(0).contiguous()
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            product, given = make(weight.to(dtype), bias.to(dtype)), x.to(dtype)
            found = [
                (product(given), wanted),
                (product.plus(given, other.to(dtype)), wanted + other),
                (product.activated(given, "gelu", "tried"), F.gelu(wanted)),
            ]
            return all(float((a.float() - b).abs().max()) <= bound * float(b.abs().max()) for a, b in found)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


class CpuLinear(nn.Module):
    """A linear map with a product chosen for the processor.

    Args:
        source: the module with the weight and bias, shared.
        make: makes the product, at the first use.
    """

    def __init__(self, source: nn.Linear, make: Callable[[Tensor, Tensor | None], Product]) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight = source.weight
        self.bias = source.bias
        self._make = make
        self._product: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(..., out_features)``."""
        if self._product is None:
            self._product = self._make(self.weight, self.bias)
        return self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


# Tokens of a text below which torch's softmax alone takes as long as its fused attention, and the width of a head
# below which nothing is gained.
_SHORTEST, _NARROWEST = 16, 64
# Scores at a time, 2 MB of float32; a quarter and four times of it took longer.
_SCORES = 1 << 19


class HalfAttention:
    """``softmax(q k^T * scale) v`` in bfloat16, without mask and bias; the rest is left to torch's fused attention.

    Args:
        scratch: where heads and scores are kept.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, dropout: float, scale: float
    ) -> Tensor:
        """Return the mixed values, ``(B, N, S, H)``."""
        texts, heads, length, width = q.shape
        plain = mask is None and bias is None and k.shape == q.shape and q.dtype == torch.bfloat16
        if not plain or length < _SHORTEST or width < _NARROWEST:
            return fused(q, k, v, mask, bias, dropout, scale)
        out = q.new_empty(texts, length, heads, width).transpose(1, 2)
        count = max(1, _SCORES // (heads * length * length))
        for some in (slice(at, at + count) for at in range(0, texts, count)):
            out[some] = self._mixed(q[some], k[some], v[some], scale)
        return out

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        texts, heads, length, width = q.shape
        query, key, value = (self._laid(name, x) for name, x in (("queries", q), ("keys", k), ("values", v)))
        turned, places = key.transpose(1, 2), key.shape[1]
        whole, half = (
            self._scratch.take("scores", len(key) * places, places, dtype).view(-1, places, places)
            for dtype in (torch.float32, torch.bfloat16)
        )
        whole.copy_(torch.bmm(query, turned, out=half))
        whole.sub_(half.baddbmm_(query, turned, alpha=-1)).mul_(scale)
        whole[:, :, length:] = -torch.inf
        half.copy_(whole.softmax(-1))
        return torch.bmm(half, value, out=query).view(-1, heads, places, width)[:texts, :, :length]

    def _laid(self, name: str, x: Tensor) -> Tensor:
        """Return ``(B, N, S, H)`` head after head, ``(B * N, S, H)`` with B and S rounded up by zeros."""
        texts, heads, length, width = x.shape
        count, places = rounded(texts), rounded(length)
        room = self._scratch.take(name, count * heads * places, width, x.dtype).view(count, heads, places, width)
        room[:texts, :, :length] = x
        room[:texts, :, length:] = 0
        room[texts:] = 0
        return room.view(-1, places, width)


@cache
def has_half_attention() -> bool:
    """Return whether torch's batched products keep what `HalfAttention` relies on."""
    # A separate generator, so that the check leaves the random state alone; scores up to 30.
    numbers = torch.arange(3 * 2 * 2 * 18 * 64, dtype=torch.float32).mul_(0.37).sin_()
    q, k, v = numbers.view(3, 2, 2, 18, 64).bfloat16()
    with torch.inference_mode():
        wanted = fused(q.float(), k.float(), v.float(), None, None, 0.0, 1.0)
        found = HalfAttention(Scratch())(q, k, v, None, None, 0.0, 1.0).float()
    return float((found - wanted).norm()) <= 5e-3 * float(wanted.norm())


class Branch(NamedTuple):
    """States, as the table has them, with a pending last product, inside of which the residual is added."""

    states: Any
    linear: nn.Linear


def plain_parts(layer: Layer, also: type[nn.Module] = nn.Linear) -> str | None:
    """Return why a layer is unsupported by this backend, or None.

    Args:
        layer: a layer.
        also: a further supported kind of projection.
    """
    if type(layer.attention) not in (SelfAttention, DisentangledAttention):
        return f"its attention is a {type(layer.attention).__name__}"
    if type(layer.feed_forward) is not FeedForward:
        return f"its feed-forward part is a {type(layer.feed_forward).__name__}"
    strange = [type(m).__name__ for m in layer_linears(layer) if type(m) not in (nn.Linear, also)]
    if strange:
        return f"a projection is a {strange[0]}"
    return "a hook watches its parts" if watched(layer) else None


def layer_linears(layer: Layer) -> list[nn.Module]:
    """Return the projections of a layer of known parts."""
    attention, feed_forward = layer.attention, layer.feed_forward
    parts: Any = [attention.query, attention.key, attention.value, attention.output]
    return parts + [p for p in (feed_forward.gate, feed_forward.up, feed_forward.down) if p is not None]


class ProcessorTable(Table):
    """Runs the layers of one graph that predicts, by products chosen for the processor.

    Args:
        make: makes the product of a weight and a bias.
        joined: one product for query, key and value; costs a copy of their weights.
        kernel: takes the place of torch's fused attention; None for none.
    """

    name = "processor"

    def __init__(self, make: MakeProduct, *, joined: bool, kernel: Kernel | None = None) -> None:
        self._make = make
        self._kernel = kernel
        self.joined = joined
        self.products: dict[tuple[int, ...], Product] = {}

    def lacks(self, layer: Layer) -> str | None:
        """Return why this table cannot run a layer."""
        return plain_parts(layer)

    def attend(self, layer: Layer, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any], first: bool) -> Branch:
        """Return mixed values, before their output projection."""
        attention: Any = layer.attention
        if first and type(attention) is SelfAttention and attention.rotary is None:
            # Only a text's first token queries; all tokens are keys.
            key, value = self._projected(hidden, attention.key, attention.value)
            query = self.product(attention.query)(layout.first(hidden))
            mixed = attention.mixed_first(query, key, value, layout, kwargs.get("bias"))
            return Branch(mixed, attention.output)
        query, key, value = self._projected(hidden, attention.query, attention.key, attention.value)
        more: dict[str, Any] = {"kernel": self._kernel} if type(attention) is SelfAttention else {}
        mixed = attention.mixed(query, key, value, layout, **kwargs, fast=True, **more)
        return Branch((layout.first(mixed) if first else mixed).flatten(0, -2), attention.output)

    def transform(self, layer: Layer, hidden: Tensor, layout: Layout) -> Branch:
        """Return the widened states, before their last projection."""
        feed_forward, flat = layer.feed_forward, hidden.flatten(0, -2)
        product = self.product(feed_forward.up if feed_forward.gate is None else feed_forward.gate)
        if feed_forward.activation.name == "prelu":
            wide = feed_forward.activation(product(flat, "wide"))
        else:
            wide = product.activated(flat, feed_forward.activation.name, "wide")
        if feed_forward.gate is not None:
            wide = wide.mul_(self.product(feed_forward.up)(flat, "gated"))
        return Branch(wide, feed_forward.down)

    def add(self, layer: Layer, branch: Branch, residual: Tensor, layout: Layout) -> Tensor:
        """Return ``residual`` plus the branch, summed inside its last product."""
        return self.product(branch.linear).plus(branch.states, residual.flatten(0, -2)).view(residual.shape)

    def norm(self, norm: nn.Module, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the normalised states."""
        return normalised(norm, hidden)

    def product(self, *linears: nn.Linear) -> Product:
        """Return the product with one weight, or with several that are joined."""
        key = tuple(map(id, linears))
        found = self.products.get(key)
        if found is None:
            weight, bias = linears[0].weight, linears[0].bias
            if len(linears) > 1:
                weight, bias = torch.cat([part.weight for part in linears]), joined_bias(linears)
            found = self.products[key] = self._make(weight, bias)
        return found

    def _projected(self, hidden: Tensor, *parts: nn.Linear) -> list[Tensor]:
        """Return several projections of the same states."""
        flat = hidden.flatten(0, -2)
        if self.joined:
            found = self.product(*parts)(flat, "qkv").split([part.out_features for part in parts], 1)
        else:
            names = ("query", "key", "value")[-len(parts) :]
            found = [self.product(part)(flat, name) for part, name in zip(parts, names, strict=True)]
        return [x.view(*hidden.shape[:-1], -1) for x in found]
