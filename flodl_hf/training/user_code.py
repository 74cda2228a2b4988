"""Functions of the user: a loss, metrics, callbacks.

This module defines their arguments and how results are combined, so that a step with such a loss is the
same for any micro-batch size, and metrics are the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flodl.errors import TrainError
from flodl.metrics import Metric
from flodl.train import Callback
from flodl_hf.training.eval_predictions import CollectedPredictions
from flodl_hf.training.observation import Rules, Watch
from flodl_hf.training.task import Scorer, Task
from flodl_hf.training.user_loss import LossFunction

__all__ = ["Own", "OwnScorer"]

MetricFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Own:
    """Functions of the user.

    Attributes:
        loss: ``loss(scores, labels)``; see `flodl_hf.training.user_loss.own_loss`.
        metrics: ``metrics(predictions, truth)`` returns a mapping of metrics; or a mapping of names to functions.
        callbacks: hooks into the training loop.
    """

    loss: LossFunction | None = None
    metrics: MetricFunction | Mapping[str, MetricFunction] | None = None
    callbacks: Sequence[Callback] = field(default=())

    @property
    def hooks(self) -> list[Callback]:
        """The callbacks that the Trainer calls; `Watch` and `Rules` are settings of the Trainer instead."""
        return [callback for callback in self.callbacks if not isinstance(callback, (Watch, Rules))]

    @property
    def names(self) -> list[str]:
        """Names of the given arguments."""
        return [name for name in ("loss", "metrics", "callbacks") if getattr(self, name)]

    def faults(self, task: Task, options: Any) -> list[str]:
        """Return the problems of the functions, for a task and the options of a run."""
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
            problems.append("metrics: expected a function of predictions and truth, or a mapping of names to functions")
        if self.metrics is not None and task.kind == "words":
            problems.append("metrics: of masked words scores are too large to be kept; expected none")
        return problems


class OwnScorer:
    """Scorer of a task, with the metrics of the user.

    Args:
        scorer: the task's.
        task: the task, which defines the form of predictions.
        metrics: as in `Own`.
    """

    def __init__(self, scorer: Scorer, task: Task, metrics: MetricFunction | Mapping[str, MetricFunction]) -> None:
        self.scorer, self.task, self.own, self.kept = scorer, task, metrics, CollectedPredictions()

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Add the scores of one example."""
        pair = self.scorer.update(example, scores)
        if pair is not None:
            self.kept.update(example, *pair)
        return pair

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics of the task, and the collected predictions."""
        return [*self.scorer.metrics(), self.kept]

    def compute(self) -> dict[str, Any]:
        """Return the metrics of the task and the user; the latter replace metrics of the same name.

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
                f"metrics: found {type(given).__name__}; expected a mapping of metrics, such as {{'accuracy': 0.9}}",
                found=type(given).__name__,
            )
        return figures | {str(name): value for name, value in given.items()}
