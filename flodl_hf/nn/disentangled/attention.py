"""The attention module of DeBERTa: projections, scores, mask, softmax, mix.

Knows both layouts and the order of dropouts; the scores themselves are `scores`', distances are `parts`'. The kernels
are an operator with gradients (`operator`), registered at the first call.

Shapes: B texts, S tokens of a row, T tokens in all, N heads, H width of a head, R table rows that a call reaches.
"""

from __future__ import annotations

import math
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.disentangled.parts import Relative, RelativePositions
from flodl_hf.nn.disentangled.scores import (
    PositionTables,
    attend_fast,
    disentangled_scores,
    query_scaled_scores,
    score_scale,
)
from flodl_hf.nn.joined_tensors import are_all, joined_bias, products_by_head
from flodl_hf.nn.kernels.self_test import LEAST_CAPABILITY, trusted
from flodl_hf.nn.layout import Layout, Packed


class DisentangledAttention(nn.Module):
    """Self-attention over content and relative position, with its output projection.

    Args:
        hidden_size: width of a token's state.
        num_heads: heads; divides ``hidden_size``.
        attention_dropout: probability of dropping a weight, in [0, 1).
        hidden_dropout: the same for an output value, and for a value of the table of distances.
        kinds: which position scores there are: "c2p" (content to position), "p2c" (position to content).
        relative: whether positions are scored; without it ``kinds`` still scales the scores.
        share_keys: positions go through the projections of content rather than through their own.
        joined: DeBERTa's first version: one matrix for query, key and value, in which they alternate by head, no
            bias of keys, and queries divided rather than scores. All of it matters to the reference's bits alone.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention_dropout: float,
        hidden_dropout: float,
        *,
        kinds: tuple[str, ...],
        relative: bool = True,
        share_keys: bool = False,
        joined: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.joined = joined
        self.content_to_position = "c2p" in kinds
        self.position_to_content = "p2c" in kinds
        self.implementation = "sdpa"
        self.seen: tuple[list[Tensor], ...] = ()  # where eager attention leaves its weights while somebody looks
        self.held: PositionTables | None = None
        self.keeps_positions = False
        """Whether the first call without a gradient caches positions for later ones, in a prepared graph."""
        self.terms = 1 + self.content_to_position + self.position_to_content
        self.scale = math.sqrt(hidden_size // num_heads * self.terms)
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size, bias=not joined)
        self.value = nn.Linear(hidden_size, hidden_size)
        own = relative and not share_keys
        self.pos_key = (
            nn.Linear(hidden_size, hidden_size, bias=not joined) if own and self.content_to_position else None
        )
        self.pos_query = nn.Linear(hidden_size, hidden_size) if own and self.position_to_content else None
        self.position_dropout = nn.Dropout(hidden_dropout)
        self.attention_dropout = nn.Dropout(attention_dropout)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout)

    def forward(self, hidden: Tensor, layout: Layout, relative: Relative | None = None) -> Tensor:
        """Return the attended states, shaped like ``hidden``: ``(B, S, hidden)`` or ``(T, hidden)``."""
        parts = (self.query, self.key, self.value)
        if self._joins(hidden):
            mixed = self._joined(hidden, layout, relative)
        elif self.joined and self._way(hidden, self._computed(hidden)) == "reference":
            mixed = self._by_reference(products_by_head(hidden, self.num_heads, *parts), layout, relative)
        else:
            query, key, value = (part(hidden) for part in parts)
            mixed = self.mixed(query, key, value, layout, relative)
        return self.dropout(self.output(mixed))

    def mixed(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, relative: Relative | None, *,
        fast: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the mixed values of projected states, ``(B, S, hidden)`` or ``(T, hidden)``, heads side by side.

        ``fast`` changes nothing here: prepared graphs have the "fast" ``implementation``.
        """
        way, states = self._way(query), (query, key, value)
        if way == "reference":
            return self._by_reference(states, layout, relative)
        tables = None if relative is None else self._scaled_tables(relative, query)
        if way == "kernel":
            return attend_by_kernel(states, layout, tables, relative, **self._options())
        attend = partial(attend_fast, tables=tables, relative=relative, **self._options())
        return layout.by_rows(attend, *states)

    def _by_reference(self, states: tuple[Tensor, ...], layout: Layout, relative: Relative | None) -> Tensor:
        """Return the mixed values, ``(..., N*H)``, of queries, keys and values ``(..., N*H)`` or ``(..., N, H)``."""
        tables = None
        if relative is not None:
            tables = self.position_tables(relative.table, relative.reached if self.joined else None)
        return layout.by_rows(partial(self._texts, tables=tables, relative=relative), *states)

    def _joins(self, hidden: Tensor) -> bool:
        """Whether one product may stand for three: in half precision by kernel, where no bits are promised."""
        dtype, parts = self._computed(hidden), (self.query, self.key, self.value)
        half = dtype in (torch.float16, torch.bfloat16)
        return half and self._way(hidden, dtype) == "kernel" and are_all(nn.Linear, parts)

    def _computed(self, hidden: Tensor) -> torch.dtype:
        """Return the dtype that products of ``hidden`` have."""
        kind = hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.query.weight.dtype

    def _joined(self, hidden: Tensor, layout: Layout, relative: Relative | None) -> Tensor:
        """Return the mixed values with query, key and value from one product, and so one gradient."""
        dtype, parts = self._computed(hidden), (self.query, self.key, self.value)
        weight, bias = torch.cat([part.weight for part in parts]).to(dtype), joined_bias(parts)
        assert bias is not None
        bias = bias.to(dtype)
        states = F.linear(hidden, weight, bias)
        tables = None
        if relative is not None and (self.pos_key or self.pos_query or self._holds(states)):
            tables = self._scaled_tables(relative, states)
        elif relative is not None:
            width = self.query.out_features
            table = self.position_dropout(relative.table[relative.window])
            both = F.linear(table, weight[: 2 * width], bias[: 2 * width])
            query, key = (self._heads(x) for x in both.chunk(2, dim=-1))
            tables = PositionTables(
                key / self.scale if self.content_to_position else None,
                query / self.scale if self.position_to_content else None,
            )
        return attend_by_kernel((states,), layout, tables, relative, **self._options())

    def _options(self) -> dict[str, Any]:
        dropout = self.attention_dropout.p if self.training else 0.0
        return {"num_heads": self.num_heads, "scale": self.scale, "dropout": dropout}

    def _way(self, states: Tensor, dtype: torch.dtype | None = None) -> Literal["reference", "fast", "kernel"]:
        """Return how ``implementation`` is carried out for such states, or ones like them of ``dtype``."""
        if self.implementation == "fast":
            return "kernel" if has_kernel(states, self.num_heads, dtype) else "fast"
        # Half precision has no bits to repeat, so it takes the kernel wherever there is one.
        half = (dtype or states.dtype) in (torch.float16, torch.bfloat16)
        if self.implementation == "sdpa" and half and has_kernel(states, self.num_heads, dtype):
            return "kernel"
        return "reference"

    def position_tables(self, table: Tensor, rows: slice | None = None) -> PositionTables:
        """Return this layer's projections of the table of distances, ``(2 * span, hidden)`` in.

        Args:
            table: of distances.
            rows: for the reference of ``joined`` alone, the rows to project; queries then come divided.
        """
        # The view makes one point a layer where gradients of both projections meet before layers add up: the
        # reference's order, and so its bits.
        table = self.position_dropout(table)
        table = table.view_as(table) if rows is None else table[rows]
        pos_key = pos_query = None
        if self.position_to_content:
            pos_query = (self.pos_query or self.query)(table)
            if rows is None:
                pos_query = self._heads(pos_query)
            else:
                # In place, as in the reference: that decides in which order its bias's gradient is summed.
                pos_query = pos_query.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
                pos_query /= score_scale(pos_query.shape[-1], self.terms, pos_query.dtype)
        if self.content_to_position:
            pos_key = self._heads((self.pos_key or self.key)(table))
        return PositionTables(pos_key, pos_query)

    def _heads(self, table: Tensor) -> Tensor:
        return table.reshape(table.shape[0], self.num_heads, -1).transpose(0, 1).contiguous()

    def _texts(
        self, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *,
        tables: PositionTables | None, relative: Relative | None,
    ) -> Tensor:  # fmt: skip
        """Return the mixed values of texts of one length as the reference does, ``(B, S, hidden)``."""
        batch, length = query.shape[:2]
        q, k, v = (x.view(batch, length, self.num_heads, -1).transpose(1, 2) for x in (query, key, value))
        if self.joined:
            weights = self._weights(query_scaled_scores(q, k, tables, relative, self.terms), mask)
            return torch.matmul(weights, v).transpose(1, 2).flatten(2)
        q, k, v = (x.reshape(batch * self.num_heads, length, -1) for x in (q, k, v))
        scores = disentangled_scores(q, k, tables, relative, self.terms).view(batch, self.num_heads, length, length)
        weights = self._weights(scores, mask)
        mixed = torch.bmm(weights.view(batch * self.num_heads, length, length), v)
        return mixed.view(batch, self.num_heads, length, -1).transpose(1, 2).flatten(2)

    def _weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention weights of each token, ``(B, N, S, S)`` like the scores, after dropout."""
        if mask is not None:
            # Both have to be real. The dtype's lowest number rather than -inf: a row without a real token stays finite.
            scores = scores.masked_fill(
                ~(mask[:, None, None, :] & mask[:, None, :, None]), torch.finfo(scores.dtype).min
            )
        weights = self.attention_dropout(F.softmax(scores, dim=-1))
        for taker in self.seen:
            taker.append(weights)
        return weights

    def _holds(self, states: Tensor) -> bool:
        held = self.held
        return held is not None and not self.training and not torch.is_grad_enabled() and held.fits(states)

    def _scaled_tables(self, relative: Relative, states: Tensor) -> PositionTables:
        """Return the projected positions divided by the scale, only rows that this call can reach."""
        found = self.held if self._holds(states) else None
        if found is None:
            keeps = self.keeps_positions and not self.training and not torch.is_grad_enabled()
            table = self.position_tables(relative.table if keeps else relative.table[relative.window])
            found = table.each(lambda each: each / self.scale)
            if not keeps:
                return found
            found = found.each(lambda each: each.to(states.dtype))
            # Numbers made during a recording exist only while it is replayed.
            if not (states.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.held = found
        return found.each(lambda each: each[:, relative.window])


def attend_by_kernel(
    states: tuple[Tensor, ...],
    layout: Layout,
    tables: PositionTables | None,
    relative: Relative | None,
    *,
    num_heads: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Return the mixed values, ``(B, S, N*H)`` or ``(T, N*H)``; rows of padding contain arbitrary numbers.

    Args:
        states: queries, keys and values, ``(B, S, N*H)`` or ``(T, N*H)``, with any row stride; or all three
            adjacent in one tensor ``(..., 3*N*H)``, with a gradient that is one tensor too.
        layout: which tokens belong together.
        tables: projected positions divided by ``scale``, the rows of ``relative.window``; None for none.
        relative: distances of the call; None for none.
        num_heads: N.
        scale: what scores are divided by.
        dropout: probability of dropping an attention weight, drawn from the device's generator.
    """
    # Registering takes a hundredth of a second, which an import should not.
    from flodl_hf.nn.disentangled.operator import disentangled

    width = states[0].shape[-1] * len(states) // 3
    if len(states) == 1:
        q, k, v = states[0].reshape(-1, 3, num_heads, width // num_heads), None, None
    else:
        q, k, v = (x.reshape(-1, num_heads, width // num_heads) for x in states)
    offsets = ends = keep = None
    longest = layout.length(states[0])
    if isinstance(layout, Packed):
        offsets = layout.offsets
    elif layout.mask is not None:
        keep, ends = layout.mask.reshape(-1), layout.row_ends()
    seed = torch.randint(2**62, (1,), device=q.device) if dropout > 0.0 else None
    pk = pq = lut = None
    near, middle, reach = True, 0, 0
    if tables is not None and relative is not None:
        pk, pq = (None if table is None else table.to(q.dtype) for table in tables)
        near = relative.near
        middle = relative.used
        lut = None if near else relative.columns
        # Farther distances may share the last row of the single distances.
        reach = relative.reach - 1
    mixed, _ = disentangled(
        q, k, v, pk, pq, lut, offsets, ends, keep, seed, longest, middle, reach, near, 1.0 / scale, dropout
    )
    return mixed.view(*states[0].shape[:-1], width)


# Texts of one tile and of several; near distances and, with 16 buckets, far ones.
CASES = ((37, 5, 1), (150, 33))


@cache
def _able(device: torch.device) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def has_kernel(states: Tensor, num_heads: int, dtype: torch.dtype | None = None) -> bool:
    """Return whether the kernels take ``(..., N*H)`` states: CUDA from Ampere on, Triton there, H from 16 to 128.

    Where they do in principle, the first question computes a small case to see that they do, see
    `flodl_hf.nn.kernels.self_test`.

    Args:
        states: states of the device and width in question.
        num_heads: N.
        dtype: what queries will be; None for what ``states`` is.
    """
    dtype = dtype or states.dtype
    width = states.shape[-1] // num_heads
    able = (
        states.is_cuda
        and dtype in (torch.float16, torch.bfloat16, torch.float32)
        and 16 <= width <= 128
        and _able(states.device)
    )
    if not able or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return able
    return trusted("disentangled", states.device, dtype, width, furthest)


def furthest(device: torch.device, dtype: torch.dtype, width: int) -> tuple[float, str]:
    """Return the largest relative distance of a result or gradient from the reference's in float32, and of what.

    Args:
        device: where.
        dtype: of queries, keys and values.
        width: of a head.
    """
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        return max(_max_error(device, dtype, width, lengths) for lengths in CASES), "attention or a gradient of it"


def _max_error(device: torch.device, dtype: torch.dtype, width: int, lengths: tuple[int, ...]) -> float:
    """Return the largest relative distance of the result and of all gradients."""
    draw = torch.Generator().manual_seed(0)
    tokens, heads, scale = sum(lengths), 2, (3 * width) ** 0.5
    layout = Packed.of(lengths, device)
    hidden = torch.zeros(tokens, heads * width, device=device)
    relative = RelativePositions(heads * width, 16, 16, 64, None).to(device)(hidden, layout)
    assert relative is not None
    rows = relative.table[relative.window].shape[0]
    shapes = [(tokens, heads * width)] * 4 + [(heads, rows, width)] * 2
    *states, direction, pk, pq = (torch.randn(shape, generator=draw).to(device, dtype).float() for shape in shapes)
    inputs = [*states, pk / scale, pq / scale]

    def both(kind: torch.dtype, kernel: bool) -> list[Tensor]:
        given = [x.detach().to(kind).requires_grad_() for x in inputs]
        states, tables = (given[0], given[1], given[2]), PositionTables(*given[3:])
        options: dict[str, Any] = {"num_heads": heads, "scale": scale, "dropout": 0.0}
        if kernel:
            found = attend_by_kernel(states, layout, tables, relative, **options)
        else:
            found = layout.by_rows(partial(attend_fast, tables=tables, relative=relative, **options), *states)
        return [found, *torch.autograd.grad(found, given, direction.to(found.dtype))]

    pairs = zip(both(dtype, True), both(torch.float32, False), strict=True)
    return max(float((a.detach().float() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)
