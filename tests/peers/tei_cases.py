"""Requests of text-embeddings-inference's router tests and OpenAPI document: the statuses and shapes that it documents.

Expected values are those of its documentation (version 1.8): the original is a program in Rust, which is not run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flodl_hf.serving.responses import RefusedError
from tests.flodl_hf.serving.serving_models import MODELS, write
from tests.peers.case import Case

__all__ = ["cases"]

TEXT, LONG = "What is Deep Learning?", "the cat sat on the mat " * 40
VECTOR = ["float"]
SCORES = [{"score": "float", "label": "str"}]
RANKS = [{"index": "int", "score": "float"}]
TEXTS = [{"index": "int", "score": "float", "text": "str"}]
WEIGHTS = [{"index": "int", "value": "float"}]
TOKEN = {"id": "int", "text": "str", "special": "bool", "start": "int", "stop": "int"}
SPECIAL = {**TOKEN, "start": "NoneType", "stop": "NoneType"}
ERROR = {"error": "str", "error_type": "str"}
OPENAI = {
    "object": "str", "model": "str", "usage": {"prompt_tokens": "int", "total_tokens": "int"},
    "data": [{"object": "str", "embedding": VECTOR, "index": "int"}],
}  # fmt: skip
Request = tuple[str, str, Any, int, Any]
# Model, path, body, status, shape of the answer.
REQUESTS: list[Request] = [
    ("embed", "/embed", {"inputs": TEXT}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": [TEXT, "b", "c"]}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": TEXT, "normalize": False}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": TEXT, "truncate": False, "truncation_direction": "Right", "prompt_name": None}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": LONG, "truncate": True, "truncation_direction": "Left"}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": TEXT, "dimensions": 8}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": [2, 5, 6, 3]}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": [[2, 5, 6, 3], [2, 7, 3]]}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": [TEXT, [2, 7, 3]]}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": [2, *[5] * 100, 3], "truncate": True}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": [[2, *[5] * 100, 3], TEXT], "truncate": True, "truncation_direction": "Left"}, 200, [VECTOR]),
    ("embed", "/embed", {"inputs": [2, *[5] * 100, 3]}, 413, ERROR),
    ("embed", "/embed", {"inputs": LONG}, 413, ERROR),
    ("embed", "/embed", {"inputs": ["a"] * 40}, 413, ERROR),
    ("embed", "/embed", {"inputs": LONG, "truncate": False}, 413, ERROR),
    ("embed", "/embed", {"inputs": []}, 400, ERROR),
    ("embed", "/embed", {"inputs": TEXT, "prompt_name": "none"}, 422, ERROR),
    ("embed", "/embed", {}, 422, ERROR),
    ("embed", "/embed", {"inputs": 5}, 422, ERROR),
    ("embed", "/embed", {"inputs": TEXT, "truncation_direction": "Up"}, 422, ERROR),
    ("embed", "/embed", {"inputs": TEXT, "truncate": "maybe"}, 422, ERROR),
    ("classes", "/embed", {"inputs": TEXT}, 424, ERROR),
    ("embed", "/embed_all", {"inputs": TEXT}, 200, [[VECTOR]]),
    ("embed", "/embed_all", {"inputs": ["a", "b c"]}, 200, [[VECTOR]]),
    ("embed", "/embed_all", {"inputs": []}, 400, ERROR),
    ("m3", "/embed_sparse", {"inputs": TEXT}, 200, [WEIGHTS]),
    ("m3", "/embed_sparse", {"inputs": ["a cat", "dog"]}, 200, [WEIGHTS]),
    ("m3", "/embed_sparse", {"inputs": []}, 400, ERROR),
    ("embed", "/embed_sparse", {"inputs": TEXT}, 424, ERROR),
    ("classes", "/predict", {"inputs": TEXT}, 200, SCORES),
    ("classes", "/predict", {"inputs": TEXT, "raw_scores": True, "truncate": True}, 200, SCORES),
    ("classes", "/predict", {"inputs": ["a", "b"]}, 200, SCORES),
    ("classes", "/predict", {"inputs": [["a"], ["b"]]}, 200, [SCORES]),
    ("classes", "/predict", {"inputs": [["a", "b"], ["c", "d"]]}, 200, [SCORES]),
    ("classes", "/predict", {"inputs": [[TEXT], ["a", "b"]]}, 200, [SCORES]),
    ("classes", "/predict", {"inputs": []}, 400, ERROR),
    ("classes", "/predict", {}, 422, ERROR),
    ("classes", "/predict", {"inputs": [["a", "b", "c"]]}, 422, ERROR),
    ("classes", "/predict", {"inputs": [["a"]] * 40}, 413, ERROR),
    ("embed", "/predict", {"inputs": TEXT}, 424, ERROR),
    ("ranker", "/rerank", {"query": "cat", "texts": ["a cat", "dog"]}, 200, RANKS),
    ("ranker", "/rerank", {"query": "cat", "texts": ["a cat", "dog"], "return_text": True}, 200, TEXTS),
    ("ranker", "/rerank", {"query": "cat", "texts": ["a"], "raw_scores": True, "truncate": True}, 200, RANKS),
    ("ranker", "/rerank", {"query": "cat", "texts": []}, 400, ERROR),
    ("ranker", "/rerank", {"texts": ["a"]}, 422, ERROR),
    ("ranker", "/rerank", {"query": "cat"}, 422, ERROR),
    ("ranker", "/rerank", {"query": "cat", "texts": ["a"] * 40}, 413, ERROR),
    ("embed", "/rerank", {"query": "cat", "texts": ["a"]}, 424, ERROR),
    ("embed", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}, 200, VECTOR),
    ("embed", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": True}}, 200, VECTOR),
    ("embed", "/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, ERROR),
    ("embed", "/similarity", {"inputs": {"sentences": ["a"]}}, 422, ERROR),
    ("classes", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, 424, ERROR),
    ("embed", "/tokenize", {"inputs": "a"}, 200, [[SPECIAL, TOKEN, SPECIAL]]),
    ("embed", "/tokenize", {"inputs": ["a", TEXT], "add_special_tokens": False}, 200, [[TOKEN]]),
    ("embed", "/tokenize", {"inputs": []}, 400, ERROR),
    ("embed", "/decode", {"ids": [5, 6, 7]}, 200, ["str"]),
    ("embed", "/decode", {"ids": [[2, 5, 3], [7]], "skip_special_tokens": True}, 200, ["str"]),
    ("embed", "/v1/embeddings", {"input": TEXT, "model": "embed"}, 200, OPENAI),
    ("embed", "/v1/embeddings", {"input": [TEXT, "b"], "model": "embed", "user": "me"}, 200, OPENAI),
    ("embed", "/v1/embeddings", {"input": TEXT, "model": "embed", "encoding_format": "base64"}, 200,
     {**OPENAI, "data": [{"object": "str", "embedding": "str", "index": "int"}]}),
    ("embed", "/", {"inputs": TEXT}, 200, [VECTOR]),
    ("classes", "/", {"inputs": TEXT}, 200, [SCORES]),
]  # fmt: skip
INFO = {
    "model_id": "str", "model_dtype": "str", "max_concurrent_requests": "int", "max_input_length": "int",
    "max_batch_tokens": "int", "max_client_batch_size": "int", "auto_truncate": "bool", "tokenization_workers": "int",
    "version": "str",
}  # fmt: skip


def shape(value: Any) -> Any:
    """Return the types of an answer; of a list the one that all its values have."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        found = [shape(one) for one in value]
        return found[:1] if all(one == found[0] for one in found) else found
    return "float" if isinstance(value, float) else type(value).__name__


def cases(room: Path, *, quick: bool = False) -> Iterator[Case]:
    """Return each request to a server of small models of every task."""
    import httpx

    from flodl_hf.serving.running import running
    from flodl_hf.serving.settings import Served, Settings

    served = tuple(Served(name, str(write(room, name))) for name in MODELS if name in {row[0] for row in REQUESTS})
    with (
        running(Settings(models=served, devices=("cpu",), max_inputs=32)) as (url, _),
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        for name, path, body, status, expected in REQUESTS:
            found = partial(answered, client, path, {"model": name, **body}, status, expected)
            yield Case(f"{name}: POST {path} {str(body)[:80]}", lambda s=status, e=expected: [s, e], found)
        for path, status in (("/health", 200), ("/ping", 200), ("/metrics", 200), ("/none", 404), ("/embed", 405)):
            yield Case(f"GET {path}", lambda s=status: s, lambda p=path: client.get(p).status_code)
        yield Case("GET /info", lambda: INFO, lambda: asked_for(shape(client.get("/info").json()), INFO))
        yield Case("POST broken JSON", lambda: 400, lambda: client.post("/embed", content=b"{").status_code)
    crowded = Settings(models=served[:1], devices=("cpu",), max_concurrent=1)
    with running(crowded) as (url, _):
        yield Case("POST /embed of many clients", lambda: [[200, 429], [ERROR]], partial(crowd, url))


def asked_for(found: Any, expected: Any) -> Any:
    """Return a shape without the keys that this library adds."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {key: asked_for(one, expected[key]) for key, one in found.items() if key in expected}
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return [asked_for(one, other) for one, other in zip(found, expected, strict=True)]
    return found


def answered(client: Any, path: str, body: Any, status: int, expected: Any) -> list[Any]:
    """Return status and shape of an answer.

    Raises:
        RefusedError: the request is valid there, and refused here.
    """
    found = client.post(path, json=body)
    if found.status_code == 422 != status:
        raise RefusedError(found.json()["error"])
    return [found.status_code, asked_for(shape(found.json()), expected)]


def crowd(url: str) -> list[Any]:
    """Return the statuses and the shape of the refusals of requests that are sent at once."""
    from concurrent.futures import ThreadPoolExecutor

    import httpx

    send: Callable[[int], Any] = lambda _: httpx.post(f"{url}/embed", json={"inputs": [TEXT] * 30}, timeout=30)  # noqa: E731
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(send, range(24)))
    refusals = [shape(one.json()) for one in found if one.status_code == 429]
    return [sorted({one.status_code for one in found}), refusals[:1]]
