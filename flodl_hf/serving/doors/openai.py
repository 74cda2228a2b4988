"""OpenAI's embeddings: strings or ids, as floats or base64.

Ids are taken as the model's own, specials included. As there, a text that is too long is refused with status 400; the
field ``truncate``, or ``truncate_prompt_tokens`` of vLLM, truncates it.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from flodl_hf.serving.doors.door import MODEL, OTHERS, SHORTENED, Call, Door, Reply, shortening
from flodl_hf.serving.doors.fields import Field
from flodl_hf.serving.doors.tei import DIMENSIONS, NORMALIZE, PROMPT, TRUNCATE, WINDOWS, prompted

__all__ = ["DOORS", "FORMS", "written"]

FORMS = (
    Field("add_special_tokens", "true", "special tokens are always added"),
    Field("embed_dtype", "float32", "the type of numbers in base64"),
    Field("endianness", "endianness", "the order of bytes in base64"),
)
"""Fields of vLLM of which one value is supported."""

# As Cohere and others write them; further words of theirs change nothing here.
_KINDS = {"query": "query", "search_query": "query"} | dict.fromkeys(
    ("document", "passage", "search_document"), "document"
)


async def _embeddings(call: Call) -> Reply:
    fields = call.fields
    call.info("embed")
    normalize = fields["normalize"] if fields["normalize"] is not None else fields["use_activation"]
    given = {
        **shortening(call),
        **prompted(call),
        "dimensions": fields["dimensions"],
        "normalize": normalize,
        "kind": _KINDS.get(fields["input_type"]),
    }
    found = await call.ask("embed", fields["input"], given)
    vectors = found.arrays[0]
    return Reply(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": written(row, fields["encoding_format"])}
                for i, row in enumerate(vectors)
            ],
            "model": call.model,
            "usage": {"prompt_tokens": call.tokens, "total_tokens": call.tokens, "dropped_tokens": call.dropped},
        },
        vectors,
    )


def written(row: np.ndarray, encoding: str | None) -> Any:
    """Return an array as a client asks for it: as it is, or its numbers in base64."""
    return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode() if encoding == "base64" else row


DOORS = (
    Door(
        "/v1/embeddings",
        "a vector for each text",
        (
            Field("input", "inputs", "texts, or the model's ids", True),
            MODEL,
            Field("encoding_format", "encoding", "float or base64"),
            DIMENSIONS,
            NORMALIZE,
            Field("use_activation", "flag", "as normalize, which comes first"),
            TRUNCATE,
            *SHORTENED,
            WINDOWS,
            PROMPT,
            Field("input_type", "input_type", "query or document: takes the folder's prompt and route for them"),
            *FORMS,
            Field("modality", "modality", "text"),
            *OTHERS,
        ),
        _embeddings,
        style="openai",
        group="OpenAI",
    ),
)
"""Paths of OpenAI's interface."""
