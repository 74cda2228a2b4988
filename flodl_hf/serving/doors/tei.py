"""The doors of text-embeddings-inference: paths, fields and answers as it has them.

Where it computes otherwise, ours stay exact: texts that are too long are read in windows unless ``truncate`` says
otherwise, and GELU is what the checkpoint names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flodl.errors import shown
from flodl_hf.serving.doors.door import MODEL, Call, Door, Reply
from flodl_hf.serving.doors.fields import Field
from flodl_hf.serving.faults import RefusedError

__all__ = ["DOORS", "cutting", "prompted"]

TRUNCATE = Field("truncate", "flag", "true cuts long texts, false refuses them; without it they are read in windows")
DIRECTION = Field("truncation_direction", "direction", "which end stays when cut; only right is cut off")
PROMPT = Field("prompt_name", "text", "a prompt of the model's folder, put before each text")
ROUTE = Field("route", "text", "the way of these texts, where the folder has several: query, document")
NORMALIZE = Field("normalize", "flag", "scale vectors to length 1; by default as the folder says")
RAW = Field("raw_scores", "flag", "scores as they leave the head")


def cutting(call: Call) -> dict[str, Any]:
    """Return how long texts are read.

    Raises:
        RefusedError: they are to be cut at their beginning.
    """
    direction = call.fields.get("truncation_direction")
    if direction in ("left", "Left") and call.fields["truncate"]:
        raise RefusedError(
            "truncation_direction is left; texts are cut at their end only. Leave truncate out to have all read.",
            "field",
            param="truncation_direction",
        )
    return {"truncate": call.fields["truncate"]}


def prompted(call: Call) -> dict[str, Any]:
    """Return the prompt that was asked for, by its name.

    Raises:
        RefusedError: the model has no such prompt.
    """
    name = call.fields.get("prompt_name")
    if name is None:
        return {}
    prompts = call.house.workers.models[call.model]["prompts"]
    if name not in prompts:
        have = ", ".join(prompts) or "none, as the model has none"
        raise RefusedError(f"prompt_name is {shown(name, 60)}; expected one of {have}", "field", param="prompt_name")
    return {"prompt": name}


def _texts(call: Call) -> list[str]:
    """Return texts with the prompt that was asked for before each."""
    texts, found = call.fields["inputs"], prompted(call)
    if not found:
        return texts
    before = call.house.workers.models[call.model]["prompts"][found["prompt"]]
    return [before + text for text in texts]


async def _embed(call: Call) -> Reply:
    call.info("embed")
    given = {**cutting(call), **prompted(call)}
    given |= {name: call.fields[name] for name in ("normalize", "dimensions", "route")}
    found = await call.ask("embed", call.fields["inputs"], given)
    return Reply(found.arrays[0], found.arrays[0])


async def _embed_all(call: Call) -> Reply:
    call.info("embed_all")
    found = await call.ask("embed_all", _texts(call), cutting(call))
    ends = np.cumsum(found.data["lengths"])
    return Reply(np.split(found.arrays[0], ends[:-1]), found.arrays[0])


async def _embed_sparse(call: Call) -> Reply:
    call.info("embed_sparse")
    return await call.passed_on("embed_sparse", _texts(call), cutting(call))


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
    given = {**cutting(call), "raw": call.fields["raw_scores"]}
    found = await call.ask("classify", items, given)
    rows = [[{"score": one["score"], "label": one["label"]} for one in row] for row in found.data]
    return Reply(rows[0] if single else rows)


async def _rerank(call: Call) -> Reply:
    texts = call.fields["texts"]
    if not texts:
        raise RefusedError("texts is empty; expected at least one", "empty", param="texts")
    given = {**cutting(call), "raw": call.fields["raw_scores"]}
    found = await call.ask("rerank", [call.fields["query"], *texts], given, texts=len(texts))
    more = {"text": texts} if call.fields["return_text"] else {}
    return Reply(
        [
            {"index": one["index"], "score": one["score"], **{name: held[one["index"]] for name, held in more.items()}}
            for one in found.data
        ]
    )


async def _similarity(call: Call) -> Reply:
    given, parameters = call.fields["inputs"], call.fields["parameters"] or {}
    source, sentences = given.get("source_sentence"), given.get("sentences")
    right = isinstance(source, str) and isinstance(sentences, list) and set(map(type, sentences)) <= {str}
    if not right:
        raise RefusedError(
            'inputs: expected {"source_sentence": "...", "sentences": ["..."]}', "field", param="inputs"
        )  # fmt: skip
    if not sentences:
        raise RefusedError("sentences is empty; expected at least one", "empty", param="inputs")
    truncate = parameters.get("truncate")
    options = {"truncate": truncate if isinstance(truncate, bool) else None}
    found = await call.ask("similarity", [source, *sentences], options, texts=1 + len(sentences))
    return Reply(found.data)


async def _tokenize(call: Call) -> Reply:
    call.info("tokenize")
    special = call.fields["add_special_tokens"]
    return await call.passed_on("tokenize", _texts(call), {"special": special})


async def _decode(call: Call) -> Reply:
    return await call.passed_on("decode", call.fields["ids"], {"special": call.fields["skip_special_tokens"]})


_INPUTS = Field("inputs", "inputs", "texts, or ids as they are", True)
_TEXTS = Field("inputs", "texts", "one text or several", True)
_DIMENSIONS = Field("dimensions", "whole", "keep so many features")

DOORS = tuple(
    Door(path, says, (*fields, MODEL), answer, group="text-embeddings-inference")
    for path, says, fields, answer in (
        (
            "/embed",
            "a vector for each text",
            (_INPUTS, NORMALIZE, TRUNCATE, DIRECTION, PROMPT, ROUTE, _DIMENSIONS),
            _embed,
        ),
        ("/embed_all", "a state for each token", (_TEXTS, TRUNCATE, DIRECTION, PROMPT), _embed_all),
        ("/embed_sparse", "weights of words for each text", (_TEXTS, TRUNCATE, DIRECTION, PROMPT), _embed_sparse),
        (
            "/predict",
            "labels with scores",
            (
                Field("inputs", "any", "a text, a pair, or a list of lists of one or two", True),
                TRUNCATE,
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
                TRUNCATE,
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
                Field("inputs", "object", "source_sentence and sentences", True),
                Field("parameters", "object", "truncate and others"),
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
