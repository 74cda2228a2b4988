"""Predictions and gold labels of held-out examples, for the report and for tuned thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EvalPredictions"]


@dataclass
class EvalPredictions:
    """Predictions and gold labels of all examples of one evaluation set.

    Attributes:
        name: name of the set; empty if there is only one.
        predictions: scores ``(examples, labels)``, lists of tags, or answers.
        truth: labels, lists of tags, or lists of accepted answers.
        figures: metrics of the same evaluation; None before one.
    """

    name: str
    predictions: Any = None
    truth: Any = None
    figures: Mapping[str, float] | None = None

    def __call__(self, predictions: Any, truth: Any) -> dict[str, float]:
        """Store predictions and gold labels; return no metric."""
        self.predictions, self.truth = predictions, truth
        return {}
