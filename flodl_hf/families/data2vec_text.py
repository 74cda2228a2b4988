"""data2vec for text (Baevski et al. 2022, https://arxiv.org/abs/2202.03555): RoBERTa, trained on its own states.

An alias: architecture and configuration are RoBERTa's; only the names differ.
"""

from __future__ import annotations

from flodl_hf.families import bert, roberta

FAMILY = roberta.FAMILY.renamed(
    "data2vec-text", "Data2VecText", base_prefix="data2vec_text", left_out=bert.FAMILY.left_out
)
