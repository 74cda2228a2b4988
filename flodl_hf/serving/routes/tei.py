"""Routes of text-embeddings-inference.

Texts that are too long for a vector are refused with status 413 unless ``truncate`` is true. Scores read long texts in
windows unless ``truncate`` is given. GELU is the function that the checkpoint specifies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from flodl.errors import shown
from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.fields import Field, is_pair
from flodl_hf.serving.routes.route import (
    MODEL,
    Request,
    Response,
    Route,
    add_route,
    is_blank,
    text_options,
    with_empty_flag,
)

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

ROUTES: list[Route] = []
"""Routes of text-embeddings-inference."""
_route = partial(add_route, ROUTES, group="text-embeddings-inference")


def prompt_option(request: Request, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the selected prompt as the option of a task.

    Args:
        request: the request.
        fields: the fields; None uses the request's own.

    Raises:
        RefusedError: the model has no such prompt.
    """
    name = (request.fields if fields is None else fields).get("prompt_name")
    if name is None:
        return {}
    prompts = request.state.workers.models[request.model]["prompts"]
    if name not in prompts:
        have = ", ".join(prompts) or "no prompt_name, as the model has no prompts"
        raise RefusedError(f"prompt_name is {shown(name, 60)}, expected one of {have}", "field", param="prompt_name")
    return {"prompt": prompts[name]}


def _texts(request: Request) -> list[str]:
    """Return the texts with the selected prompt."""
    texts, found = request.fields["inputs"], prompt_option(request)
    if not found:
        return texts
    return [found["prompt"] + text for text in texts]


@_route("/embed", "a vector for each text", _INPUTS, NORMALIZE, *_LONG, ROUTE, DIMENSIONS, MODEL)
async def _embed(request: Request) -> Response:
    request.info("embed")
    given = {**text_options(request.fields), **prompt_option(request)}
    given |= {name: request.fields[name] for name in ("normalize", "dimensions", "route")}
    found = await request.ask("embed", request.fields["inputs"], given)
    return Response(found.arrays[0], found.arrays[0])


@_route("/embed_all", "a state for each token", _TEXTS, *_LONG, MODEL)
async def _embed_all(request: Request) -> Response:
    request.info("embed_all")
    found = await request.ask("embed_all", _texts(request), text_options(request.fields))
    ends = np.cumsum(found.data["lengths"])
    return Response(np.split(found.arrays[0], ends[:-1]), found.arrays[0])


@_route("/embed_sparse", "weights of words for each text", _TEXTS, *_LONG, MODEL)
async def _embed_sparse(request: Request) -> Response:
    request.info("embed_sparse")
    return Response((await request.ask("embed_sparse", _texts(request), text_options(request.fields))).data)


def _pairs_of(value: Any) -> tuple[list[Any], bool]:
    """Return the inputs, and whether there is one: "a", ["a", "b"], or [["a"], ["a", "b"]]."""
    if isinstance(value, str):
        return [value], True
    if is_pair(value):
        return [value], True
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], str):
            return value, True
        rows = [row[0] if isinstance(row, list) and len(row) == 1 and isinstance(row[0], str) else row for row in value]
        if all(isinstance(row, str) or is_pair(row) for row in rows):
            return rows, False
    raise RefusedError(
        'inputs: expected a string, a pair ["a", "b"], or a list of [["a"], ["a", "b"]]', "field", param="inputs"
    )


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
    found = await request.ask(
        "similarity", texts, {**text_options(parameters), **prompt_option(request, parameters)}, texts=len(texts)
    )
    return Response(found.data)


@_route(
    "/tokenize",
    "tokens with their offsets",
    _TEXTS,
    Field("add_special_tokens", "flag", "true by default"),
    PROMPT,
    MODEL,
)
async def _tokenize(request: Request) -> Response:
    request.info("tokenize")
    options = {"special": request.fields["add_special_tokens"]}
    return Response((await request.ask("tokenize", _texts(request), options)).data)


@_route(
    "/decode", "texts of ids", Field("ids", "rows", "ids of one text or several", True),
    Field("skip_special_tokens", "flag", "true by default"), MODEL,
)  # fmt: skip
async def _decode(request: Request) -> Response:
    options = {"special": request.fields["skip_special_tokens"]}
    return Response((await request.ask("decode", request.fields["ids"], options)).data)
