"""Routes of vLLM's pooling models: ``/classify``, ``/score`` and ``/pooling``."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

import numpy as np

from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.fields import Field
from flodl_hf.serving.routes.openai import FORMS, encoded_vector
from flodl_hf.serving.routes.route import (
    ACTIVATIONS,
    MODEL,
    OTHERS,
    SHORTENED,
    Request,
    Response,
    Route,
    add_route,
    is_blank,
    text_options,
    with_empty_flag,
)
from flodl_hf.serving.routes.tei import DIMENSIONS, NORMALIZE

_INPUT = Field("input", "texts", "one text or several", True)
_SCORES = (*ACTIVATIONS, *SHORTENED, FORMS[0], *OTHERS)

ROUTES: list[Route] = []
"""Routes of vLLM's pooling models."""
_route = partial(add_route, ROUTES, style="openai", group="vLLM")


def _whole(request: Request, kind: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model,
        "data": data,
        "usage": request.token_usage(completion_tokens=0, dropped_tokens=request.dropped),
    }


@_route("/classify", "the best label and all probabilities", MODEL, _INPUT, *_SCORES)
async def _classify(request: Request) -> Response:
    found = await request.ask("classify", request.fields["input"], text_options(request.fields))
    data = []
    for index, row in enumerate(found.data):
        probs = _by_label(request, row)
        record = {"index": index, "label": row[0]["label"], "probs": probs, "num_classes": len(probs)}
        data.append(with_empty_flag(record, is_blank(request.fields["input"][index])))
    return Response(_whole(request, "classify", data))


def _by_label(request: Request, row: list[dict[str, Any]]) -> list[float]:
    """Return scores in the order of the model's labels."""
    scores = {one["label"]: one["score"] for one in row}
    return [scores[label] for label in request.state.workers.models[request.model]["labels"]]


@_route(
    "/score /v1/score", "similarity or relevance of pairs of texts", MODEL,
    Field("text_1", "texts", "one text, or the same number as text_2", True),
    Field("text_2", "texts", "one text or several", True), *_SCORES,
)  # fmt: skip
async def _score(request: Request) -> Response:
    first, second = request.fields["text_1"], request.fields["text_2"]
    if len(first) not in (1, len(second)):
        raise RefusedError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}, expected one or the same number",
            "field",
            param="text_1",
        )
    firsts = first * len(second) if len(first) == 1 else first
    pairs = [[a, b] for a, b in zip(firsts, second, strict=True)]
    found = await request.ask("score", pairs, text_options(request.fields))
    data = [
        with_empty_flag({"index": i, "object": "score", "score": score}, is_blank(pair))
        for i, (score, pair) in enumerate(zip(found.data, pairs, strict=True))
    ]
    return Response(_whole(request, "score", data))


@_route(
    "/pooling", "vectors, states of tokens, or scores", MODEL, _INPUT,
    Field("task", "pooling task", "embed, token_embed or classify; default: by the model's head"), DIMENSIONS,
    NORMALIZE, Field("encoding_format", "encoding", "float or base64"), *FORMS[1:], *_SCORES,
)  # fmt: skip
async def _pooling(request: Request) -> Response:
    """Return token states or vectors of an encoder, or scores of a model with a classification head."""
    fields, info = request.fields, request.info("embed_all", "classify")
    tasks = ("token_embed", "embed") if "embed_all" in info["tasks"] else ("classify",)
    task = fields["task"] or tasks[0]
    if task not in tasks:
        raise RefusedError(
            f"task is {task!r}, expected one of {', '.join(tasks)} for {request.model}", "unknown", param="task"
        )
    if task == "classify":
        for name in ("dimensions", "normalize"):
            if fields[name] is not None:
                raise RefusedError(
                    f"{name}: {request.model} returns scores, which have no such option", "unknown", param=name
                )
        found = await request.ask("classify", fields["input"], text_options(request.fields))
        rows: list[Any] = [np.array(_by_label(request, row), np.float32) for row in found.data]
    else:
        normalize = fields["normalize"] if fields["normalize"] is not None else fields["use_activation"]
        given = {**text_options(request.fields), "dimensions": fields["dimensions"], "normalize": normalize}
        found = await request.ask("embed" if task == "embed" else "embed_all", fields["input"], given)
        rows = list(found.arrays[0])
        if task == "token_embed":
            rows = np.split(found.arrays[0], np.cumsum(found.data["lengths"])[:-1])
    data = [
        {"index": i, "object": "pooling", "data": encoded_vector(row, fields["encoding_format"])}
        for i, row in enumerate(rows)
    ]
    return Response(_whole(request, "pool", data))
