"""Reranking as Cohere (``/v2/rerank``) and Jina (``/v1/rerank``) have it; Cohere's first version is answered too."""

from __future__ import annotations

import uuid
from typing import Any

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
from flodl_hf.serving.doors.tei import CUT
from flodl_hf.serving.faults import RefusedError

__all__ = ["DOORS"]


async def _rerank(call: Call) -> Reply:
    fields = call.fields
    documents = fields["documents"]
    if not documents:
        raise RefusedError("documents is empty; expected at least one", "empty", param="documents")
    query = fields["query"]
    given = {**shortening(call), "max_tokens_per_doc": fields["max_tokens_per_doc"], "raw": is_raw(call)}
    found = await call.ask("rerank", [query, *documents], given, texts=len(documents))
    top = fields["top_n"] or len(documents)
    results: list[dict[str, Any]] = []
    for one in found.data[:top]:
        empty = is_blank(query) or is_blank(documents[one["index"]])
        result = flagged({"index": one["index"], "relevance_score": one["score"]}, empty)
        if fields["return_documents"]:
            result["document"] = {"text": documents[one["index"]]}
        results.append(result)
    return Reply(
        {
            "id": str(uuid.uuid4()),
            "model": call.model,
            "results": results,
            "usage": {"prompt_tokens": call.tokens, "total_tokens": call.tokens},
            "meta": {
                "api_version": {"version": call.door.path[2]},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": call.tokens},
                "warnings": [f"{call.dropped} tokens were truncated"] if call.dropped else [],
            },
        }
    )


_FIELDS = (
    MODEL,
    Field("query", "text", "what is looked for", True),
    Field("documents", "documents", "what may fit", True),
    Field("top_n", "whole", "most documents in the answer"),
    Field("max_tokens_per_doc", "whole", "cut documents after so many tokens; else long ones are read in windows"),
    Field("return_documents", "flag", "whether texts are in the answer"),
    Field("rank_fields", "text fields", "the fields of documents that are read"),
    CUT,
    *SHORTENED,
    *ACTIVATIONS,
    *OTHERS,
)

DOORS = tuple(
    Door(path, "documents by how well they fit a query", _FIELDS, _rerank, style="cohere", group="Cohere and Jina")
    for path in ("/v1/rerank", "/v2/rerank")
)
"""Paths of reranking services."""
