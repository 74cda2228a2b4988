"""CamemBERT (Martin et al. 2019, https://arxiv.org/abs/1911.03894): RoBERTa trained on French.

An alias: architecture, tensor names and configuration are RoBERTa's; names and vocabulary differ.
"""

from __future__ import annotations

from flodl_hf.families import bert, roberta

FAMILY = roberta.FAMILY.renamed(
    "camembert", "Camembert", left_out=bert.FAMILY.left_out, real={"base": roberta.REAL | {"vocab_size": 32005}},
    tokenizer=roberta.pieces(("<s>NOTUSED", "pad_token", "</s>NOTUSED", "unk_token", "<unk>NOTUSED"), 1, True),
)  # fmt: skip
