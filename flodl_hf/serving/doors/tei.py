"""The doors of text-embeddings-inference: paths, fields and answers as it has them.

As there, a text that is too long for a vector is refused with status 413 unless ``truncate`` is true. Scores of texts
and pairs read long texts in windows unless ``truncate`` is given, and GELU is the function that the checkpoint names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flodl.errors import shown
from flodl_hf.serving.doors.door import MODEL, Call, Door, Reply, flagged, is_blank, is_raw, shortening
from flodl_hf.serving.doors.fields import Field
from flodl_hf.serving.faults import RefusedError

__all__ = [
    "CUT",
    "DIMENSIONS",
    "DIRECTION",
    "NORMALIZE",
    "PAIR",
    "PROMPT",
    "ROUTE",
    "TRUNCATE",
    "WINDOWS",
    "prompted",
    "similarity",
]

TRUNCATE = Field("truncate", "flag", "true truncates long texts; otherwise they are refused")
CUT = Field("truncate", "flag", "true truncates long texts, false refuses them; without it they are read in windows")
DIRECTION = Field("truncation_direction", "direction", "the end that truncation removes; right by default")
WINDOWS = Field("windows", "flag", "true reads all of a long text in windows and averages their vectors")
PROMPT = Field("prompt_name", "text", "a prompt of the model's folder, put before each text")
ROUTE = Field("route", "text", "the way of these texts, where the folder has several: query, document")
NORMALIZE = Field("normalize", "flag", "scale vectors to length 1; by default as the folder says")
DIMENSIONS = Field("dimensions", "whole", "keep so many features")
RAW = Field("raw_scores", "flag", "scores as they leave the head")
PAIR = (
    Field("source_sentence", "text", "the text that the others are compared with", True),
    Field("sentences", "texts", "the others", True),
)


def prompted(call: Call, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the prompt that a request names, as the option of a task.

    Args:
        call: the request.
        given: the fields; None takes those of the request.

    Raises:
        RefusedError: the model has no such prompt.
    """
    name = (call.fields if given is None else given).get("prompt_name")
    if name is None:
        return {}
    prompts = call.house.workers.models[call.model]["prompts"]
    if name not in prompts:
        have = ", ".join(prompts) or "none, as the model has none"
        raise RefusedError(f"prompt_name is {shown(name, 60)}; expected one of {have}", "field", param="prompt_name")
    return {"prompt": prompts[name]}


def _texts(call: Call) -> list[str]:
    """Return texts with the prompt that was asked for before each."""
    texts, found = call.fields["inputs"], prompted(call)
    if not found:
        return texts
    return [found["prompt"] + text for text in texts]


async def _embed(call: Call) -> Reply:
    call.info("embed")
    given = {**shortening(call), **prompted(call)}
    given |= {name: call.fields[name] for name in ("normalize", "dimensions", "route")}
    found = await call.ask("embed", call.fields["inputs"], given)
    return Reply(found.arrays[0], found.arrays[0])


async def _embed_all(call: Call) -> Reply:
    call.info("embed_all")
    found = await call.ask("embed_all", _texts(call), shortening(call))
    ends = np.cumsum(found.data["lengths"])
    return Reply(np.split(found.arrays[0], ends[:-1]), found.arrays[0])


async def _embed_sparse(call: Call) -> Reply:
    call.info("embed_sparse")
    return await call.passed_on("embed_sparse", _texts(call), shortening(call))


def _pairs_of(value: Any) -> tuple[list[Any], bool]:
    """Return what is classified, and whether it is one text: "a", ["a", "b"], or [["a"], ["a", "b"]]."""
    if isinstance(value, str):
        return [value], True
    if isinstance(value, list) and value:
        if all(isinstance(part, str) for part in value) and len(value) <= 2:
            return [value if len(value) == 2 else value[0]], True
        good = [
            isinstance(row, str)
            or (isinstance(row, list) and len(row) in (1, 2) and all(isinstance(part, str) for part in row))
            for row in value
        ]
        if all(good):
            return [row[0] if isinstance(row, list) and len(row) == 1 else row for row in value], False
    if value == []:
        return [], False
    raise RefusedError(
        'inputs: expected a string, a pair ["a", "b"], or a list of [["a"], ["a", "b"]]', "field", param="inputs"
    )


async def _predict(call: Call) -> Reply:
    items, single = _pairs_of(call.fields["inputs"])
    given = {**shortening(call), "raw": is_raw(call)}
    found = await call.ask("classify", items, given)
    rows = [
        [flagged({"score": one["score"], "label": one["label"]}, is_blank(item)) for one in row]
        for row, item in zip(found.data, items, strict=True)
    ]
    return Reply(rows[0] if single else rows)


async def _rerank(call: Call) -> Reply:
    query, texts = call.fields["query"], call.fields["texts"]
    if not texts:
        raise RefusedError("texts is empty; expected at least one", "empty", param="texts")
    given = {**shortening(call), "raw": is_raw(call)}
    found = await call.ask("rerank", [query, *texts], given, texts=len(texts))
    ranked = [(one, texts[one["index"]]) for one in found.data]
    more = call.fields["return_text"] is True
    return Reply(
        [
            flagged(
                {"index": one["index"], "score": one["score"]} | ({"text": text} if more else {}),
                is_blank(query) or is_blank(text),
            )
            for one, text in ranked
        ]
    )


async def _similarity(call: Call) -> Reply:
    return await similarity(call, call.fields["inputs"], call.fields["parameters"] or {})


async def similarity(call: Call, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> Reply:
    """Return how alike a text is to others.

    Args:
        call: the request.
        inputs: of `PAIR`.
        given: ``truncate``, ``truncation_direction``, ``prompt_name``.
    """
    call.info("similarity")
    texts = [inputs["source_sentence"], *inputs["sentences"]]
    if len(texts) == 1:
        raise RefusedError("sentences is empty; expected at least one", "empty", param="inputs")
    found = await call.ask("similarity", texts, {**shortening(call, given), **prompted(call, given)}, texts=len(texts))
    return Reply(found.data)


async def _tokenize(call: Call) -> Reply:
    call.info("tokenize")
    special = call.fields["add_special_tokens"]
    return await call.passed_on("tokenize", _texts(call), {"special": special})


async def _decode(call: Call) -> Reply:
    return await call.passed_on("decode", call.fields["ids"], {"special": call.fields["skip_special_tokens"]})


_INPUTS = Field("inputs", "inputs", "texts, or ids as they are", True)
_TEXTS = Field("inputs", "texts", "one text or several", True)

DOORS = tuple(
    Door(path, says, (*fields, MODEL), answer, group="text-embeddings-inference")
    for path, says, fields, answer in (
        (
            "/embed",
            "a vector for each text",
            (_INPUTS, NORMALIZE, TRUNCATE, DIRECTION, WINDOWS, PROMPT, ROUTE, DIMENSIONS),
            _embed,
        ),
        ("/embed_all", "a state for each token", (_TEXTS, TRUNCATE, DIRECTION, WINDOWS, PROMPT), _embed_all),
        (
            "/embed_sparse",
            "weights of words for each text",
            (_TEXTS, TRUNCATE, DIRECTION, WINDOWS, PROMPT),
            _embed_sparse,
        ),
        (
            "/predict",
            "labels with scores",
            (
                Field("inputs", "any", "a text, a pair, or a list of lists of one or two", True),
                CUT,
                DIRECTION,
                RAW,
            ),
            _predict,
        ),
        (
            "/rerank",
            "texts by how well they fit a query",
            (
                Field("query", "text", "what is looked for", True),
                Field("texts", "texts", "what may fit", True),
                CUT,
                DIRECTION,
                RAW,
                Field("return_text", "flag", "whether texts are in the answer"),
            ),
            _rerank,
        ),
        (
            "/similarity",
            "how alike a text is to others",
            (
                Field("inputs", "object", "source_sentence and sentences", True, fields=PAIR),
                Field("parameters", "object", "of the texts", fields=(TRUNCATE, DIRECTION, PROMPT)),
            ),
            _similarity,
        ),
        (
            "/tokenize",
            "tokens with their places",
            (_TEXTS, Field("add_special_tokens", "flag", "true by default"), PROMPT),
            _tokenize,
        ),
        (
            "/decode",
            "texts of ids",
            (
                Field("ids", "rows", "ids of one text or several", True),
                Field("skip_special_tokens", "flag", "true by default"),
            ),
            _decode,
        ),
    )
)
"""Paths of text-embeddings-inference."""
