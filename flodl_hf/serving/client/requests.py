"""Requests of the client: the fields of each call, how its answer is read, and how it is split into several."""

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

__all__ = ["MODELS", "Ask", "ServerError", "embed", "encoded", "own", "requests_of", "rerank", "sparse", "tokens"]

MOST = 2048
"""Texts of a request: what a server accepts by default. Requests that it refuses with 413 are halved."""


class ServerError(FlodlError):
    """A request that the server did not answer.

    Attributes:
        status: of HTTP; 0 where nothing came.
        kind: the server's word for it.
        reason: the header ``x-flodl-fault``: "limit" and "size" for a request that is too large; else "".
    """

    status: int
    kind: str
    reason: str


def _joined(parts: list[Any]) -> Any:
    return [row for part in parts for row in part]


@dataclass(frozen=True)
class Ask:
    """A request, and how its answer is read.

    Attributes:
        path: of the address.
        body: the fields; None for GET.
        read: makes an answer of a response.
        accept: the form of the response.
        items: the field with a list of texts that may be sent in several requests; None where there is none.
        join: makes one answer of those of several requests, in the order of the texts.
        truncated: whether a warning counts the texts that the server truncated.
    """

    path: str
    body: Mapping[str, Any] | None
    read: Callable[[httpx.Response], Any]
    accept: str = "application/json"
    items: str | None = None
    join: Callable[[list[Any]], Any] = _joined
    truncated: bool = False

    def parts(self) -> Generator[Ask, Any, Any]:
        """Yield requests that the server accepts, take their answers, and return the answer to all texts.

        Raises:
            ServerError: thrown in by the caller, of a request that no smaller one could replace.
        """
        given = None if self.body is None or self.items is None else self.body[self.items]
        if not isinstance(given, list) or len(given) < 2:
            return (yield self)
        found, at, size = [], 0, MOST
        while at < len(given):
            part = given[at : at + size]
            try:
                found.append((yield replace(self, body={**self.body, self.items: part})))  # type: ignore[dict-item]
            except ServerError as fault:
                if fault.reason not in ("limit", "size") or len(part) == 1:
                    raise
                size = -(-len(part) // 2)
            else:
                at += len(part)
        return self.join(found)


def _results(answer: httpx.Response) -> list[dict[str, Any]]:
    return answer.json()["results"]


def _array(answer: httpx.Response) -> np.ndarray:
    return np.load(io.BytesIO(answer.content), allow_pickle=False)


def _said(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def embed(
    texts: str | Sequence[str], model: str | None, normalize: bool | None, dimensions: int | None, truncate: bool,
    windows: bool,
) -> Ask:  # fmt: skip
    """Return the request for vectors of texts."""
    body = _said(
        inputs=_plain(texts), model=model, normalize=normalize, dimensions=dimensions, truncate=truncate,
        windows=windows or None,
    )  # fmt: skip
    if isinstance(texts, str):
        return Ask("embed", body, lambda answer: _array(answer)[0], "application/x-npy", truncated=True)
    return Ask("embed", body, _array, "application/x-npy", "inputs", np.concatenate, truncated=True)


def _plain(texts: str | Sequence[Any]) -> Any:
    return texts if isinstance(texts, str) else [list(t) if isinstance(t, tuple) else t for t in texts]


def own(task: str, inputs: Any, model: str | None, more: Mapping[str, Any]) -> Ask:
    """Return the request for answers of a task at this library's own paths."""
    return Ask(f"v1/{task}", _said(inputs=_plain(inputs), model=model, **more), _results, items="inputs")


def sparse(texts: str | Sequence[str], model: str | None) -> Ask:
    """Return the request for weights of words."""

    def read(answer: httpx.Response) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (np.array([one["index"] for one in row], np.int64), np.array([one["value"] for one in row], np.float32))
            for row in answer.json()
        ]

    body = _said(inputs=_plain(texts), model=model, truncate=True)
    return Ask("embed_sparse", body, read, items="inputs", truncated=True)


def tokens(texts: str | Sequence[str], query: bool, model: str | None) -> Ask:
    """Return the request for vectors of tokens."""

    def read(answer: httpx.Response) -> list[np.ndarray]:
        return [np.array(row["vectors"], np.float32) for row in _results(answer)]

    body = _said(inputs=_plain(texts), query=query, model=model)
    return Ask("v1/late-interaction", body, read, items="inputs")


def rerank(query: str, documents: Sequence[str], model: str | None, top_k: int | None) -> Ask:
    """Return the request for scores of documents."""
    texts = list(documents)

    def read(answer: httpx.Response) -> list[tuple[int, float]]:
        return [(one["index"], one["relevance_score"]) for one in answer.json()["results"]]

    def join(parts: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
        found, before = [], 0
        for part in parts:
            found += [(before + index, score) for index, score in part]
            before += len(part)
        return sorted(found, key=lambda one: -one[1])[:top_k]

    # Without top_n, so that the length of each answer is that of its request.
    return Ask("v2/rerank", _said(query=query, documents=texts, model=model), read, items="documents", join=join)


def encoded(path: str, body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a request.

    Raises:
        DataError: a text is no valid Unicode, or a value is no JSON.
    """
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as fault:
        wrong = f"found the lone surrogate {fault.object[fault.start]!a}, expected valid Unicode. Remove or replace it"
    except (TypeError, ValueError) as fault:
        wrong = f"found a value that JSON does not have ({fault}), expected texts, numbers, lists and mappings"
    raise DataError(f"{path}: a request cannot be sent: {wrong}", path=path)


def requests_of(ask: Ask) -> Generator[Ask, Any, Any]:
    """Yield the requests of a call, and warn once of texts that the server truncated."""
    cut = 0

    def read(answer: httpx.Response) -> Any:
        nonlocal cut
        cut += int(answer.headers.get("x-flodl-truncated-texts", 0))
        return ask.read(answer)

    found = yield from replace(ask, read=read).parts()
    if cut and ask.truncated:
        warnings.warn(
            f"{ask.path}: the server truncated {cut:,} texts to the length that the model takes; windows=True of embed "
            "reads all of a text, truncate=False refuses it",
            stacklevel=4,
        )
    return found


MODELS = Ask("v1/models", None, lambda answer: {row["id"]: row for row in answer.json()["data"]})
