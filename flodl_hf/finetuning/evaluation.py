"""A model judged on held-out data: every window once, figures by example, no scores kept.

Windows of one example are brought together before they are judged, whatever batches they came in. What is
judged, and by which figures, is decided by the task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.data.batch import Batch
from flodl.data.collate import Where
from flodl.errors import ConfigError, nearest
from flodl.train.precision import Precision
from flodl_hf.finetuning.rows import CollateRows
from flodl_hf.finetuning.step import Objective, rows_of_scores, score
from flodl_hf.finetuning.task import Prepared, Task

__all__ = ["Evaluation"]


@dataclass(frozen=True)
class Evaluation:
    """Called with a model, returns its figures on the prepared data.

    Args:
        task: what is learned.
        prepared: the data.
        collate: makes batches.
        objective: the loss, plain or as in training.
        batch_size: rows at once.
        precision: as in training.
        seed: decides what is masked.
    """

    task: Task
    prepared: Prepared
    collate: CollateRows
    objective: Objective
    batch_size: int
    precision: str = "fp32"
    seed: int = 0

    def __call__(self, model: Any) -> dict[str, float]:
        """Return the figures, ``eval_loss`` first; the model must be in evaluation mode."""
        rows, scorer = self.prepared.rows, self.task.scorer(self.prepared)
        device = model.device
        precision = Precision(self.precision if self.precision != "fp16" else "fp32", device)
        held: dict[int, list[Tensor]] = {}
        windows = np.bincount(rows.owners)
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for number, indices in enumerate(self.batches()):
                where = Where(self.seed, 0, number, tuple(indices.tolist()))
                parts = self.collate([rows.get(int(i)) for i in indices], where)
                batch = Batch(parts, len(indices)).to(device)
                with precision.context():
                    scores = score(model, batch)
                    loss = self.objective.of(scores, batch)
                total += loss.totals().cpu()
                per_row = rows_of_scores(scores.float(), batch, per_row=self.task.per_row)
                for i, row in zip(indices.tolist(), per_row, strict=True):
                    owner = int(rows.owners[i])
                    held.setdefault(owner, []).append(row.cpu() if self.task.kind != "words" else row[:0])
                    if len(held[owner]) == windows[owner]:
                        scorer.update(owner, held.pop(owner))
        mean = (total[0] / total[1]).item() if total[1] else math.nan
        figures = {"eval_loss": mean, **scorer.compute()}
        if self.task.kind == "words":
            figures["perplexity"] = math.exp(mean) if mean < 700 else math.inf
        return figures

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of each batch: examples by falling length, their windows in order."""
        rows = self.prepared.rows
        starts = np.flatnonzero(np.diff(rows.owners, prepend=-1))
        groups = np.split(np.arange(len(rows)), starts[1:])
        by_length = sorted(groups, key=lambda group: -int(rows.lengths[group[0]]))
        order = np.concatenate(by_length)
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    def check_metric(self, name: str) -> str:
        """Return the name of a figure with its sign: ``-`` before those of which less is better.

        Raises:
            ConfigError: the task has no such figure.
        """
        known = ["eval_loss", *self.task.scorer(self.prepared).compute()]
        if self.task.kind == "words":
            known.append("perplexity")
        bare = "eval_loss" if name.lstrip("-") == "loss" else name.lstrip("-")
        if bare not in known and "/" not in bare:
            raise ConfigError(
                f"metric: found {name!r}{nearest(bare, known)}; expected one of {', '.join(known)}", problems=[name]
            )
        return f"-{bare}" if name.startswith("-") or bare in LOWER_IS_BETTER else bare


LOWER_IS_BETTER = ("eval_loss", "perplexity", "mse", "rmse", "mae")
