"""Vectors in fewer bytes: half precision, one byte a number, one bit a number; as sentence-transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.errors import nearest
from flodl_hf.errors import PredictError
from flodl_hf.inference.search import SearchResults, as_vectors, check_numbers, search_blocks

__all__ = ["binary_search", "byte_search", "quantize_embeddings", "ranges_of"]

PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
STORED_PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
"""The values of ``precision`` of sentence-transformers' ``encode``."""
BLOCK = 256
"""Queries with results that are sorted together."""


def ranges_of(vectors: Any) -> NDArray[Any]:
    """Return the least and the greatest number of each feature, ``(2, size)``, float32."""
    found = as_vectors(vectors, "vectors").float().cpu().numpy()
    return np.stack([found.min(0), found.max(0)])


def quantize_embeddings(
    vectors: Any, precision: str, ranges: Any = None, calibration_embeddings: Any = None
) -> NDArray[Any]:
    """Return vectors in another precision, an array ``(n, size)``, or ``(n, size / 8)`` of bits.

    Args:
        vectors: ``(n, size)``. An empty list is returned as it is.
        precision: one of `PRECISIONS`. A bit is set where a number is above zero; "binary" is "ubinary" less 128.
        ranges: int8: the minimum and maximum of each feature, ``(2, size)``; None takes those of
            ``calibration_embeddings``, else of these vectors.
        calibration_embeddings: int8: vectors to compute ranges of, ``(m, size)``.

    Raises:
        PredictError: there is no such precision, or one vector is to be bytes without ``ranges``.
    """
    check_store(precision, "precision")
    if isinstance(vectors, list) and not vectors:
        return vectors  # type: ignore[return-value]
    if ranges is None and calibration_embeddings is not None:
        ranges = ranges_of(calibration_embeddings)
    found: NDArray[Any] = as_vectors(vectors, "vectors").float().cpu().numpy()
    if precision.startswith("float"):
        return found.astype(precision)
    if precision.endswith("binary"):
        bits = np.packbits(found > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if not len(found):
        return found.astype(precision)
    if len(found) == 1 and ranges is None:
        raise PredictError(
            f"quantize_embeddings: one vector alone has no ranges to cut into steps, so {precision} would keep nothing "
            "of it; expected ranges=ranges_of(vectors), of the corpus that it belongs to",
            precision=precision,
        )
    low, high = ranges_of(found) if ranges is None else np.asarray(ranges, np.float32)
    steps = (high - low) / 255
    counted = np.clip(np.floor((found - low) / np.where(steps == 0, 1, steps)), 0, 255)
    return counted.astype(np.uint8) if precision == "uint8" else (counted - 128).astype(np.int8)


def check_store(value: str, name: str = "store") -> None:
    """Refuse a precision that vectors cannot be kept in.

    Args:
        value: the argument's value.
        name: of the argument in the message.

    Raises:
        PredictError: it is none of `PRECISIONS`.
    """
    if value not in PRECISIONS:
        raise PredictError(
            f"{name} {value!r}{nearest(value, PRECISIONS)}; expected one of {', '.join(PRECISIONS)}", precision=value
        )


def binary_search(
    queries: Any, corpus: Any, *, top_k: int = 10, rescore_multiplier: int = 4, whole: Any = None, device: Any = None
) -> SearchResults:
    """Return the nearest binary vectors, found by bits and sorted by products with the unquantised queries.

    Args:
        queries: ``(queries, size)``, as they were before they became bits.
        corpus: ``(texts, size / 8)``, of "binary" or "ubinary".
        top_k: how many for each query.
        rescore_multiplier: so many times more are found by bits.
        whole: the unquantised corpus, ``(texts, size)``, to sort by; only candidates are read, so that it may
            be a mapped file. None takes the bits.
        device: where to compute; None is where the corpus is.

    Raises:
        PredictError: vectors of other sizes, or a number below 1.
    """
    asked, packed = as_vectors(queries, "queries").float(), as_vectors(corpus, "corpus")
    _check("binary_search", asked, 8 * packed.shape[1], 8, top_k, rescore_multiplier)
    place = torch.device(device) if device is not None else packed.device
    size = asked.shape[1]
    near = search_blocks(
        torch.where(asked > 0, 1.0, -1.0), packed, lambda own, bits: own @ _signs(bits, size).T,
        top_k * rescore_multiplier, place,
    )  # fmt: skip
    rows = as_vectors(packed if whole is None else whole, "corpus")
    return _in_order(asked, near, rows, (lambda bits: _signs(bits, size)) if whole is None else None, top_k, place)


def byte_search(
    queries: Any, corpus: Any, ranges: Any, *, top_k: int = 10, rescore_multiplier: int = 4, whole: Any = None,
    device: Any = None,
) -> SearchResults:  # fmt: skip
    """Return the nearest int8 vectors, by products with the unquantised queries.

    Args:
        queries: ``(queries, size)``, as they were before they became bytes.
        corpus: ``(texts, size)``, of "int8" or "uint8". A byte stands for the middle of its step.
        ranges: the least and greatest number of each feature that they were made by, ``(2, size)``.
        top_k: how many for each query.
        rescore_multiplier: with ``whole``, so many times more are found by bytes.
        whole: the unquantised corpus, to sort by; only candidates are read. None: scores are those of bytes.
        device: where to compute; None is where the corpus is.

    Raises:
        PredictError: vectors of other sizes, or a number below 1.
    """
    asked, counted = as_vectors(queries, "queries").float(), as_vectors(corpus, "corpus")
    _check("byte_search", asked, counted.shape[1], 1, top_k, rescore_multiplier)
    place = torch.device(device) if device is not None else counted.device
    low, high = as_vectors(ranges, "ranges").float().cpu()
    steps = (high - low) / 255
    middle = low + steps * (128.5 if counted.dtype == torch.int8 else 0.5)
    scaled = asked * steps.to(asked.device)
    wanted = top_k if whole is None else top_k * rescore_multiplier
    near = search_blocks(scaled, counted, lambda own, texts: own @ texts.float().T, wanted, place)
    near = SearchResults(near.scores + (asked.cpu() @ middle)[:, None], near.indices)
    return near if whole is None else _in_order(asked, near, as_vectors(whole, "whole"), None, top_k, place)


def _check(function: str, queries: Tensor, size: int, unit: int, top_k: int, more: int) -> None:
    fits = 0 <= size - queries.shape[1] < unit
    faults = [] if fits else [f"queries of {queries.shape[1]} features and a corpus of {size}; expected as many"]
    check_numbers(function, {"top_k": top_k, "rescore_multiplier": more}, *faults)


def _signs(bits: Tensor, size: int) -> Tensor:
    """Return 1 for a bit that is set and -1 for another, ``(n, size)``, float32."""
    plain = bits if bits.dtype == torch.uint8 else (bits.to(torch.int16) + 128).to(torch.uint8)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return ((plain[..., None] >> shifts) & 1).flatten(-2)[..., :size].float() * 2 - 1


def _in_order(
    queries: Tensor,
    near: SearchResults,
    rows: Tensor,
    expand: Callable[[Tensor], Tensor] | None,
    top_k: int,
    device: torch.device,
) -> SearchResults:
    """Return the candidates in the order of their products with the queries, some queries at a time."""
    scores, indices = [], []
    for block, at in zip(queries.split(BLOCK), near.indices.split(BLOCK), strict=True):
        own = rows[at.flatten().to(rows.device)].to(device)
        own = (own.float() if expand is None else expand(own)).view(*at.shape, -1)
        found = torch.einsum("qd,qkd->qk", block.to(device), own).cpu()
        order = found.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        scores.append(found.gather(1, order))
        indices.append(at.gather(1, order))
    return SearchResults(torch.cat(scores), torch.cat(indices)) if scores else SearchResults(near.scores, near.indices)
