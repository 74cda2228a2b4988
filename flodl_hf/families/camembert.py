"""CamemBERT (Martin et al. 2019, https://arxiv.org/abs/1911.03894): RoBERTa trained on French.

An alias: architecture, tensor names and configuration are RoBERTa's; only the names differ.
"""

from __future__ import annotations

from flodl_hf.families import roberta

__all__ = ["FAMILY"]

FAMILY = roberta.FAMILY.renamed("camembert", "Camembert")
