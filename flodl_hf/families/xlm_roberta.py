"""XLM-RoBERTa (Conneau et al. 2019, https://arxiv.org/abs/1911.02116): RoBERTa, trained on a hundred languages.

An alias: architecture, tensor names and configuration are RoBERTa's; names and vocabulary differ.
"""

from __future__ import annotations

from flodl_hf.families import bert, roberta

FAMILY = roberta.FAMILY.renamed(
    "xlm-roberta", "XLMRoberta", tokenizer=roberta.PIECES, left_out=bert.FAMILY.left_out,
    real={"base": roberta.REAL | {"vocab_size": 250002}},
)  # fmt: skip
