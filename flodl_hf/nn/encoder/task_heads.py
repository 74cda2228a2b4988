"""Classifier modules of the tasks; each family specifies which one it uses.

Every body is a graph from states to logits with the input ``layout``. States are the token states
``(..., hidden)``, or the pooler's output ``(texts, hidden)`` if the family sets ``pooled``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.nn.encoder.graphs import dropped, pooled, sequence
from flodl_hf.nn.layers.activations import Activation


class Relation(nn.Module):
    """Scores of the relation of two texts, from the pooler's output, next to a head that scores tokens.

    Args:
        hidden_size: width of the states.
        num_labels: scores out.
        dropout: before the projection; None for none.
    """

    def __init__(self, hidden_size: int, num_labels: int, dropout: float | None = None) -> None:
        super().__init__()
        self.dropout = dropped(dropout)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, hidden: Tensor, pooled: Tensor) -> Tensor:
        """Return ``(texts, labels)`` of ``pooled``; token states are not read."""
        return self.classifier(pooled if self.dropout is None else self.dropout(pooled))


class Squeezed(nn.Module):
    """The one score of each state, without a separate dimension."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(...)`` of ``(..., 1)``."""
        return hidden.squeeze(-1)


class Shift(nn.Module):
    """A learned number added to each value of a state.

    Args:
        size: width of the states.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` plus the bias, same shape."""
        return hidden + self.bias


def linear(hidden_size: int, num_labels: int, dropout: float | None, name: str = "classifier") -> Graph:
    """Return dropout (None: none) and one projection: a label score for each state."""
    return sequence(dropout=dropped(dropout), **{name: nn.Linear(hidden_size, num_labels)})


def first_token_mlp(
    hidden_size: int, num_labels: int, *, dropout_in: float | None, activation: str, dropout_out: float
) -> Graph:
    """Return the first token's state through a projection, an activation, dropout and the label projection.

    Args:
        hidden_size: width of the states.
        num_labels: scores out.
        dropout_in: dropout before the first projection; None for none.
        activation: between the projections.
        dropout_out: dropout before the label projection.
    """
    return sequence(
        pooled("cls"),
        dropout_in=dropped(dropout_in),
        dense=nn.Linear(hidden_size, hidden_size),
        activation=Activation(activation),
        dropout=nn.Dropout(dropout_out),
        classifier=nn.Linear(hidden_size, num_labels),
    )


def summary(hidden_size: int, *, projection: bool, activation: str | None, dropout: float) -> Graph:
    """Return one score of a text from its first token's state, as transformers' summaries are configured.

    Args:
        hidden_size: width of the states.
        projection: whether there is one before the activation.
        activation: before the score; None for none.
        dropout: before the score.
    """
    return sequence(
        pooled("cls"),
        dense=nn.Linear(hidden_size, hidden_size) if projection else None,
        activation=None if activation is None else Activation(activation),
        dropout=nn.Dropout(dropout),
        classifier=nn.Linear(hidden_size, 1),
    )


def token_score(hidden_size: int, activation: str) -> Graph:
    """Return a projection, an activation and one score for each token."""
    dense, classifier = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, 1)
    return sequence(dense=dense, activation=Activation(activation), classifier=classifier, squeezed=Squeezed())


def lm(hidden_size: int, embedding_size: int, vocab_size: int, activation: str, norm_eps: float) -> Graph:
    """Return the masked-word head: projection, activation, norm, then a score for every word.

    The decoder's table is the word embedding itself where the configuration ties them.
    """
    return sequence(
        dense=nn.Linear(hidden_size, embedding_size),
        activation=Activation(activation),
        norm=nn.LayerNorm(embedding_size, eps=norm_eps),
        decoder=nn.Linear(embedding_size, vocab_size),
    )


def shifted_lm(hidden_size: int, vocab_size: int, activation: str, norm_eps: float, prefix: str, bias: str) -> Graph:
    """Return the masked-word head with a bias that is added after the decoder.

    Args:
        hidden_size: width of the states.
        vocab_size: scores out.
        activation: after the projection.
        norm_eps: of the norm.
        prefix: of the names of projection, activation and norm.
        bias: name of the bias.
    """
    return sequence(
        **{
            f"{prefix}dense": nn.Linear(hidden_size, hidden_size),
            f"{prefix}activation": Activation(activation),
            f"{prefix}norm": nn.LayerNorm(hidden_size, eps=norm_eps),
            "decoder": nn.Linear(hidden_size, vocab_size, bias=False),
            bias: Shift(vocab_size),
        }
    )


def normed(
    hidden_size: int,
    num_labels: int,
    *,
    activation: str,
    norm: nn.Module,
    bias: bool = True,
    pooling: str | None = None,
    dropout: float | None = None,
    out_bias: bool = True,
    name: str = "classifier",
) -> Graph:
    """Return states through a projection, an activation and a norm, then dropout and the last projection.

    Args:
        hidden_size: width of the states.
        num_labels: scores out.
        activation: after the first projection.
        norm: after the activation.
        bias: whether the first projection adds one.
        pooling: "cls" or "mean" to score texts by their first token or the mean of all; None to score tokens.
        dropout: before the last projection; None for none.
        out_bias: whether the last projection adds a bias.
        name: of the last projection.
    """
    return sequence(
        None if pooling is None else pooled(pooling),
        dense=nn.Linear(hidden_size, hidden_size, bias=bias),
        activation=Activation(activation),
        norm=norm,
        dropout=dropped(dropout),
        **{name: nn.Linear(hidden_size, num_labels, bias=out_bias)},
    )
