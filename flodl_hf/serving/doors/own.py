"""Our doors, for the heads that no convention has: classes, entities, answers, masks, labels of one's own.

All answer alike: the model, a result for each input, and what it came to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flodl_hf.serving.doors.door import MODEL, Call, Door, Reply, is_blank, shortening
from flodl_hf.serving.doors.fields import Field
from flodl_hf.serving.doors.tei import CUT, DIRECTION
from flodl_hf.serving.faults import RefusedError

__all__ = ["DOORS", "READ_ALL"]

READ_ALL = Field(
    "truncate", "flag", "false refuses texts that do not fit into one window; else they are read in windows"
)


def _whole(call: Call, name: str, rows: list[Any], items: list[Any]) -> Reply:
    results = [{name: row, "empty": is_blank(item)} for row, item in zip(rows, items, strict=True)]
    return Reply({"model": call.model, "results": results, "usage": call.usage()})


def _chosen(call: Call, *names: str) -> dict[str, Any]:
    return {name: call.fields[name] for name in names}


async def _classify(call: Call) -> Reply:
    items = call.fields["inputs"]
    given = {**_chosen(call, "top_k", "threshold"), **shortening(call)}
    found = await call.ask("classify", items, {**given, "function_to_apply": call.fields["activation"]})
    return _whole(call, "labels", found.data, items)


async def _entities(call: Call) -> Reply:
    items = call.fields["inputs"]
    given = _chosen(call, "aggregation", "ignore_labels", "constrained", "truncate")
    found = await call.ask("entities", items, given)
    return _whole(call, "entities", found.data, items)


async def _answer(call: Call) -> Reply:
    items = call.fields["inputs"]
    given = _chosen(call, "top_k", "max_answer_length", "no_answer", "truncate")
    found = await call.ask("answer", items, given, texts=len(items))
    return _whole(call, "answers", found.data, [context for _, context in items])


async def _fill_mask(call: Call) -> Reply:
    items = call.fields["inputs"]
    found = await call.ask("fill_mask", items, _chosen(call, "top_k", "targets"))
    return _whole(call, "masks", found.data, items)


async def _zero_shot(call: Call) -> Reply:
    items, labels = call.fields["inputs"], call.fields["labels"]
    if not labels:
        raise RefusedError("labels is empty; expected at least one", "empty", param="labels")
    if len(items) * len(labels) > call.house.settings.max_inputs:
        raise RefusedError(
            f"{len(items)} inputs with {len(labels)} labels are {len(items) * len(labels)} pairs; expected at most "
            f"{call.house.settings.max_inputs} in a request",
            "limit",
        )
    given = _chosen(call, "labels", "template", "multi_label", "truncate")
    found = await call.ask("zero_shot", items, given)
    return _whole(call, "labels", found.data, items)


async def _late_interaction(call: Call) -> Reply:
    items = call.fields["inputs"]
    found = await call.ask("late_interaction", items, _chosen(call, "query", "truncate"))
    rows = np.split(found.arrays[0], np.cumsum(found.data["lengths"])[:-1])
    return _whole(call, "vectors", rows, items)


_TEXTS = Field("inputs", "texts", "one text or several", True)
_TOP = Field("top_k", "whole", "most of each input")

DOORS = tuple(
    Door(path, says, (*fields, MODEL), answer)
    for path, says, fields, answer in (
        (
            "/v1/classify",
            "labels of texts and pairs, best first",
            (
                Field("inputs", "pairs", "one text, or a list of texts and pairs", True),
                _TOP,
                Field("threshold", "thresholds", "least score, for all or by label"),
                Field("activation", "activation", "what makes scores of the head's numbers"),
                CUT,
                DIRECTION,
            ),
            _classify,
        ),
        (
            "/v1/entities",
            "entities of texts, with their places in characters",
            (
                _TEXTS,
                Field("aggregation", "aggregation", "what carries an entity's label; first by default"),
                Field("ignore_labels", "texts", "labels that are left out; O by default"),
                Field("constrained", "flag", "the best sequence that the tag scheme allows"),
                READ_ALL,
            ),
            _entities,
        ),
        (
            "/v1/answer",
            "answers to questions, best first, with their places in the context",
            (
                Field("inputs", "questions", "question and context, one or several", True),
                _TOP,
                Field("max_answer_length", "whole", "most tokens of an answer"),
                Field("no_answer", "flag", "whether there may be no answer"),
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
            "labels of one's own, by a model of inference",
            (
                _TEXTS,
                Field("labels", "texts", "the labels", True),
                Field("template", "text", "the hypothesis, with {} where the label goes"),
                Field("multi_label", "flag", "whether several labels may be true"),
                READ_ALL,
            ),
            _zero_shot,
        ),
        (
            "/v1/late-interaction",
            "a vector for each token, to be compared late; texts are cut as the folder says",
            (
                _TEXTS,
                Field("query", "flag", "whether texts are what is looked for"),
                Field("truncate", "flag", "false refuses texts that would be cut"),
            ),
            _late_interaction,
        ),
    )
)
"""Our own paths."""
