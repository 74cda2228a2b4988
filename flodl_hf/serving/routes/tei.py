"""Routes of text-embeddings-inference, and Cohere's and Jina's reranking.

Texts that are too long for a vector are refused with status 413 unless ``truncate`` is true. Scores read long texts in
windows unless ``truncate`` is given. GELU is the function that the checkpoint specifies.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from flodl.errors import shown
from flodl_hf.serving.responses import RefusedError, Response
from flodl_hf.serving.routes.route import (
    Answer,
    Field,
    Request,
    checked,
    is_blank,
    route,
    with_empty_flag,
)

MODEL = Field("model", "text", "name of a served model; required if several models have the head")
OTHERS = (
    *(Field(name, "text", "accepted", effect=False) for name in ("user", "request_id", "cache_salt")),
    Field("priority", "any", "accepted without effect; see the header x-priority", effect=False),
)
"""Fields that clients of OpenAI, Cohere and vLLM send and that do not change results."""
SHORTENED = (
    Field(
        "truncate_prompt_tokens", "tokens", "truncate texts to this number of tokens; -1 is the model's maximum length"
    ),
    Field("truncation_side", "direction", "side that truncation removes; default: the tokenizer's setting"),
)
"""vLLM's fields for truncation."""
ACTIVATIONS = (
    Field("use_activation", "flag", "false returns the head's raw scores"),
    Field("activation", "flag", "alias of use_activation"),
    Field("softmax", "flag", "alias of use_activation"),
    Field("raw_scores", "flag", "true returns the head's raw scores"),
)
"""Fields of vLLM and infinity for scores without an activation."""
TRUNCATE = Field("truncate", "flag", "true truncates long texts; default: they are refused")
CUT = Field("truncate", "flag", "true truncates long texts, false refuses them; default: they are read in windows")
DIRECTION = Field("truncation_direction", "direction", "side that truncation removes; default: right")
WINDOWS = Field("windows", "flag", "true reads all of a long text in windows and averages their vectors")
PROMPT = Field("prompt_name", "text", "name of a prompt of the model, prepended to each text")
ROUTE = Field("route", "text", "query or document, for models with separate routes")
NORMALIZE = Field("normalize", "flag", "scale vectors to length 1; default: the model's setting")
DIMENSIONS = Field("dimensions", "whole", "truncate vectors to this number of features")
RAW = Field("raw_scores", "flag", "return the head's raw scores")
PAIR = (
    Field("source_sentence", "text", "text to compare with the others", True),
    Field("sentences", "texts", "texts to compare with it", True),
)
_INPUTS = Field("inputs", "inputs", "texts, or token ids", True)
_TEXTS = Field("inputs", "texts", "one text or several", True)
_LONG = (TRUNCATE, DIRECTION, WINDOWS, PROMPT)

_route = partial(route, group="text-embeddings-inference")


def text_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a task for texts that are too long, and for scores without an activation.

    Args:
        fields: fields of a request.
    """
    size, truncate = fields.get("truncate_prompt_tokens"), fields.get("truncate")
    activations = fields.get("use_activation"), fields.get("activation"), fields.get("softmax")
    return {
        "truncate": truncate if size is None else True,
        "max_tokens": None if size == -1 else size,
        "side": fields.get("truncation_side") or fields.get("truncation_direction"),
        "windows": fields.get("windows"),
        "raw": fields.get("raw_scores") is True or False in activations,
    }


def prompt_of(request: Request, fields: Mapping[str, Any]) -> str | None:
    """Return the prompt that fields select, or None.

    Raises:
        RefusedError: the model has no such prompt.
    """
    name = fields.get("prompt_name")
    if name is None:
        return None
    prompts = request.state.workers.models[request.model]["prompts"]
    if name not in prompts:
        have = ", ".join(prompts) or "no prompt_name, as the model has no prompts"
        raise RefusedError(f"prompt_name is {shown(name, 60)}, expected one of {have}", "field", param="prompt_name")
    return prompts[name]


async def embedded(request: Request, inputs: Any, fields: Mapping[str, Any]) -> Response:
    """Return a vector for each input.

    Args:
        request: the request.
        inputs: texts and lists of token ids.
        fields: options for long texts, prompts, routes, sizes and normalization.
    """
    request.info("embed")
    options = {**text_options(fields), "prompt": prompt_of(request, fields)}
    options |= {name: fields.get(name) for name in ("normalize", "dimensions", "route")}
    vectors = (await request.ask("embed", inputs, options)).arrays[0]
    return Response(vectors, vectors)


def token_states(found: Answer) -> list[np.ndarray]:
    """Return the rows of the tokens of each text."""
    return np.split(found.arrays[0], np.cumsum(found.data["lengths"])[:-1])


async def _with_prompt(request: Request, task: str, options: dict[str, Any]) -> Answer:
    """Run a task for the texts with the selected prompt."""
    request.info(task)
    prompt = prompt_of(request, request.fields) or ""
    return await request.ask(task, [prompt + text for text in request.fields["inputs"]], options)


@_route("/embed", "a vector for each text", _INPUTS, NORMALIZE, *_LONG, ROUTE, DIMENSIONS, MODEL)
async def _embed(request: Request) -> Response:
    return await embedded(request, request.fields["inputs"], request.fields)


@_route("/embed_all", "a state for each token", _TEXTS, *_LONG, MODEL)
async def _embed_all(request: Request) -> Response:
    found = await _with_prompt(request, "embed_all", text_options(request.fields))
    return Response(token_states(found), found.arrays[0])


@_route("/embed_sparse", "weights of words for each text", _TEXTS, *_LONG, MODEL)
async def _embed_sparse(request: Request) -> Response:
    return Response((await _with_prompt(request, "embed_sparse", text_options(request.fields))).data)


def _pairs_of(value: Any) -> tuple[list[Any], bool]:
    """Return the inputs, and whether there is one: "a", ["a"], ["a", "b"], or [["a"], ["a", "b"]]."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return [value], True
    single = isinstance(value, str) or (isinstance(value, list) and len(value) == 1 and isinstance(value[0], str))
    if isinstance(value, list):
        value = [row[0] if isinstance(row, list) and len(row) == 1 else row for row in value]
    try:
        return checked("pairs", value, "inputs"), single
    except RefusedError:
        expected = 'a string, a pair ["a", "b"], or a list of [["a"], ["a", "b"]]'
        raise RefusedError(f"inputs: expected {expected}", "field", param="inputs") from None


@_route(
    "/predict", "labels with scores",
    Field("inputs", "any", "a text, a pair, or a list of lists of one or two texts", True), CUT, DIRECTION, RAW, MODEL,
)  # fmt: skip
async def _predict(request: Request) -> Response:
    items, single = _pairs_of(request.fields["inputs"])
    given = text_options(request.fields)
    found = await request.ask("classify", items, given)
    rows = [
        [with_empty_flag({"score": one["score"], "label": one["label"]}, is_blank(item)) for one in row]
        for row, item in zip(found.data, items, strict=True)
    ]
    return Response(rows[0] if single else rows)


@_route(
    "/similarity", "similarity of a text and others",
    Field("inputs", "object", "source_sentence and sentences", True, fields=PAIR),
    Field("parameters", "object", "options for long texts and prompts", fields=(TRUNCATE, DIRECTION, PROMPT)), MODEL,
)  # fmt: skip
async def _similarity(request: Request) -> Response:
    return await similarity(request, request.fields["inputs"], request.fields["parameters"] or {})


async def similarity(request: Request, inputs: Mapping[str, Any], parameters: Mapping[str, Any]) -> Response:
    """Return the similarities of a text and others.

    Args:
        request: the request.
        inputs: values of `PAIR`.
        parameters: ``truncate``, ``truncation_direction``, ``prompt_name``.
    """
    request.info("similarity")
    texts = [inputs["source_sentence"], *inputs["sentences"]]
    if len(texts) == 1:
        raise RefusedError("sentences is empty, expected at least one", "empty", param="inputs")
    options = {**text_options(parameters), "prompt": prompt_of(request, parameters)}
    return Response((await request.ask("similarity", texts, options, texts=len(texts))).data)


@_route(
    "/tokenize", "tokens with their offsets", _TEXTS, Field("add_special_tokens", "flag", "true by default"), PROMPT,
    MODEL,
)  # fmt: skip
async def _tokenize(request: Request) -> Response:
    return Response((await _with_prompt(request, "tokenize", {"special": request.fields["add_special_tokens"]})).data)


@_route(
    "/decode", "texts of ids", Field("ids", "rows", "ids of one text or several", True),
    Field("skip_special_tokens", "flag", "true by default"), MODEL,
)  # fmt: skip
async def _decode(request: Request) -> Response:
    options = {"special": request.fields["skip_special_tokens"]}
    return Response((await request.ask("decode", request.fields["ids"], options)).data)


# ---- reranking -----------------------------------------------------------------------------------------

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


async def _ranked(request: Request, name: str) -> list[tuple[str, Any, bool]]:
    """Return the text, the result, and whether it is of an empty input, of each text of a field, best first.

    Raises:
        RefusedError: the query or the field is missing, or the field is empty.
    """
    for needed in ("query", name):
        if request.fields[needed] is None:
            raise RefusedError(f"{needed} is missing, expected it for a ranking", "field", param=needed)
    query, texts = request.fields["query"], request.fields[name]
    if not texts:
        raise RefusedError(f"{name} is empty, expected at least one", "empty", param=name)
    options = {**text_options(request.fields), "max_tokens_per_doc": request.fields.get("max_tokens_per_doc")}
    found = await request.ask("rerank", [query, *texts], options, texts=len(texts))
    listed = [(texts[one["index"]], one) for one in found.data]
    return [(text, one, is_blank(query) or is_blank(text)) for text, one in listed]


async def rank_texts(request: Request) -> Response:
    """Return the ranks of the field ``texts``, in the form of text-embeddings-inference.

    Raises:
        RefusedError: query or texts are missing.
    """
    rows = []
    for text, one, empty in await _ranked(request, "texts"):
        row = {"index": one["index"], "score": one["score"]}
        if request.fields["return_text"]:
            row["text"] = text
        rows.append(with_empty_flag(row, empty))
    return Response(rows)


@_route("/rerank", _SUMMARY, *_EITHER.values())
async def _rank_either(request: Request) -> Response:
    return await (rank_texts if request.fields["documents"] is None else _rank_documents)(request)


@route("/v1/rerank /v2/rerank", _SUMMARY, *_FIELDS, style="cohere", group="Cohere and Jina")
async def _rank_documents(request: Request) -> Response:
    results: list[dict[str, Any]] = []
    for text, one, empty in (await _ranked(request, "documents"))[: request.fields["top_n"]]:
        result = with_empty_flag({"index": one["index"], "relevance_score": one["score"]}, empty)
        if request.fields["return_documents"]:
            result["document"] = {"text": text}
        results.append(result)
    return Response({
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
    })  # fmt: skip
