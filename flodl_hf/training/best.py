"""The best model of a run: its weights and its metrics."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flodl.errors import CheckpointError
from flodl.train.optim.ema import averaged_state
from flodl.train.saving.reading import ranked, read_checkpoint, signed
from flodl.train.saving.state import load_model, model_state

__all__ = ["Best", "figures_in", "take_best"]


def figures_in(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record of `flodl.train.events.Past.evaluations`."""
    return {name: value for name, value in evaluation.items() if name not in ("step", "epoch", "details")}


class Best:
    """Keeps the best weights in memory, for runs without a folder; called with a model after each evaluation.

    Args:
        metric: name of a figure, ``-`` before it where less is better.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self._kept: tuple[float, int, dict[str, Any], dict[str, float]] | None = None

    def __call__(self, model: nn.Module, step: int, figures: Mapping[str, float]) -> None:
        """Consider a model that was evaluated."""
        value = signed(self.metric, figures) if step else None  # an evaluation before the first step is not considered
        if value is not None and (self._kept is None or value > self._kept[0]):
            self._kept = value, step, model_state(model), dict(figures)

    def take(self, model: nn.Module) -> tuple[int, dict[str, float]] | None:
        """Load the best weights into ``model``; return their step and metrics, None without an evaluation."""
        if self._kept is None:
            return None
        _, step, state, figures = self._kept
        load_model(model, state)
        return step, figures


def take_best(
    metric: str, folder: Path, model: nn.Module, history: list[dict[str, Any]], last_step: int
) -> tuple[int, dict[str, float]] | None:
    """Load the weights of the best complete checkpoint; return its step and metrics, None without an evaluation.

    A warning reports a better evaluation whose checkpoint is damaged or missing.
    """
    taken, fault = None, ""
    history = [row for row in history if row["step"]]  # an evaluation before the first step is not considered
    values = [(value, row) for row in history if (value := signed(metric, row)) is not None]
    best = max((value for value, _ in values), default=None)
    first = next((row for value, row in values if value == best), None)
    if first is not None and first["step"] == last_step:  # the model at hand
        return last_step, figures_in(first)
    for _, step, path in ranked(folder, metric):
        try:
            saved = read_checkpoint(path, weights_only=True)
        except CheckpointError as error:
            fault = fault or error.message
            continue
        if step != last_step:
            load_model(model, averaged_state(saved.tensors))
        taken = step, dict(saved.metrics)
        break
    found = None if taken is None else signed(metric, taken[1])
    if best is not None and (found is None or found < best):
        step = first["step"] if first is not None else last_step
        warnings.warn(
            f"finetune: the best evaluation was that of step {step} ({metric.lstrip('-')} {abs(best):.6g}), whose "
            f"checkpoint is damaged or was not kept; the model is from step {taken[0] if taken else last_step}. "
            f"{fault}".strip(),
            RuntimeWarning,
            stacklevel=3,
        )
    return taken
