"""OpenAI's and Cohere's embeddings, and vLLM's ``/classify``, ``/score`` and ``/pooling``.

Ids are the model's own, including special tokens. Texts that are too long are refused with status 400 unless
``truncate``, or vLLM's ``truncate_prompt_tokens``, is given.
"""

from __future__ import annotations

import base64
import time
import uuid
from functools import partial
from typing import Any

import numpy as np

from flodl_hf.serving.responses import RefusedError, Response
from flodl_hf.serving.routes.route import (
    Field,
    Request,
    is_blank,
    route,
    with_empty_flag,
)
from flodl_hf.serving.routes.tei import (
    ACTIVATIONS,
    DIMENSIONS,
    MODEL,
    NORMALIZE,
    OTHERS,
    PROMPT,
    SHORTENED,
    TRUNCATE,
    WINDOWS,
    prompt_of,
    text_options,
    token_states,
)

_FORMS = (
    Field("add_special_tokens", "true", "special tokens are always added"),
    Field("embed_dtype", "float32", "type of numbers in base64"),
    Field("endianness", "endianness", "byte order in base64"),
)
"""vLLM's fields with one supported value."""

# Values of Cohere and others; further values have no effect.
_KINDS = {
    "query": "query", "search_query": "query", "document": "document", "passage": "document",
    "search_document": "document",
}  # fmt: skip

_INPUT_TYPE = Field("input_type", "input_type", "query or document; selects the model's prompt and route")
_FIELDS = (
    Field("input", "inputs", "texts, or token ids of the model", True),
    MODEL,
    Field("encoding_format", "encoding", "float or base64"),
    DIMENSIONS,
    NORMALIZE,
    Field("use_activation", "flag", "alias of normalize, which takes precedence"),
    TRUNCATE,
    *SHORTENED,
    WINDOWS,
    PROMPT,
    _INPUT_TYPE,
    *_FORMS,
    Field("modality", "modality", "text"),
    *OTHERS,
)
_COHERE_FIELDS = (
    MODEL,
    Field("texts", "texts", "the texts", True),
    _INPUT_TYPE,
    Field("embedding_types", "encodings", "types of the vectors; default: float"),
    Field("truncate", "truncated side", "end (default) or start truncates long texts, none refuses them"),
    Field("max_tokens", "whole", "truncate texts to this number of tokens"),
    Field("output_dimension", "whole", "truncate vectors to this number of features"),
    OTHERS[-1],
)


def _encoded(row: np.ndarray, encoding: str | None) -> Any:
    """Return an array, or its numbers in base64."""
    return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode() if encoding == "base64" else row


@route("/v1/embeddings /embeddings", "a vector for each text", *_FIELDS, style="openai", group="OpenAI")
async def _embeddings(request: Request) -> Response:
    fields = request.fields
    request.info("embed")
    options = {
        **text_options(fields),
        "prompt": prompt_of(request, fields),
        "dimensions": fields["dimensions"],
        "normalize": fields["use_activation"] if fields["normalize"] is None else fields["normalize"],
        "kind": _KINDS.get(fields["input_type"]),
    }
    vectors = (await request.ask("embed", fields["input"], options)).arrays[0]
    rows = [_encoded(row, fields["encoding_format"]) for row in vectors]
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = request.token_usage(dropped_tokens=request.dropped)
    return Response({"object": "list", "data": data, "model": request.model, "usage": usage}, vectors)


@route("/v2/embed", "a vector for each text", *_COHERE_FIELDS, style="cohere", group="Cohere and Jina")
async def _cohere_embed(request: Request) -> Response:
    """Return vectors by type, as Cohere's second version does; long texts are truncated by default."""
    fields = request.fields
    options = {
        "truncate": fields["truncate"] != "none",
        "side": "left" if fields["truncate"] == "start" else "right",
        "max_tokens": fields["max_tokens"],
        "dimensions": fields["output_dimension"],
        "kind": _KINDS.get(fields["input_type"]),
    }
    vectors = (await request.ask("embed", fields["texts"], options)).arrays[0]
    kinds = fields["embedding_types"] or ["float"]
    whole = {
        "id": str(uuid.uuid4()),
        "embeddings": {kind: [_encoded(row, kind) for row in vectors] for kind in kinds},
        "texts": fields["texts"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": request.tokens}},
        "response_type": "embeddings_by_type",
    }
    return Response(whole, vectors)


# ---- vLLM ----------------------------------------------------------------------------------------------

_INPUT = Field("input", "texts", "one text or several", True)
_SCORES = (*ACTIVATIONS, *SHORTENED, _FORMS[0], *OTHERS)

_vllm = partial(route, style="openai", group="vLLM")


def _whole(request: Request, kind: str, data: list[dict[str, Any]]) -> Response:
    return Response({
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model,
        "data": data,
        "usage": request.token_usage(completion_tokens=0, dropped_tokens=request.dropped),
    })  # fmt: skip


async def _scores(request: Request) -> list[tuple[str, list[float]]]:
    """Return the best label of each text, and the scores in the order of the model's labels."""
    found = await request.ask("classify", request.fields["input"], text_options(request.fields))
    labels = request.state.workers.models[request.model]["labels"]
    by_label = [{one["label"]: one["score"] for one in row} for row in found.data]
    return [(next(iter(scores)), [scores[label] for label in labels]) for scores in by_label]


@_vllm("/classify", "the best label and all probabilities", MODEL, _INPUT, *_SCORES)
async def _classify(request: Request) -> Response:
    data = []
    for index, (label, probs) in enumerate(await _scores(request)):
        record = {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
        data.append(with_empty_flag(record, is_blank(request.fields["input"][index])))
    return _whole(request, "classify", data)


@_vllm(
    "/score /v1/score", "similarity or relevance of pairs of texts", MODEL,
    Field("text_1", "texts", "one text, or the same number as text_2", True),
    Field("text_2", "texts", "one text or several", True), *_SCORES,
)  # fmt: skip
async def _score(request: Request) -> Response:
    first, second = request.fields["text_1"], request.fields["text_2"]
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}, expected one or the same number"
        raise RefusedError(message, "field", param="text_1")
    firsts = first * len(second) if len(first) == 1 else first
    pairs = [[a, b] for a, b in zip(firsts, second, strict=True)]
    found = await request.ask("score", pairs, text_options(request.fields))
    data = [
        with_empty_flag({"index": i, "object": "score", "score": score}, is_blank(pair))
        for i, (score, pair) in enumerate(zip(found.data, pairs, strict=True))
    ]
    return _whole(request, "score", data)


@_vllm(
    "/pooling", "vectors, states of tokens, or scores", MODEL, _INPUT,
    Field("task", "pooling task", "embed, token_embed or classify; default: by the model's head"), DIMENSIONS,
    NORMALIZE, Field("encoding_format", "encoding", "float or base64"), *_FORMS[1:], *_SCORES,
)  # fmt: skip
async def _pooling(request: Request) -> Response:
    """Return token states or vectors of an encoder, or scores of a model with a classification head."""
    fields, info = request.fields, request.info("embed_all", "classify")
    tasks = ("token_embed", "embed") if "embed_all" in info["tasks"] else ("classify",)
    task = fields["task"] or tasks[0]
    if task not in tasks:
        message = f"task is {task!r}, expected one of {', '.join(tasks)} for {request.model}"
        raise RefusedError(message, "unknown", param="task")
    if task == "classify":
        for name in ("dimensions", "normalize"):
            if fields[name] is not None:
                message = f"{name}: {request.model} returns scores, which have no such option"
                raise RefusedError(message, "unknown", param=name)
        rows: list[Any] = [np.array(probs, np.float32) for _, probs in await _scores(request)]
    else:
        normalize = fields["use_activation"] if fields["normalize"] is None else fields["normalize"]
        options = {**text_options(fields), "dimensions": fields["dimensions"], "normalize": normalize}
        found = await request.ask("embed" if task == "embed" else "embed_all", fields["input"], options)
        rows = token_states(found) if task == "token_embed" else list(found.arrays[0])
    encoded = [_encoded(row, fields["encoding_format"]) for row in rows]
    return _whole(request, "pool", [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(encoded)])
