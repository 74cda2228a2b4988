"""The score from which a label holds, chosen on held-out data for the best F1.

Of several labels each has its own; of two, the second one's decides between them. On the examples that it was chosen on
a threshold does as well as it can, and on others perhaps less; the card says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flodl_hf.training.eval_predictions import EvalPredictions
from flodl_hf.training.report.figures import best_thresholds

if TYPE_CHECKING:
    from flodl_hf.training.task import Task

__all__ = ["Tuned", "threshold_faults", "tune_thresholds"]


@dataclass(frozen=True)
class Tuned:
    """Thresholds, and what they come to on the examples that they were chosen on.

    Attributes:
        thresholds: by label.
        usual: F1 of each label with 0.5; of two labels that of the second, under its name.
        tuned: F1 of each label with its threshold.
        examples: how many there were.
        where: name of the set; empty where there is one.
    """

    thresholds: dict[str, float]
    usual: dict[str, float]
    tuned: dict[str, float]
    examples: int
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return {
            "thresholds": self.thresholds, "f1_at_0.5": self.usual, "f1_tuned": self.tuned, "examples": self.examples,
            "set": self.where,
        }  # fmt: skip


def threshold_faults(task: Task) -> list[str]:
    """Return the problem of a task whose answers have no thresholds: neither several labels at once nor one of two."""
    if task.kind == "multi_label" or (task.kind == "single_label" and len(task.labels or ()) == 2):
        return []
    return [
        f"tune_thresholds: found {task.kind.replace('_', ' ')} with {len(task.labels or ())} labels; expected several "
        "labels at once (multi_label_classification), or one of two"
    ]


def tune_thresholds(judged: EvalPredictions, labels: tuple[str, ...]) -> Tuned:
    """Return the thresholds of the best F1.

    Args:
        judged: scores and truth of the held-out examples.
        labels: label names by number.
    """
    logits, truth = np.asarray(judged.predictions, np.float64), np.asarray(judged.truth)
    is_binary = truth.ndim == 1
    if is_binary:
        # The probability of the second of two, as a softmax has it.
        scores, there = _sigmoid(logits[:, 1:] - logits[:, :1]), (truth == 1)[:, None]
    else:
        scores, there = _sigmoid(logits), truth > 0.5
    found = [round(float(value), 6) for value in best_thresholds(scores, there)]
    named = labels[1:] if is_binary else labels
    usual, tuned = (
        {name: _f1(scores[:, i] >= at[i], there[:, i]) for i, name in enumerate(named)}
        for at in ([0.5] * len(named), found)
    )
    thresholds = dict(zip(named, found, strict=True))
    if is_binary:
        thresholds = {labels[0]: round(1 - found[0], 6), **thresholds}
    return Tuned(thresholds, usual, tuned, len(scores), judged.name)


def _sigmoid(logits: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-logits))


def _f1(said: Any, there: Any) -> float:
    total = int(said.sum()) + int(there.sum())
    return 2 * int((said & there).sum()) / total if total else 0.0
