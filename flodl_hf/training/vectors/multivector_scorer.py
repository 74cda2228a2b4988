"""Vectors of tokens of held-out examples, kept until all are there, and what they are worth by the form of the data."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.metrics import Metric
from flodl_hf.inference.similarity import max_sim
from flodl_hf.training.evaluators.retrieval import figures_of_found
from flodl_hf.training.vectors.scorer import NAMES, RETRIEVAL, HeldOut

__all__ = ["LateScorer"]

QUERIES = 64
"""Queries whose scores are kept at once."""


class _CollectedScores:
    """Vectors of tokens by example, a `flodl.metrics.Metric` that ranks hand each other."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.vectors: dict[int, list[NDArray[np.float32]]] = {}

    def update(self, example: int, vectors: Tensor) -> None:
        """Take in the vectors of one example, ``(texts, tokens, size)``, zeros where there is none."""
        self.vectors[example] = [text[(text != 0).any(-1)].numpy() for text in vectors]

    def merge(self, other: _CollectedScores) -> None:
        """Add what ``other`` has."""
        self.vectors |= other.vectors

    def compute(self) -> dict[str, float]:
        """Return how many examples there are."""
        return {"count": float(len(self.vectors))}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is kept, as JSON values."""
        whole = [text for texts in self.vectors.values() for text in texts]
        data = np.concatenate(whole) if whole else np.zeros((0, 0), np.float32)
        return {
            "examples": list(self.vectors),
            "texts": len(whole) // max(1, len(self.vectors)),
            "tokens": [len(text) for text in whole],
            "size": data.shape[1],
            "data": base64.b64encode(data.tobytes()).decode(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was kept elsewhere."""
        self.reset()
        if not state["examples"]:
            return
        data = np.frombuffer(base64.b64decode(state["data"]), np.float32).reshape(-1, state["size"])
        texts = np.split(data, np.cumsum(state["tokens"])[:-1])
        for place, example in enumerate(state["examples"]):
            self.vectors[example] = texts[place * state["texts"] : (place + 1) * state["texts"]]


class LateScorer:
    """Judges vectors of tokens by MaxSim.

    Args:
        truth: what is known of the examples.
    """

    def __init__(self, truth: HeldOut) -> None:
        self.truth, self.kept = truth, _CollectedScores()

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Take in the vectors of one example, ``[(texts, tokens, size)]``."""
        self.kept.update(example, scores[0])

    def metrics(self) -> Sequence[Metric]:
        """Return what is kept."""
        return [self.kept]

    def compute(self) -> dict[str, float]:
        """Return the figures; NaN each where nothing was taken in."""
        names = NAMES[self.truth.form]
        if not self.kept.vectors:
            return dict.fromkeys(names, math.nan)
        examples = sorted(self.kept.vectors)
        vectors = [[torch.from_numpy(text.copy()) for text in self.kept.vectors[i]] for i in examples]
        figures: dict[str, float] = {}
        if "ndcg@10" in names:
            figures |= _retrieval(vectors, self.truth.texts[examples])
        if "triplet_accuracy" in names:
            figures["triplet_accuracy"] = _triplets(vectors)
        return figures


def _retrieval(vectors: Sequence[Sequence[Tensor]], texts: NDArray[np.int64]) -> dict[str, float]:
    """Return how well queries find their documents among all documents, each distinct text once."""
    corpus, places = np.unique(texts[:, 1:], return_inverse=True)
    places = places.reshape(texts[:, 1:].shape)
    documents: list[Any] = [None] * len(corpus)
    for row, at in zip(vectors, places, strict=True):
        for vector, place in zip(row[1:], at.tolist(), strict=True):
            documents[place] = vector
    queries, first, group = np.unique(texts[:, 0], return_index=True, return_inverse=True)
    relevant: list[set[int]] = [set() for _ in queries]
    for query, place in zip(group.tolist(), places[:, 0].tolist(), strict=True):
        relevant[query].add(place)
    deepest = max(k for numbers in RETRIEVAL.values() for k in numbers)
    found = []
    for start in range(0, len(first), QUERIES):
        scores = max_sim([vectors[i][0] for i in first[start : start + QUERIES]], documents)
        found += scores.topk(min(deepest, len(documents)), dim=1).indices.tolist()
    return figures_of_found(found, relevant, RETRIEVAL)


def _triplets(vectors: Sequence[Sequence[Tensor]]) -> float:
    """Return how often a query is nearer to its first document than to each other one."""
    won = []
    for query, right, *others in vectors:
        scores = max_sim([query], [right, *others])[0]
        won.append((scores[0] > scores[1:]).double().mean().item())
    return float(np.mean(won))
