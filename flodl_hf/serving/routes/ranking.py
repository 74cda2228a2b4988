"""Reranking of Cohere (``/v2/rerank``, ``/v1/rerank``) and Jina (``/v1/rerank``)."""

from __future__ import annotations

import uuid
from typing import Any

from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.fields import Field
from flodl_hf.serving.routes.route import (
    ACTIVATIONS,
    MODEL,
    OTHERS,
    SHORTENED,
    Request,
    Response,
    Route,
    is_blank,
    truncation_options,
    wants_raw_scores,
    with_empty_flag,
)
from flodl_hf.serving.routes.tei import CUT

__all__ = ["ROUTES"]


async def _rerank(request: Request) -> Response:
    fields = request.fields
    documents = fields["documents"]
    if not documents:
        raise RefusedError("documents is empty, expected at least one", "empty", param="documents")
    query = fields["query"]
    given = {
        **truncation_options(request),
        "max_tokens_per_doc": fields["max_tokens_per_doc"],
        "raw": wants_raw_scores(request),
    }
    found = await request.ask("rerank", [query, *documents], given, texts=len(documents))
    top = fields["top_n"] or len(documents)
    results: list[dict[str, Any]] = []
    for one in found.data[:top]:
        empty = is_blank(query) or is_blank(documents[one["index"]])
        result = with_empty_flag({"index": one["index"], "relevance_score": one["score"]}, empty)
        if fields["return_documents"]:
            result["document"] = {"text": documents[one["index"]]}
        results.append(result)
    return Response(
        {
            "id": str(uuid.uuid4()),
            "model": request.model,
            "results": results,
            "usage": {"prompt_tokens": request.tokens, "total_tokens": request.tokens},
            "meta": {
                "api_version": {"version": request.route.path[2]},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": request.tokens},
                "warnings": [f"{request.dropped} tokens were truncated"] if request.dropped else [],
            },
        }
    )


_FIELDS = (
    MODEL,
    Field("query", "text", "the query", True),
    Field("documents", "documents", "documents to rank", True),
    Field("top_n", "whole", "maximum number of documents in the response"),
    Field(
        "max_tokens_per_doc",
        "whole",
        "truncate documents to this number of tokens; default: long ones are read in windows",
    ),
    Field("return_documents", "flag", "include texts in the response"),
    Field("rank_fields", "text fields", "fields of documents to read"),
    CUT,
    *SHORTENED,
    *ACTIVATIONS,
    *OTHERS,
)

ROUTES = tuple(
    Route(path, "documents ranked by relevance for a query", _FIELDS, _rerank, style="cohere", group="Cohere and Jina")
    for path in ("/v1/rerank", "/v2/rerank")
)
"""Routes of reranking services."""
