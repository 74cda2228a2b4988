"""The most alike of a corpus for each query, found exactly: scores in blocks, so that no table of all is ever there.

Of equal scores the text with the lower index wins. Products of blocks of other sizes, or on a GPU, may round
otherwise in the last bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl.errors import nearest
from flodl_hf.errors import PredictError
from flodl_hf.inference.similarity import MEASURES

__all__ = ["SearchResults", "semantic_search"]

QUERIES, CORPUS = 1024, 65_536
"""Rows of a block of scores, and its columns."""


@dataclass(frozen=True)
class SearchResults(Sequence[list[dict[str, Any]]]):
    """Results for each query, the most similar first; item ``i`` is a list of dictionaries, as in other libraries.

    Attributes:
        scores: how alike, ``(queries, top_k)``, float32, on the processor.
        indices: places in the corpus, ``(queries, top_k)``, int64.
    """

    scores: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        pairs = zip(self.indices[index].tolist(), self.scores[index].tolist(), strict=True)
        return [{"corpus_id": place, "score": score} for place, score in pairs]


def as_vectors(values: Any, name: str) -> Tensor:
    """Return vectors as a tensor ``(n, size)``, in the dtype they have.

    Args:
        values: a tensor, an array, a list of either, or one vector.
        name: name of the vectors in the message.

    Raises:
        PredictError: they are no such vectors.
    """
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], Tensor):
        values = torch.stack(list(values))
    vectors = values if isinstance(values, Tensor) else _from_array(np.asarray(values))
    vectors = vectors[None] if vectors.dim() == 1 else vectors
    if vectors.dim() != 2:
        raise PredictError(
            f"{name}: found vectors of shape {tuple(vectors.shape)}; expected (n, size)", found=tuple(vectors.shape)
        )
    return vectors.detach()


def _from_array(array: Any) -> Tensor:
    if array.flags.writeable:
        return torch.as_tensor(array)
    with warnings.catch_warnings():
        # Nothing is written to it here, so that a file that is mapped read-only need not be copied.
        warnings.simplefilter("ignore", UserWarning)
        return torch.as_tensor(array)


def semantic_search(
    query_embeddings: Any,
    corpus_embeddings: Any,
    *,
    top_k: int = 10,
    measure: str = "cosine",
    query_chunk_size: int = QUERIES,
    corpus_chunk_size: int = CORPUS,
    device: torch.device | str | None = None,
) -> SearchResults:
    """Return the ``top_k`` vectors of a corpus that are most like each query.

    Args:
        query_embeddings: ``(queries, size)``, or one vector.
        corpus_embeddings: ``(texts, size)``, of any dtype; blocks are computed in float32.
        top_k: how many for each query; all where there are fewer.
        measure: "cosine", "dot", "euclidean" or "manhattan"; "dot" is the same as "cosine" for vectors of length 1.
        query_chunk_size: number of queries per block.
        corpus_chunk_size: number of corpus vectors per block.
        device: where to compute; None is where the corpus is.

    Raises:
        PredictError: vectors of different sizes, an unknown measure, or a number below 1.
    """
    queries, corpus = as_vectors(query_embeddings, "queries"), as_vectors(corpus_embeddings, "corpus")
    faults = []
    if measure not in MEASURES:
        faults.append(f"measure {measure!r}{nearest(str(measure), MEASURES)}; expected one of {', '.join(MEASURES)}")
    if len(queries) and len(corpus) and queries.shape[1] != corpus.shape[1]:
        faults.append(f"queries of {queries.shape[1]} features and a corpus of {corpus.shape[1]}; expected as many")
    sizes = {"query_chunk_size": query_chunk_size, "corpus_chunk_size": corpus_chunk_size}
    check_numbers("semantic_search", {"top_k": top_k, **sizes}, *faults)
    place = torch.device(device) if device is not None else corpus.device
    score = MEASURES[measure]
    return search_blocks(
        queries, corpus, lambda block, texts: score(block, texts.float()), top_k, place, query_chunk_size,
        corpus_chunk_size,
    )  # fmt: skip


def search_blocks(
    queries: Tensor,
    corpus: Tensor,
    score: Callable[[Tensor, Tensor], Tensor],
    top_k: int,
    device: torch.device,
    query_chunk_size: int = QUERIES,
    corpus_chunk_size: int = CORPUS,
) -> SearchResults:
    """Return the best of a corpus for each query by any score of a block of queries and a block of the corpus.

    Args:
        queries: ``(queries, size)``; scored in float32.
        corpus: ``(texts, ...)``; scored in the dtype that it has.
        score: gives ``(queries, texts)``, the larger the better.
        top_k: how many for each query; all where there are fewer.
        device: where to compute.
        query_chunk_size: number of queries per block.
        corpus_chunk_size: number of corpus vectors per block.
    """
    most = min(top_k, len(corpus))
    if not len(queries) or not most:
        return SearchResults(torch.zeros(len(queries), most), torch.zeros(len(queries), most, dtype=torch.int64))
    parts = []
    for block in queries.split(query_chunk_size):
        asked = block.to(device, torch.float32)
        scores = torch.empty(len(block), 0, device=device)
        indices = torch.empty(len(block), 0, dtype=torch.int64, device=device)
        for start in range(0, len(corpus), corpus_chunk_size):
            found = score(asked, corpus[start : start + corpus_chunk_size].to(device))
            places = torch.arange(start, start + found.shape[1], device=device).expand(len(block), -1)
            scores, indices = _best(torch.cat([scores, found], 1), torch.cat([indices, places], 1), most)
        parts.append((scores.cpu(), indices.cpu()))
    return SearchResults(torch.cat([scores for scores, _ in parts]), torch.cat([indices for _, indices in parts]))


def check_numbers(function: str, numbers: dict[str, int], *faults: str) -> None:
    """Raise if a number is below 1, or with further faults.

    Raises:
        PredictError: with all of them.
    """
    wrong = [f"{name}={value}; expected 1 or more" for name, value in numbers.items() if value < 1] + list(faults)
    if wrong:
        raise PredictError(f"{function}: {'; '.join(wrong)}", problems=wrong)


def _best(scores: Tensor, indices: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores, falling, and where they are; columns come by rising index, which decides ties."""
    if scores.shape[1] <= most:
        order = scores.sort(dim=1, descending=True, stable=True).indices
        return scores.gather(1, order), indices.gather(1, order)
    top = scores.topk(most, 1)
    least = top.values[:, -1:]
    tied = (scores >= least).sum(1) > most  # which of the last ones come is for their place to say
    chosen = top.indices.sort(1).values
    rows = tied.nonzero().flatten()
    if len(rows):
        order = scores[rows].sort(dim=1, descending=True, stable=True).indices[:, :most]
        chosen[rows] = order.sort(1).values
    kept = scores.gather(1, chosen)
    order = kept.sort(dim=1, descending=True, stable=True).indices
    return kept.gather(1, order), indices.gather(1, chosen).gather(1, order)
