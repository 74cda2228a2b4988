"""Classifier modules of the tasks, of which each family specifies one, and the losses of their logits.

Every body is a graph from states to logits with the input ``layout``. States are the token states
``(..., hidden)``, or the pooler's output ``(texts, hidden)`` if the family sets ``pooled``. Losses are computed as
transformers does, operation by operation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.graph import Graph
from flodl_hf.errors import PredictError
from flodl_hf.nn.encoder import FirstToken, sequence


class Relation(nn.Module):
    """Scores of the relation of two texts, from the pooler's output, next to a head that scores tokens.

    Args:
        hidden_size: width of the states.
        num_labels: scores out.
        dropout: before the projection; None for none.
    """

    def __init__(self, hidden_size: int, num_labels: int, dropout: float | None = None) -> None:
        super().__init__()
        self.dropout = None if dropout is None else nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, hidden: Tensor, pooled: Tensor) -> Tensor:
        """Return ``(texts, labels)`` of ``pooled``; token states are not read."""
        return self.classifier(pooled if self.dropout is None else self.dropout(pooled))


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
    return sequence(dropout=dropout, **{name: nn.Linear(hidden_size, num_labels)})


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
        first=FirstToken(),
        dropout_in=dropout_in,
        dense=nn.Linear(hidden_size, hidden_size),
        activation=activation,
        dropout=dropout_out,
        classifier=nn.Linear(hidden_size, num_labels),
    )


def lm(hidden_size: int, embedding_size: int, vocab_size: int, activation: str, norm_eps: float) -> Graph:
    """Return the masked-word head: projection, activation, norm, then a score for every word.

    The decoder's table is the word embedding itself where the configuration ties them.
    """
    return sequence(
        dense=nn.Linear(hidden_size, embedding_size),
        activation=activation,
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
            f"{prefix}activation": activation,
            f"{prefix}norm": nn.LayerNorm(hidden_size, eps=norm_eps),
            "decoder": nn.Linear(hidden_size, vocab_size, bias=False),
            bias: Shift(vocab_size),
        }
    )


IGNORED_LABEL = -100  # the label of tokens that do not count


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None) -> Tensor:
    """Return the mean loss of whole-text labels.

    Args:
        logits: ``(batch, labels)``.
        labels: ids ``(batch,)``; 0/1 floats ``(batch, labels)`` for several labels a text; numbers
            ``(batch,)`` or ``(batch, labels)`` for regression.
        problem_type: as in the configuration; None infers it.

    Raises:
        PredictError: a label id is outside the classifier's rows.
    """
    num_labels = logits.shape[-1]
    labels = labels.to(logits.device)
    if problem_type is None and num_labels > 1:
        single = labels.dtype in (torch.long, torch.int)
        problem_type = "single_label_classification" if single else "multi_label_classification"
    if problem_type in (None, "regression"):
        return F.mse_loss(logits.squeeze(), labels.squeeze()) if num_labels == 1 else F.mse_loss(logits, labels)
    if problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels)
    return F.cross_entropy(logits.view(-1, num_labels), labels.view(-1))


def token_loss(logits: Tensor, labels: Tensor, *, upcast: bool = False) -> Tensor:
    """Return the mean cross-entropy over tokens with labels other than -100.

    Args:
        logits: ``(..., classes)``.
        labels: ``(...)``.
        upcast: compute in float32 (the masked-word loss does).
    """
    scores = logits.float() if upcast else logits
    return F.cross_entropy(
        scores.view(-1, scores.shape[-1]), labels.to(logits.device).view(-1), ignore_index=IGNORED_LABEL
    )


def span_loss(start_logits: Tensor, end_logits: Tensor, start_positions: Tensor, end_positions: Tensor) -> Tensor:
    """Return the mean of the losses of both ends; positions outside the row do not count.

    Args:
        start_logits: ``(batch, seq)``; ``end_logits`` alike.
        start_positions: ``(batch,)`` or ``(batch, 1)``; ``end_positions`` alike.
    """
    outside = start_logits.shape[1]

    def one(logits: Tensor, positions: Tensor) -> Tensor:
        flat = positions.squeeze(-1) if positions.dim() > 1 else positions
        return F.cross_entropy(logits, flat.to(logits.device).clamp(0, outside), ignore_index=outside)

    return (one(start_logits, start_positions) + one(end_logits, end_positions)) / 2


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise if a label id has no class; torch's own message names neither.

    Raises:
        PredictError: an id is outside ``0..classes-1`` and is not -100.
    """
    if labels.dtype not in (torch.long, torch.int) or labels.numel() == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if high >= classes or (low < 0 and low != IGNORED_LABEL):
        raise PredictError(
            f"labels run from {low} to {high}; expected 0 to {classes - 1} (or {IGNORED_LABEL} for tokens that do "
            "not count). Check num_labels against the data.",
            low=low,
            high=high,
            classes=classes,
        )
