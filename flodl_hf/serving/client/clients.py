"""The synchronous client and the client for asyncio. Their methods are defined once, in `_Methods`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any, Self

import httpx

from flodl_hf.serving.client import requests
from flodl_hf.serving.client.requests import Query, ServerError

MAX_RETRY_S = 60.0
"""Longest pause before a retry."""

Steps = Generator[tuple[float, dict[str, Any]], httpx.Response, Any]


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
        """Yield a pause in seconds and the arguments of each HTTP request, receive responses, return the result."""
        parts = requests.split(query)
        try:
            part = next(parts)
            while True:
                try:
                    result = yield from self._attempts(part)
                except ServerError as error:
                    part = parts.throw(error)
                else:
                    part = parts.send(result)
        except StopIteration as end:
            return end.value

    def _attempts(self, query: Query) -> Steps:
        """Send one request, and retry it while the server has no capacity."""
        arguments, pause_s = _arguments(query), 0.0
        for attempt in range(self.retries + 1):
            try:
                response = yield pause_s, arguments
            except httpx.TransportError as error:
                raise ServerError(
                    f"{self.url}/{query.path}: no response ({str(error) or type(error).__name__}). Check the address "
                    "and that the server runs.",
                    status=0, kind="unreached", reason="",
                ) from None  # fmt: skip
            if response.status_code == 200:
                return query.read(response)
            if response.status_code not in (429, 503) or attempt == self.retries:
                raise _server_error(f"{self.url}/{query.path}", response)
            after = response.headers.get("retry-after", "")
            pause_s = min(MAX_RETRY_S, float(after)) if after.isdecimal() else min(8.0, 0.5 * 2**attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

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
        return self._run(requests.embed(texts, model, normalize, dimensions, truncate, windows))

    def embed_sparse(self, texts: str | Sequence[str], *, model: str | None = None) -> Any:
        """Return a list of ``(token ids, weights)``, two arrays for each text.

        Args:
            texts: a text or a list of texts.
            model: name of a masked-word model or of a model with bge-m3's layers.
        """
        return self._run(requests.sparse(texts, model))

    def embed_tokens(self, texts: str | Sequence[str], *, query: bool = False, model: str | None = None) -> Any:
        """Return a list of arrays ``(tokens, features)`` for late interaction, one for each text.

        Args:
            texts: a text or a list of texts.
            query: whether the texts are queries.
            model: name of a served model.
        """
        return self._run(requests.tokens(texts, query, model))

    def classify(self, texts: Any, *, model: str | None = None, **options: Any) -> Any:
        """Return ``{"labels": [{"label", "score", "windows"}], "empty"}`` for each text or pair.

        Args:
            texts: a text, or a list of texts and pairs.
            model: name of a served model.
            **options: ``top_k``, ``threshold``, ``activation``, ``truncate``.
        """
        return self._run(requests.own("classify", texts, model, options))

    def entities(self, texts: str | Sequence[str], *, model: str | None = None, **options: Any) -> Any:
        """Return the entities of each text as a list of records.

        Args:
            texts: a text or a list of texts.
            model: name of a served model.
            **options: ``aggregation``, ``ignore_labels``, ``constrained``, ``truncate``.
        """
        return self._run(requests.own("entities", texts, model, options))

    def answer(self, pairs: Sequence[Any], *, model: str | None = None, **options: Any) -> Any:
        """Return the answers to each question as a list of records.

        Args:
            pairs: ``(question, context)``.
            model: name of a served model.
            **options: ``top_k``, ``max_answer_length``, ``no_answer``, ``truncate``.
        """
        return self._run(requests.own("answer", pairs, model, options))

    def fill_mask(self, texts: str | Sequence[str], *, model: str | None = None, **options: Any) -> Any:
        """Return the predicted words of each text's masks as a list of records.

        Args:
            texts: a text or a list of texts.
            model: name of a served model.
            **options: ``top_k``, ``targets``.
        """
        return self._run(requests.own("fill-mask", texts, model, options))

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
        return self._run(requests.own("zero-shot", texts, model, {"labels": list(labels), **options}))

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
        return self._run(requests.rerank(query, documents, model, top_k))

    def models(self) -> Any:
        """Return information about each served model, by name."""
        return self._run(requests.MODELS)


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
                    response = self._http.request(**arguments)
                except httpx.TransportError as error:
                    pause_s, arguments = steps.throw(error)
                else:
                    pause_s, arguments = steps.send(response)
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
                    response = await self._http.request(**arguments)
                except httpx.TransportError as error:
                    pause_s, arguments = steps.throw(error)
                else:
                    pause_s, arguments = steps.send(response)
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
    content = None if query.body is None else requests.encoded(query.path, query.body)
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
