"""Clients of ``flodl-hf serve``, synchronous and for asyncio, that return arrays and records.

They retry requests that the server refuses for lack of capacity and split long lists of texts. They need `httpx` (the
extra ``client``) and no torch. Their methods are defined once, in `_Methods`.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any, Self

import httpx
import numpy as np

from flodl.errors import DataError, FlodlError

__all__ = ["AsyncClient", "Client", "ServerError"]

MAX_TEXTS = 2048
"""Texts of one request: the default limit of a server. Requests that a server refuses with 413 are halved."""
MAX_RETRY_S = 60.0
"""Longest pause before a retry."""


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


@dataclass(frozen=True)
class Query:
    """One request of the client.

    Attributes:
        path: path of the route, without a leading slash.
        body: the JSON fields, without those that are None; None for GET.
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
    join: Callable[[list[Any]], Any] = lambda parts: [row for part in parts for row in part]
    truncated: bool = False


def _read_results(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the results of a response."""
    return response.json()["results"]


def _read_array(response: httpx.Response) -> np.ndarray:
    """Return the array of a response."""
    return np.load(io.BytesIO(response.content), allow_pickle=False)


def _list_of(texts: str | Sequence[Any]) -> Any:
    """Return texts and pairs as JSON types."""
    return texts if isinstance(texts, str) else [list(t) if isinstance(t, tuple) else t for t in texts]


def _read_sparse(response: httpx.Response) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return token ids and weights of each text."""
    return [
        (np.array([one["index"] for one in row], np.int64), np.array([one["value"] for one in row], np.float32))
        for row in response.json()
    ]


def _encoded(path: str, body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a request.

    Raises:
        DataError: a text is not valid Unicode, or a value has no JSON form.
    """
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path}: a request cannot be sent: found a value that JSON does not have ({error}), expected texts of "
            "valid Unicode, numbers, lists and mappings",
            path=path,
        ) from None


Steps = Generator[tuple[float, dict[str, Any]], httpx.Response | httpx.TransportError, Any]


class _Methods:
    """Methods of both clients: `Client` returns results, `AsyncClient` returns coroutines of the same results.

    Args:
        url: the server's address.
        api_key: the API key, if the server requires one.
        timeout_s: timeout of one HTTP request in seconds.
        retries: number of retries of a request that the server refused with status 429 or 503.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, retries: int = 3) -> None:
        self.url = url.rstrip("/")
        self.retries = retries
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._options: dict[str, Any] = {"base_url": self.url + "/", "headers": headers, "timeout": timeout_s}

    def _run(self, query: Query) -> Any:
        raise NotImplementedError

    def _steps(self, query: Query) -> Steps:
        """Yield a pause in seconds and the arguments of each HTTP request, receive responses, return the result.

        Long lists are sent in parts; a part that the server refuses as too large is halved. Warns once about texts that
        the server truncated.
        """
        texts = None if query.body is None or query.items is None else query.body[query.items]
        if not isinstance(texts, list) or len(texts) < 2:
            texts = [None]
        results, start, size, truncated = [], 0, MAX_TEXTS, 0
        while start < len(texts):
            part = texts[start : start + size]
            body = query.body if part == [None] else {**(query.body or {}), str(query.items): part}
            try:
                response = yield from self._attempts(replace(query, body=body))
            except ServerError as error:
                if error.reason not in ("limit", "size") or len(part) == 1:
                    raise
                size = -(-len(part) // 2)
                continue
            truncated += int(response.headers.get("x-flodl-truncated-texts", 0))
            results.append(query.read(response))
            start += len(part)
        if truncated and query.truncated:
            warnings.warn(
                f"{query.path}: the server truncated {truncated:,} texts to the model's maximum length. "
                "embed(windows=True) reads whole texts, embed(truncate=False) refuses long ones.",
                stacklevel=4,
            )
        return results[0] if len(texts) == 1 else query.join(results)

    def _attempts(self, query: Query) -> Steps:
        """Send one request, and retry it while the server has no capacity."""
        address, pause_s = f"{self.url}/{query.path}", 0.0
        for attempt in count():
            found = yield pause_s, _arguments(query)
            if isinstance(found, httpx.TransportError):
                raise ServerError(
                    f"{address}: no response ({str(found) or type(found).__name__}). Check the address and that the "
                    "server runs.",
                    status=0, kind="unreached", reason="",
                )  # fmt: skip
            if found.status_code == 200:
                return found
            if found.status_code not in (429, 503) or attempt == self.retries:
                raise _server_error(address, found)
            after = found.headers.get("retry-after", "")
            pause_s = min(MAX_RETRY_S, float(after)) if after.isdecimal() else min(8.0, 0.5 * 2**attempt)

    def _task(self, task: str, inputs: Any, model: str | None, options: dict[str, Any]) -> Any:
        """Run a task of this library's own routes."""
        body = {"inputs": _list_of(inputs), "model": model, **options}
        return self._run(Query(f"v1/{task}", body, _read_results, items="inputs"))

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        model: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = True,
        windows: bool = False,
    ) -> Any:
        """Return embeddings as an array ``(texts, features)``, float32; of a single string ``(features,)``.

        Args:
            texts: a text or a list of texts.
            model: name of a served model; None if only one model has embeddings.
            normalize: scale vectors to length 1; None uses the setting of the folder.
            dimensions: truncate vectors to this many features.
            truncate: truncate long texts with a warning, as sentence-transformers does; False raises an error.
            windows: read all of a long text in windows and average their vectors.

        Raises:
            ServerError: the server refused the request or did not respond.
        """
        return self._run(
            Query("embed",
                  {"inputs": _list_of(texts), "model": model, "normalize": normalize, "dimensions": dimensions,
                   "truncate": truncate, "windows": windows or None},
                  (lambda response: _read_array(response)[0]) if isinstance(texts, str) else _read_array,
                  "application/x-npy", "inputs", np.concatenate, truncated=True)
        )  # fmt: skip

    def embed_sparse(self, texts: str | Sequence[str], *, model: str | None = None) -> Any:
        """Return a list of ``(token ids, weights)``, two arrays for each text.

        Args:
            texts: a text or a list of texts.
            model: name of a masked-word model or of a model with bge-m3's layers.
        """
        body = {"inputs": _list_of(texts), "model": model, "truncate": True}
        return self._run(Query("embed_sparse", body, _read_sparse, items="inputs", truncated=True))

    def embed_tokens(self, texts: str | Sequence[str], *, query: bool = False, model: str | None = None) -> Any:
        """Return a list of arrays ``(tokens, features)`` for late interaction, one for each text.

        Args:
            texts: a text or a list of texts.
            query: whether the texts are queries.
            model: name of a served model.
        """
        body = {"inputs": _list_of(texts), "query": query, "model": model}

        def read(response: httpx.Response) -> list[np.ndarray]:
            return [np.array(row["vectors"], np.float32) for row in _read_results(response)]

        return self._run(Query("v1/late-interaction", body, read, items="inputs"))

    def classify(self, texts: Any, *, model: str | None = None, **options: Any) -> Any:
        """Return ``{"labels": [{"label", "score", "windows"}], "empty"}`` for each text or pair.

        Args:
            texts: a text, or a list of texts and pairs.
            model: name of a served model.
            **options: ``top_k``, ``threshold``, ``activation``, ``truncate``.
        """
        return self._task("classify", texts, model, options)

    def entities(self, texts: str | Sequence[str], *, model: str | None = None, **options: Any) -> Any:
        """Return the entities of each text as a list of records.

        Args:
            texts: a text or a list of texts.
            model: name of a served model.
            **options: ``aggregation``, ``ignore_labels``, ``constrained``, ``truncate``.
        """
        return self._task("entities", texts, model, options)

    def answer(self, pairs: Sequence[Any], *, model: str | None = None, **options: Any) -> Any:
        """Return the answers to each question as a list of records.

        Args:
            pairs: ``(question, context)``.
            model: name of a served model.
            **options: ``top_k``, ``max_answer_length``, ``no_answer``, ``truncate``.
        """
        return self._task("answer", pairs, model, options)

    def fill_mask(self, texts: str | Sequence[str], *, model: str | None = None, **options: Any) -> Any:
        """Return the predicted words of each text's masks as a list of records.

        Args:
            texts: a text or a list of texts.
            model: name of a served model.
            **options: ``top_k``, ``targets``.
        """
        return self._task("fill-mask", texts, model, options)

    def zero_shot(
        self, texts: str | Sequence[str], labels: Sequence[str], *, model: str | None = None, **options: Any
    ) -> Any:
        """Return the scores of user-defined labels for each text.

        Args:
            texts: a text or a list of texts.
            labels: the labels.
            model: name of a served model.
            **options: ``template``, ``multi_label``, ``truncate``.
        """
        return self._task("zero-shot", texts, model, {"labels": list(labels), **options})

    def rerank(
        self, query: str, documents: Sequence[str], *, model: str | None = None, top_k: int | None = None
    ) -> Any:
        """Return ``(index, score)`` of documents, best first.

        Args:
            query: the query.
            documents: the documents to rank.
            model: name of a served model.
            top_k: maximum number of documents.
        """
        # Without top_n, each response has as many results as its request has documents.
        body = {"query": query, "documents": list(documents), "model": model}

        def read(response: httpx.Response) -> list[tuple[int, float]]:
            return [(one["index"], one["relevance_score"]) for one in _read_results(response)]

        def join(parts: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
            found = []
            for start, part in zip(accumulate(map(len, parts), initial=0), parts, strict=False):
                found += [(start + index, score) for index, score in part]
            return sorted(found, key=lambda one: -one[1])[:top_k]

        return self._run(Query("v2/rerank", body, read, items="documents", join=join))

    def models(self) -> Any:
        """Return information about each served model, by name."""
        return self._run(Query("v1/models", None, lambda found: {row["id"]: row for row in found.json()["data"]}))


class Client(_Methods):
    """A synchronous client of ``flodl-hf serve``.

    Args:
        url: the server's address.
        api_key: the API key, if the server requires one.
        timeout_s: timeout of one HTTP request in seconds.
        retries: number of retries of a request that the server refused with status 429 or 503.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._http = httpx.Client(**self._options)

    def _run(self, query: Query) -> Any:
        steps = self._steps(query)
        try:
            pause_s, arguments = next(steps)
            while True:
                time.sleep(pause_s)
                try:
                    found = self._http.request(**arguments)
                except httpx.TransportError as error:
                    found = error
                pause_s, arguments = steps.send(found)
        except StopIteration as end:
            return end.value

    def healthy(self) -> bool:
        """Return whether the server answers requests."""
        try:
            return self._http.get("health").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Methods):
    """A client for asyncio; it has the methods of `Client`, to be awaited.

    Args:
        url: the server's address.
        api_key: the API key, if the server requires one.
        timeout_s: timeout of one HTTP request in seconds.
        retries: number of retries of a request that the server refused with status 429 or 503.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._http = httpx.AsyncClient(**self._options)

    async def _run(self, query: Query) -> Any:
        steps = self._steps(query)
        try:
            pause_s, arguments = next(steps)
            while True:
                await asyncio.sleep(pause_s)
                try:
                    found = await self._http.request(**arguments)
                except httpx.TransportError as error:
                    found = error
                pause_s, arguments = steps.send(found)
        except StopIteration as end:
            return end.value

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _arguments(query: Query) -> dict[str, Any]:
    """Return the arguments of httpx's ``request``, with the trace context of a program that uses OpenTelemetry."""
    headers = {"accept": query.accept, "content-type": "application/json"}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject

        inject(headers)
    content = None if query.body is None else _encoded(query.path, query.body)
    method = "GET" if content is None else "POST"
    return {"method": method, "url": query.path, "content": content, "headers": headers}


def _server_error(address: str, response: httpx.Response) -> ServerError:
    """Return the error that a response with another status than 200 describes."""
    try:
        body = response.json()
    except ValueError:
        body = {}
    body = body if isinstance(body, dict) else {}
    error = body.get("error", body.get("message"))
    message = error.get("message") if isinstance(error, dict) else error
    return ServerError(
        f"{address}: {message or response.reason_phrase} ({response.status_code})",
        status=response.status_code,
        kind=body.get("error_type", ""),
        reason=response.headers.get("x-flodl-fault", ""),
    )
