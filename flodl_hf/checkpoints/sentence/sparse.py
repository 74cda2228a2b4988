"""Sparse vectors of texts: a weight for few words of a vocabulary, as SPLADE and bge-m3 make them.

Decides what such vectors are, how they are compared and joined; how they are computed is the models' affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.checkpoints.sentence.module_files import folder_files, json_bytes
from flodl_hf.errors import PredictError


@dataclass(frozen=True)
class SpladePooling:
    """How scores of words at tokens become the weights of a text (Formal et al. 2021, arXiv 2109.10086).

    Args:
        strategy: over a text's tokens: "max" or "sum".
        activation: of a score: "relu" for log(1 + relu), "log1p_relu" for the logarithm of one plus that.
    """

    strategy: str = "max"
    activation: str = "relu"

    def activated(self, scores: Tensor) -> Tensor:
        """Return weights shaped like ``scores``, none below zero."""
        found = torch.log1p(torch.relu(scores))
        return torch.log1p(found) if self.activation == "log1p_relu" else found


class SparseVectors(Sequence[dict[int, float]]):
    """One sparse vector a text; each read alone is a dictionary from a word's id to its weight, largest first.

    Args:
        ids: of the words of each text, ascending.
        weights: of the same words, float32.
        size: how many words there are in all.
        tokens: the words of ids, for `words`; None where there is no tokenizer.
    """

    def __init__(
        self, ids: Sequence[np.ndarray], weights: Sequence[np.ndarray], size: int, words: dict[int, str] | None = None
    ) -> None:
        self.ids = list(ids)
        self.weights = list(weights)
        self.size = size
        self._words = words

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[int, float]:  # type: ignore[override]
        order = np.argsort(-self.weights[index], kind="stable")
        return dict(zip(self.ids[index][order].tolist(), self.weights[index][order].tolist(), strict=True))

    def __repr__(self) -> str:
        mean = sum(map(len, self.ids)) / max(1, len(self))
        return f"SparseVectors({len(self)} texts, {mean:.1f} of {self.size} words each)"

    def words(self, index: int) -> dict[str, float]:
        """Return a text's words with their weights, largest first.

        Raises:
            PredictError: no vocabulary for the ids is known.
        """
        if self._words is None:
            raise PredictError("words: these vectors know ids alone; they were made without a tokenizer")
        return {self._words[token]: weight for token, weight in self[index].items()}

    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return text, word and weight of each entry."""
        rows = np.repeat(np.arange(len(self)), np.array([*map(len, self.ids)], np.int64))
        ids, weights = [*self.ids, np.zeros(0, np.int64)], [*self.weights, np.zeros(0, np.float32)]
        return rows, np.concatenate(ids), np.concatenate(weights)

    def to_tensor(self) -> Tensor:
        """Return all vectors as a sparse tensor, ``(texts, size)``, as sentence-transformers' SparseEncoder does."""
        rows, columns, values = self._flat()
        places = torch.from_numpy(np.stack([rows, columns.astype(np.int64)]))
        with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns although the argument requests the check
            return torch.sparse_coo_tensor(
                places, torch.from_numpy(values), (len(self), self.size), check_invariants=True, is_coalesced=True
            )

    def similarity(self, other: SparseVectors) -> Tensor:
        """Return the inner product of each vector with each of ``other``, ``(len(self), len(other))``.

        Raises:
            PredictError: the vocabularies are of different sizes.
        """
        if self.size != other.size:
            raise PredictError(
                f"similarity: vectors over {self.size} and over {other.size} words; expected one vocabulary"
            )
        scores = np.zeros((len(self), len(other)), np.float32)
        rows, ids, weights = self._flat()
        for column, (own, given) in enumerate(zip(other.ids, other.weights, strict=True)):
            whole = np.zeros(self.size, np.float32)
            whole[own] = given
            scores[:, column] = np.bincount(rows, weights * whole[ids], len(self))
        return torch.from_numpy(scores)

    def top(self, most: int) -> SparseVectors:
        """Return vectors that keep their ``most`` largest weights."""
        kept = [np.sort(np.argsort(-weights, kind="stable")[:most]) for weights in self.weights]
        return SparseVectors(
            [ids[keep] for ids, keep in zip(self.ids, kept, strict=True)],
            [weights[keep] for weights, keep in zip(self.weights, kept, strict=True)], self.size, self._words,
        )  # fmt: skip

    @classmethod
    def joined(cls, parts: Iterable[SparseVectors]) -> SparseVectors:
        """Return the vectors of all parts, one after another."""
        found = list(parts)
        words = {token: word for part in found for token, word in (part._words or {}).items()}
        return cls([i for p in found for i in p.ids], [w for p in found for w in p.weights], found[0].size, words)


def from_dense(
    rows: np.ndarray, owners: np.ndarray, texts: int, strategy: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids and weights of each text from the weights of all words in each of its windows, ``(rows, size)``."""
    for text in range(texts):
        own = rows[owners == text]
        whole = own.max(0) if strategy == "max" else own.sum(0)
        ids = np.flatnonzero(whole)
        yield ids, whole[ids].astype(np.float32)


def from_tokens(ids: np.ndarray, weights: np.ndarray, left_out: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and weights of a text from the weights of its tokens: a word has its largest, none has zero."""
    kept = (weights > 0) & ~np.isin(ids, list(left_out))
    words, places = np.unique(ids[kept], return_inverse=True)
    largest = np.zeros(len(words), np.float32)
    np.maximum.at(largest, places, weights[kept])
    return words.astype(np.int64), largest


def splade_files(
    pooling: SpladePooling, max_tokens: int | None, settings: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Return the small files of a SparseEncoder's folder.

    Args:
        pooling: how weights are made.
        max_tokens: most tokens of a text.
        settings: further contents of ``config_sentence_transformers.json``: prompts, ``max_active_dims``.
    """
    prefix = "sentence_transformers.sparse_encoder.models."
    said = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "default_prompt_name": None}
    files = folder_files(
        [(f"{prefix}MLMTransformer", ""), (f"{prefix}SpladePooling", "1_SpladePooling")],
        said | {"similarity_fn_name": "dot"} | dict(settings or {}),
        {"max_seq_length": max_tokens, "do_lower_case": False},
    )
    own = {"pooling_strategy": pooling.strategy, "activation_function": pooling.activation}
    return files | {"1_SpladePooling/config.json": json_bytes(own)}
