"""Endpoints over HTTP: text-embeddings-inference, OpenAI's interface with what vLLM and Cohere add, Hugging Face's.

Decides the request and response format of each; only the texts of the comparison are sent.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np

from flodl_hf.parity.endpoint_checks.targets import QUERY, Target, TargetError, by_label

_MOST = 256 << 20


class _Server:
    """The JSON server at an address."""

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a request: GET without a body, POST with one.

        Raises:
            TargetError: there is none, or it is no JSON.
        """
        where = self.url + path
        if body is not None and self.model is not None:
            body = {**body, "model": self.model}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(where, data, self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return json.loads(answer.read(_MOST))
        except urllib.error.HTTPError as fault:
            said = fault.read(400).decode("utf-8", "replace").strip()
            raise TargetError(f"{where}: answered with status {fault.code}: {said}", status=fault.code) from None
        except (OSError, ValueError) as fault:
            why = getattr(fault, "reason", fault)
            raise TargetError(f"{where}: no answer that can be read ({why}); is the address right?", status=0) from None


class _Told:
    """Base of all interfaces.

    Args:
        server: the server.
        task: "vectors", "labels" or "ranking".
        labels: labels of the source.
    """

    scales = False
    style = ""
    pooling: tuple[str, ...] = ("mean",)
    """Of the source, for answers that are states of tokens."""

    def __init__(self, server: _Server, task: str, labels: Sequence[str]) -> None:
        self.server, self.task, self.labels = server, task, list(labels)
        named = f", model {server.model}" if server.model else ""
        self.name = f"{server.url} ({self.style}{named})"

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return None: there is no such path."""
        return None

    def _rows(self, found: Any, count: int) -> np.ndarray:
        """Return an answer as one row of numbers for each item."""
        try:
            rows = np.asarray(found, np.float64)
        except (TypeError, ValueError):
            rows = np.zeros(0)
        if rows.ndim != 2 or len(rows) != count:
            raise TargetError(
                f"{self.server.url}: answered {count} texts with {_shape(found)}; expected a vector for each",
                status=200,
            )
        return rows

    def _scores(self, found: Any, count: int) -> np.ndarray:
        """Return ``[[{label, score}]]`` in the order of labels."""
        rows = [found] if isinstance(found, list) and found and isinstance(found[0], dict) else found
        try:
            pairs = [[(one["label"], float(one["score"])) for one in row] for row in rows]
        except (TypeError, KeyError, ValueError):
            pairs = []
        if len(pairs) != count:
            raise TargetError(
                f"{self.server.url}: answered {count} texts with {_shape(found)}; expected labels for each", status=200
            )
        return by_label(pairs, self.labels)

    def _ranked(self, found: Any, name: str, count: int) -> np.ndarray:
        """Return ``[{index, score}]`` in the order of documents."""
        scores = np.full((count, 1), np.nan)
        try:
            for one in found:
                scores[int(one["index"])] = float(one[name])
        except (TypeError, KeyError, ValueError, IndexError):
            scores[:] = np.nan
        if np.isnan(scores).any():
            raise TargetError(
                f"{self.server.url}: ranked {count} documents with {_shape(found)}; expected index and {name} of each",
                status=200,
            )
        return scores


class Tei(_Told):
    """text-embeddings-inference, and ``flodl-hf serve``."""

    scales = True
    style = "text-embeddings-inference"

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item."""
        ask, count = self.server.ask, len(items)
        if self.task == "vectors":
            return self._rows(ask("/embed", {"inputs": list(items), "normalize": True, **options}), count)
        if options:
            raise TargetError(f"{self.style} has no {', '.join(options)} of {self.task}", status=0)
        if self.task == "labels":
            return self._scores(ask("/predict", {"inputs": [[item] for item in items]}), count)
        return self._ranked(ask("/rerank", {"query": QUERY, "texts": list(items)}), "score", count)

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of ``/tokenize``, or None where it has none."""
        try:
            found = self.server.ask("/tokenize", {"inputs": list(texts)})
        except TargetError as fault:
            if fault.status in (404, 405):
                return None
            raise
        try:
            return [[int(token["id"]) for token in row] for row in found]
        except (TypeError, KeyError, ValueError):
            raise TargetError(
                f"{self.server.url}/tokenize: answered {_shape(found)}; expected a list of tokens with their ids",
                status=200,
            ) from None


class OpenAI(_Told):
    """OpenAI's embeddings; labels and ranks as in vLLM's extensions."""

    style = "OpenAI"

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item."""
        if options:
            raise TargetError(f"{self.style} has no {', '.join(options)}", status=0)
        ask, count = self.server.ask, len(items)
        if self.task == "ranking":
            found = ask("/v1/rerank", {"query": QUERY, "documents": list(items)})
            return self._ranked(_part(found, "results"), "relevance_score", count)
        if self.task == "labels":
            data = _part(ask("/classify", {"input": list(items)}), "data")
        else:
            data = _part(ask("/v1/embeddings", {"input": list(items), "encoding_format": "float"}), "data")
        # Each result contains the index of its text.
        try:
            data = sorted(data, key=lambda one: one["index"])
            rows = [one["probs" if self.task == "labels" else "embedding"] for one in data]
        except (TypeError, KeyError):
            rows = None
        return self._rows(rows, count)


class HuggingFace(_Told):
    """Hugging Face's inference endpoints: ``inputs`` at the root, answered as pipelines answer."""

    style = "Hugging Face"

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item."""
        if options or self.task == "ranking":
            raise TargetError(f"{self.style} has no {', '.join(options) or 'ranking'}", status=0)
        if self.task == "vectors":
            found = self.server.ask("", {"inputs": list(items)})
            return self._rows([_pooled(row, self.pooling) for row in found] if _deep(found) else found, len(items))
        return self._scores(
            self.server.ask("", {"inputs": list(items), "parameters": {"top_k": len(self.labels)}}), len(items)
        )


STYLES: dict[str, type[Tei] | type[OpenAI] | type[HuggingFace]] = {"tei": Tei, "openai": OpenAI, "hf": HuggingFace}
"""By the word of the command line."""


def open_http(
    url: str, task: str, labels: Sequence[str], *, style: str = "auto", model: str | None = None,
    api_key: str | None = None, timeout_s: float = 60.0, pooling: Sequence[str] = ("mean",),
) -> Target:  # fmt: skip
    """Return the interface of the server at a URL.

    Args:
        url: its address; ``/v1`` at the end, as OpenAI's clients want it, may be there.
        task: "vectors", "labels" or "ranking".
        labels: of the source.
        style: a name of `STYLES`; "auto" finds it by ``/info`` and ``/v1/models``.
        model: which of its models.
        api_key: where it needs one.
        timeout_s: after so long an answer is given up.
        pooling: how states of tokens become a vector, where the answer is such.

    Raises:
        TargetError: nothing answers there.
    """
    server = _Server(url.rstrip("/").removesuffix("/v1"), model, api_key, timeout_s)
    if style == "auto":
        style = "openai" if url.rstrip("/").endswith("/v1") else _style_of(server)
    if style == "openai" and model is None:
        models = _part(server.ask("/v1/models"), "data")
        server.model = models[0]["id"] if isinstance(models, list) and models else None
    found = STYLES[style](server, task, labels)
    found.pooling = tuple(pooling)
    return found


def _style_of(server: _Server) -> str:
    faults = []
    for path, name, style in (("/info", "model_type", "tei"), ("/v1/models", "data", "openai")):
        try:
            if _part(server.ask(path), name) is not None:
                return style
        except TargetError as fault:
            if fault.status in (401, 403):
                raise
            faults.append(fault)
    if len(faults) == 2 and all(fault.status == 0 for fault in faults):
        raise faults[0]
    return "hf"


def _deep(found: Any) -> bool:
    """Return whether an answer is states of tokens rather than vectors of texts."""
    return isinstance(found, list) and bool(found) and isinstance(found[0], list) and isinstance(found[0][0], list)


def _pooled(states: Any, pooling: Sequence[str]) -> list[float]:
    """Return the vector of a text, pooled from states ``(tokens, features)`` or a list with one such array."""
    import torch

    from flodl_hf.inference.decode.pooling import pool_padded

    try:
        values = torch.tensor(states, dtype=torch.float32)
    except (TypeError, ValueError):
        values = torch.zeros(0)
    values = values[0] if values.ndim == 3 and len(values) == 1 else values
    if values.ndim != 2 or not len(values):
        raise TargetError(f"states of tokens are {_shape(states)}; expected a list of vectors", status=200)
    names: Any = tuple(pooling)
    return pool_padded(values[None], torch.ones(1, len(values)), names)[0].tolist()


def _part(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


def _shape(found: Any) -> str:
    """Return a description of a response's structure."""
    if isinstance(found, list):
        return f"a list of {len(found)}" + (f", each {_shape(found[0])}" if found else "")
    return {dict: "an object", str: "a string", float: "a number", int: "a number"}.get(type(found), "something else")
