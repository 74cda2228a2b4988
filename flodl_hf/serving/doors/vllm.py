"""The doors of vLLM's pooling models: ``/classify``, ``/score`` and ``/pooling``."""

from __future__ import annotations

import time
import uuid
from typing import Any

import numpy as np

from flodl_hf.serving.doors.door import (
    ACTIVATIONS,
    MODEL,
    OTHERS,
    SHORTENED,
    Call,
    Door,
    Reply,
    flagged,
    is_blank,
    is_raw,
    shortening,
)
from flodl_hf.serving.doors.fields import Field
from flodl_hf.serving.doors.openai import FORMS, written
from flodl_hf.serving.doors.tei import DIMENSIONS, NORMALIZE
from flodl_hf.serving.faults import RefusedError

__all__ = ["DOORS"]


def _whole(call: Call, kind: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": call.model,
        "data": data,
        "usage": {
            "prompt_tokens": call.tokens,
            "total_tokens": call.tokens,
            "completion_tokens": 0,
            "dropped_tokens": call.dropped,
        },
    }


async def _classify(call: Call) -> Reply:
    found = await call.ask("classify", call.fields["input"], {**shortening(call), "raw": is_raw(call)})
    labels = call.house.workers.models[call.model]["labels"]
    data = []
    for index, row in enumerate(found.data):
        by_label = {one["label"]: one["score"] for one in row}
        probs = [by_label[label] for label in labels]
        best = row[0]["label"]
        record = {"index": index, "label": best, "probs": probs, "num_classes": len(labels)}
        data.append(flagged(record, is_blank(call.fields["input"][index])))
    return Reply(_whole(call, "classify", data))


async def _score(call: Call) -> Reply:
    first, second = call.fields["text_1"], call.fields["text_2"]
    if len(first) not in (1, len(second)):
        raise RefusedError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; expected one, or as many", "field", param="text_1"
        )
    firsts = first * len(second) if len(first) == 1 else first
    pairs = [[a, b] for a, b in zip(firsts, second, strict=True)]
    found = await call.ask("score", pairs, {**shortening(call), "raw": is_raw(call)})
    data = [
        flagged({"index": i, "object": "score", "score": score}, is_blank(pair))
        for i, (score, pair) in enumerate(zip(found.data, pairs, strict=True))
    ]
    return Reply(_whole(call, "score", data))


async def _pooling(call: Call) -> Reply:
    """Answer with the states of all tokens or the vector of an encoder, or with the scores of a model with a head."""
    fields, info = call.fields, call.info("embed_all", "classify")
    tasks = ("token_embed", "embed") if "embed_all" in info["tasks"] else ("classify",)
    task = fields["task"] or tasks[0]
    if task not in tasks:
        raise RefusedError(
            f"task is {task!r}; expected one of {', '.join(tasks)} for {call.model}", "unknown", param="task"
        )
    if task == "classify":
        for name in ("dimensions", "normalize"):
            if fields[name] is not None:
                raise RefusedError(f"{name}: {call.model} has scores and no vectors", "unknown", param=name)
        found = await call.ask("classify", fields["input"], {"raw": is_raw(call), **shortening(call)})
        scores = [{one["label"]: one["score"] for one in row} for row in found.data]
        rows: list[Any] = [np.array([row[label] for label in info["labels"]], np.float32) for row in scores]
    else:
        normalize = fields["normalize"] if fields["normalize"] is not None else fields["use_activation"]
        given = {**shortening(call), "dimensions": fields["dimensions"], "normalize": normalize}
        found = await call.ask("embed" if task == "embed" else "embed_all", fields["input"], given)
        rows = list(found.arrays[0])
        if task == "token_embed":
            rows = np.split(found.arrays[0], np.cumsum(found.data["lengths"])[:-1])
    data = [
        {"index": i, "object": "pooling", "data": written(row, fields["encoding_format"])} for i, row in enumerate(rows)
    ]
    return Reply(_whole(call, "pool", data))


_INPUT = Field("input", "texts", "one text or several", True)

_SCORES = (*ACTIVATIONS, *SHORTENED, FORMS[0], *OTHERS)

DOORS = tuple(
    Door(path, says, (MODEL, *fields), answer, style="openai", group="vLLM")
    for path, says, fields, answer in (
        ("/classify", "the best label and all probabilities", (_INPUT, *_SCORES), _classify),
        (
            "/score",
            "how well texts fit one another",
            (
                Field("text_1", "texts", "one text, or as many as text_2", True),
                Field("text_2", "texts", "one text or several", True),
                *_SCORES,
            ),
            _score,
        ),
        (
            "/pooling",
            "vectors, states of tokens, or scores",
            (
                _INPUT,
                Field("task", "pooling task", "embed, token_embed or classify; by default what the model has"),
                DIMENSIONS,
                NORMALIZE,
                Field("encoding_format", "encoding", "float or base64"),
                *FORMS[1:],
                *_SCORES,
            ),
            _pooling,
        ),
    )
)
"""Paths of vLLM's pooling models."""
