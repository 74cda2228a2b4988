"""Watched values of a run, averaged over ranks, for the observers of graphs, for events, and for rules.

`flodl.train.watching` collects values in forward passes, `flodl.train.steplog` emits the values of steps, and
`flodl.train.rules` evaluates rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.graph.stepping import GraphSteps
from flodl.train.events import Decided, EpochMetrics, Observed
from flodl.train.rules import RuleEngine
from flodl.train.settings import Settings
from flodl.train.steplog import Tally, epoch_metrics, means
from flodl.train.watching import Watching


class Observing:
    """Watched values and rules of one run.

    Args:
        model: the trained model.
        ranks: the ranks.
        settings: settings of the run.

    Attributes:
        watching: collects values in forward passes.
        graphs: the graphs in the model; the run ends their steps and epochs.
        deciding: rules of the run.
        epochs: watched values of each epoch, averaged over ranks.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, settings: Settings) -> None:
        self.ranks, self.settings, self.every = ranks, settings, settings.trend_every
        self.graphs = GraphSteps(model)
        self.watching = Watching(model, settings.watch)
        self.deciding = RuleEngine(model, ranks, settings.rules)
        self.epochs: list[dict[str, float]] = []
        self._looked_at = 0
        self._before = Tally().to_dict()

    def optimizer(self, make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return the optimiser of ``make()``, including parameters that a rule may unfreeze."""
        with self.deciding.thawed():
            optimizer = make()
        self.deciding.prepare(optimizer)
        return optimizer

    def refresh(self) -> None:
        """Update after a change of the model or of its watched values."""
        self.graphs.refresh()
        self.watching.refresh()

    # ---- input ----------------------------------------------------------------------------------------

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation, equal on all ranks."""
        self.deciding.note("evaluation", {"eval_loss" if name == "loss" else name: v for name, v in figures.items()})

    def due(self, steps: int) -> bool:
        """Return whether a window of ``trend_every`` steps has ended."""
        every = self.every
        return bool(every and self.deciding.rules and self._looked_at // every < steps // every)

    def end_window(self, tally: Tally, steps: int, *, shared_loss: bool) -> None:
        """Add a value of the last window of steps to each trend; all ranks must call this after the same step.

        Args:
            tally: totals of this rank.
            shared_loss: whether each rank has the loss of all ranks.
        """
        parts = self.ranks.gather(_less(tally.to_dict(), self._before))
        self._looked_at, self._before = steps, tally.to_dict()
        figures = epoch_metrics(parts, shared_loss=shared_loss, epoch=0, step=steps, evaluated={})
        self._note(figures, means(parts, "observed"))

    def end_epoch(self, metrics: EpochMetrics, parts: Sequence[Mapping[str, Any]]) -> Observed | None:
        """End an epoch of all graphs, and return its watched values; None if there are none.

        Args:
            metrics: metrics of the epoch.
            parts: totals of all ranks.
        """
        values = means(parts, "observed")
        self.epochs.append(values)
        # Negative totals: the first window of the next epoch includes the last steps of this one.
        self._before = _less(self._before, parts[self.ranks.rank])
        self.watching.hand_back(values)
        self.graphs.end_epoch()
        if self.every is None:
            self._note(metrics, values)
        known = self.deciding.values
        if known["training"]:
            self.deciding.check_names(self.settings.watch)
        if not values:
            return None
        return Observed(rank=self.ranks.rank, step=metrics.step, epoch=metrics.epoch, scope="epoch", values=values)

    def _note(self, metrics: EpochMetrics, values: Mapping[str, float]) -> None:
        named = {name: value for found, value in metrics.metrics.items() for name in (found, f"train/{found}")}
        self.deciding.note("training", {**named, "loss": metrics.loss})
        self.deciding.note("watched", values)

    def decide(self, steps: int, epochs: int) -> list[Decided]:
        """Apply rules with a true condition and return them; all ranks must call this at the same points."""
        return self.deciding.decide(steps, epochs)

    def close(self) -> None:
        """Stop watching values added by the run."""
        self.watching.close()

    # ---- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, as JSON values."""
        return {"epochs": self.epochs, "looked_at": self._looked_at, **self.deciding.state_dict()}

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank, as JSON values."""
        return {"before": self._before}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Restore `state_dict` and `own_state`, and the histories of graphs."""
        self.deciding.load_state_dict(state)
        self._looked_at = state.get("looked_at", 0)
        self._before = own.get("before", self._before)
        self.epochs = [dict(values) for values in state.get("epochs", ())]
        self.watching.hand_back_all(self.epochs)


def _less(a: Any, b: Any) -> Any:
    """Return the difference of two results of `Tally.to_dict`; missing values are 0."""
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        return {key: _less((a or {}).get(key), (b or {}).get(key)) for key in {**(a or {}), **(b or {})}}
    if isinstance(a, list) or isinstance(b, list):
        return [_less(x, y) for x, y in zip(a or [0.0] * len(b), b or [0.0] * len(a), strict=True)]
    return (a or 0) - (b or 0)
