"""What a model says of held-out examples, as the scorers of fine-tuning see it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.finetuning.evaluation import Evaluation, Evaluations
    from flodl_hf.model.encoder_model import EncoderModel

__all__ = ["Judged", "judge"]


@dataclass
class Judged:
    """Predictions and truth of all examples of one set.

    Attributes:
        name: of the set; empty where there is one.
        predictions: scores ``(examples, labels)``, lists of tags, or answers.
        truth: labels, lists of tags, or lists of accepted answers.
    """

    name: str
    predictions: Any = None
    truth: Any = None

    def __call__(self, predictions: Any, truth: Any) -> dict[str, float]:
        """Keep what a scorer gives, and give no figure."""
        self.predictions, self.truth = predictions, truth
        return {}


def judge(model: EncoderModel, evaluation: Evaluation | Evaluations) -> Judged | None:
    """Return what the model says of the first set of held-out data; None for masked words, whose scores are too large
    to keep.

    One more evaluation, on this process alone; the model is in evaluation mode.
    """
    from flodl_hf.finetuning.evaluation import Evaluations

    name, one = next(iter(evaluation.sets.items())) if isinstance(evaluation, Evaluations) else ("", evaluation)
    if one.task.kind == "words":
        return None
    kept = Judged(name)
    replace(one, own=kept)(model)
    return kept if kept.predictions is not None else None
