"""What was watched inside of a model, told by a run: at its steps, merged over ranks at the ends of its epochs.

`flodl.train.watching` collects values in forward passes, steps carry them beside their metrics, and
`flodl.train.steplog` tells those of steps. Here epochs are told, and the observers of graphs are given their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from flodl.graph.stepping import GraphSteps
from flodl.train.events import EpochMetrics, Events, Observed
from flodl.train.tally import means
from flodl.train.watching import Watching

__all__ = ["Observing"]


class Observing:
    """The values watched in one run.

    Args:
        model: the model that is trained.
        events: who is told.
        wanted: what to watch besides what graphs watch already; see `Watching`.

    Attributes:
        watching: collects values in forward passes.
        graphs: the model's graphs, whose steps and epochs are ended.
    """

    def __init__(self, model: nn.Module, events: Events, wanted: Sequence[str] = ()) -> None:
        self.events = events
        self.graphs = GraphSteps(model)
        self.watching = Watching(model, wanted)

    def look_again(self) -> None:
        """Be told that the model, or what is watched in it, may have changed."""
        self.graphs.look_again()
        self.watching.look_again()

    def end_epoch(self, metrics: EpochMetrics, parts: Sequence[Mapping[str, Any]]) -> Observed | None:
        """Close an epoch of all graphs, and return what was watched in it; None where nothing was.

        Args:
            metrics: the figures of the epoch.
            parts: the tallies of all ranks.
        """
        values = means(parts, "observed")
        self.watching.hand_back(values.items())
        self.graphs.end_epoch()
        if not values:
            return None
        return Observed(rank=self.events.rank, step=metrics.step, epoch=metrics.epoch, scope="epoch", values=values)

    def close(self) -> None:
        """Watch no more than the graphs did before the run."""
        self.watching.close()
