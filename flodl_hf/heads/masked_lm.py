"""The word behind each mask.

Transformers' class: ``BertForMaskedLM`` and its siblings.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from flodl_hf.heads.head import Head
from flodl_hf.heads.losses import check_labels, token_loss
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.outputs import MaskedLMOutput

__all__ = ["HEAD", "MaskedLM"]


class MaskedLM(ScoringModel):
    """An encoder that scores every word at every token; logits are ``(batch, seq, vocab)``."""

    head: ClassVar[str] = "masked_lm"
    output = MaskedLMOutput

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, seq, vocab)``.
            labels: ids ``(batch, seq)``; -100 for tokens that do not count.
        """
        check_labels(labels, logits.shape[-1])
        return token_loss(logits, labels, upcast=True)


HEAD = Head("masked_lm", "ForMaskedLM", MaskedLM, "mlm")
