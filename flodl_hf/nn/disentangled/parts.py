"""Parts of DeBERTa other than attention: embeddings, the convolution, and the table with a state for each distance.

They work on both layouts. Shapes: ``(batch, seq, hidden)`` or ``(tokens, hidden)``.

The table of distances is shared by all layers; each layer projects it by itself. Distances are query minus key,
counted in tokens of one text. Near ones have a row each, far ones share rows that widen with the
logarithm of the distance (He et al. 2021, https://arxiv.org/abs/2111.09543, the v2 code release).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flodl_hf.nn.encoder import Embeddings
from flodl_hf.nn.layers import Activation, EncoderLayer
from flodl_hf.nn.layout import Layout


class MaskedEmbeddings(Embeddings):
    """Words, positions and token types summed, widened, normalised, zeroed where padding is, and dropped.

    Args:
        vocab_size: rows of the word table.
        size: width of each table.
        hidden_size: width of the states; another than ``size`` adds a projection.
        norm_eps: epsilon of the layer norm.
        dropout: probability of dropping a value, in [0, 1).
        norm: which layer norm.
        max_positions: rows of the position table; 0 for none.
        type_vocab_size: rows of the token type table; 0 for none.
        pad_token_id: the word row that gets no gradient; None for none.
    """

    def __init__(
        self, vocab_size: int, size: int, hidden_size: int, norm_eps: float, dropout: float, *,
        norm: type[nn.LayerNorm] = nn.LayerNorm, max_positions: int = 0, type_vocab_size: int = 0,
        pad_token_id: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            vocab_size, size, None, dropout,
            max_positions=max_positions, type_vocab_size=type_vocab_size, pad_token_id=pad_token_id,
        )  # fmt: skip
        self.projection = nn.Linear(size, hidden_size, bias=False) if size != hidden_size else None
        self.norm = norm(hidden_size, eps=norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return the embedded tokens, ``(..., hidden)``. Absent ``token_type_ids`` are zeros."""
        assert layout is not None
        assert self.norm is not None
        states = self.summed(input_ids, token_type_ids, position_ids, layout)
        states = self.norm(states if self.projection is None else self.projection(states))
        keep = layout.keep(states)
        return self.dropout(states if keep is None else states * keep.to(states.dtype))

    def summed(
        self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None, layout: Layout
    ) -> Tensor:
        """Return the sum of a token's embeddings, ``(..., size)``: positions before token types, as the reference."""
        states = self.word(input_ids)
        if self.position is not None:
            states = states + self.position(layout.positions(input_ids) if position_ids is None else position_ids)
        if self.token_type is not None:
            zeros = input_ids.new_zeros(()).expand_as(input_ids)
            states = states + self.token_type(zeros if token_type_ids is None else token_type_ids)
        return states


class Convolution(nn.Module):
    """Neighbouring embeddings mixed, added to a layer's output and normalised.

    Args:
        hidden_size: width of a state.
        kernel_size: tokens seen, odd, so that texts keep their length.
        groups: groups of channels; divides ``hidden_size``.
        activation: a name of `flodl_hf.nn.layers.ACTIVATIONS`.
        norm_eps: epsilon of the layer norm.
        dropout: probability of dropping a mixed value, in [0, 1).
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        groups: int,
        activation: str,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        padding = (kernel_size - 1) // 2
        self.filter = nn.Conv1d(hidden_size, hidden_size, kernel_size, padding=padding, groups=groups)
        self.dropout = nn.Dropout(dropout)
        self.activation = Activation(activation)
        self.norm = nn.LayerNorm(hidden_size, eps=norm_eps)

    def forward(self, hidden: Tensor, below: Tensor, layout: Layout) -> Tensor:
        """Return a layer's output ``hidden`` joined with the mixed ``below``, same shape; padding is zero."""
        mixed = layout.by_rows(self._rows, below)
        states = self.norm(hidden + self.activation(self.dropout(mixed)))
        keep = layout.keep(states)
        return states if keep is None else states * keep.to(states.dtype)

    def _rows(self, keep: Tensor | None, states: Tensor) -> Tensor:
        # Rows gathered from packed texts contain other texts' tokens where ``keep`` is False.
        states = states if keep is None else states * keep[:, :, None].to(states.dtype)
        return self.filter(states.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()


class ConvolvedLayer(EncoderLayer):
    """A layer that adds a convolution of its input to its output.

    Args:
        *parts: as of `EncoderLayer`.
        conv: the convolution.
    """

    def __init__(self, *parts: Any, conv: Convolution) -> None:
        super().__init__(*parts)
        self.conv = conv

    def forward(self, hidden: Tensor, layout: Layout, **kwargs: Any) -> Tensor:
        """Return the layer's states, shaped like ``hidden``."""
        return self.conv(super().forward(hidden, layout, **kwargs), below=hidden, layout=layout)


# Rows of distances on a device, a few kilobytes each: a dozen launches less in every call.
_KEPT: dict[tuple[int, int, int, int, torch.device], Tensor] = {}
_MOST_KEPT = 1024


@dataclass(frozen=True)
class Relative:
    """What every layer needs to know about distances in one call.

    Attributes:
        table: a state for each row of the table, ``(2 * span, hidden)``.
        rows: the table row of each distance from ``-(length - 1)``, ``(2 * length - 1,)``, int64.
        length: tokens of the longest text.
        reach: distances up to this one have a separate row in the table.
        buckets: as in `bucketed`.
        max_distance: as in `bucketed`.
    """

    table: Tensor
    rows: Tensor
    length: int
    reach: int
    buckets: int
    max_distance: int
    _computed: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def used(self) -> int:
        """The number of rows of each sign that distances of the call can reach, in eights, or a few more."""
        span, farthest = self.table.shape[0] // 2, self.length - 1
        if farthest > self.reach and self.buckets > 0 and self.max_distance > 0:
            # `bucketed`, and one more because logarithms are rounded differently here.
            middle = self.buckets // 2
            if self.max_distance - 1 <= middle:  # none between near and last: the reference's scale is 0 or below
                return span
            far = math.log(farthest / middle) / math.log((self.max_distance - 1) / middle) * (middle - 1)
            farthest = middle + math.ceil(far) + 1
        return min(span, -(-(farthest + 1) // 8) * 8)

    @property
    def near(self) -> bool:
        """Whether every distance of the call has a separate row."""
        return self.length - 1 <= self.reach

    @property
    def window(self) -> slice:
        """Rows of the table that distances of the call can index; distance 0 has the middle row."""
        middle = self.table.shape[0] // 2
        return slice(middle - self.used, middle + self.used)

    @property
    def reached(self) -> slice:
        """Rows of the table that can be indexed at the longest length, of a table without buckets."""
        middle = self.table.shape[0] // 2
        reach = min(self.length, middle)
        return slice(middle - reach, middle + reach)

    @property
    def columns(self) -> Tensor:
        """The positions of ``rows`` in the `window`, int32; computed once for all layers."""
        # torch.compile cannot enter the lock of `functools.cached_property` in Python 3.11.
        if "columns" not in self._computed:
            self._computed["columns"] = (self.rows - self.window.start).int()
        return self._computed["columns"]

    def index_for(self, length: int, *, by_key: bool = False) -> Tensor:
        """Return the table row for every pair of tokens of a text, ``(length, length)``, query by key.

        Only differences of places count, so a shorter text reads the corner of the longest one's.

        Args:
            length: tokens of the text.
            by_key: turn rows and columns round, in memory order.
        """
        name = "by_key" if by_key else "by_query"
        if name not in self._computed:
            if by_key:
                found = self.index_for(self.length).t().contiguous()
            elif torch.compiler.is_compiling():  # `unfold` would fix the length of exported and compiled graphs
                places = torch.arange(self.length, device=self.rows.device)
                found = self.rows[places[:, None] - places + (self.length - 1)]
            else:
                # Windows over the reversed rows: the one of token i ends with its distance to the first token, i.
                found = self.rows.flip(0).unfold(0, self.length, 1).flip(0)
            self._computed[name] = found
        return self._computed[name][:length, :length]


def bucketed(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return distances with the far ones merged: integers kept in float32.

    Up to ``mid = buckets // 2`` a distance stands for itself. Beyond, it becomes
    ``mid + ceil(log(distance / mid) / log((max_distance - 1) / mid) * (mid - 1))``, with its sign.
    The order of operations is the reference's, because ``ceil`` turns a last-bit difference into a
    whole row.

    Args:
        distance: integers of any shape.
        buckets: how many rows each sign has, at least 2.
        max_distance: the distance that falls into the last bucket, plus one.
    """
    mid = buckets // 2
    near = (distance < mid) & (distance > -mid)
    size = torch.where(near, torch.full((), mid - 1, dtype=distance.dtype, device=distance.device), distance.abs())
    scale = torch.log(torch.tensor((max_distance - 1) / mid))
    far = torch.ceil(torch.log(size / mid) / scale * (mid - 1)) + mid
    return torch.where(size <= mid, distance.type_as(far), far * torch.sign(distance))


def table_rows(length: int, span: int, buckets: int, max_distance: int, device: torch.device | None = None) -> Tensor:
    """Return the table row of each distance from ``-(length - 1)`` to ``length - 1``, ``(2 * length - 1,)``.

    Args:
        length: tokens of a text.
        span: rows that each sign of the table has.
        buckets: as in `bucketed`; below 1 every distance up to ``span`` has its own row.
        max_distance: as in `bucketed`.
        device: where to make it.
    """
    distance = torch.arange(1 - length, length, device=device)
    if buckets > 0 and max_distance > 0:
        distance = bucketed(distance, buckets, max_distance).to(torch.long)
    return torch.clamp(distance + span, 0, 2 * span - 1)


class RelativePositions(nn.Module):
    """The table of distances, normalised once a call and handed to every layer.

    Args:
        hidden_size: width of a row.
        span: number of rows per sign; 0 for no relative attention.
        buckets: how many rows share the distances of one sign; below 1 each distance has its own.
        max_distance: the distance that falls into the last bucket, plus one.
        norm_eps: epsilon of the table's layer norm; None for no norm.
    """

    def __init__(self, hidden_size: int, span: int, buckets: int, max_distance: int, norm_eps: float | None) -> None:
        super().__init__()
        self.span = span
        self.buckets = buckets
        self.max_distance = max_distance
        self.embeddings = nn.Embedding(2 * span, hidden_size) if span else None
        # Without relative attention the reference still makes the norm and writes it.
        self.norm = None if norm_eps is None else nn.LayerNorm(hidden_size, eps=norm_eps)

    def forward(self, hidden: Tensor, layout: Layout) -> Relative | None:
        """Return the table and its index for texts of ``layout``; None without relative attention.

        Args:
            hidden: token states ``(batch, seq, hidden)`` or ``(tokens, hidden)``, read for length and device.
            layout: which tokens belong together.
        """
        if self.embeddings is None:
            return None
        table = self.embeddings.weight if self.norm is None else self.norm(self.embeddings.weight)
        length = layout.length(hidden)
        reach = self.buckets // 2 if self.buckets > 0 else self.span - 1
        return Relative(table, self._rows(length, hidden.device), length, reach, self.buckets, self.max_distance)

    def _rows(self, length: int, device: torch.device) -> Tensor:
        settings = (length, self.span, self.buckets, self.max_distance, device)
        if device.type != "cuda" or torch.compiler.is_compiling():
            return table_rows(*settings)
        found = _KEPT.get(settings)
        if found is None:
            with torch.inference_mode(False):
                found = table_rows(*settings)
            # Tensors created during a recording belong to it, and contain numbers only after it is replayed.
            # Cached tensors are never freed, because a recording reads them at their address.
            whole = type(found) is Tensor and not torch.cuda.is_current_stream_capturing()
            if whole and len(_KEPT) < _MOST_KEPT:
                _KEPT[settings] = found
        return found

    def extra_repr(self) -> str:
        """Show the distances in ``print(model)``."""
        return f"span={self.span}, buckets={self.buckets}, max_distance={self.max_distance}"
