"""Vectors of evaluation examples, collected for metrics that depend on the form of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        measure: how alike two vectors are, a name of `flodl_hf.inference.similarity.MEASURES`.
    """

    def __init__(self, truth: HeldOut, measure: str = "cosine") -> None:
        super().__init__(CollectedValues())
        self.truth, self.measure, self.kept = truth, measure, self.parts[0]

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the vectors of one example, ``[(texts, size)]``."""
        self.kept.update(example, scores[0].numpy())

    def compute(self) -> dict[str, float]:
        """Return the metrics; NaN without examples."""
        if not self.kept.items:
            return dict.fromkeys(METRICS[self.truth.form].names, math.nan)
        examples = sorted(self.kept.items)
        columns = torch.from_numpy(np.stack([self.kept.items[i] for i in examples])).unbind(1)
        texts = self.truth.texts[examples]
        labels = None if self.truth.labels is None else self.truth.labels[examples]
        figures: dict[str, float] = {}
        for compute in METRICS[self.truth.form].functions:
            figures |= compute(columns, texts, labels, self.measure)
        return figures


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


def _retrieval(columns: Sequence[Tensor], texts: NDArray[np.int64], _: Any, measure: str) -> dict[str, float]:
    """Return how well anchors find their positives among all positives and negatives, each distinct text once."""
    there = texts[:, 1:] >= 0
    places, first, relevant = related_texts(texts)
    vectors = torch.zeros(places.max() + 1, columns[0].shape[1])
    for k, column in enumerate(columns[1:]):
        vectors[torch.from_numpy(places[there[:, k], k])] = column[torch.from_numpy(there[:, k])]
    return retrieval_figures(columns[0][torch.from_numpy(first)], vectors, relevant, at=RETRIEVAL, measure=measure)


def _triplets(columns: Sequence[Tensor], texts: Any, labels: Any, measure: str) -> dict[str, float]:
    a, b, *others = columns
    parts, counts = [], []
    for k, other in enumerate(others, 2):
        there = torch.from_numpy(texts[:, k] >= 0)
        if there.any():
            parts.append(triplet_figures(a[there], b[there], other[there], measure=measure)["triplet_accuracy"])
            counts.append(int(there.sum()))
    return {"triplet_accuracy": float(np.average(parts, weights=counts)) if parts else math.nan}


def _of_two(figures: Callable[..., dict[str, float]]) -> Any:
    """Return a function of `FormMetrics` that compares two columns with their labels."""
    return lambda columns, texts, labels, measure: figures(columns[0], columns[1], labels, measure=measure)


class FormMetrics(NamedTuple):
    """Metrics of a form of data.

    Attributes:
        main: the metric that selects the best model.
        names: names of all metrics.
        functions: called with columns of vectors, texts, labels and measure, return the metrics.
    """

    main: str = "-eval_loss"
    names: tuple[str, ...] = ()
    functions: tuple[Callable[[Sequence[Tensor], NDArray[np.int64], Any, str], dict[str, float]], ...] = ()


_FOUND = ("recall@1", "recall@10", "mrr@10", "ndcg@10", "map@100")
_OF_BINARY = ("accuracy", "accuracy_threshold", "f1", "f1_threshold", "precision", "recall", "ap", "mcc")
METRICS: dict[Form, FormMetrics] = {
    "pairs": FormMetrics("ndcg@10", _FOUND, (_retrieval,)),
    "triplets": FormMetrics("ndcg@10", (*_FOUND, "triplet_accuracy"), (_retrieval, _triplets)),
    "scored": FormMetrics("spearman", ("pearson", "spearman"), (_of_two(similarity_figures),)),
    "binary": FormMetrics("ap", _OF_BINARY, (_of_two(binary_figures),)),
    "pair_classes": FormMetrics(),
    "classes": FormMetrics(
        "neighbour_accuracy",
        ("neighbour_accuracy", "v_measure"),
        (lambda columns, texts, labels, measure: clustering_figures(columns[0], labels),),
    ),
    "texts": FormMetrics(),
    "teacher_scores": FormMetrics("triplet_accuracy", ("triplet_accuracy",), (_triplets,)),
    "teacher_vectors": FormMetrics(),
}
