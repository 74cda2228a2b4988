"""This library's routes for heads without an API convention: labels, entities, answers, masks, zero-shot, tokens.

Every response contains the model, a result for each input, and token counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.fields import Field
from flodl_hf.serving.routes.route import MODEL, Request, Response, Route, add_route, is_blank, text_options
from flodl_hf.serving.routes.tei import DIRECTION

READ_ALL = (
    Field("long_texts", "long texts in windows", "error refuses texts longer than one window; default: windows"),
    Field("truncate", "flag", "false is an alias of long_texts error"),
)


def _add(task: str, name: str, summary: str, *fields: Field) -> None:
    """Add the route of a task, which has its fields as options; ``name`` is the key of results."""

    @add_route(ROUTES, f"/v1/{task.replace('_', '-')}", summary, *fields, MODEL)
    async def answer(request: Request) -> Response:
        items = request.fields["inputs"]
        options = {**request.fields, "inputs": None, "long_texts": None, "truncate": _truncate(request.fields)}
        if task == "classify":
            options |= text_options(options) | {"function_to_apply": options["activation"]}
        elif task == "zero_shot":
            _check_labels(request)
        found = await request.ask(task, items, options)
        if task == "late_interaction":
            rows: Any = np.split(found.arrays[0], np.cumsum(found.data["lengths"])[:-1])
        else:
            rows = found.data
        # An answer is empty if its context is.
        texts = [context for _, context in items] if task == "answer" else items
        results = [{name: row, "empty": is_blank(text)} for row, text in zip(rows, texts, strict=True)]
        return Response({"model": request.model, "results": results, "usage": request.usage()})


def _truncate(fields: Mapping[str, Any]) -> bool | None:
    """Return the option ``truncate`` of a task: True, False (long texts are refused), or None (its default)."""
    long_texts, truncate = fields.get("long_texts"), fields.get("truncate")
    if long_texts is None:
        return truncate
    if truncate is not None:
        raise RefusedError("found long_texts and truncate, expected only long_texts", "field", param="truncate")
    return {"truncate": True, "error": False}.get(long_texts)


def _check_labels(request: Request) -> None:
    """Refuse a request without labels, or with too many pairs of texts and labels."""
    items, labels, most = request.fields["inputs"], request.fields["labels"], request.state.settings.max_inputs
    if not labels:
        raise RefusedError("labels is empty, expected at least one", "empty", param="labels")
    if (pairs := len(items) * len(labels)) > most:
        raise RefusedError(
            f"{len(items)} inputs with {len(labels)} labels are {pairs} pairs, expected at most {most} in a request",
            "limit",
        )


_TEXTS = Field("inputs", "texts", "one text or several", True)
_TOP = Field("top_k", "whole", "maximum number of results of each input")

ROUTES: list[Route] = []
"""This library's own routes."""

_add(
    "classify", "labels", "labels of texts and pairs, best first",
    Field("inputs", "pairs", "one text, or a list of texts and pairs", True),
    _TOP,
    Field("threshold", "thresholds", "minimum score, for all labels or by label"),
    Field("activation", "activation", "function from the head's outputs to scores"),
    Field("long_texts", "long texts", "windows, truncate or error; default: windows"),
    Field("truncate", "flag", "alias: true of long_texts truncate, false of error"),
    DIRECTION,
)  # fmt: skip
_add(
    "entities", "entities", "entities of texts, with character offsets", _TEXTS,
    Field("aggregation", "aggregation", "token that determines an entity's label; default: first"),
    Field("ignore_labels", "texts", "labels to omit; default: O"),
    Field("constrained", "flag", "decode the best sequence that the tag scheme allows"),
    *READ_ALL,
)  # fmt: skip
_add(
    "answer", "answers", "answers to questions, best first, with offsets in the context",
    Field("inputs", "questions", "one or several questions with contexts", True),
    _TOP,
    Field("max_answer_length", "whole", "maximum tokens of an answer"),
    Field("no_answer", "flag", "allow a result without an answer"),
    *READ_ALL,
)  # fmt: skip
_add(
    "fill_mask",
    "masks",
    "words for the masks of texts",
    _TEXTS,
    _TOP,
    Field("targets", "texts", "words to choose from"),
)
_add(
    "zero_shot", "labels", "scores of user-defined labels, by an NLI model", _TEXTS,
    Field("labels", "texts", "the labels", True),
    Field("template", "text", "hypothesis, with {} for the label"),
    Field("multi_label", "flag", "score labels independently"),
    *READ_ALL,
)  # fmt: skip
_add(
    "late_interaction", "vectors", "a vector for each token, for late interaction", _TEXTS,
    Field("query", "flag", "whether the texts are queries"),
    Field("long_texts", "long tokens", "error refuses texts that would be truncated; default: truncate"),
    Field("truncate", "flag", "false is an alias of long_texts error"),
)  # fmt: skip
