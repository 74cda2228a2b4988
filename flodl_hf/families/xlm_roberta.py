"""XLM-RoBERTa (Conneau et al. 2019, https://arxiv.org/abs/1911.02116): RoBERTa, trained on a hundred languages.

An alias: architecture, tensor names and configuration are RoBERTa's; names and vocabulary differ.
"""

from __future__ import annotations

from dataclasses import replace

from flodl_hf.families import roberta

__all__ = ["FAMILY"]

TOKENIZER = replace(roberta.PIECES, first=("bos_token", "pad_token", "eos_token", "unk_token"), skipped=3)

CHECKPOINTS = {
    "base": "FacebookAI/xlm-roberta-base",
    "sequence_classification": "cardiffnlp/twitter-xlm-roberta-base-sentiment",
    "token_classification": "Davlan/xlm-roberta-large-ner-hrl",
    "question_answering": "deepset/xlm-roberta-large-squad2",
    "masked_lm": "FacebookAI/xlm-roberta-base",
}

FAMILY = roberta.FAMILY.renamed(
    "xlm-roberta",
    "XLMRoberta",
    tokenizer=TOKENIZER,
    real={"base": roberta.REAL | {"vocab_size": 250002}},
    checkpoints=CHECKPOINTS,
)
