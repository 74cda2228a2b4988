"""HTTP requests of the client: their fields, how their responses are read, and how long lists are split."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np

from flodl.errors import DataError, FlodlError

MAX_TEXTS = 2048
"""Texts of one request: the default limit of a server. Requests that a server refuses with 413 are halved."""


class ServerError(FlodlError):
    """A request that the server refused or did not answer.

    Attributes:
        status: HTTP status; 0 without a response.
        kind: the ``error_type`` of the response.
        reason: the header ``x-flodl-fault``: "limit" and "size" for a request that is too large; otherwise "".
    """

    status: int
    kind: str
    reason: str


def _joined(parts: list[Any]) -> Any:
    return [row for part in parts for row in part]


@dataclass(frozen=True)
class Query:
    """One request of the client.

    Attributes:
        path: path of the route, without a leading slash.
        body: the JSON fields; None for GET.
        read: function from the response to the result.
        accept: media type of the response.
        items: name of the field with a list of texts that may be split; None if there is none.
        join: function from the results of all parts to the result.
        truncated: whether to warn about texts that the server truncated.
    """

    path: str
    body: Mapping[str, Any] | None
    read: Callable[[httpx.Response], Any]
    accept: str = "application/json"
    items: str | None = None
    join: Callable[[list[Any]], Any] = _joined
    truncated: bool = False


def split(query: Query) -> Generator[Query, Any, Any]:
    """Yield requests that the server accepts, receive their results, and return the result of all texts.

    Warns once about texts that the server truncated.

    Raises:
        ServerError: thrown in by the caller, for a request that no smaller one can replace.
    """
    truncated = 0

    def read(response: httpx.Response) -> Any:
        nonlocal truncated
        truncated += int(response.headers.get("x-flodl-truncated-texts", 0))
        return query.read(response)

    result = yield from _parts(replace(query, read=read))
    if truncated and query.truncated:
        warnings.warn(
            f"{query.path}: the server truncated {truncated:,} texts to the model's maximum length. "
            "embed(windows=True) reads whole texts, embed(truncate=False) refuses long ones.",
            stacklevel=5,
        )
    return result


def _parts(query: Query) -> Generator[Query, Any, Any]:
    """Yield parts of a request; a part that the server refuses as too large is halved."""
    texts = None if query.body is None or query.items is None else query.body[query.items]
    if not isinstance(texts, list) or len(texts) < 2:
        return (yield query)
    results, start, size = [], 0, MAX_TEXTS
    while start < len(texts):
        part = texts[start : start + size]
        try:
            results.append((yield replace(query, body={**query.body, query.items: part})))  # type: ignore[dict-item]
        except ServerError as error:
            if error.reason not in ("limit", "size") or len(part) == 1:
                raise
            size = -(-len(part) // 2)
        else:
            start += len(part)
    return query.join(results)


def _results(response: httpx.Response) -> list[dict[str, Any]]:
    return response.json()["results"]


def _array(response: httpx.Response) -> np.ndarray:
    return np.load(io.BytesIO(response.content), allow_pickle=False)


def _fields(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _as_json(texts: str | Sequence[Any]) -> Any:
    return texts if isinstance(texts, str) else [list(t) if isinstance(t, tuple) else t for t in texts]


def embed(
    texts: str | Sequence[str], model: str | None, normalize: bool | None, dimensions: int | None, truncate: bool,
    windows: bool,
) -> Query:  # fmt: skip
    """Return the request for embeddings of texts."""
    body = _fields(
        inputs=_as_json(texts), model=model, normalize=normalize, dimensions=dimensions, truncate=truncate,
        windows=windows or None,
    )  # fmt: skip
    if isinstance(texts, str):
        return Query("embed", body, lambda response: _array(response)[0], "application/x-npy", truncated=True)
    return Query("embed", body, _array, "application/x-npy", "inputs", np.concatenate, truncated=True)


def own(task: str, inputs: Any, model: str | None, options: Mapping[str, Any]) -> Query:
    """Return the request for a task of this library's own routes."""
    return Query(f"v1/{task}", _fields(inputs=_as_json(inputs), model=model, **options), _results, items="inputs")


def sparse(texts: str | Sequence[str], model: str | None) -> Query:
    """Return the request for sparse embeddings."""

    def read(response: httpx.Response) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (np.array([one["index"] for one in row], np.int64), np.array([one["value"] for one in row], np.float32))
            for row in response.json()
        ]

    body = _fields(inputs=_as_json(texts), model=model, truncate=True)
    return Query("embed_sparse", body, read, items="inputs", truncated=True)


def tokens(texts: str | Sequence[str], query: bool, model: str | None) -> Query:
    """Return the request for token embeddings."""

    def read(response: httpx.Response) -> list[np.ndarray]:
        return [np.array(row["vectors"], np.float32) for row in _results(response)]

    return Query("v1/late-interaction", _fields(inputs=_as_json(texts), query=query, model=model), read, items="inputs")


def rerank(query: str, documents: Sequence[str], model: str | None, top_k: int | None) -> Query:
    """Return the request for scores of documents."""

    def read(response: httpx.Response) -> list[tuple[int, float]]:
        return [(one["index"], one["relevance_score"]) for one in response.json()["results"]]

    def join(parts: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
        found, offset = [], 0
        for part in parts:
            found += [(offset + index, score) for index, score in part]
            offset += len(part)
        return sorted(found, key=lambda one: -one[1])[:top_k]

    # Without top_n, each response has as many results as its request has documents.
    body = _fields(query=query, documents=list(documents), model=model)
    return Query("v2/rerank", body, read, items="documents", join=join)


def encoded(path: str, body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a request.

    Raises:
        DataError: a text is not valid Unicode, or a value has no JSON form.
    """
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        wrong = f"found the lone surrogate {error.object[error.start]!a}, expected valid Unicode. Remove or replace it"
    except (TypeError, ValueError) as error:
        wrong = f"found a value that JSON does not have ({error}), expected texts, numbers, lists and mappings"
    raise DataError(f"{path}: a request cannot be sent: {wrong}", path=path)


MODELS = Query("v1/models", None, lambda response: {row["id"]: row for row in response.json()["data"]})
