"""What a run knows of itself: values watched inside of the model, trends, and the rules that act on them.

`flodl.train.watching` collects values in forward passes, steps carry them beside their metrics, and
`flodl.train.steplog` tells those of steps. Here figures of epochs are put together over ranks, the observers of graphs
are given their values, and rules (`flodl.train.rules`) the trends that they ask about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.graph.stepping import GraphSteps
from flodl.train.epoch_figures import Tally, epoch_metrics, means
from flodl.train.events import Decided, EpochMetrics, Observed
from flodl.train.rules import RuleEngine
from flodl.train.settings import Settings
from flodl.train.watching import Watching

__all__ = ["Observing"]


class Observing:
    """What is watched and decided in one run.

    Args:
        model: the model that is trained.
        ranks: who trains it.
        settings: of the run.

    Attributes:
        watching: collects values in forward passes.
        graphs: the model's graphs, whose steps and epochs are ended.
        deciding: the rules of the run.
        epochs: what was watched in each epoch, merged over ranks.
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
        """Return the optimiser that ``make`` makes, ready for what rules may do."""
        with self.deciding.thawed():
            optimizer = make()
        self.deciding.prepare(optimizer)
        return optimizer

    def refresh(self) -> None:
        """Note that the model, or what is watched in it, may have changed."""
        self.graphs.refresh()
        self.watching.refresh()

    # ---- what becomes known --------------------------------------------------------------------------

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """Take in the figures of an evaluation, the same on all ranks."""
        self.deciding.note("evaluation", {"eval_loss" if name == "loss" else name: v for name, v in figures.items()})

    def due(self, steps: int) -> bool:
        """Return whether trends get a value after so many steps."""
        every = self.every
        return bool(every and self.deciding.rules and self._looked_at // every < steps // every)

    def end_window(self, tally: Tally, steps: int, *, shared_loss: bool) -> None:
        """Give trends a value of the steps since the last one; all ranks call this after the same steps.

        Args:
            tally: this rank's, all steps told.
            shared_loss: each rank's loss already stands for all ranks.
        """
        parts = self.ranks.gather(_less(tally.to_dict(), self._before))
        self._looked_at, self._before = steps, tally.to_dict()
        figures = epoch_metrics(parts, shared_loss=shared_loss, epoch=0, step=steps, evaluated={})
        self._note(figures, means(parts, "observed"))

    def end_epoch(self, metrics: EpochMetrics, parts: Sequence[Mapping[str, Any]]) -> Observed | None:
        """Close an epoch of all graphs, and return what was watched in it; None where nothing was.

        Args:
            metrics: the figures of the epoch.
            parts: the tallies of all ranks.
        """
        values = means(parts, "observed")
        self.epochs.append(values)
        # Less than nothing, so that the first value of the next epoch has the steps since the last one of this.
        self._before = _less(self._before, parts[self.ranks.rank])
        self.watching.hand_back(values)
        self.graphs.end_epoch()
        if self.every is None:
            self._note(metrics, values)
        known = self.deciding.values
        if known["training"] and (known["evaluation"] or not self.settings.eval_delay):
            self.deciding.check_names(self.settings.watch)
        if not values:
            return None
        return Observed(rank=self.ranks.rank, step=metrics.step, epoch=metrics.epoch, scope="epoch", values=values)

    def _note(self, metrics: EpochMetrics, values: Mapping[str, float]) -> None:
        named = {name: value for found, value in metrics.metrics.items() for name in (found, f"train/{found}")}
        self.deciding.note("training", {**named, "loss": metrics.loss})
        self.deciding.note("watched", values)

    def decide(self, steps: int, epochs: int) -> list[Decided]:
        """Act on the rules that came true, and return what was done; all ranks call this at the same points."""
        return self.deciding.decide(steps, epochs)

    def close(self) -> None:
        """Watch no more than the graphs did before the run."""
        self.watching.close()

    # ---- in checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks share, as JSON values."""
        return {"epochs": self.epochs, "looked_at": self._looked_at, **self.deciding.state_dict()}

    def own_state(self) -> dict[str, Any]:
        """Return what is this rank's own, as JSON values."""
        return {"before": self._before}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Take up what `state_dict` and `own_state` gave; the observers of graphs get their histories."""
        self.deciding.load_state_dict(state)
        self._looked_at = state.get("looked_at", 0)
        self._before = own.get("before", self._before)
        self.epochs = [dict(values) for values in state.get("epochs", ())]
        self.watching.hand_back_all(self.epochs)


def _less(a: Any, b: Any) -> Any:
    """Return sums less other sums, as `Tally.to_dict` gives them; what either lacks counts as 0."""
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        return {key: _less((a or {}).get(key), (b or {}).get(key)) for key in {**(a or {}), **(b or {})}}
    if isinstance(a, list) or isinstance(b, list):
        return [_less(x, y) for x, y in zip(a or [0.0] * len(b), b or [0.0] * len(a), strict=True)]
    return (a or 0) - (b or 0)
