"""Reranking: ``/rerank`` of text-embeddings-inference, and Cohere's and Jina's routes with ``documents``."""

from __future__ import annotations

import uuid
from dataclasses import replace
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
    add_route,
    is_blank,
    text_options,
    with_empty_flag,
)
from flodl_hf.serving.routes.tei import CUT, DIRECTION, RAW

RANKED = (
    Field("query", "text", "the query"),
    Field("texts", "texts", "texts to rank"),
    RAW,
    Field("return_text", "flag", "include texts in the response"),
)
"""Fields of a ranking in text-embeddings-inference."""
_DOCUMENTS = Field("documents", "documents", "documents to rank", True)
_FIELDS = (
    MODEL,
    Field("query", "text", "the query", True),
    _DOCUMENTS,
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
_EITHER = {field.name: field for field in (*_FIELDS, *RANKED, DIRECTION)}
_EITHER["documents"] = replace(_DOCUMENTS, required=False)
_SUMMARY = "texts ranked by relevance for a query"

ROUTES: list[Route] = []
"""Routes of reranking services."""


async def _ranked(request: Request, name: str) -> tuple[str, list[str], Any]:
    """Return the query, the texts of a field, and their scores, best first."""
    query, texts = request.fields["query"], request.fields[name]
    if not texts:
        raise RefusedError(f"{name} is empty, expected at least one", "empty", param=name)
    given = {
        **text_options(request.fields),
        "max_tokens_per_doc": request.fields.get("max_tokens_per_doc"),
    }
    found = await request.ask("rerank", [query, *texts], given, texts=len(texts))
    return query, texts, found.data


async def rank_texts(request: Request) -> Response:
    """Return the ranks of the field ``texts``, in the form of text-embeddings-inference.

    Raises:
        RefusedError: query or texts are missing.
    """
    for name in ("query", "texts"):
        if request.fields[name] is None:
            raise RefusedError(f"{name} is missing, expected it for a ranking", "field", param=name)
    query, texts, found = await _ranked(request, "texts")
    rows = []
    for one in found:
        text = texts[one["index"]]
        row = {"index": one["index"], "score": one["score"]}
        if request.fields["return_text"]:
            row["text"] = text
        rows.append(with_empty_flag(row, is_blank(query) or is_blank(text)))
    return Response(rows)


@add_route(ROUTES, "/rerank", _SUMMARY, *_EITHER.values(), group="text-embeddings-inference")
async def _rank_either(request: Request) -> Response:
    return await (rank_texts if request.fields["documents"] is None else _rank_documents)(request)


@add_route(ROUTES, "/v1/rerank /v2/rerank", _SUMMARY, *_FIELDS, style="cohere", group="Cohere and Jina")
async def _rank_documents(request: Request) -> Response:
    fields = request.fields
    query, documents, found = await _ranked(request, "documents")
    top = fields["top_n"] or len(documents)
    results: list[dict[str, Any]] = []
    for one in found[:top]:
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
            "usage": request.token_usage(),
            "meta": {
                "api_version": {"version": "2" if request.route.path.startswith("/v2/") else "1"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": request.tokens},
                "warnings": [f"{request.dropped} tokens were truncated"] if request.dropped else [],
            },
        }
    )
