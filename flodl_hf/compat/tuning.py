"""Report the evaluations of a fine-tuning run to a search of settings: Optuna prunes, Ray Tune schedules."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flodl.train import Callback

__all__ = ["OptunaPruning", "RayReport"]


class OptunaPruning(Callback):
    """Reports a metric of each evaluation to an Optuna trial, and ends a run that the trial prunes.

    Args:
        trial: the trial.
        metric: name of the metric, such as "accuracy"; "loss" is the loss of the evaluation.
    """

    def __init__(self, trial: Any, metric: str) -> None:
        self.trial = trial
        self.metric = metric
        self.evaluations = 0

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Report the metric with the number of the evaluation.

        Raises:
            optuna.TrialPruned: the trial is worse than others at this step.
        """
        import optuna

        self.trial.report(metrics[self.metric], self.evaluations)
        self.evaluations += 1
        if self.trial.should_prune():
            raise optuna.TrialPruned


class RayReport(Callback):
    """Reports the metrics of each evaluation to Ray Tune, whose scheduler may end the run."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Report the metrics."""
        from ray import tune

        tune.report(dict(metrics))
