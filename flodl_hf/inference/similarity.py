"""How alike texts are, from their vectors: the measures of sentence-transformers, under its names.

Of texts with a vector for each token (multi-vector models, late interaction), `max_sim`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl.errors import nearest
from flodl_hf.errors import PredictError
from flodl_hf.inference.result_pages import similarity_page

__all__ = ["Similarity", "max_sim"]


class Similarity(Tensor):
    """A table of similarities, ``(a, b)``: a tensor that a notebook shows as a coloured table.

    Attributes:
        rows: the texts of its rows, if it was computed from texts.
        columns: the texts of its columns.
    """

    rows: Sequence[str] = ()
    columns: Sequence[str] = ()

    def _repr_html_(self) -> str:
        if self.dim() != 2:
            return f"<pre>{self.as_subclass(Tensor)}</pre>"
        values: np.ndarray = self.detach().as_subclass(Tensor).float().cpu().numpy()
        return similarity_page(values, self.rows, self.columns)


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda a, b: torch.nn.functional.normalize(a, dim=-1) @ torch.nn.functional.normalize(b, dim=-1).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: -torch.cdist(a, b, p=2.0),
    "manhattan": lambda a, b: -torch.cdist(a, b, p=1.0),
}
"""Measures by name; larger is more similar, so distances are negative."""

PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda a, b: (torch.nn.functional.normalize(a, dim=-1) * torch.nn.functional.normalize(b, dim=-1)).sum(
        -1
    ),
    "dot": lambda a, b: (a * b).sum(-1),
    "euclidean": lambda a, b: -torch.linalg.vector_norm(a - b, dim=-1),
    "manhattan": lambda a, b: -(a - b).abs().sum(-1),
}
"""The same of each row of ``a`` with the row of ``b`` in its place, ``(rows,)``."""


def measure_of(files: Mapping[str, bytes]) -> str:
    """Return the measure that a folder of sentence-transformers names; cosine where none.

    Args:
        files: its small files by name.
    """
    try:
        named = json.loads(files.get("config_sentence_transformers.json", b"{}")).get("similarity_fn_name")
    except (ValueError, AttributeError):
        named = None
    return named if named in MEASURES else "cosine"


def similarity_of(a: Any, b: Any, measure: str, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Similarity:
    """Return the similarity of each vector of ``a`` with each of ``b``, ``(len(a), len(b))``, in float32.

    Args:
        a: ``(n, size)``, or one vector.
        b: ``(m, size)``, or one vector.
        measure: a name of `MEASURES`.
        rows: the texts of ``a``.
        columns: the texts of ``b``.

    Raises:
        PredictError: the measure is unknown, or the vectors are of different lengths.
    """
    first, second = _compared(a, b, measure)
    found = MEASURES[measure](first, second).as_subclass(Similarity)
    found.rows, found.columns = tuple(rows), tuple(columns)
    return found


def pairwise_of(a: Any, b: Any, measure: str) -> Tensor:
    """Return the similarity of each vector of ``a`` with the one at its place in ``b``, ``(rows,)``, in float32.

    Args:
        a: ``(n, size)``, or one vector.
        b: ``(n, size)``, or one vector.
        measure: a name of `PAIRWISE`.

    Raises:
        PredictError: the measure is unknown, or the vectors differ in number or length.
    """
    first, second = _compared(a, b, measure)
    if first.shape != second.shape:
        raise PredictError(
            f"similarity_pairwise: found {len(first)} and {len(second)} vectors; expected as many of both. Give one "
            "vector for each pair, or call similarity for all pairs.",
            found=(len(first), len(second)),
        )
    return PAIRWISE[measure](first, second)


def _compared(a: Any, b: Any, measure: str) -> tuple[Tensor, Tensor]:
    """Return both as tables of float32 on one device.

    Raises:
        PredictError: the measure is unknown, or the vectors are of different lengths.
    """
    if measure not in MEASURES:
        raise PredictError(
            f"similarity: no measure {measure!r}{nearest(str(measure), MEASURES)}; expected one of "
            f"{', '.join(MEASURES)}",
            measure=measure,
        )
    first, second = (torch.as_tensor(np.asarray(x) if isinstance(x, list) else x) for x in (a, b))
    first, second = (x[None] if x.dim() == 1 else x for x in (first, second))
    if first.dim() != 2 or second.dim() != 2 or first.shape[1] != second.shape[1]:
        raise PredictError(
            f"similarity: found vectors of shape {tuple(first.shape)} and {tuple(second.shape)}; expected (n, size) "
            "and (m, size)",
            found=(tuple(first.shape), tuple(second.shape)),
        )
    return first.float(), second.float().to(first.device)


def max_sim(queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
    """Return the score of each query with each document, ``(queries, documents)``; the larger the more alike.

    For each token of the query its largest product with a token of the document, summed over the query's tokens
    (Khattab and Zaharia 2020, https://arxiv.org/abs/2004.12832).

    Args:
        queries: the vectors of each, ``(tokens, size)``.
        documents: the same; a document without vectors scores minus infinity.

    Raises:
        PredictError: vectors are of different sizes.
    """
    sizes = {int(vectors.shape[-1]) for vectors in (*queries, *documents)}
    if len(sizes) > 1:
        raise PredictError(f"max_sim: vectors of sizes {sorted(sizes)}; expected one size")
    scores = torch.full((len(queries), len(documents)), float("-inf"), dtype=torch.float32)
    kept = [place for place, vectors in enumerate(documents) if len(vectors)]
    if not kept:
        return scores
    lengths = torch.tensor([len(documents[place]) for place in kept])
    whole = torch.cat([documents[place].float() for place in kept])
    for row, query in enumerate(queries):
        products = whole @ query.float().T
        best = torch.segment_reduce(products, "max", lengths=lengths, axis=0)
        scores[row, kept] = best.sum(-1)
    return scores
