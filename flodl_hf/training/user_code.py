"""What the user brings to a run instead of or besides the task's: a loss, figures, callbacks.

Decides what own functions are called with and how what they return adds up, so that a step with an own loss is the
same however its rows are cut, and own figures are the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flodl.errors import TrainError
from flodl.metrics import Metric
from flodl.train import Callback
from flodl_hf.training.task import Scorer, Task
from flodl_hf.training.user_loss import LossFunction

__all__ = ["CollectedPredictions", "Own", "OwnScorer"]

MetricFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Own:
    """What the user brings.

    Attributes:
        loss: ``loss(scores, labels)``; see `flodl_hf.training.user_loss.own_loss`.
        metrics: ``metrics(predictions, truth)`` gives figures by name; or such functions by name, each giving one.
        callbacks: take part in training.
    """

    loss: LossFunction | None = None
    metrics: MetricFunction | Mapping[str, MetricFunction] | None = None
    callbacks: Sequence[Callback] = field(default=())

    @property
    def names(self) -> list[str]:
        """What was given, by the names of the arguments."""
        return [name for name in ("loss", "metrics", "callbacks") if getattr(self, name)]

    def faults(self, task: Task, options: Any) -> list[str]:
        """Return the problems of what the user brings, for a task and the options of a run."""
        problems = []
        if self.loss is not None and not callable(self.loss):
            problems.append(f"loss: found {type(self.loss).__name__}; expected a function of scores and labels")
        elif self.loss is not None:
            problems += [
                f"{name}: it belongs to the loss of the task, which loss= replaces; expected one of both"
                for name in ("class_weights", "label_smoothing")
                if getattr(options, name) not in (None, 0.0)
            ]
        named = self.metrics.values() if isinstance(self.metrics, Mapping) else [self.metrics] if self.metrics else []
        if not all(callable(call) for call in named):
            problems.append("metrics: expected a function of predictions and truth, or such functions by name")
        if self.metrics is not None and task.kind == "words":
            problems.append("metrics: of masked words scores are too large to be kept; expected none")
        return problems


class CollectedPredictions:
    """Predictions and truth of examples, kept for figures that are no sums; a `flodl.metrics.Metric`."""

    def __init__(self) -> None:
        self.items: dict[int, tuple[Any, Any]] = {}

    def update(self, example: int, prediction: Any, truth: Any) -> None:
        """Take in one example, as JSON values."""
        self.items[example] = (prediction, truth)

    def merge(self, other: CollectedPredictions) -> None:
        """Add what ``other`` has."""
        self.items |= other.items

    def compute(self) -> dict[str, float]:
        """Return how many examples there are."""
        return {"count": float(len(self.items))}

    def reset(self) -> None:
        """Forget everything."""
        self.items = {}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is kept."""
        return {"items": [[example, *pair] for example, pair in self.items.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was kept elsewhere."""
        self.items = {example: (prediction, truth) for example, prediction, truth in state["items"]}


class OwnScorer:
    """A task's scorer, and beside its figures the user's own.

    Args:
        scorer: the task's.
        task: says in which form predictions are given.
        metrics: as in `Own`.
    """

    def __init__(self, scorer: Scorer, task: Task, metrics: MetricFunction | Mapping[str, MetricFunction]) -> None:
        self.scorer, self.task, self.own, self.kept = scorer, task, metrics, CollectedPredictions()

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Take in the scores of one example."""
        pair = self.scorer.update(example, scores)
        if pair is not None:
            self.kept.update(example, *pair)
        return pair

    def metrics(self) -> Sequence[Metric]:
        """Return the task's metrics, and what is kept."""
        return [*self.scorer.metrics(), self.kept]

    def compute(self) -> dict[str, Any]:
        """Return the task's figures and the user's own, which replace those of the same name.

        Results that are not numbers are returned as the user's function gave them.
        """
        figures = self.scorer.compute()
        if not self.kept.items:
            return figures | (dict.fromkeys(self.own, float("nan")) if isinstance(self.own, Mapping) else {})
        pairs = [self.kept.items[example] for example in sorted(self.kept.items)]
        predictions, truth = ([pair[i] for pair in pairs] for i in (0, 1))
        if self.task.per_row:
            import numpy as np

            whole = np.int64 if self.task.kind == "single_label" else np.float32
            predictions, truth = np.asarray(predictions, np.float32), np.asarray(truth, whole)
        if isinstance(self.own, Mapping):
            return figures | {name: call(predictions, truth) for name, call in self.own.items()}
        given = self.own(predictions, truth)
        if not isinstance(given, Mapping):
            raise TrainError(
                f"metrics: found {type(given).__name__}; expected figures by name, such as {{'accuracy': 0.9}}",
                found=type(given).__name__,
            )
        return figures | {str(name): value for name, value in given.items()}
