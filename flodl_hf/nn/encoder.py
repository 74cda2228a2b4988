"""The encoder that the families share, as graphs: embeddings, a stack of layers, a pooler.

A family's file chains these parts and sets the differences. Names given here are the vocabulary of
every family: ``embeddings.word``, ``layers.3.attention.query``, ``layers.3.feed_forward.up``.
Shapes: ids ``(batch, seq)`` or ``(tokens,)``; states with one more dimension, ``hidden_size`` wide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from flodl.graph import FlowBuilder, Graph
from flodl_hf.nn.attention import SelfAttention
from flodl_hf.nn.layers import Activation, EncoderLayer, FeedForward, Order
from flodl_hf.nn.layout import Layout

__all__ = [
    "BlockConfig",
    "Embeddings",
    "FirstToken",
    "MeanToken",
    "bert_block",
    "chain",
    "pooler",
    "pre_norm_block",
    "stack",
]


class Embeddings(nn.Module):
    """Words, token types and positions summed, normalised and dropped.

    Args:
        vocab_size: rows of the word table.
        size: width of each table.
        norm_eps: epsilon of the layer norm; None for no norm.
        dropout: probability of dropping a value, in [0, 1).
        norm_bias: whether the norm adds a bias.
        max_positions: rows of the position table; 0 for none.
        type_vocab_size: rows of the token type table; 0 for none.
        pad_token_id: the word row that gets no gradient; None for none.
        positions_after_pad: count positions over the ids that are not padding, starting after
            ``pad_token_id`` (RoBERTa), rather than from 0 along the row.

    Attributes:
        given_whole: embeddings passed to a call replace the whole output of these embeddings, rather than words.
    """

    given_whole = False

    def __init__(
        self,
        vocab_size: int,
        size: int,
        norm_eps: float | None,
        dropout: float,
        *,
        norm_bias: bool = True,
        max_positions: int = 0,
        type_vocab_size: int = 0,
        pad_token_id: int | None = None,
        positions_after_pad: bool = False,
    ) -> None:
        super().__init__()
        self.pad_token_id = pad_token_id
        self.positions_after_pad = positions_after_pad
        self.word = nn.Embedding(vocab_size, size, padding_idx=pad_token_id)
        position_padding = pad_token_id if positions_after_pad else None
        self.position = nn.Embedding(max_positions, size, padding_idx=position_padding) if max_positions else None
        self.token_type = nn.Embedding(type_vocab_size, size) if type_vocab_size else None
        self.norm = None if norm_eps is None else nn.LayerNorm(size, eps=norm_eps, bias=norm_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return the embedded tokens, ``(..., size)``. Absent ``token_type_ids`` are zeros."""
        assert layout is not None
        states = self.summed(input_ids, token_type_ids, position_ids, layout)
        return self.dropout(states if self.norm is None else self.norm(states))

    def summed(
        self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None, layout: Layout
    ) -> Tensor:
        """Return the sum of a token's embeddings, ``(..., size)``, before the norm."""
        states = self.word(input_ids)
        if self.token_type is not None:
            states = states + self.token_type(
                input_ids.new_zeros(()).expand_as(input_ids) if token_type_ids is None else token_type_ids
            )
        if self.position is not None:
            states = states + self.position(
                self._positions(input_ids, layout) if position_ids is None else position_ids
            )
        return states

    def _positions(self, ids: Tensor, layout: Layout) -> Tensor:
        if not self.positions_after_pad:
            return layout.positions(ids)
        assert self.pad_token_id is not None
        real = ids.ne(self.pad_token_id).long()
        return layout.running_count(real) * real + self.pad_token_id


class MeanToken(nn.Module):
    """The mean state of each text's tokens."""

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return ``(texts, hidden)``."""
        return layout.mean(hidden)


class FirstToken(nn.Module):
    """The state of each text's first token.

    Args:
        taken: the states are those of first tokens already, and are returned as they are.
    """

    def __init__(self, *, taken: bool = False) -> None:
        super().__init__()
        self.taken = taken

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return ``(texts, hidden)``."""
        return hidden if self.taken else layout.first(hidden)


class BlockConfig(Protocol):
    """The fields that every family's config has under these names, because the shared block needs them."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def activation(self) -> str: ...  # noqa: D102
    @property
    def hidden_dropout(self) -> float: ...  # noqa: D102
    @property
    def attention_dropout(self) -> float: ...  # noqa: D102
    @property
    def norm_eps(self) -> float: ...  # noqa: D102


def bert_block(
    config: BlockConfig,
    *,
    attention: Mapping[str, Any] = {},
    feed_forward: Mapping[str, Any] = {},
    order: Order = "post",
) -> EncoderLayer:
    """Return one layer: attend, add, normalise, transform, add, normalise (Devlin et al. 2018).

    Args:
        config: the settings.
        attention: further arguments of `SelfAttention`, and other values of its dropout.
        feed_forward: further arguments of `FeedForward`, and other values of its activation and dropout.
        order: "pre" normalises the inputs of both parts instead of their sums.
    """
    c = config
    widths = (c.hidden_size, c.num_heads, c.attention_dropout)
    transform = {"activation": c.activation, "dropout": c.hidden_dropout, **feed_forward}
    return EncoderLayer(
        SelfAttention(*widths, **{"hidden_dropout": c.hidden_dropout, **attention}),
        FeedForward(c.hidden_size, c.intermediate_size, **transform),
        nn.LayerNorm(c.hidden_size, eps=c.norm_eps),
        nn.LayerNorm(c.hidden_size, eps=c.norm_eps),
        order=order,
    )


def pre_norm_block(config: BlockConfig, *, feed_forward_dropout: float | None = None) -> EncoderLayer:
    """Return BERT's layer with norms before its parts rather than after their sums.

    Args:
        config: the settings that `bert_block` reads.
        feed_forward_dropout: probability of dropping a value after the feed-forward part; None for the states' own.
    """
    dropout = config.hidden_dropout if feed_forward_dropout is None else feed_forward_dropout
    return bert_block(config, feed_forward={"dropout": dropout}, order="pre")


def stack(blocks: Iterable[nn.Module], *names: str) -> Graph:
    """Return the blocks in sequence, named ``0``, ``1``, ...; ``names`` are the further arguments of each."""
    flow = FlowBuilder().input("layout", *names).label("layers")
    for index, block in enumerate(blocks):
        flow = flow.through(block, name=str(index)).using("layout", *names)
    return flow.build()


class Repeated(nn.ModuleList):
    """Blocks applied by a schedule that may name one several times; each is stored once, by its number.

    Args:
        blocks: the stored blocks, named ``0``, ``1``, ...
        schedule: which block each application takes.
    """

    def __init__(self, blocks: Iterable[nn.Module], schedule: Iterable[int]) -> None:
        super().__init__(blocks)
        self.schedule = tuple(schedule)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the states after the whole schedule, shaped like ``hidden``."""
        for block in self.schedule:
            hidden = self[block](hidden, layout=layout)
        return hidden


def chain(
    embeddings: nn.Module,
    layers: nn.Module,
    *,
    projection: nn.Module | None = None,
    bias: nn.Module | None = None,
    bias_name: str = "bias",
    norm: nn.Module | None = None,
) -> Graph:
    """Return the encoder: ids in, token states out, with the optional inputs every family takes.

    Args:
        embeddings: called with ids, ``token_type_ids``, ``position_ids`` and ``layout``.
        layers: called with states and ``layout``.
        projection: between the two, where embeddings are narrower than states.
        bias: computes the bias of all layers' scores.
        bias_name: the argument of ``layers`` that takes it.
        norm: after the last layer, if layers normalise the inputs of their parts.
    """
    flow = (
        FlowBuilder(embeddings, name="embeddings")
        .label("encoder")
        .input("token_type_ids", "position_ids", default=None)
        .input("layout")
        .using("token_type_ids", "position_ids", "layout")
    )
    if projection is not None:
        flow = flow.through(projection, name="projection")
    if bias is None:
        flow = flow.through(layers, name="layers").using("layout")
    else:
        flow = flow.fork(bias, name="relative").tag("distances").using("layout")
        flow = flow.through(layers, name="layers").using("layout", **{bias_name: "distances"})
    return (flow if norm is None else flow.through(norm, name="norm")).build()


def sequence(**modules: nn.Module | float | str | None) -> Graph:
    """Return modules in sequence, named by their keywords, with the input ``layout``.

    Args:
        **modules: modules; a number is a dropout of that probability, a text the name of an activation. None for a
            module that is omitted.
    """
    flow = None
    for name, module in modules.items():
        if module is None:
            continue
        if isinstance(module, float | int):
            module = nn.Dropout(module)
        elif isinstance(module, str):
            module = Activation(module)
        flow = flow.through(module, name=name) if flow else FlowBuilder(module, name=name).input("layout")
        if isinstance(module, FirstToken | MeanToken):
            flow = flow.using("layout")
    assert flow is not None
    return flow.build()


def pooler(hidden_size: int, activation: str = "tanh", dropout: float | None = None) -> Graph:
    """Return the pooler: the first token's state through a projection and an activation."""
    dense = nn.Linear(hidden_size, hidden_size)
    return sequence(first=FirstToken(), dropout=dropout, dense=dense, activation=activation)
