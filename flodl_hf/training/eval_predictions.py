"""Predictions and gold labels of evaluation examples, for the report and for tuned thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CollectedPredictions", "CollectedValues", "EvalPredictions"]


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


class CollectedValues:
    """Values of examples, collected for metrics that are no sums; subclasses are a `flodl.metrics.Metric`."""

    def __init__(self) -> None:
        self.items: dict[int, Any] = {}

    def merge(self, other: Any) -> None:
        """Add the examples of ``other``."""
        self.items |= other.items

    def compute(self) -> dict[str, float]:
        """Return the number of examples."""
        return {"count": float(len(self.items))}

    def reset(self) -> None:
        """Remove all examples."""
        self.items = {}


class CollectedPredictions(CollectedValues):
    """Predictions and gold labels of examples."""

    def update(self, example: int, prediction: Any, truth: Any) -> None:
        """Add one example, as JSON values."""
        self.items[example] = (prediction, truth)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"items": [[example, *pair] for example, pair in self.items.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        self.items = {example: (prediction, truth) for example, prediction, truth in state["items"]}
