"""Further parts of DeBERTa's encoder: its embeddings, its convolution, a separate bias.

All three work on both layouts. Shapes: ``(batch, seq, hidden)`` or ``(tokens, hidden)``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flodl_hf.nn.encoder.graphs import Embeddings
from flodl_hf.nn.layers.activations import Activation
from flodl_hf.nn.layers.encoder_layer import EncoderLayer
from flodl_hf.nn.layout.layouts import Layout


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
        activation: a name of `flodl_hf.nn.layers.activations.ACTIVATIONS`.
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
        states = self.norm(hidden + self.activation(self.dropout(self._mixed(below, layout))))
        keep = layout.keep(states)
        return states if keep is None else states * keep.to(states.dtype)

    def _mixed(self, below: Tensor, layout: Layout) -> Tensor:
        def rows(keep: Tensor | None, below: Tensor) -> Tensor:
            # Rows gathered from packed texts contain other texts' tokens where ``keep`` is False.
            return self._rows(below if keep is None else below * keep[:, :, None].to(below.dtype))

        return layout.by_rows(rows, below)

    def _rows(self, states: Tensor) -> Tensor:
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
