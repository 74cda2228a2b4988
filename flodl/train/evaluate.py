"""Evaluation between training steps: sums and counts over ranks, so that no logits are kept."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from flodl.distributed.board import EVALUATE
from flodl.distributed.sharded import is_sharded
from flodl.distributed.shares import deal
from flodl.errors import TrainError, nearest
from flodl.train.events import EvalDone
from flodl.train.feed import Feed
from flodl.train.loss import as_loss, batch_len
from flodl.train.saving.reading import signed
from flodl.train.steplog import means


class Evaluator:
    """Evaluates the model of a trainer, and stops a run whose figures do not improve any more.

    Args:
        trainer: the trainer.
        evals: step and feed of each evaluation set by name.
        eval_fn: returns figures of the model on rank 0, or on all ranks if it has a method
            ``on_ranks(model, ranks, speeds)``.

    Attributes:
        found: the last figures.
        at_step: the step of the last evaluation.
        history: ``step``, ``epoch`` and figures of every evaluation, including those before a resume.
    """

    def __init__(self, trainer: Any, evals: Mapping[str, tuple[Any, Feed]], eval_fn: Any) -> None:
        settings = trainer.settings
        self.trainer, self.evals, self.eval_fn = trainer, evals, eval_fn
        self.evaluates = eval_fn is not None or bool(evals)
        self.metric, self.patience = settings.early_stopping or (None, 0)
        self._unchecked: dict[str, str | None] = {"early_stopping": self.metric, "keep_best": settings.keep_best}
        self.history: list[dict[str, Any]] = []
        self.found: dict[str, float] = {}
        self.at_step = 0
        self.best: float | None = None
        self.waits = 0

    def between_steps(self, flags: Sequence[float]) -> None:
        """Evaluate if it is due or requested."""
        every, steps = self.trainer.settings.eval_every, self.trainer.policy.steps
        if every and self.at_step // every < steps // every:
            self.scheduled()
        elif any(flags) and flags[EVALUATE]:
            self.run()

    def scheduled(self) -> None:
        """Evaluate, and pass the figures to the schedule."""
        self.run()
        self.trainer.rates.evaluated(self)

    def run(self) -> None:
        """Evaluate the model, report its figures, and stop if they do not improve any more; all ranks call this."""
        trainer = self.trainer
        trainer.log.settle(trainer.tally)
        self.at_step = trainer.policy.steps
        if not self.evaluates:
            return
        with trainer.averaged_weights(), trainer.graphs.apart():
            found, details = self._evaluate()
            self._check_names(found)
            self.found = found
            # NaN is no improvement, and no value for later comparisons.
            if self.metric is not None:
                value = signed(self.metric, found)
                better = value is not None and (self.best is None or value > self.best)
                self.best, self.waits = (value, 0) if better else (self.best, self.waits + 1)
            trainer.observing.note("evaluation", {"eval_loss" if n == "loss" else n: v for n, v in found.items()})
            record = {"step": self.at_step, "epoch": trainer.epoch_number, **found}
            self.history.append(record | ({"details": details} if details else {}))
            # Emitted here, so that subscribers see the weights that were evaluated.
            about = {**trainer.about(), "step": self.at_step, "wall_ms": trainer.wall_ms()}
            trainer.events.emit(EvalDone(**about, metrics=found, details=details))
        trainer.hooks.call("on_evaluate", found)
        trainer.wall_ms()
        trainer.stopping = trainer.stopping or self.is_spent

    def of_step(self, step: int) -> dict[str, float]:
        """Return the figures of the model after ``step``; empty if it was not evaluated then."""
        return self.found if self.at_step == step else {}

    def _evaluate(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Return figures and details, equal on all ranks."""
        model, ranks, speeds = self.trainer.model, self.trainer.ranks, self.trainer.policy.speeds
        speeds = speeds if len(speeds) == ranks.world else (1.0,) * ranks.world
        ranks.phase("evaluation")
        found: dict[str, float] = {}
        details: dict[str, Any] = {}
        with evaluating(model), torch.no_grad():
            for name, (eval_step, data) in self.evals.items():
                figures = self._means(eval_step, data, speeds)
                found |= {f"{name}/{figure}" if name else figure: value for figure, value in figures.items()}
            if self.eval_fn is not None:
                if hasattr(self.eval_fn, "on_ranks"):
                    figures, details = split_figures(self.eval_fn.on_ranks(model, ranks, speeds))
                else:
                    figures, details = ranks.tell(split_figures(self.eval_fn(model)) if ranks.rank == 0 else [])
                found |= figures
        return found, details

    def _check_names(self, figures: Mapping[str, float]) -> None:
        """Check once that the figures named by settings exist.

        Raises:
            TrainError: a figure does not exist.
        """
        unchecked, self._unchecked = self._unchecked, {}
        for setting, metric in unchecked.items():
            name = metric and metric.lstrip("-")
            if name is not None and name not in figures:
                raise TrainError(
                    f"{setting}: found no figure {name!r}{nearest(name, figures)} after the evaluation; expected one "
                    f"of {', '.join(figures)}, with '-' before it if smaller values are better.",
                    setting=setting,
                    found=list(figures),
                )

    def _means(self, eval_step: Callable[..., Any], data: Feed, speeds: Sequence[float]) -> dict[str, float]:
        """Return means over an evaluation set; ranks share its batches according to their speeds."""
        model, ranks = self.trainer.model, self.trainer.ranks
        owners = deal([1.0] * data.turns(0), speeds)
        sums: dict[str, list[Any]] = {}
        # A pass of a sharded model needs every rank, so each rank passes all batches and counts its share.
        every = is_sharded(model)
        turns = [turn for turn, owner in enumerate(owners) if every or owner == ranks.rank]
        for turn, batches in data.work(0, turns, None):
            for batch in batches:
                with self.trainer.precision.context():
                    result = eval_step(model, batch)
                if owners[turn] == ranks.rank:
                    _add(sums, result, batch)
        parts = ranks.gather({name: [float(total), float(count)] for name, (total, count) in sums.items()})
        return dict(sorted(means(parts).items()))

    @property
    def is_spent(self) -> bool:
        """True if the metric has not improved for as many evaluations as early stopping allows."""
        return self.metric is not None and self.waits >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the figures and the best so far, as JSON values."""
        names = ("found", "at_step", "metric", "best", "waits")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; its best value only if the metric of early stopping is the same."""
        self.found, self.at_step = dict(state["found"]), state["at_step"]
        if self.metric is not None and state.get("metric", self.metric) == self.metric:
            self.best, self.waits = state["best"], state["waits"]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode: no dropout, no changes of BatchNorm statistics."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _add(sums: dict[str, list[Any]], result: Any, batch: Any) -> None:
    """Add the result of an evaluation step."""
    if not isinstance(result, Mapping):
        loss = as_loss(result, batch_len(batch))
        result = {"eval_loss": loss.totals().unbind(), **loss.metrics}
    for name, figures in result.items():
        if not isinstance(figures, Sequence | torch.Tensor) or len(figures) != 2:
            raise TrainError(
                f"evaluate: the figure {name!r} is {type(figures).__name__}; expected a sum and a count, such as "
                "(hits, len(labels)). Use eval_fn for a function that returns final figures."
            )
        kept = sums.setdefault(name, [0.0, 0.0])
        for i, figure in enumerate(figures):
            # summed on its device, so that the host does not wait for each batch
            kept[i] = kept[i] + (figure.double() if isinstance(figure, torch.Tensor) else float(figure))


def split_figures(results: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the numbers of an evaluation, and the rest as JSON values.

    Args:
        results: by name. Numbers in nested mappings have names such as ``report/macro avg/f1-score``; lists,
            arrays and texts are the rest.
    """
    figures: dict[str, float] = {}
    details: dict[str, Any] = {}
    for name, value in results.items():
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
