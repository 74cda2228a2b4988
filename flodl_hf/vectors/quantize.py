"""Vectors in fewer bytes: half precision, one byte a number, one bit a number; as sentence-transformers has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.errors import nearest
from flodl_hf.errors import PredictError
from flodl_hf.vectors.search import Found, as_vectors, semantic_search

__all__ = ["PRECISIONS", "binary_search", "quantize_embeddings", "ranges_of"]

PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")


def ranges_of(vectors: Any) -> NDArray[Any]:
    """Return the least and the greatest number of each feature, ``(2, size)``, float32."""
    found = as_vectors(vectors, "vectors").float().cpu().numpy()
    return np.stack([found.min(0), found.max(0)])


def quantize_embeddings(vectors: Any, precision: str, *, ranges: Any = None) -> NDArray[Any]:
    """Return vectors in another precision, an array ``(n, size)``, or ``(n, size / 8)`` of bits.

    Args:
        vectors: ``(n, size)``.
        precision: one of `PRECISIONS`. A bit is set where a number is above zero; "binary" is "ubinary" less 128.
        ranges: int8: the least and greatest number of each feature, ``(2, size)``; None takes those of these vectors.

    Raises:
        PredictError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise PredictError(
            f"precision {precision!r}{nearest(precision, PRECISIONS)}; expected one of {', '.join(PRECISIONS)}",
            precision=precision,
        )
    found: NDArray[Any] = as_vectors(vectors, "vectors").float().cpu().numpy()
    if precision.startswith("float"):
        return found.astype(precision)
    if precision.endswith("binary"):
        bits = np.packbits(found > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if not len(found):
        return found.astype(precision)
    low, high = ranges_of(found) if ranges is None else np.asarray(ranges, np.float32)
    steps = (high - low) / 255
    counted = np.clip(np.floor((found - low) / np.where(steps == 0, 1, steps)), 0, 255)
    return counted.astype(np.uint8) if precision == "uint8" else (counted - 128).astype(np.int8)


def binary_search(
    queries: Any, corpus: Any, *, top_k: int = 10, rescore_multiplier: int = 4, device: Any = None
) -> Found:
    """Return what is most alike among vectors of bits, found by bits and put in order by the queries' own numbers.

    Args:
        queries: ``(queries, size)``, as they were before they became bits.
        corpus: ``(texts, size / 8)``, of "binary" or "ubinary".
        top_k: how many for each query.
        rescore_multiplier: so many times more are found by bits.
        device: where to compute; None is where the corpus is.

    Raises:
        PredictError: as `semantic_search`.
    """
    asked = as_vectors(queries, "queries").float().cpu()
    packed = as_vectors(corpus, "corpus").cpu().numpy()
    bits = packed if packed.dtype == np.uint8 else (packed.astype(np.int16) + 128).astype(np.uint8)
    signs = torch.from_numpy(np.unpackbits(bits, axis=1)[:, : asked.shape[1]].astype(np.int8) * 2 - 1)
    own = torch.where(asked > 0, 1.0, -1.0)
    near = semantic_search(own, signs, top_k=top_k * rescore_multiplier, measure="dot", device=device)
    scores = torch.einsum("qd,qkd->qk", asked, signs[near.indices].float())
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    return Found(scores.gather(1, order), near.indices.gather(1, order))
