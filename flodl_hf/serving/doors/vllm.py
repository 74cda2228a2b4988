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


async def _classify(call: Call) -> Reply:
    found = await call.ask("classify", call.fields["input"], {})
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
    found = await call.ask("score", [[a, b] for a, b in zip(firsts, second, strict=True)])
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(found.data)]
    return Reply(_whole(call, "score", data))


async def _pooling(call: Call) -> Reply:
    """The states of all tokens of an encoder; of a model with a head its raw scores."""
    info = call.info("embed_all", "classify")
    if "embed_all" in info["tasks"]:
        found = await call.ask("embed_all", call.fields["input"])
        rows: list[Any] = np.split(found.arrays[0], np.cumsum(found.data["lengths"])[:-1])
    else:
        found = await call.ask("classify", call.fields["input"], {"raw": True})
        scores = [{one["label"]: one["score"] for one in row} for row in found.data]
        rows = [[row[label] for label in info["labels"]] if row else [] for row in scores]
    return Reply(
        _whole(call, "pool", [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(rows)])
    )  # fmt: skip


_INPUT = Field("input", "texts", "one text or several", True)

DOORS = tuple(
    Door(path, says, (MODEL, *fields), answer, style="openai", group="vLLM")
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
