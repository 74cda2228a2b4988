"""The doors of vLLM's pooling models: ``/classify``, ``/score`` and ``/pooling``."""

from __future__ import annotations

import time
import uuid
from typing import Any

import numpy as np

from flodl_hf.serving.doors.door import MODEL, Call, Door, Reply
from flodl_hf.serving.doors.fields import Field
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


def _cut(call: Call, *tasks: str) -> dict[str, Any]:
    """Return how long texts are read: in windows, or cut to the model's window where that is asked for.

    Raises:
        RefusedError: they are to be cut anywhere else.
    """
    size = call.fields["truncate_prompt_tokens"]
    if size is None:
        return {}
    limit = call.info(*tasks)["max_tokens"]
    if type(size) is not int or not (size == -1 or (limit is not None and size >= limit)):
        raise RefusedError(
            f"truncate_prompt_tokens is {size!r}; expected -1, which is the model's length"
            f"{f' of {limit}' if limit else ''}. Leave it out to have all of a text read.",
            "field",
            param="truncate_prompt_tokens",
        )
    return {"truncate": True}


async def _classify(call: Call) -> Reply:
    found = await call.ask("classify", call.fields["input"], _cut(call, "classify"))
    labels = call.house.workers.models[call.model]["labels"]
    data = []
    for index, row in enumerate(found.data):
        by_label = {one["label"]: one["score"] for one in row}
        # Of a text with nothing to read there is no label and no probability.
        probs = [by_label[label] for label in labels] if row else []
        best = row[0]["label"] if row else None
        data.append({"index": index, "label": best, "probs": probs, "num_classes": len(labels)})
    return Reply(_whole(call, "classify", data))


async def _score(call: Call) -> Reply:
    first, second = call.fields["text_1"], call.fields["text_2"]
    if len(first) not in (1, len(second)):
        raise RefusedError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; expected one, or as many", "field", param="text_1"
        )
    firsts = first * len(second) if len(first) == 1 else first
    found = await call.ask("score", [[a, b] for a, b in zip(firsts, second, strict=True)], _cut(call, "score"))
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(found.data)]
    return Reply(_whole(call, "score", data))


async def _pooling(call: Call) -> Reply:
    """The states of all tokens of an encoder; of a model with a head its raw scores."""
    info = call.info("embed_all", "classify")
    if "embed_all" in info["tasks"]:
        found = await call.ask("embed_all", call.fields["input"], _cut(call, "embed_all"))
        rows: list[Any] = np.split(found.arrays[0], np.cumsum(found.data["lengths"])[:-1])
    else:
        found = await call.ask("classify", call.fields["input"], {"raw": True, **_cut(call, "classify")})
        scores = [{one["label"]: one["score"] for one in row} for row in found.data]
        rows = [[row[label] for label in info["labels"]] if row else [] for row in scores]
    return Reply(
        _whole(call, "pool", [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(rows)])
    )  # fmt: skip


_TRUNCATE = Field("truncate_prompt_tokens", "any", "-1 cuts at the model's length; else long texts are read in windows")
_INPUT = Field("input", "texts", "one text or several", True)

DOORS = tuple(
    Door(path, says, (MODEL, *fields, _TRUNCATE), answer, style="openai", group="vLLM")
    for path, says, fields, answer in (
        ("/classify", "the best label and all probabilities", (_INPUT,), _classify),
        (
            "/score",
            "how well texts fit one another",
            (
                Field("text_1", "texts", "one text, or as many as text_2", True),
                Field("text_2", "texts", "one text or several", True),
            ),
            _score,
        ),
        ("/pooling", "states of tokens, or raw scores", (_INPUT,), _pooling),
    )
)
"""Paths of vLLM's pooling models."""
