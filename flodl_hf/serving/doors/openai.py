"""OpenAI's embeddings: strings or ids, as floats or base64.

Ids are taken as the model's own, specials included. What does not fit into one window is read in several.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from flodl_hf.serving.doors.door import MODEL, Call, Door, Reply
from flodl_hf.serving.doors.fields import Field

__all__ = ["DOORS"]


# As Cohere and others write them; further words of theirs change nothing here.
_KINDS = {"query": "query", "search_query": "query"} | dict.fromkeys(
    ("document", "passage", "search_document"), "document"
)


async def _embeddings(call: Call) -> Reply:
    fields = call.fields
    given = {
        "dimensions": fields["dimensions"],
        "truncate": fields["truncate"],
        "kind": _KINDS.get(fields["input_type"]),
    }
    found = await call.ask("embed", fields["input"], given)
    vectors = found.arrays[0]
    return Reply(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": _written(row, fields["encoding_format"])}
                for i, row in enumerate(vectors)
            ],
            "model": call.model,
            "usage": {"prompt_tokens": call.tokens, "total_tokens": call.tokens, "dropped_tokens": call.dropped},
        },
        vectors,
    )


def _written(row: np.ndarray, encoding: str | None) -> Any:
    return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode() if encoding == "base64" else row


DOORS = (
    Door(
        "/v1/embeddings",
        "a vector for each text",
        (
            Field("input", "inputs", "texts, or the model's ids", True),
            MODEL,
            Field("encoding_format", "encoding", "float or base64"),
            Field("dimensions", "whole", "keep so many features"),
            Field("truncate", "flag", "true cuts long texts, false refuses them; else they are read in windows"),
            Field("input_type", "input_type", "query or document: takes the folder's prompt and route for them"),
            Field("user", "text", "passed over"),
        ),
        _embeddings,
        style="openai",
        group="OpenAI",
    ),
)
"""Paths of OpenAI's interface."""
