"""RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692).

BERT's encoder under another prefix. It departs from BERT in:

* positions are counted over the ids that are not padding and start after the padding id, so the
  first ``pad_token_id + 1`` rows of the table are never a token's;
* a second text is not marked by token types, though the table exists;
* classification reads the first token through a separate projection and tanh, not the pooler;
* the masked-word head's activation is always the exact GELU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flodl.graph import Graph
from flodl_hf.families import bert
from flodl_hf.families.schema import FamilyHead, FamilyTokenizer
from flodl_hf.families.schema.config_rows import changed, count
from flodl_hf.families.schema.record import KeyRow, Tie, rows_under
from flodl_hf.nn import task_heads
from flodl_hf.nn.encoder import bert_block, chain, stack


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(bert.BertConfig):
    """The settings of a RoBERTa encoder: BERT's, with padding at id 1.

    Attributes:
        pad_token_id: the id that positions skip; its word and position rows get no gradient.
    """

    pad_token_id: int = 1


PADDING = replace(
    count(0, 10_000_000),
    expected="an integer from 0 to 10000000, because positions are counted from it (without it transformers fails)",
)

# fmt: off
CONFIG = changed(bert.CONFIG, {"pad_token_id": {"check": PADDING, "default": 1}})

KEYS = rows_under("roberta", bert.KEYS)

MASKED_LM_KEYS = (
    KeyRow("head.dense",        "lm_head.dense"),
    KeyRow("head.norm",         "lm_head.layer_norm"),
    KeyRow("head.decoder",      "lm_head.decoder"),
    KeyRow("head.decoder.bias", "lm_head.bias"),
)
# fmt: on


def encoder(c: RobertaConfig) -> Graph:
    """Return the graph from ids to token states."""
    return chain(bert.embeddings(c, positions_after_pad=True), stack(bert_block(c) for _ in range(c.num_layers)))


HEADS = {
    "sequence_classification": FamilyHead(
        body=bert.first_token("tanh"),
        keys=(KeyRow("head.dense", "classifier.dense"), KeyRow("head.classifier", "classifier.out_proj")),
        classifier="head.classifier",
    ),
    "token_classification": bert.HEADS["token_classification"],
    "question_answering": bert.HEADS["question_answering"],
    "masked_lm": FamilyHead(
        body=lambda c, _: task_heads.lm(c.hidden_size, c.hidden_size, c.vocab_size, "gelu", c.norm_eps),
        keys=MASKED_LM_KEYS,
        ties=(Tie("encoder.embeddings.word.weight", "head.decoder.weight"),),
        aliases=(("lm_head.decoder.bias", "lm_head.bias"),),
    ),
    "multiple_choice": replace(bert.DROPPED_TOKENS, pooled=True).scoring_choices(),
}

TOKENIZER = FamilyTokenizer(
    special={
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "cls_token": "<s>",
        "mask_token": "<mask>",
    },
    type_ids=False,
    files=("vocab.json", "merges.txt"),
    template="roberta",
)

# At the base size, where RoBERTa departs from BERT; the word table is each alias's own.
REAL = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


def pieces(first: tuple[str, ...], skipped: int, mask_takes_space: bool = False) -> FamilyTokenizer:
    """Return the tokenizer of a relative that was trained on sentencepiece's pieces, numbered after ``first``."""
    return replace(
        TOKENIZER, files=("sentencepiece.bpe.model",), build="pieces", template="doubled ends", first=first,
        skipped=skipped, last=("mask_token",), mask_takes_space=mask_takes_space, prefix=True, steps=("charsmap",),
        spaces="words",
    )  # fmt: skip


PIECES = pieces(("bos_token", "pad_token", "eos_token", "unk_token"), skipped=3)

FAMILY = bert.FAMILY.renamed(
    "roberta", "Roberta", base_prefix="roberta", config=RobertaConfig, rows=CONFIG, keys=KEYS,
    encoder=encoder, heads=HEADS, pretraining={}, unused_positions=lambda c: c.pad_token_id + 1,
    tokenizer=TOKENIZER, left_out={**bert.FAMILY.left_out, "vocab_size": 50265},
    real={"base": REAL | {"vocab_size": 50265}},
)  # fmt: skip
