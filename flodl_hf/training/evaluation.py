"""Evaluation of a model: every window once, metrics by example, without storing scores.

The windows of one example are combined first. Several ranks share the data and sum their metrics. The task defines the
metrics; functions of the user add others. Predictions are kept for the report, and for decision thresholds of labels
with the best F1 on the evaluation data.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as count_from
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.data import Batch, Where
from flodl.distributed import Ranks
from flodl.distributed.sharded import is_sharded
from flodl.distributed.shares import deal
from flodl.errors import ConfigError, TrainError, nearest
from flodl.metrics import Metric, merged
from flodl.train import Callback, Precision
from flodl_hf.training.rows import CollateRows
from flodl_hf.training.step import LossFunction, rows_of_scores
from flodl_hf.training.task import Prepared, Scorer, Task


@dataclass
class EvalPredictions:
    """Predictions and gold labels of all examples of one evaluation set.

    Attributes:
        name: name of the set; empty if there is only one.
        predictions: scores ``(examples, labels)``, lists of tags, or answers.
        truth: labels, lists of tags, or lists of accepted answers.
        figures: metrics of the same evaluation; None before one.
    """

    name: str
    predictions: Any = None
    truth: Any = None
    figures: Mapping[str, float] | None = None

    def __call__(self, predictions: Any, truth: Any) -> dict[str, float]:
        """Store predictions and gold labels; return no metric."""
        self.predictions, self.truth = predictions, truth
        return {}


class CollectedValues:
    """Values of examples, collected for metrics that are no sums; a `flodl.metrics.Metric` that ranks exchange.

    Values are JSON values and float32 arrays.
    """

    def __init__(self) -> None:
        self.items: dict[int, Any] = {}

    def update(self, example: int, value: Any) -> None:
        """Add one example."""
        self.items[example] = value

    def merge(self, other: Any) -> None:
        """Add the examples of ``other``."""
        self.items |= other.items

    def compute(self) -> dict[str, float]:
        """Return the number of examples."""
        return {"count": float(len(self.items))}

    def reset(self) -> None:
        """Remove all examples."""
        self.items = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON values."""
        return {"items": [[example, _json(value)] for example, value in self.items.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        self.items = {example: _from_json(value) for example, value in state["items"]}


def _json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"shape": list(value.shape), "data": base64.b64encode(value.tobytes()).decode()}
    return [_json(part) for part in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return np.frombuffer(base64.b64decode(value["data"]), np.float32).reshape(value["shape"])
    return [_from_json(part) for part in value] if isinstance(value, list) else value


MetricFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Own:
    """Functions of the user.

    Attributes:
        loss: ``loss(scores, labels)``; see `flodl_hf.training.step.own_loss`.
        metrics: ``metrics(predictions, truth)`` returns a mapping of metrics; or a mapping of names to functions.
        callbacks: hooks into the training loop.
    """

    loss: LossFunction | None = None
    metrics: MetricFunction | Mapping[str, MetricFunction] | None = None
    callbacks: Sequence[Callback] = field(default=())

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


class OwnScorer(Scorer):
    """Scorer of a task, with the metrics of the user.

    Args:
        scorer: the task's.
        task: the task, which defines the form of predictions.
        metrics: as in `Own`.
    """

    def __init__(self, scorer: Scorer, task: Task, metrics: MetricFunction | Mapping[str, MetricFunction]) -> None:
        self.scorer, self.task, self.own, self.kept = scorer, task, metrics, CollectedValues()

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Add the scores of one example."""
        pair = self.scorer.update(example, scores)
        if pair is not None:
            self.kept.update(example, pair)
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


Numbered = tuple[int, NDArray[np.int64]]
"""A batch: its number among all, and its rows."""


@dataclass(frozen=True)
class Evaluation:
    """Called with a model, returns its figures on the prepared data; `on_ranks` does so with several ranks.

    Args:
        task: the task.
        prepared: the data.
        collate: makes batches.
        objective: the loss, plain or as in training.
        batch_size: rows in a batch.
        precision: as in training.
        seed: seed of the masking.
        own: figures of the user's own, as in `flodl_hf.training.evaluation.Own`.
        seen: is given predictions, truth and figures of each evaluation, where they are wanted again afterwards.
    """

    task: Task
    prepared: Prepared
    collate: CollateRows
    objective: Any
    batch_size: int
    precision: str = "fp32"
    seed: int = 0
    own: Any = None
    seen: EvalPredictions | None = None

    def scorer(self) -> Scorer:
        """Return a new scorer."""
        scorer = self.prepared.scorer()
        scorer = scorer if self.own is None else OwnScorer(scorer, self.task, self.own)
        return scorer if self.seen is None else OwnScorer(scorer, self.task, self.seen)

    def __call__(self, model: Any, units: int | None = None) -> dict[str, float]:
        """Return the figures, ``eval_loss`` first; the model must be in evaluation mode.

        Args:
            model: the model.
            units: number of units that are evaluated; None for all.
        """
        return self._figures(*self._evaluate(model, [batch for unit in self.units()[:units] for batch in unit]))

    def on_ranks(self, model: Any, ranks: Ranks, speeds: Sequence[float]) -> dict[str, float]:
        """Return the metrics; every rank evaluates a share of the data.

        The batches are those of one rank, and the losses are summed in the same order, so the loss is bit-equal;
        so are metrics that are counts. Sums of numbers within metrics may differ in the last bits.

        Args:
            ranks: the ranks; all call this at the same time, with equal weights.
            speeds: how fast ranks are in proportion, the same on all.
        """
        units = self.units()
        costs = [float(sum(self.prepared.rows.lengths[rows].max() * len(rows) for _, rows in unit)) for unit in units]
        owners = deal(costs, speeds)
        mine = [batch for unit, owner in zip(units, owners, strict=True) if owner == ranks.rank for batch in unit]
        more = 0
        if is_sharded(model):
            # A forward pass with shards needs every rank, so all ranks run the same number of passes.
            more = int(max(row[0] for row in ranks.table([float(len(mine))]))) - len(mine)
        losses, scorer = self._evaluate(model, mine, more)
        parts = ranks.gather({"losses": losses, "metrics": [metric.state_dict() for metric in scorer.metrics()]})
        whole = self.scorer()
        for i, metric in enumerate(whole.metrics()):
            merged(metric, [part["metrics"][i] for part in parts])
        return self._figures([loss for part in parts for loss in part["losses"]], whole)

    def _evaluate(
        self, model: Any, batches: Sequence[Numbered], more: int = 0
    ) -> tuple[list[tuple[int, float, float]], Scorer]:
        """Return number, sum and count of each batch's loss, and a scorer that has seen the batches.

        Args:
            model: the model.
            batches: number and rows of each.
            more: additional passes for other ranks; their scores are discarded.
        """
        rows, scorer = self.prepared.rows, self.scorer()
        device = model.device
        precision = Precision(self.precision if self.precision != "fp16" else "fp32", device)
        held: dict[int, list[Tensor]] = {}
        windows = np.bincount(rows.owners)
        totals: list[Tensor] = []
        by_row: Any = getattr(self.objective, "by_row", None)
        with torch.no_grad():
            for turn, (number, indices) in enumerate([*batches, *[self.units()[0][0]] * more]):
                where = Where(self.seed, 0, number, tuple(indices.tolist()))
                given = Batch(self.collate(rows.__getitems__(indices), where), len(indices))
                batch = given.to(device)
                with precision.context():
                    scores = self.objective.score(model, batch)
                    if turn >= len(batches):
                        continue
                    totals.append(self.objective.of(scores, batch).totals())
                if by_row is not None:
                    scores = by_row(scores, batch)
                if self.task.kind == "words":  # the loss is sufficient, and the scores are large
                    continue
                per_row = rows_of_scores(scores.float().cpu(), given, per_row=self.task.per_row)
                for i, row in zip(indices.tolist(), per_row, strict=True):
                    owner = int(rows.owners[i])
                    held.setdefault(owner, []).append(row)
                    if len(held[owner]) == windows[owner]:
                        scorer.update(owner, held.pop(owner))
        figures = torch.stack(totals).tolist() if totals else []
        return [(number, *figure) for (number, _), figure in zip(batches, figures, strict=True)], scorer

    def _figures(self, losses: Iterable[Sequence[float]], scorer: Scorer) -> dict[str, float]:
        total = count = 0.0
        for _, loss_sum, items in sorted(map(tuple, losses)):
            total, count = total + loss_sum, count + items
        mean = total / count if count else math.nan
        figures = {"eval_loss": mean, **scorer.compute()}
        if self.task.kind == "words":
            figures["perplexity"] = math.exp(mean) if mean < 700 else math.inf
        if self.seen is not None:
            self.seen.figures = dict(figures)
        return figures

    def units(self) -> list[list[Numbered]]:
        """Return the batches, with their numbers, in units that share no example.

        Examples come by falling length with their windows in order. A unit is one batch, or several where one example
        has more windows than a batch has rows.
        """
        rows = self.prepared.rows
        starts = np.flatnonzero(np.diff(rows.owners, prepend=-1))
        groups = np.split(np.arange(len(rows)), starts[1:])
        by_length = sorted(groups, key=lambda group: -int(rows.lengths[group[0]]))
        units: list[list[NDArray[np.int64]]] = []
        room = 0
        for group in by_length:
            if len(group) <= room:
                units[-1][0] = np.concatenate([units[-1][0], group])
                room -= len(group)
            else:
                units.append([group[i : i + self.batch_size] for i in range(0, len(group), self.batch_size)])
                room = self.batch_size - len(group)
        numbers = count_from(0)
        return [[(next(numbers), batch) for batch in unit] for unit in units]

    def check_metric(self, name: str) -> str:
        """Return the name of a metric with its sign: ``-`` if lower is better.

        Raises:
            ConfigError: the task has no such figure.
        """
        known = ["eval_loss", *self.scorer().compute()]
        if self.task.kind == "words":
            known.append("perplexity")
        bare = "eval_loss" if name.lstrip("-") == "loss" else name.lstrip("-")
        bare = bare.removeprefix("eval_") if bare not in known and bare.removeprefix("eval_") in known else bare
        # which figures a function of the user's gives is known when it has given them
        if bare not in known and "/" not in bare and (self.own is None or isinstance(self.own, Mapping)):
            raise ConfigError(
                f"metric: found {name!r}{nearest(bare, known)}; expected one of {', '.join(known)}", problems=[name]
            )
        return f"-{bare}" if name.startswith("-") or bare in LOWER_IS_BETTER else bare


LOWER_IS_BETTER = ("eval_loss", "perplexity", "mse", "rmse", "mae")


@dataclass(frozen=True)
class Evaluations:
    """The evaluation sets of a run; metrics are named ``<set>/<metric>``, or ``<metric>`` of a set without a name.

    Args:
        sets: evaluations; the main metric of the first selects the best model by default.
    """

    sets: Mapping[str, Evaluation]

    def __call__(self, model: Any, units: int | None = None) -> dict[str, float]:
        """Return the figures of all sets; arguments as for `Evaluation`."""
        return self._named({name: one(model, units) for name, one in self.sets.items()})

    def on_ranks(self, model: Any, ranks: Ranks, speeds: Sequence[float]) -> dict[str, float]:
        """Return the figures of all sets, to which every rank contributes."""
        return self._named({name: one.on_ranks(model, ranks, speeds) for name, one in self.sets.items()})

    def _named(self, results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        return {
            f"{name}/{figure}".removeprefix("/"): value
            for name, figures in results.items()
            for figure, value in figures.items()
        }

    def check_metric(self, name: str) -> str:
        """Return the name of a figure with its set and sign; by default of the first set.

        Args:
            name: ``set/figure``, or as transformers names it ``eval_set_figure``.

        Raises:
            ConfigError: no set has such a figure.
        """
        sign, bare = ("-", name[1:]) if name.startswith("-") else ("", name)
        at, _, figure = bare.partition("/")
        if "" in self.sets:
            at, figure = "", bare
        elif at not in self.sets:
            named = [(one, f"{start}{one}_") for start in ("eval_", "") for one in sorted(self.sets, key=len)]
            fits = [(one, bare.removeprefix(start)) for one, start in named if bare.startswith(start)]
            at, figure = fits[-1] if fits else (next(iter(self.sets)), bare)
        found = self.sets[at].check_metric(sign + figure)
        if not at:
            return found
        return f"-{at}/{found[1:]}" if found.startswith("-") else f"{at}/{found}"


def collect_predictions(
    model: Any,
    evaluation: Evaluations,
    figures: Mapping[str, float] | None = None,
    best: EvalPredictions | None = None,
) -> EvalPredictions | None:
    """Return the predictions of a model for the first evaluation set.

    The result of an earlier evaluation is reused if it has the same metrics. Otherwise this process evaluates the model
    once more. Masked language models return None, because their scores are too large to store.

    Args:
        model: the model, in evaluation mode.
        evaluation: the evaluation of the run.
        figures: metrics of the model, if it was evaluated before.
        best: predictions of the best evaluation.
    """
    name, one = next(iter(evaluation.sets.items()))
    if one.task.kind == "words":
        return None
    for seen in (one.seen, best):
        prefix = f"{seen.name}/" if seen is not None and seen.name else ""
        numbers = {} if seen is None else {k: v for k, v in (seen.figures or {}).items() if isinstance(v, int | float)}
        # The metrics of all sets include the numbers of the stored evaluation.
        if (
            seen is not None
            and figures
            and numbers
            and numbers == {name: figures.get(prefix + name) for name in numbers}
        ):
            return seen if seen.predictions is not None else None
    collected = EvalPredictions(name)
    replace(one, own=collected, seen=None)(model)
    return collected if collected.predictions is not None else None
