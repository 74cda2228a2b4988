"""Evaluation between training steps: sums and counts over ranks, so that no logits are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.distributed.sharded import is_sharded
from flodl.distributed.shares import deal
from flodl.errors import TrainError, nearest
from flodl.train.events import EpochMetrics
from flodl.train.feed import Feed
from flodl.train.loss import as_loss, batch_len
from flodl.train.precision import Precision
from flodl.train.saving.judged import signed


@runtime_checkable
class RankedEval(Protocol):
    """An ``eval_fn`` that shares its work among ranks."""

    def on_ranks(self, model: nn.Module, ranks: Ranks, speeds: Sequence[float]) -> Mapping[str, Any]:
        """Return the figures of ``model``, the same on each rank.

        Args:
            speeds: relative speeds of the ranks, the same on all.
        """
        ...


@dataclass
class Callbacks:
    """Functions of the user that the loop calls; see `flodl.train.builder.TrainerBuilder`.

    An ``eval_fn`` that is a `RankedEval` is called on every rank, others only on rank 0. An error in ``metrics_fn`` or
    ``checkpoint_fn`` is reported one time and training continues; an error in the others ends the run.
    """

    epoch_fn: Callable[[int, Any], Any] | None = None
    checkpoint_fn: Callable[[int, nn.Module], Any] | None = None
    metrics_fn: Callable[[EpochMetrics], Any] | None = None
    eval_fn: Callable[[nn.Module], Mapping[str, Any]] | None = None
    evals: Mapping[str, tuple[Callable[[nn.Module, Any], Any], Feed]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


class Evaluator:
    """Evaluate, store the last figures, and detect that they do not improve any more.

    Args:
        early_stopping: ``(metric, patience)``; a leading ``-`` if smaller values are better.

    Attributes:
        found: the last figures.
        details: the last results of ``eval_fn`` that are not numbers, as JSON values.
        at_step: the step of the last evaluation.
        history: ``step``, ``epoch`` and figures of every evaluation, including those before a resume.
    """

    def __init__(
        self, callbacks: Callbacks, early_stopping: tuple[str, int] | None = None, keep_best: str | None = None
    ) -> None:
        self.callbacks, self.early_stopping = callbacks, early_stopping
        self._asked: dict[str, str | None] | None = {
            "early_stopping": early_stopping[0] if early_stopping else None,
            "keep_best": keep_best,
        }
        self.history: list[dict[str, Any]] = []
        self.found: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self.at_step = 0
        self.best: float | None = None
        self.waits = 0

    @property
    def evaluates(self) -> bool:
        """True if there is an evaluation function or evaluation data."""
        return self.callbacks.eval_fn is not None or bool(self.callbacks.evals)

    def run(
        self,
        model: nn.Module,
        ranks: Ranks,
        precision: Precision,
        step: int,
        speeds: Sequence[float] | None = None,
        *,
        counts: bool = True,
    ) -> dict[str, float] | None:
        """Return the figures of ``model``, equal on all ranks; None without an evaluation.

        Args:
            speeds: relative speeds of the ranks, the same on all; None for equal speeds.
            counts: store the figures and use them for early stopping.
        """
        speeds = speeds if speeds is not None and len(speeds) == ranks.world else (1.0,) * ranks.world
        calls = self.callbacks
        self.at_step = step
        if not self.evaluates:
            return None
        ranks.phase("evaluation")
        found: dict[str, float] = {}
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                for name, (eval_step, data) in calls.evals.items():
                    figures = self._shares(eval_step, data, model, ranks, precision, speeds)
                    found |= {f"{name}/{figure}" if name else figure: value for figure, value in figures.items()}
                if calls.eval_fn is not None:
                    figures, self.details = _called(calls.eval_fn, model, ranks, speeds)
                    found |= figures
        finally:
            for module, mode in modes:
                module.training = mode
        if self._asked is not None:
            self._check_names(found)
        if counts:
            self.found = found
            self._watch(found)
        return found

    def of_step(self, step: int) -> dict[str, float]:
        """Return the figures of the model after ``step``; empty if it was not evaluated then."""
        return self.found if self.at_step == step else {}

    def _check_names(self, found: Mapping[str, float]) -> None:
        """Check one time that the figures named by settings exist.

        Raises:
            TrainError: a figure does not exist.
        """
        asked, self._asked = self._asked, None
        for setting, name in (asked or {}).items():
            if name is not None and name.lstrip("-") not in found:
                raise TrainError(
                    f"{setting}: found no figure {name.lstrip('-')!r}{nearest(name.lstrip('-'), found)} after the "
                    f"evaluation; expected one of {', '.join(found)}, with '-' before it if smaller values are better.",
                    setting=setting,
                    found=list(found),
                )

    def _shares(
        self,
        eval_step: Callable[[nn.Module, Any], Any],
        data: Feed,
        model: nn.Module,
        ranks: Ranks,
        precision: Precision,
        speeds: Sequence[float],
    ) -> dict[str, float]:
        """Return means over the whole evaluation set; ranks share its batches according to their speeds."""
        owners = deal([1.0] * data.turns(0), speeds)
        sums: dict[str, list[Any]] = {}
        # A pass of a sharded model needs every rank, so each rank passes all batches and counts its share.
        every = is_sharded(model)
        turns = [turn for turn, owner in enumerate(owners) if every or owner == ranks.rank]
        for turn, batches in data.work(0, turns, None):
            for batch in batches:
                with precision.context():
                    given = eval_step(model, batch)
                if owners[turn] != ranks.rank:
                    continue
                if not isinstance(given, Mapping):
                    loss = as_loss(given, batch_len(batch))
                    given = {"eval_loss": loss.totals().unbind(), **loss.metrics}
                for name, figures in given.items():
                    if not isinstance(figures, Sequence | torch.Tensor) or len(figures) != 2:
                        raise TrainError(
                            f"evaluate: the figure {name!r} is {type(figures).__name__}; expected a sum and a count, "
                            "such as (hits, len(labels)), which add up over batches and ranks. Use eval_fn for "
                            "a function that returns final figures."
                        )
                    kept = sums.setdefault(name, [0.0, 0.0])
                    for i, figure in enumerate(figures):
                        # summed on its device, so that the host does not wait for each batch
                        kept[i] = kept[i] + (figure.double() if isinstance(figure, torch.Tensor) else float(figure))
        parts = ranks.gather({name: [float(total), float(count)] for name, (total, count) in sums.items()})
        means = {}
        for name in sorted({name for part in parts for name in part}):
            total, count = (sum(part.get(name, (0.0, 0.0))[i] for part in parts) for i in (0, 1))
            means[name] = total / count if count else math.nan
        return means

    def _watch(self, found: Mapping[str, float]) -> None:
        if self.early_stopping is None:
            return
        # NaN is no improvement, and no value for later comparisons.
        value = signed(self.early_stopping[0], found)
        if value is not None and (self.best is None or value > self.best):
            self.best, self.waits = value, 0
        else:
            self.waits += 1

    @property
    def is_spent(self) -> bool:
        """True if the metric has not improved for as many evaluations as early stopping allows."""
        return self.early_stopping is not None and self.waits >= self.early_stopping[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the figures and the best so far, as JSON values."""
        metric = self.early_stopping[0] if self.early_stopping else None
        return {"found": self.found, "at_step": self.at_step, "metric": metric, "best": self.best, "waits": self.waits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; its best value only if the metric of early stopping is the same."""
        self.found, self.at_step = dict(state["found"]), state["at_step"]
        if self.early_stopping is not None and state.get("metric", self.early_stopping[0]) == self.early_stopping[0]:
            self.best, self.waits = state["best"], state["waits"]


def split_figures(found: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the numbers of an evaluation, and the rest as JSON values.

    Args:
        found: results. Numbers in nested mappings have names such as ``report/macro avg/f1-score``; lists,
            arrays and texts are the rest.
    """
    figures: dict[str, float] = {}
    details: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            numbers, rest = split_figures({f"{name}/{key}": part for key, part in value.items()})
            figures, details = figures | numbers, details | rest
        elif isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1:
            figures[str(name)] = float(value.item())
        elif isinstance(value, Real):
            figures[str(name)] = float(value)
        else:
            details[str(name)] = _as_json(value)
    return figures, details


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return _as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): _as_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_as_json(part) for part in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _called(
    call: Any, model: nn.Module, ranks: Ranks, speeds: Sequence[float]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return figures and details of a user's function: of all ranks for a `RankedEval`, else of rank 0."""
    if isinstance(call, RankedEval):
        return split_figures(call.on_ranks(model, ranks, speeds))
    figures, details = ranks.tell(split_figures(call(model)) if ranks.rank == 0 else [])
    return figures, details
