"""Evaluation of a model: every window once, metrics by example, without storing scores.

The windows of one example are combined first. Several ranks share the data and sum their
metrics. The task defines the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from flodl.errors import ConfigError, nearest
from flodl.metrics import merged
from flodl.train import Precision
from flodl_hf.training.eval_predictions import EvalPredictions
from flodl_hf.training.generator import JointObjective
from flodl_hf.training.pairs import PretrainingObjective
from flodl_hf.training.rows import CollateRows
from flodl_hf.training.step import Objective, rows_of_scores
from flodl_hf.training.task import Prepared, Scorer, Task
from flodl_hf.training.user_code import OwnScorer
from flodl_hf.training.vectors.step import VectorObjective

__all__ = ["Evaluation", "Evaluations", "collect_predictions"]

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
        own: figures of the user's own, as in `flodl_hf.training.user_code.Own`.
        seen: is given predictions, truth and figures of each evaluation, where they are wanted again afterwards.
    """

    task: Task
    prepared: Prepared
    collate: CollateRows
    objective: Objective | VectorObjective
    batch_size: int
    precision: str = "fp32"
    seed: int = 0
    own: Any = None
    seen: EvalPredictions | None = None

    @property
    def sets(self) -> dict[str, Evaluation]:
        """This evaluation as the only set, without a name."""
        return {"": self}

    def scorer(self) -> Scorer:
        """Return a new scorer."""
        scorer = self.task.scorer(self.prepared)
        scorer = scorer if self.own is None else OwnScorer(scorer, self.task, self.own)
        return scorer if self.seen is None else OwnScorer(scorer, self.task, self.seen)

    def __call__(self, model: Any) -> dict[str, float]:
        """Return the figures, ``eval_loss`` first; the model must be in evaluation mode."""
        losses, scorer = self._evaluate(model, [batch for unit in self.units() for batch in unit])
        return self._figures(losses, scorer)

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
        with torch.no_grad():
            for turn, (number, indices) in enumerate([*batches, *[self.units()[0][0]] * more]):
                where = Where(self.seed, 0, number, tuple(indices.tolist()))
                given = Batch(self.collate([rows.get(int(i)) for i in indices], where), len(indices))
                batch = given.to(device)
                with precision.context():
                    scores = self.objective.score(model, batch)
                    if turn >= len(batches):
                        continue
                    totals.append(self.objective.of(scores, batch).totals())
                if isinstance(self.objective, (JointObjective, PretrainingObjective, VectorObjective)):
                    scores = self.objective.by_row(scores, batch)
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
    """Several evaluation sets; metrics are named ``<set>/<metric>``.

    Args:
        sets: evaluations; the main metric of the first selects the best model by default.
    """

    sets: Mapping[str, Evaluation]

    def __call__(self, model: Any) -> dict[str, float]:
        """Return the figures of all sets."""
        return self._named({name: one(model) for name, one in self.sets.items()})

    def on_ranks(self, model: Any, ranks: Ranks, speeds: Sequence[float]) -> dict[str, float]:
        """Return the figures of all sets, to which every rank contributes."""
        return self._named({name: one.on_ranks(model, ranks, speeds) for name, one in self.sets.items()})

    def _named(self, found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        return {f"{name}/{figure}": value for name, figures in found.items() for figure, value in figures.items()}

    def check_metric(self, name: str) -> str:
        """Return the name of a figure with its set and sign; by default of the first set.

        Args:
            name: ``set/figure``, or as transformers names it ``eval_set_figure``.

        Raises:
            ConfigError: no set has such a figure.
        """
        sign, bare = ("-", name[1:]) if name.startswith("-") else ("", name)
        at, _, figure = bare.partition("/")
        if at not in self.sets:
            named = [(one, f"{start}{one}_") for start in ("eval_", "") for one in sorted(self.sets, key=len)]
            fits = [(one, bare.removeprefix(start)) for one, start in named if bare.startswith(start)]
            at, figure = fits[-1] if fits else (next(iter(self.sets)), bare)
        found = self.sets[at].check_metric(sign + figure)
        return f"-{at}/{found[1:]}" if found.startswith("-") else f"{at}/{found}"


def collect_predictions(
    model: Any, evaluation: Evaluation | Evaluations, figures: Mapping[str, float] | None = None
) -> EvalPredictions | None:
    """Return the predictions of a model for the first evaluation set.

    The result of the last evaluation is reused if it has the same metrics. Otherwise this process evaluates the model
    once more. Masked language models return None, because their scores are too large to store.

    Args:
        model: the model, in evaluation mode.
        evaluation: the evaluation of the run.
        figures: metrics of the model, if it was evaluated before.
    """
    name, one = next(iter(evaluation.sets.items()))
    if one.task.kind == "words":
        return None
    if one.seen is not None and figures and _has_figures(one.seen, figures):
        return one.seen if one.seen.predictions is not None else None
    collected = EvalPredictions(name)
    replace(one, own=collected, seen=None)(model)
    return collected if collected.predictions is not None else None


def _has_figures(seen: EvalPredictions, figures: Mapping[str, float]) -> bool:
    """Return whether the metrics of all sets include those of the stored evaluation."""
    prefix = f"{seen.name}/" if seen.name else ""
    return bool(seen.figures) and seen.figures == {key: figures.get(prefix + key) for key in seen.figures or {}}
