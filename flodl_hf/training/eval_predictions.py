"""Predictions and gold labels of held-out examples, for the report and for tuned thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.training.evaluation import Evaluation, Evaluations

__all__ = ["EvalPredictions", "collect_predictions"]


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


def collect_predictions(
    model: EncoderModel, evaluation: Evaluation | Evaluations, figures: Mapping[str, float] | None = None
) -> EvalPredictions | None:
    """Return the predictions of a model for the first evaluation set.

    The result of the last evaluation is reused if it has the same metrics. Otherwise this process evaluates the model
    once more. Masked language models return None, because their scores are too large to store.

    Args:
        model: the model, in evaluation mode.
        evaluation: the evaluation of the run.
        figures: metrics of the model, if it was evaluated before.
    """
    name, one = next(iter(evaluation.sets.items()))
    if one.task.kind == "words":
        return None
    if one.seen is not None and figures and _has_figures(one.seen, figures):
        return one.seen if one.seen.predictions is not None else None
    collected = EvalPredictions(name)
    replace(one, own=collected, seen=None)(model)
    return collected if collected.predictions is not None else None


def _has_figures(seen: EvalPredictions, figures: Mapping[str, float]) -> bool:
    """Return whether the metrics of all sets include those of the stored evaluation."""
    prefix = f"{seen.name}/" if seen.name else ""
    return bool(seen.figures) and seen.figures == {key: figures.get(prefix + key) for key in seen.figures or {}}
