"""Labels for whole texts: one of several, several at once, or a number.

Transformers' class: ``BertForSequenceClassification`` and its siblings.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from flodl_hf.heads.head import Head
from flodl_hf.heads.losses import check_labels, classification_loss
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.outputs import SequenceClassificationOutput

__all__ = ["HEAD", "SequenceClassifier"]


class SequenceClassifier(ScoringModel):
    """An encoder that labels whole texts; logits are ``(batch, labels)``."""

    head: ClassVar[str] = "sequence_classification"
    output = SequenceClassificationOutput

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, labels)``.
            labels: ids ``(batch,)``; 0/1 floats ``(batch, labels)`` for several at once; numbers for regression.
        """
        if self.num_labels > 1:
            check_labels(labels, self.num_labels)
        return classification_loss(logits, labels, self.config.problem_type)


HEAD = Head("sequence_classification", "ForSequenceClassification", SequenceClassifier, "seqcls", labelled=True)
