"""OpenAI's and Cohere's embeddings: texts or token ids, as floats or base64.

Ids are the model's own, including special tokens. Texts that are too long are refused with status 400 unless
``truncate``, or vLLM's ``truncate_prompt_tokens``, is given.
"""

from __future__ import annotations

import base64
import uuid
from typing import Any

import numpy as np

from flodl_hf.serving.routes.fields import Field
from flodl_hf.serving.routes.route import MODEL, OTHERS, SHORTENED, Request, Response, Route, add_route, text_options
from flodl_hf.serving.routes.tei import DIMENSIONS, NORMALIZE, PROMPT, TRUNCATE, WINDOWS, prompt_option

FORMS = (
    Field("add_special_tokens", "true", "special tokens are always added"),
    Field("embed_dtype", "float32", "type of numbers in base64"),
    Field("endianness", "endianness", "byte order in base64"),
)
"""vLLM's fields with one supported value."""

# Values of Cohere and others; further values have no effect.
_KINDS = {"query": "query", "search_query": "query"} | dict.fromkeys(
    ("document", "passage", "search_document"), "document"
)


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
    *FORMS,
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

ROUTES: list[Route] = []
"""Routes of OpenAI's and Cohere's embeddings."""


@add_route(ROUTES, "/v1/embeddings /embeddings", "a vector for each text", *_FIELDS, style="openai", group="OpenAI")
async def _embeddings(request: Request) -> Response:
    fields = request.fields
    request.info("embed")
    normalize = fields["normalize"] if fields["normalize"] is not None else fields["use_activation"]
    given = {
        **text_options(request.fields),
        **prompt_option(request),
        "dimensions": fields["dimensions"],
        "normalize": normalize,
        "kind": _KINDS.get(fields["input_type"]),
    }
    found = await request.ask("embed", fields["input"], given)
    vectors = found.arrays[0]
    return Response(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": encoded_vector(row, fields["encoding_format"])}
                for i, row in enumerate(vectors)
            ],
            "model": request.model,
            "usage": request.token_usage(dropped_tokens=request.dropped),
        },
        vectors,
    )


def encoded_vector(row: np.ndarray, encoding: str | None) -> Any:
    """Return an array, or its numbers in base64."""
    return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode() if encoding == "base64" else row


@add_route(ROUTES, "/v2/embed", "a vector for each text", *_COHERE_FIELDS, style="cohere", group="Cohere and Jina")
async def _cohere_embed(request: Request) -> Response:
    """Return vectors by type, as Cohere's second version does; long texts are truncated by default."""
    fields = request.fields
    truncate = fields["truncate"] or "end"
    given = {
        "truncate": truncate != "none",
        "side": "left" if truncate == "start" else "right",
        "max_tokens": fields["max_tokens"],
        "dimensions": fields["output_dimension"],
        "kind": _KINDS.get(fields["input_type"]),
    }
    found = await request.ask("embed", fields["texts"], given)
    vectors = found.arrays[0]
    kinds = fields["embedding_types"] or ["float"]
    return Response(
        {
            "id": str(uuid.uuid4()),
            "embeddings": {kind: [encoded_vector(row, kind) for row in vectors] for kind in kinds},
            "texts": fields["texts"],
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": request.tokens}},
            "response_type": "embeddings_by_type",
        },
        vectors,
    )
