"""RoFormer (Su et al. 2021, https://arxiv.org/abs/2104.09864), also AntiBERTa2's encoder of antibodies.

BERT's encoder with rotary positions. It departs from BERT in:

* queries and keys, and optionally values, are rotated by position, each feature with its neighbour;
* the file contains the table of sines and cosines, which is used unchanged;
* words and token types may be narrower than states; a projection then widens them;
* there is no pooler: classification reads the first token through a projection, multiple choice a summary;
* scores are divided as the reference divides them: it has no fused attention;
* its tokenizer cuts Chinese words by jieba's dictionary, which is not included: ``tokenizer.json`` is
  read, and BERT's files by ``tokenizer_class``.

The second RoFormer (Su 2022) has no biases and other norms; its files are refused by their keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flodl.graph import Graph
from flodl_hf.families import bert, electra, roberta
from flodl_hf.families.schema import PassthroughTensor
from flodl_hf.families.schema.config_rows import IgnoredKey, Row, boolean, changed
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.nn import task_heads
from flodl_hf.nn.encoder import Embeddings, bert_block, chain, stack
from flodl_hf.nn.layout import Layout
from flodl_hf.nn.positions import PairedRotary


@dataclass(frozen=True, kw_only=True)
class RoFormerConfig(electra.ElectraConfig):
    """The settings of a RoFormer encoder: ELECTRA's, and which states are rotated.

    Attributes:
        rotary_value: whether values are turned by their places too.
    """

    rotary_value: bool = False


# fmt: off
CHANGED = {
    "embedding_size":     {"default": lambda fields: fields["hidden_size"]},
    "summary":            {"default": "last"},
    "summary_projection": {"default": False},
    "summary_activation": {"default": None},
    "summary_dropout":    {"default": 0.0},
}
CONFIG = (
    *(row for row in changed(electra.CONFIG, CHANGED) if row.field != "classifier_dropout"),
    Row("rotary_value", "rotary_value", boolean(), False),
)

IGNORED_KEYS = (
    IgnoredKey("classifier_dropout", "classifiers drop as the states do"),
    IgnoredKey("use_bias",           "RoFormer v2 is another architecture", (True,)),
    IgnoredKey("norm_type",          "RoFormer v2 is another architecture", ("layer_norm",)),
)

KEYS = (
    *rows_under("roformer", bert.KEYS, {"encoder.embeddings.position": None, "pooler.dense": None}),
    KeyRow("encoder.projection", "roformer.embeddings_project"),
)
KEPT = (
    PassthroughTensor(
        "roformer.encoder.embed_positions.weight", "sines and cosines of places, taken as they are",
        module="encoder.embeddings.rotary",
    ),
)
# fmt: on


def _rotary(c: RoFormerConfig, *, held: bool = False) -> PairedRotary:
    return PairedRotary(c.hidden_size // c.num_heads, c.max_positions, values=c.rotary_value, held=held)


class RoFormerEmbeddings(Embeddings):
    """Words and token types summed, normalised and dropped; contains the table of rotations of all layers.

    Args:
        *args: as of `Embeddings`.
        rotary: the table.
        **options: as of `Embeddings`.
    """

    def __init__(self, *args: Any, rotary: PairedRotary, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rotary = rotary

    def summed(
        self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None, layout: Layout
    ) -> Tensor:
        """Return the sum of a token's embeddings, ``(..., size)``."""
        states = super().summed(input_ids, token_type_ids, position_ids, layout)
        self.rotary.angles(states, layout)  # which all layers of the call find
        return states


def encoder(c: RoFormerConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = bert.embeddings(c, c.embedding_size, RoFormerEmbeddings, max_positions=0, rotary=_rotary(c, held=True))
    blocks = (bert_block(c, attention={"rotary": _rotary(c), "fused": False}) for _ in range(c.num_layers))
    return chain(embeddings, stack(blocks), projection=bert.widening(c))


HEADS = {
    "sequence_classification": replace(
        roberta.HEADS["sequence_classification"],
        body=lambda c, labels: task_heads.first_token_mlp(
            c.hidden_size, labels, dropout_in=c.hidden_dropout, activation=c.activation, dropout_out=c.hidden_dropout
        ),
    ),
    "token_classification": bert.HEADS["token_classification"],
    "question_answering": bert.HEADS["question_answering"],
    "masked_lm": replace(
        bert.MASKED_LM,
        body=lambda c, _: task_heads.lm(c.hidden_size, c.embedding_size, c.vocab_size, c.activation, c.norm_eps),
    ),
    "multiple_choice": electra.HEADS["multiple_choice"],
}

TOKENIZER = replace(bert.TOKENIZER, words="jieba's dictionary (class RoFormerTokenizer)")

FAMILY = bert.FAMILY.renamed(
    "roformer", "RoFormer", base_prefix="roformer", takes_prefix=False, config=RoFormerConfig, rows=CONFIG,
    ignored_keys=IGNORED_KEYS, keys=KEYS, ignored=(), kept=KEPT, encoder=encoder, pooler=None, heads=HEADS,
    pretraining={}, tokenizer=TOKENIZER, left_out={**bert.FAMILY.left_out, "vocab_size": 50000, "max_positions": 1536},
    tiny={
        "base": {"embedding_size": 16, "summary_type": "first", "summary_use_proj": True, "summary_activation": "tanh"},
        "values too": {"rotary_value": True, "summary_type": "first"},
    },
    real={"base": {"vocab_size": 50000, "max_position_embeddings": 1536, "summary_type": "first"}},
)  # fmt: skip
