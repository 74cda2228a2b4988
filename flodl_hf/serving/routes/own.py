"""This library's routes for heads without an API convention: labels, entities, answers, masks, zero-shot, tokens.

Every response contains the model, a result for each input, and token counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.fields import Field
from flodl_hf.serving.routes.route import MODEL, Request, Response, Route, is_blank, truncation_options
from flodl_hf.serving.routes.tei import CUT, DIRECTION

READ_ALL = Field("truncate", "flag", "false refuses texts longer than one window; default: they are read in windows")


def _whole(request: Request, name: str, rows: list[Any], items: list[Any]) -> Response:
    results = [{name: row, "empty": is_blank(item)} for row, item in zip(rows, items, strict=True)]
    return Response({"model": request.model, "results": results, "usage": request.usage()})


def _chosen(request: Request, *names: str) -> dict[str, Any]:
    return {name: request.fields[name] for name in names}


async def _classify(request: Request) -> Response:
    items = request.fields["inputs"]
    given = {**_chosen(request, "top_k", "threshold"), **truncation_options(request)}
    found = await request.ask("classify", items, {**given, "function_to_apply": request.fields["activation"]})
    return _whole(request, "labels", found.data, items)


async def _entities(request: Request) -> Response:
    items = request.fields["inputs"]
    given = _chosen(request, "aggregation", "ignore_labels", "constrained", "truncate")
    found = await request.ask("entities", items, given)
    return _whole(request, "entities", found.data, items)


async def _answer(request: Request) -> Response:
    items = request.fields["inputs"]
    given = _chosen(request, "top_k", "max_answer_length", "no_answer", "truncate")
    found = await request.ask("answer", items, given, texts=len(items))
    return _whole(request, "answers", found.data, [context for _, context in items])


async def _fill_mask(request: Request) -> Response:
    items = request.fields["inputs"]
    found = await request.ask("fill_mask", items, _chosen(request, "top_k", "targets"))
    return _whole(request, "masks", found.data, items)


async def _zero_shot(request: Request) -> Response:
    items, labels = request.fields["inputs"], request.fields["labels"]
    if not labels:
        raise RefusedError("labels is empty, expected at least one", "empty", param="labels")
    if len(items) * len(labels) > request.state.settings.max_inputs:
        raise RefusedError(
            f"{len(items)} inputs with {len(labels)} labels are {len(items) * len(labels)} pairs, expected at most "
            f"{request.state.settings.max_inputs} in a request",
            "limit",
        )
    given = _chosen(request, "labels", "template", "multi_label", "truncate")
    found = await request.ask("zero_shot", items, given)
    return _whole(request, "labels", found.data, items)


async def _late_interaction(request: Request) -> Response:
    items = request.fields["inputs"]
    found = await request.ask("late_interaction", items, _chosen(request, "query", "truncate"))
    rows = np.split(found.arrays[0], np.cumsum(found.data["lengths"])[:-1])
    return _whole(request, "vectors", rows, items)


_TEXTS = Field("inputs", "texts", "one text or several", True)
_TOP = Field("top_k", "whole", "maximum number of results of each input")

ROUTES = tuple(
    Route(path, summary, (*fields, MODEL), answer)
    for path, summary, fields, answer in (
        (
            "/v1/classify",
            "labels of texts and pairs, best first",
            (
                Field("inputs", "pairs", "one text, or a list of texts and pairs", True),
                _TOP,
                Field("threshold", "thresholds", "minimum score, for all labels or by label"),
                Field("activation", "activation", "function from the head's outputs to scores"),
                CUT,
                DIRECTION,
            ),
            _classify,
        ),
        (
            "/v1/entities",
            "entities of texts, with character offsets",
            (
                _TEXTS,
                Field("aggregation", "aggregation", "token that determines an entity's label; default: first"),
                Field("ignore_labels", "texts", "labels to omit; default: O"),
                Field("constrained", "flag", "decode the best sequence that the tag scheme allows"),
                READ_ALL,
            ),
            _entities,
        ),
        (
            "/v1/answer",
            "answers to questions, best first, with offsets in the context",
            (
                Field("inputs", "questions", "one or several questions with contexts", True),
                _TOP,
                Field("max_answer_length", "whole", "maximum tokens of an answer"),
                Field("no_answer", "flag", "allow a result without an answer"),
                READ_ALL,
            ),
            _answer,
        ),
        (
            "/v1/fill-mask",
            "words for the masks of texts",
            (_TEXTS, _TOP, Field("targets", "texts", "words to choose from")),
            _fill_mask,
        ),
        (
            "/v1/zero-shot",
            "scores of user-defined labels, by an NLI model",
            (
                _TEXTS,
                Field("labels", "texts", "the labels", True),
                Field("template", "text", "hypothesis, with {} for the label"),
                Field("multi_label", "flag", "score labels independently"),
                READ_ALL,
            ),
            _zero_shot,
        ),
        (
            "/v1/late-interaction",
            "a vector for each token, for late interaction",
            (
                _TEXTS,
                Field("query", "flag", "whether the texts are queries"),
                Field("truncate", "flag", "false refuses texts that would be truncated"),
            ),
            _late_interaction,
        ),
    )
)
"""This library's own routes."""
