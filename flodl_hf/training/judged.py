"""What a model says of held-out examples, as the scorers of fine-tuning see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Judged"]


@dataclass
class Judged:
    """Predictions and truth of all examples of one set.

    Attributes:
        name: of the set; empty where there is one.
        predictions: scores ``(examples, labels)``, lists of tags, or answers.
        truth: labels, lists of tags, or lists of accepted answers.
        figures: what came of the same evaluation; None before one.
    """

    name: str
    predictions: Any = None
    truth: Any = None
    figures: Mapping[str, float] | None = None

    def __call__(self, predictions: Any, truth: Any) -> dict[str, float]:
        """Keep what a scorer gives, and give no figure."""
        self.predictions, self.truth = predictions, truth
        return {}
