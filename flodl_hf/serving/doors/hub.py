"""The Hub's inference interface at the root: ``inputs`` and ``parameters``, answered as transformers' pipelines are.

What is meant follows from the model's head, as at endpoints of the Hub; `huggingface_hub.InferenceClient` speaks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flodl.errors import shown
from flodl_hf.serving.doors.door import MODEL, Call, Door, Reply
from flodl_hf.serving.doors.fields import KINDS, Field
from flodl_hf.serving.faults import RefusedError

__all__ = ["DOORS"]


_PARAMETERS = {
    "top_k": "whole",
    "function_to_apply": "activation",
    "hypothesis_template": "text",
    "multi_label": "flag",
    "aggregation_strategy": "aggregation",
    "ignore_labels": "texts",
    "max_answer_len": "whole",
    "handle_impossible_answer": "flag",
    "targets": "texts",
    "normalize": "flag",
    "truncate": "flag",
}
"""What each of the parameters that are read is; others are passed over."""


def _of(kind: str, value: Any, name: str) -> Any:
    _, words, check = KINDS[kind]
    found = check(value)
    if found is None:
        raise RefusedError(f"{name} is {shown(value, 60)}; expected {words}", "field", param=name)
    return found


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are there, each checked."""
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        word = name == "function_to_apply" and isinstance(value, str)
        found[name] = _of(_PARAMETERS[name], value.lower() if word else value, name) if name in _PARAMETERS else value
    return found


async def _root(call: Call) -> Reply:
    inputs, given = call.fields["inputs"], _parameters(call.fields["parameters"] or {})
    if isinstance(inputs, dict) and "source_sentence" in inputs:
        sentences = _of("texts", inputs.get("sentences"), "sentences")
        found = await call.ask("similarity", [_of("text", inputs["source_sentence"], "source_sentence"), *sentences])
        return Reply(found.data)
    head = call.info()["head"]
    single = not isinstance(inputs, list)
    answered = await _HEADS[head](call, inputs, given, single)
    return answered if isinstance(answered, Reply) else Reply(answered)


async def _vectors(call: Call, inputs: Any, given: dict[str, Any], single: bool) -> Reply:
    normalize = call.fields["normalize"] if call.fields["normalize"] is not None else given.get("normalize")
    truncate = call.fields["truncate"] if call.fields["truncate"] is not None else given.get("truncate")
    options = {"normalize": normalize, "truncate": truncate, "dimensions": call.fields["dimensions"]}
    found = await call.ask("embed", _of("inputs", inputs, "inputs"), options)
    return Reply(found.arrays[0], found.arrays[0])


async def _classes(call: Call, inputs: Any, given: dict[str, Any], single: bool) -> Any:
    if "candidate_labels" in given:
        labels = given["candidate_labels"]
        labels = [label.strip() for label in labels.split(",")] if isinstance(labels, str) else labels
        options: dict[str, Any] = {"labels": _of("texts", labels, "candidate_labels")}
        if "hypothesis_template" in given:
            options["template"] = given["hypothesis_template"]
        options["multi_label"] = given.get("multi_label") is True
        found = await call.ask("zero_shot", _of("texts", inputs, "inputs"), options)
        rows = [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]
        return rows[0] if single else rows
    items = _of("pairs", inputs, "inputs")
    options = {"function_to_apply": given.get("function_to_apply"), "top_k": given.get("top_k")}
    found = await call.ask("classify", items, options)
    return [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]


async def _entities(call: Call, inputs: Any, given: dict[str, Any], single: bool) -> Any:
    strategy = given.get("aggregation_strategy", "simple")
    options = {"aggregation": strategy, "ignore_labels": given.get("ignore_labels")}
    found = await call.ask("entities", _of("texts", inputs, "inputs"), options)
    name = "entity" if strategy == "none" else "entity_group"
    rows = [
        [{name: one["label"], **{n: one[n] for n in ("score", "word", "start", "end")}} for one in row]
        for row in found.data
    ]
    return rows[0] if single else rows


async def _answers(call: Call, inputs: Any, given: dict[str, Any], single: bool) -> Any:
    options = {
        "top_k": given.get("top_k"),
        "max_answer_length": given.get("max_answer_len"),
        "no_answer": given.get("handle_impossible_answer"),
    }
    found = await call.ask("answer", _of("questions", inputs, "inputs"), options)
    rows = [
        [{"answer": one["text"], **{n: one[n] for n in ("score", "start", "end")}} for one in row] for row in found.data
    ]
    if given.get("top_k", 1) == 1:
        return (rows[0][0] if rows[0] else {"answer": "", "score": 0.0, "start": 0, "end": 0}) if single else rows
    return rows[0] if single else rows


async def _masks(call: Call, inputs: Any, given: dict[str, Any], single: bool) -> Any:
    options = {"top_k": given.get("top_k"), "targets": given.get("targets")}
    found = await call.ask("fill_mask", _of("texts", inputs, "inputs"), options)
    rows = [
        [
            [
                {
                    "score": one["score"],
                    "token": one["token_ids"][0],
                    "token_str": one["token"],
                    "sequence": one["sequence"],
                }
                for one in mask
            ]
            for mask in masks
        ]
        for masks in found.data
    ]
    plain = [masks[0] if len(masks) == 1 else masks for masks in rows]
    return plain[0] if single else plain


_HEADS = {
    "base": _vectors,
    "sequence_classification": _classes,
    "token_classification": _entities,
    "question_answering": _answers,
    "masked_lm": _masks,
}

_ROOT = (
    Field("inputs", "any", "what the model's head takes", True),
    Field("parameters", "object", "its options, under the names of transformers' pipelines"),
    Field("normalize", "flag", "of vectors"),
    Field("truncate", "flag", "of vectors"),
    Field("dimensions", "whole", "of vectors"),
    MODEL,
)

DOORS = (Door("/", "what the model's head gives", _ROOT, _root, group="Hugging Face Inference"),)
"""The root; with several models, ``/models/NAME`` is the root of each."""
