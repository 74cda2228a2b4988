"""Vectors of evaluation examples, collected for metrics that depend on the form of the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl_hf.training.evaluation import CollectedValues
from flodl_hf.training.evaluators import (
    binary_figures,
    clustering_figures,
    retrieval_figures,
    similarity_figures,
    triplet_figures,
)
from flodl_hf.training.losses.pairs import Form
from flodl_hf.training.task import Scorer

RETRIEVAL = {"accuracy": (), "precision": (), "recall": (1, 10), "mrr": (10,), "ndcg": (10,), "map": (100,)}


@dataclass(frozen=True)
class HeldOut:
    """Gold labels of evaluation examples.

    Attributes:
        form: the form of the data.
        texts: which text each one is, ``(examples, texts)``: equal numbers are equal texts, -1 is none.
        labels: the labels of the examples.
        prompted: whether each text occurs twice: with the prompt of the loss, then with the prompt of the metrics.
    """

    form: Form
    texts: NDArray[np.int64]
    labels: NDArray[Any] | None
    prompted: bool = False


class VectorScorer(Scorer):
    """Metrics of vectors, which depend on the form of the data.

    Args:
        truth: the gold labels of the examples.
    """

    measure = "cosine"

    def __init__(self, truth: HeldOut) -> None:
        super().__init__(CollectedValues())
        self.truth, self.kept = truth, self.parts[0]

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the vectors of one example, ``[(texts, size)]``."""
        self.kept.update(example, scores[0].numpy())

    def compute(self) -> dict[str, float]:
        """Return the metrics; NaN without examples."""
        names = METRICS[self.truth.form]
        if not names or not self.kept.items:
            return dict.fromkeys(names, math.nan)
        examples = sorted(self.kept.items)
        labels = None if self.truth.labels is None else self.truth.labels[examples]
        return self.figures([self.kept.items[i] for i in examples], self.truth.texts[examples], labels)

    def figures(self, vectors: Sequence[Any], texts: NDArray[np.int64], labels: Any) -> dict[str, float]:
        """Return the metrics of the vectors, texts and labels of examples."""
        columns, form, measure = torch.from_numpy(np.stack(vectors)).unbind(1), self.truth.form, self.measure
        if form == "classes":
            return clustering_figures(columns[0], labels)
        if form in ("scored", "binary"):
            of_pairs = similarity_figures if form == "scored" else binary_figures
            return of_pairs(*columns, labels, measure=measure)
        found = {} if form == "teacher_scores" else _retrieval(columns, texts, measure)
        return found if form == "pairs" else found | _triplets(columns, texts, measure)


def related_texts(texts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], list[set[int]]]:
    """Return the corpus of distinct positives and negatives, and the distinct anchors.

    Args:
        texts: as in `HeldOut`.

    Returns:
        The place of each text in the corpus, ``(examples, texts - 1)``; the first example of each distinct anchor;
        and for each of these anchors the places of its positives.
    """
    there = texts[:, 1:] >= 0
    places = np.zeros(there.shape, np.int64)
    places[there] = np.unique(texts[:, 1:][there], return_inverse=True)[1]
    anchors, first, group = np.unique(texts[:, 0], return_index=True, return_inverse=True)
    relevant: list[set[int]] = [set() for _ in anchors]
    for anchor, place in zip(group.tolist(), places[:, 0].tolist(), strict=True):
        relevant[anchor].add(place)
    return places, first, relevant


def _retrieval(columns: Sequence[Tensor], texts: NDArray[np.int64], measure: str) -> dict[str, float]:
    """Return how well anchors find their positives among all positives and negatives, each distinct text once."""
    there = texts[:, 1:] >= 0
    places, first, relevant = related_texts(texts)
    vectors = torch.zeros(places.max() + 1, columns[0].shape[1])
    for k, column in enumerate(columns[1:]):
        vectors[torch.from_numpy(places[there[:, k], k])] = column[torch.from_numpy(there[:, k])]
    return retrieval_figures(columns[0][torch.from_numpy(first)], vectors, relevant, at=RETRIEVAL, measure=measure)


def _triplets(columns: Sequence[Tensor], texts: NDArray[np.int64], measure: str) -> dict[str, float]:
    a, b, *others = columns
    parts, counts = [], []
    for k, other in enumerate(others, 2):
        there = torch.from_numpy(texts[:, k] >= 0)
        if there.any():
            parts.append(triplet_figures(a[there], b[there], other[there], measure=measure)["triplet_accuracy"])
            counts.append(int(there.sum()))
    return {"triplet_accuracy": float(np.average(parts, weights=counts)) if parts else math.nan}


_FOUND = ("ndcg@10", "recall@1", "recall@10", "mrr@10", "map@100")
METRICS: dict[Form, tuple[str, ...]] = {
    "pairs": _FOUND,
    "triplets": (*_FOUND, "triplet_accuracy"),
    "scored": ("spearman", "pearson"),
    "binary": ("ap", "accuracy", "accuracy_threshold", "f1", "f1_threshold", "precision", "recall", "mcc"),
    "pair_classes": (),
    "classes": ("neighbour_accuracy", "v_measure"),
    "texts": (),
    "teacher_scores": ("triplet_accuracy",),
    "teacher_vectors": (),
}
"""Metrics of each form of data, first the metric that selects the best model; without metrics, the loss selects it."""


def main_metric(form: Form) -> str:
    """Return the metric of a form of data that selects the best model."""
    return next(iter(METRICS[form]), "-eval_loss")
