"""The client that waits for its answers, and the client for programs with asyncio."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

import httpx
import numpy as np

from flodl_hf.serving.client import requests
from flodl_hf.serving.client.requests import ServerError

__all__ = ["AsyncClient", "Client"]


def _traced(headers: dict[str, str]) -> dict[str, str]:
    """Return headers with the trace that the program is in, where it uses OpenTelemetry."""
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject

        inject(headers)
    return headers


class _Asking:
    """What both clients share: the address, the key, and what becomes of an answer."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, retries: int = 3) -> None:
        self.url = url.rstrip("/")
        self.retries = retries
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._given: dict[str, Any] = {"base_url": self.url + "/", "headers": headers, "timeout": timeout_s}

    @staticmethod
    def _request(ask: requests.Ask) -> dict[str, Any]:
        headers = {"accept": ask.accept, "content-type": "application/json"}
        content = None if ask.body is None else requests.encoded(ask.path, ask.body)
        return {"method": "GET" if content is None else "POST", "url": ask.path, "content": content,
                "headers": _traced(headers)}  # fmt: skip

    def _again_after(self, answer: httpx.Response, tried: int) -> float | None:
        """Return when to ask again, or None where the answer stands."""
        if answer.status_code not in (429, 503) or tried >= self.retries:
            return None
        said = answer.headers.get("retry-after", "")
        return min(60.0, float(said)) if said.isdecimal() else min(8.0, 0.5 * 2**tried)

    def _taken(self, ask: requests.Ask, answer: httpx.Response) -> Any:
        if answer.status_code == 200:
            return ask.read(answer)
        try:
            body = answer.json()
        except ValueError:
            body = {}
        fault = body.get("error", body.get("message")) if isinstance(body, dict) else None
        message = fault.get("message") if isinstance(fault, dict) else fault
        kind = body.get("error_type", "") if isinstance(body, dict) else ""
        raise ServerError(
            f"{self.url}/{ask.path}: {message or answer.reason_phrase} ({answer.status_code})",
            status=answer.status_code, kind=kind, reason=answer.headers.get("x-flodl-fault", ""),
        )  # fmt: skip

    def _unreached(self, ask: requests.Ask, fault: Exception) -> ServerError:
        said = str(fault) or type(fault).__name__
        return ServerError(
            f"{self.url}/{ask.path}: no answer ({said}); is the server there, and is the address right?", status=0,
            kind="unreached", reason="",
        )  # fmt: skip


class Client(_Asking):
    """A client that waits for its answers.

    Args:
        url: the server's address.
        api_key: where the server needs one.
        timeout_s: after so long an answer is given up.
        retries: how often a request is made again that the server has no room for.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, retries: int = 3) -> None:
        super().__init__(url, api_key=api_key, timeout_s=timeout_s, retries=retries)
        self._http = httpx.Client(**self._given)

    def _ask(self, ask: requests.Ask) -> Any:
        parts = requests.requests_of(ask)
        try:
            part = next(parts)
            while True:
                try:
                    answer = self._answer(part)
                except ServerError as fault:
                    part = parts.throw(fault)
                else:
                    part = parts.send(answer)
        except StopIteration as end:
            return end.value

    def _answer(self, ask: requests.Ask) -> Any:
        tried = 0
        while True:
            try:
                answer = self._http.request(**self._request(ask))
            except httpx.TransportError as fault:
                raise self._unreached(ask, fault) from None
            after = self._again_after(answer, tried)
            if after is None:
                return self._taken(ask, answer)
            tried += 1
            time.sleep(after)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        model: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = True,
        windows: bool = False,
    ) -> np.ndarray:
        """Return a vector for each text, ``(texts, features)`` in float32; of one text its vector.

        Args:
            texts: one text or several.
            model: which of the server's models; None where one alone embeds.
            normalize: scale vectors to length 1; None as the folder says.
            dimensions: keep so many features.
            truncate: truncate long texts, as sentence-transformers does, and warn; False refuses them.
            windows: read all of a long text in windows and average their vectors.

        Raises:
            ServerError: the server did not answer.
        """
        return self._ask(requests.embed(texts, model, normalize, dimensions, truncate, windows))

    def embed_sparse(
        self, texts: str | Sequence[str], *, model: str | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each text ids of words and their weights.

        Args:
            texts: one text or several.
            model: which model; one of masked words, or with bge-m3's layers.
        """
        return self._ask(requests.sparse(texts, model))

    def embed_tokens(
        self, texts: str | Sequence[str], *, query: bool = False, model: str | None = None
    ) -> list[np.ndarray]:
        """Return for each text a vector for each token, ``(tokens, features)``, to be compared late.

        Args:
            texts: one text or several.
            query: whether texts are what is looked for.
            model: which model.
        """
        return self._ask(requests.tokens(texts, query, model))

    def classify(self, texts: Any, *, model: str | None = None, **more: Any) -> list[dict[str, Any]]:
        """Return for each text or pair its labels, ``{"labels": [{"label", "score", "windows"}], "empty"}``.

        Args:
            texts: one text, or a list of texts and pairs.
            model: which model.
            **more: ``top_k``, ``threshold``, ``activation``, ``truncate``.
        """
        return self._ask(requests.own("classify", texts, model, more))

    def entities(self, texts: str | Sequence[str], *, model: str | None = None, **more: Any) -> list[dict[str, Any]]:
        """Return for each text its entities.

        Args:
            texts: one text or several.
            model: which model.
            **more: ``aggregation``, ``ignore_labels``, ``constrained``, ``truncate``.
        """
        return self._ask(requests.own("entities", texts, model, more))

    def answer(self, pairs: Sequence[Any], *, model: str | None = None, **more: Any) -> list[dict[str, Any]]:
        """Return for each question and context its answers.

        Args:
            pairs: ``(question, context)``.
            model: which model.
            **more: ``top_k``, ``max_answer_length``, ``no_answer``, ``truncate``.
        """
        return self._ask(requests.own("answer", pairs, model, more))

    def fill_mask(self, texts: str | Sequence[str], *, model: str | None = None, **more: Any) -> list[dict[str, Any]]:
        """Return for each text the words for its masks.

        Args:
            texts: one text or several.
            model: which model.
            **more: ``top_k``, ``targets``.
        """
        return self._ask(requests.own("fill-mask", texts, model, more))

    def zero_shot(
        self, texts: str | Sequence[str], labels: Sequence[str], *, model: str | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        """Return for each text the labels of one's own with scores.

        Args:
            texts: one text or several.
            labels: the labels.
            model: which model.
            **more: ``template``, ``multi_label``, ``truncate``.
        """
        return self._ask(requests.own("zero-shot", texts, model, {"labels": list(labels), **more}))

    def rerank(
        self, query: str, documents: Sequence[str], *, model: str | None = None, top_k: int | None = None
    ) -> list[tuple[int, float]]:
        """Return places and scores of documents, best first.

        Args:
            query: what is looked for.
            documents: what may fit.
            model: which model.
            top_k: most of them.
        """
        return self._ask(requests.rerank(query, documents, model, top_k))

    def models(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each model that is served."""
        return self._ask(requests.MODELS)

    def healthy(self) -> bool:
        """Return whether requests are answered now."""
        try:
            return self._http.get("health").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Asking):
    """A client for programs with asyncio; its methods are those of `Client`, awaited.

    Args:
        url: the server's address.
        api_key: where the server needs one.
        timeout_s: after so long an answer is given up.
        retries: how often a request is made again that the server has no room for.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, retries: int = 3) -> None:
        super().__init__(url, api_key=api_key, timeout_s=timeout_s, retries=retries)
        self._http = httpx.AsyncClient(**self._given)

    async def _ask(self, ask: requests.Ask) -> Any:
        parts = requests.requests_of(ask)
        try:
            part = next(parts)
            while True:
                try:
                    answer = await self._answer(part)
                except ServerError as fault:
                    part = parts.throw(fault)
                else:
                    part = parts.send(answer)
        except StopIteration as end:
            return end.value

    async def _answer(self, ask: requests.Ask) -> Any:
        tried = 0
        while True:
            try:
                answer = await self._http.request(**self._request(ask))
            except httpx.TransportError as fault:
                raise self._unreached(ask, fault) from None
            after = self._again_after(answer, tried)
            if after is None:
                return self._taken(ask, answer)
            tried += 1
            await asyncio.sleep(after)

    async def embed(
        self,
        texts: str | Sequence[str],
        *,
        model: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = True,
        windows: bool = False,
    ) -> np.ndarray:
        """Return a vector for each text; see `Client.embed`."""
        return await self._ask(requests.embed(texts, model, normalize, dimensions, truncate, windows))

    async def embed_sparse(
        self, texts: str | Sequence[str], *, model: str | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """As `Client.embed_sparse`."""
        return await self._ask(requests.sparse(texts, model))

    async def embed_tokens(
        self, texts: str | Sequence[str], *, query: bool = False, model: str | None = None
    ) -> list[np.ndarray]:
        """As `Client.embed_tokens`."""
        return await self._ask(requests.tokens(texts, query, model))

    async def classify(self, texts: Any, *, model: str | None = None, **more: Any) -> list[dict[str, Any]]:
        """Return for each text or pair its labels; see `Client.classify`."""
        return await self._ask(requests.own("classify", texts, model, more))

    async def entities(
        self, texts: str | Sequence[str], *, model: str | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        """Return for each text its entities; see `Client.entities`."""
        return await self._ask(requests.own("entities", texts, model, more))

    async def answer(self, pairs: Sequence[Any], *, model: str | None = None, **more: Any) -> list[dict[str, Any]]:
        """Return for each question and context its answers; see `Client.answer`."""
        return await self._ask(requests.own("answer", pairs, model, more))

    async def fill_mask(
        self, texts: str | Sequence[str], *, model: str | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        """Return for each text the words for its masks; see `Client.fill_mask`."""
        return await self._ask(requests.own("fill-mask", texts, model, more))

    async def zero_shot(
        self, texts: str | Sequence[str], labels: Sequence[str], *, model: str | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        """Return for each text the labels of one's own with scores; see `Client.zero_shot`."""
        return await self._ask(requests.own("zero-shot", texts, model, {"labels": list(labels), **more}))

    async def rerank(
        self, query: str, documents: Sequence[str], *, model: str | None = None, top_k: int | None = None
    ) -> list[tuple[int, float]]:
        """Return places and scores of documents, best first; see `Client.rerank`."""
        return await self._ask(requests.rerank(query, documents, model, top_k))

    async def models(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each model that is served."""
        return await self._ask(requests.MODELS)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
