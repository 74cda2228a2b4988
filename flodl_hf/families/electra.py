"""ELECTRA (Clark et al. 2020, https://arxiv.org/abs/2003.10555).

BERT's encoder, trained to detect replaced words. It departs from BERT in:

* words, positions and token types may be narrower than states; a projection then widens them;
* there is no pooler: classification reads the first token through a separate projection and GELU;
* replaced tokens use the discriminator's head: a projection, an activation and one score per token;
* masked words use the generator's head, which narrows back to the width of its words.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from flodl.errors import ConfigError
from flodl.graph import Graph
from flodl_hf.families import bert
from flodl_hf.families.schema import FamilyHead
from flodl_hf.families.schema.config_rows import Row, activation, boolean, count, fraction, one_of, optional
from flodl_hf.families.schema.record import KeyRow, Tie, rows_under
from flodl_hf.nn import task_heads
from flodl_hf.nn.encoder import FirstToken, bert_block, chain, sequence, stack


@dataclass(frozen=True, kw_only=True)
class ElectraConfig(bert.BertConfig):
    """The settings of an ELECTRA encoder: BERT's, and the width of its tables.

    Attributes:
        embedding_size: width of the word, position and token type tables.
        summary: which state multiple choice reads of a text.
        summary_projection: whether multiple choice projects it before it scores.
        summary_activation: name of the activation after that projection; None for none.
        summary_dropout: probability of dropping a value before multiple choice scores, in [0, 1).
    """

    embedding_size: int = 128
    summary: str = "first"
    summary_projection: bool = True
    summary_activation: str | None = "gelu"
    summary_dropout: float = 0.1


# fmt: off
CONFIG = (
    *bert.CONFIG,
    Row("embedding_size",     "embedding_size",       count(), 128),
    Row("summary",            "summary_type",         one_of("first", "last", "mean", "cls_index", "attn"), "first"),
    Row("summary_projection", "summary_use_proj",     boolean(), True),
    Row("summary_activation", "summary_activation",   optional(activation()), "gelu"),
    Row("summary_dropout",    "summary_last_dropout", fraction(), 0.1),
)

KEYS = (
    *rows_under("electra", bert.KEYS[:4]),
    KeyRow("encoder.projection", "electra.embeddings_project"),
    *rows_under("electra", bert.KEYS[4:], {"pooler.dense": None}),
)

MASKED_LM_KEYS = (
    KeyRow("head.dense",      "generator_predictions.dense"),
    KeyRow("head.activation", "generator_predictions.activation"),
    KeyRow("head.norm",       "generator_predictions.LayerNorm"),
    KeyRow("head.decoder",    "generator_lm_head"),
)
# fmt: on


def encoder(c: ElectraConfig) -> Graph:
    """Return the graph from ids to token states."""
    layers = stack(bert_block(c) for _ in range(c.num_layers))
    return chain(bert.embeddings(c, c.embedding_size), layers, projection=bert.widening(c))


def _choices(c: ElectraConfig, _: int) -> Graph:
    if c.summary != "first":
        raise ConfigError(
            f"summary_type: found {c.summary!r}; expected 'first': other states of a filled row depend on the rows "
            "in the batch. Correct config.json if the model was trained with the first token's state.",
            problems=["summary_type"],
        )
    return sequence(
        first=FirstToken(),
        dense=nn.Linear(c.hidden_size, c.hidden_size) if c.summary_projection else None,
        activation=c.summary_activation,
        dropout=c.summary_dropout,
        classifier=nn.Linear(c.hidden_size, 1),
    )


class Squeezed(nn.Module):
    """The one score of each token, without a separate dimension."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(...)`` of ``(..., 1)``."""
        return hidden.squeeze(-1)


HEADS = {
    "sequence_classification": FamilyHead(
        body=bert.first_token("gelu"),
        keys=(
            KeyRow("head.dense", "classifier.dense"),
            KeyRow("head.activation", "classifier.activation"),
            KeyRow("head.classifier", "classifier.out_proj"),
        ),
        classifier="head.classifier",
    ),
    "token_classification": bert.HEADS["token_classification"],
    "question_answering": bert.HEADS["question_answering"],
    "masked_lm": FamilyHead(
        body=lambda c, _: task_heads.lm(c.hidden_size, c.embedding_size, c.vocab_size, "gelu", c.norm_eps),
        keys=MASKED_LM_KEYS,
        ties=(Tie("encoder.embeddings.word.weight", "head.decoder.weight"),),
    ),
    "multiple_choice": FamilyHead(
        body=_choices,
        keys=(
            KeyRow("head.dense", "sequence_summary.summary"),
            KeyRow("head.activation", "sequence_summary.activation"),
            KeyRow("head.classifier", "classifier"),
        ),
    ),
    "replaced_tokens": FamilyHead(
        body=lambda c, _: sequence(
            dense=nn.Linear(c.hidden_size, c.hidden_size),
            activation=c.activation,
            classifier=nn.Linear(c.hidden_size, 1),
            squeezed=Squeezed(),
        ),
        keys=(
            KeyRow("head.dense", "discriminator_predictions.dense"),
            KeyRow("head.activation", "discriminator_predictions.activation"),
            KeyRow("head.classifier", "discriminator_predictions.dense_prediction"),
        ),
    ),
}

FAMILY = bert.FAMILY.renamed(
    "electra", "Electra", base_prefix="electra", config=ElectraConfig, rows=CONFIG, keys=KEYS,
    ignored=(), encoder=encoder, pooler=None, heads=HEADS, pretraining={},
    left_out={**bert.FAMILY.left_out, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024},
    tiny={"base": {"embedding_size": 16}, "one width": {"embedding_size": 32}}, real={"base": {"embedding_size": 768}},
)  # fmt: skip
