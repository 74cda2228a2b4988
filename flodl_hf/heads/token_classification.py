"""A label for every token: named entities, parts of speech.

Transformers' class: ``BertForTokenClassification`` and its siblings.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from flodl_hf.heads.head import Head
from flodl_hf.heads.losses import check_labels, token_loss
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.outputs import TokenClassificationOutput

__all__ = ["HEAD", "TokenClassifier"]


class TokenClassifier(ScoringModel):
    """An encoder that labels tokens; logits are ``(batch, seq, labels)``."""

    head: ClassVar[str] = "token_classification"
    output = TokenClassificationOutput

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, seq, labels)``.
            labels: ids ``(batch, seq)``; -100 for tokens that do not count.
        """
        check_labels(labels, self.num_labels)
        return token_loss(logits, labels)


HEAD = Head("token_classification", "ForTokenClassification", TokenClassifier, "tokcls", labelled=True)
