"""ELECTRA (Clark et al. 2020, https://arxiv.org/abs/2003.10555).

BERT's encoder, trained to tell replaced words from the text's own. It departs from BERT in:

* words, positions and token types may be narrower than states; a projection then widens them;
* there is no pooler: classification reads the first token through a projection and GELU of its own;
* masked words are the generator's, whose head narrows back to the width of its words.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from flodl.graph import Graph
from flodl_hf import bodies
from flodl_hf.config_rows import Inert, Row, count
from flodl_hf.encoder import Embeddings, bert_block, chain, stack
from flodl_hf.families import bert
from flodl_hf.family import FamilyHead, Ignored
from flodl_hf.keys import KeyRow, Tie, rows_under

__all__ = ["FAMILY", "ElectraConfig"]


@dataclass(frozen=True, kw_only=True)
class ElectraConfig(bert.BertConfig):
    """The settings of an ELECTRA encoder: BERT's, and the width of its tables."""

    embedding_size: int = 128
    """Width of the word, position and token type tables."""


# fmt: off
CONFIG = (*bert.CONFIG, Row("embedding_size", "embedding_size", count(), 128))

INERT = tuple(
    Inert(key, "multiple choice is not one of the heads")
    for key in ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
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

_REPLACED = "telling replaced words is not one of the heads"
IGNORED = (
    Ignored("electra.embeddings.position_ids",   "positions are counted, not stored"),
    Ignored("electra.embeddings.token_type_ids", "zeros are made when needed"),
    *(
        Ignored(f"discriminator_predictions.{part}.{leaf}", _REPLACED)
        for part in ("dense", "dense_prediction") for leaf in ("weight", "bias")
    ),
)
# fmt: on


def encoder(c: ElectraConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = Embeddings(
        c.vocab_size, c.embedding_size, c.norm_eps, c.hidden_dropout,
        max_positions=c.max_positions, type_vocab_size=c.type_vocab_size, pad_token_id=c.pad_token_id,
    )  # fmt: skip
    narrow = c.embedding_size != c.hidden_size
    projection = nn.Linear(c.embedding_size, c.hidden_size) if narrow else None
    return chain(embeddings, stack(bert_block(c) for _ in range(c.num_layers)), projection=projection)


def _classification(c: ElectraConfig, num_labels: int) -> Graph:
    dropout = bert.classifier_dropout(c)
    return bodies.first_token_mlp(c.hidden_size, num_labels, dropout_in=dropout, activation="gelu", dropout_out=dropout)


HEADS = {
    "sequence_classification": FamilyHead(
        body=_classification,
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
        body=lambda c, _: bodies.lm(c.hidden_size, c.embedding_size, c.vocab_size, "gelu", c.norm_eps),
        keys=MASKED_LM_KEYS,
        ties=(Tie("encoder.embeddings.word.weight", "head.decoder.weight"),),
    ),
}

CHECKPOINTS = {
    "base": "google/electra-base-discriminator",
    "sequence_classification": "cross-encoder/ms-marco-electra-base",
    "question_answering": "deepset/electra-base-squad2",
    "masked_lm": "google/electra-small-generator",
}

FAMILY = bert.FAMILY.renamed(
    "electra", "Electra", base_prefix="electra", config=ElectraConfig, rows=CONFIG, inert=INERT, keys=KEYS,
    ignored=IGNORED, encoder=encoder, pooler=None, heads=HEADS, pretraining={"ElectraForPreTraining": "base"},
    tiny={"base": {"embedding_size": 16}, "one width": {"embedding_size": 32}}, real={"base": {"embedding_size": 768}},
    checkpoints=CHECKPOINTS,
)  # fmt: skip
