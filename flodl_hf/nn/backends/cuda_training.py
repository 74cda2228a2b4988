"""The table of training steps on CUDA, under autocast in half precision, over the kernels of `flodl_hf.nn.kernels`.

Other calls (without gradients, in another dtype, with a hook on a part) run with torch's
operations. Data that layers share in addition to the states, their half-precision copy and the seed of dropout,
is kept in the layout's memo, for this call only.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.adapter_layers import AdaptedLinear, beside
from flodl_hf.nn.backends.cpu import layer_linears, plain_parts
from flodl_hf.nn.backends.cuda import HEAD_WIDTHS, OFFSETS, WIDEST, norm_kind, walks
from flodl_hf.nn.disentangled.attention import DisentangledAttention
from flodl_hf.nn.layers import GELUS, TORCH, FeedForward, Table, watched
from flodl_hf.nn.layers import EncoderLayer as Layer
from flodl_hf.nn.layout import Layout, Packed

# Streams of random numbers of one layer: its heads, then what follows attention and what ends the layer.
AFTER_ATTENTION, AFTER_FEED_FORWARD = 1 << 20, (1 << 20) + 1
STREAMS = 1 << 21
# Tokens of the longest text, and of a text in the mean, up to which our attention takes less than torch's, forward and
# backward together (`python -m benchmarks.training_kernels`: on an H200 a tie at 256 tokens each).
LONGEST, MEAN = 512, 256


def trains_walking(layout: Layout, window: int | None) -> bool:
    """Return whether attention walks over blocks of tokens while training; shapes alone decide."""
    if walks(layout, window):
        return True
    if not isinstance(layout, Packed) or layout.places is None or layout.max_length > LONGEST:
        return False
    return layout.num_tokens <= MEAN * layout.num_texts


class _Branch(NamedTuple):
    """States in half precision with a pending last product and dropout."""

    states: Tensor
    linear: nn.Linear
    dropout: nn.Dropout
    stream: int


class _Carried:
    """What layers of one call hand to each other.

    Attributes:
        seed: seed of dropout, ``(1,)``, int64.
        depth: layers so far.
        states: the last returned states, float32.
        half: their copy in half precision; None if there is none.
        version: how often the states had been written to then.
        halves: copies in half precision of the layer's tensors, by ``id``; "joined" is one of query, key and value.
    """

    def __init__(self, device: torch.device) -> None:
        self.seed = torch.empty(1, dtype=torch.int64, device=device).random_(1 << 48)
        self.depth = -1
        self.states: Tensor | None = None
        self.half: Tensor | None = None
        self.version = 0
        self.halves: dict[Any, Any] = {}

    def holds(self, states: Tensor) -> bool:
        """Return whether these are the states that were handed on last, unchanged since."""
        return self.states is states and self.version == states._version

    def half_of(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the states in half precision, ``(T, D)``."""
        if self.half is not None and self.holds(states):
            return self.half
        return states.to(dtype).reshape(-1, states.shape[-1])

    def weights(self, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Return a projection's weight and bias in half precision."""
        return self.halves[id(linear.weight)], None if linear.bias is None else self.halves[id(linear.bias)]

    def keep(self, states: Tensor, half: Tensor | None) -> None:
        """Store the returned states, and their copy if there is one."""
        self.states, self.half, self.version = states, half, states._version


class TrainingTable(Table):
    """Runs the layers of a model while it trains.

    Args:
        dtype: of autocast: bfloat16 or float16.
    """

    name = "cuda-training"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._told = False

    def lacks(self, layer: Layer) -> str | None:
        """Return why this table cannot run a layer."""
        reason = plain_parts(layer, AdaptedLinear)
        if reason is not None:
            return reason
        attention: Any = layer.attention
        feed_forward: Any = layer.feed_forward
        parts = [part for part in layer_linears(layer) if type(part) is AdaptedLinear]
        if any(part.lora.magnitude is not None for part in parts):
            return "its adapter has learned lengths (DoRA), which have no kernel"
        if any(part.lora.up_bias is not None for part in parts):
            return "its adapter has biases (lora_bias), which have no kernel"
        asked = (attention.query, attention.key, attention.value)
        if type(attention) is DisentangledAttention and any(part in asked for part in parts):
            return "its attention computes positions by the projections that are adapted"
        width = attention.query.in_features
        if width > WIDEST:
            return f"states of {width} features are wider than {WIDEST}"
        if width // attention.num_heads not in HEAD_WIDTHS:
            return f"heads of {width // attention.num_heads} features are none of {', '.join(map(str, HEAD_WIDTHS))}"
        if feed_forward.gate is None and feed_forward.activation.name not in GELUS:
            return f"its activation is {feed_forward.activation.name}, which has no kernel"
        if feed_forward.activation.name == "prelu":
            return "its activation learns"
        # Before attention any norm will do: torch computes it.
        norms = [layer.feed_forward_norm] + [layer.attention_norm] * (layer.order == "post")
        strange = [type(norm).__name__ for norm in norms if norm_kind(norm) is None]
        if strange:
            return f"its norm is a {strange[0]}"
        if any(part.weight.dtype != torch.float32 for part in (attention.query, feed_forward.up, feed_forward.down)):
            return "its weights are not float32"
        return None

    def begin(self, layer: Layer, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any]) -> Table:
        """Return this table for a training step under autocast without hooks; else torch's."""
        if not self._takes(layer, hidden):
            return TORCH
        if watched(layer):
            if not self._told:
                self._told = True
                warnings.warn(
                    "training: layers with hooks on their parts run on torch's own operations, which is slower",
                    stacklevel=2,
                )
            return TORCH
        carried = layout.memo.get("carried")
        if carried is None or not carried.holds(hidden):
            # The first layer of a pass, or one with an input that was changed.
            carried = layout.memo["carried"] = _Carried(hidden.device)
        carried.depth += 1
        carried.halves = self._halved(layer)
        return self

    def _takes(self, layer: Layer, hidden: Tensor) -> bool:
        kind = hidden.device.type
        attention: Any = layer.attention
        if type(attention) is DisentangledAttention:
            attends = attention._joins(hidden)
        else:
            attends = attention.implementation != "eager"
        return (
            attends
            and torch.is_grad_enabled()
            and torch.is_autocast_enabled(kind)
            and torch.get_autocast_dtype(kind) == self.dtype
            and hidden.dtype in (torch.float32, self.dtype)  # a projection before the layers leaves the latter
            and attention.query.weight.dtype == torch.float32
        )

    def _halved(self, layer: Layer) -> dict[Any, Any]:
        """Return copies in half precision of a layer's tensors, in one piece of memory made by one launch."""
        attention: Any = layer.attention
        linears: list[Any] = layer_linears(layer)
        # Query, key and value come first, so that one piece of the memory is the weight of their joined product.
        asked = [] if type(attention) is DisentangledAttention else linears[:3]
        tensors = [p.weight for p in asked] + [p.bias for p in asked if p.bias is not None]
        begins = sum(t.numel() for t in tensors)
        tensors += [t for p in linears[3:] for t in (p.weight, p.bias) if t is not None]
        tensors += [t for p in linears if type(p) is AdaptedLinear for t in (p.lora.down, p.lora.up)]
        given = [t.detach().contiguous() for t in tensors]
        if given[0].is_cuda:
            from flodl_hf.nn.kernels.copies import copied

            room = copied(given, self.dtype)
        else:
            room = torch.cat([t.view(-1).to(self.dtype) for t in given])
        pieces = room.split([t.numel() for t in tensors])
        found: dict[Any, Any] = {id(t): piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)}
        if asked:
            weights = sum(p.weight.numel() for p in asked)
            bias = None if asked[0].bias is None else room[weights:begins]
            found["joined"] = (room[:weights].view(-1, asked[0].in_features), bias)
        return found

    # ---- operations ----------------------------------------------------------------------------------

    def attend(self, layer: Layer, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any], first: bool) -> _Branch:
        """Return mixed values, before their output projection."""
        attention: Any = layer.attention
        carried: _Carried = layout.memo["carried"]
        half = carried.half_of(hidden, self.dtype)
        if type(attention) is DisentangledAttention:
            mixed = attention._joined(half.view(hidden.shape), layout, **kwargs)
        else:
            # In float32, as autocast has them; so before it is left.
            rotary = attention.rotary if isinstance(layout, Packed) else None
            angles = None if rotary is None else rotary.angles(half, layout)
            with torch.autocast(hidden.device.type, enabled=False):
                mixed = self._mixed(attention, half, hidden, layout, kwargs, angles)
        return _Branch(
            mixed.reshape(-1, hidden.shape[-1]), attention.output, attention.dropout,
            carried.depth * STREAMS + AFTER_ATTENTION,
        )  # fmt: skip

    def _mixed(
        self, attention: Any, half: Tensor, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any], angles: Any
    ) -> Tensor:
        from flodl_hf.nn.kernels.operations import mixed, projected

        carried: _Carried = layout.memo["carried"]
        parts = (attention.query, attention.key, attention.value)
        weight, bias = carried.halves["joined"]
        biases: list[Tensor] = [] if bias is None else [part.bias for part in parts]
        qkv = projected(half, weight, bias, [part.weight for part in parts], biases)
        sizes = [part.out_features for part in parts]
        if any(type(part) is AdaptedLinear for part in parts):
            pieces = qkv.split(sizes, dim=-1)
            qkv = torch.cat(_adapted(pieces, half, parts, carried), -1)
        p = attention.attention_dropout if attention.training else 0.0
        if angles is not None:
            from flodl_hf.nn.kernels.operations import turned

            rotary = attention.rotary
            heads = attention.num_heads + attention.kv_heads * (1 + rotary.values)
            qkv = turned(
                qkv, *angles, heads=heads, width=rotary.width, wide=rotary.widened, halves=rotary.halves
            )  # fmt: skip
        ours = not kwargs and attention.kv_heads == attention.num_heads and qkv.numel() < OFFSETS
        if ours and trains_walking(layout, attention.window):
            assert isinstance(layout, Packed)
            assert layout.places is not None
            return mixed(
                qkv, layout.places, layout.segment_ends(), carried.seed, heads=attention.num_heads, p=p,
                stream=carried.depth * STREAMS, window=attention.window,
            )  # fmt: skip
        query, key, value = qkv.view(*hidden.shape[:-1], -1).split(sizes, dim=-1)
        return attention.mixed(query, key, value, layout, **kwargs, fast=True, placed=angles is not None)

    def transform(self, layer: Layer, hidden: Tensor, layout: Layout) -> _Branch:
        """Return the widened states, before their last projection."""
        from flodl_hf.nn.kernels.operations import activated, projected

        feed_forward: Any = layer.feed_forward
        assert type(feed_forward) is FeedForward
        carried: _Carried = layout.memo["carried"]
        with torch.autocast(hidden.device.type, enabled=False):
            half = carried.half_of(hidden, self.dtype)
            up = feed_forward.up
            if feed_forward.gate is None:
                (x,) = _adapted([projected(half, *carried.weights(up), [up.weight], [])], half, [up], carried)
                wide = activated(x, up.bias, tanh=GELUS[feed_forward.activation.name])
            else:
                gate = feed_forward.gate
                both = (gate, up)
                products = [projected(half, *carried.weights(p), [p.weight], _listed(p.bias)) for p in both]
                opened, raised = _adapted(products, half, both, carried)
                wide = feed_forward.activation(opened) * raised
            wide = feed_forward.dropped(wide)
        return _Branch(
            wide, feed_forward.down, feed_forward.dropout, carried.depth * STREAMS + AFTER_FEED_FORWARD
        )  # fmt: skip

    def add(self, layer: Layer, branch: _Branch, residual: Tensor, layout: Layout) -> Tensor:
        """Return ``residual`` plus the branch, float32."""
        from flodl_hf.nn.kernels.operations import projected

        carried: _Carried = layout.memo["carried"]
        linear = branch.linear
        with torch.autocast(residual.device.type, enabled=False):
            x = projected(branch.states, *carried.weights(linear), [linear.weight], _listed(linear.bias))
            (x,) = _adapted([x], branch.states, [linear], carried)
            p = branch.dropout.p if branch.dropout.training else 0.0
            total = residual + F.dropout(x, p, p > 0).view(residual.shape)
        carried.keep(total, None)
        return total

    def norm(self, norm: nn.Module, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the normalised states, float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return norm(hidden.float())

    def add_norm(
        self, layer: Layer, norm: nn.Module, branch: _Branch, residual: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Return the sum, float32, and its norm in half precision; post: the norm twice, float32.

        The half-precision copy of the latter is kept for the next operation.
        """
        from flodl_hf.nn.kernels.operations import added_and_normed, projected

        kind = norm_kind(norm)
        assert kind is not None
        weight, bias, eps, center = kind
        carried: _Carried = layout.memo["carried"]
        width = residual.shape[-1]
        linear, dropout, pre = branch.linear, branch.dropout, layer.order == "pre"
        with torch.autocast(residual.device.type, enabled=False):
            x = projected(branch.states, *carried.weights(linear), [linear.weight], [])
            (x,) = _adapted([x], branch.states, [linear], carried)
            states, half = added_and_normed(
                x, residual.reshape(-1, width).float(), weight, bias, linear.bias, carried.seed, eps=eps,
                p=dropout.p if dropout.training else 0.0, stream=branch.stream, center=center, pre=pre,
            )  # fmt: skip
        states = states.view(residual.shape)
        if pre:
            return states, half.view(residual.shape)
        carried.keep(states, half)
        return states, states


def _adapted(
    products: Sequence[Tensor], states: Tensor, linears: Sequence[nn.Linear], carried: _Carried
) -> list[Tensor]:
    """Return the outputs of projections of ``states``, with their parts; those of one matrix drop the same values."""
    dropped: dict[int, Tensor] = {}
    found = []
    for x, linear in zip(products, linears, strict=True):
        if type(linear) is not AdaptedLinear:
            found.append(x)
            continue
        part = linear.lora
        if id(part.down) not in dropped:
            dropped[id(part.down)] = F.dropout(states, part.dropped) if part.dropped else states
        halves = (carried.halves[id(tensor)] for tensor in (part.down, part.up))
        found.append(beside(x, dropped[id(part.down)], part, *halves))
    return found


def _listed(bias: Tensor | None) -> list[Tensor]:
    return [] if bias is None else [bias]
