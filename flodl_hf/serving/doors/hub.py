"""The Hub's inference interface at the root: ``inputs`` and ``parameters``, answered as transformers' pipelines are.

What is meant follows from the model's head, as at endpoints of the Hub; `huggingface_hub.InferenceClient` speaks it.
"""

from __future__ import annotations

from typing import Any

from flodl.errors import shown
from flodl_hf.serving.doors.door import MODEL, Call, Door, Reply, shortening
from flodl_hf.serving.doors.fields import KINDS, Field, not_a_field, read
from flodl_hf.serving.doors.tei import (
    CUT,
    DIMENSIONS,
    DIRECTION,
    NORMALIZE,
    PAIR,
    PROMPT,
    ROUTE,
    TRUNCATE,
    WINDOWS,
    prompted,
    similarity,
)
from flodl_hf.serving.faults import RefusedError

__all__ = ["DOORS"]

_SIMILARITY = (TRUNCATE, DIRECTION, PROMPT)
_VECTORS = (*_SIMILARITY, NORMALIZE, DIMENSIONS, WINDOWS, ROUTE, Field("encoding_format", "float", "float"))
_TOP = Field("top_k", "whole", "most answers of each input")
_CLASSES = (
    _TOP,
    Field("function_to_apply", "activation", "what makes scores of the head's numbers"),
    Field("threshold", "thresholds", "least score, for all or by label"),
    CUT,
    Field("truncation", "flag", "as truncate"),
    DIRECTION,
)
_ZERO_SHOT = (
    Field("candidate_labels", "labels", "the labels, for a model of inference"),
    Field("hypothesis_template", "text", "the hypothesis, with {} where the label goes"),
    Field("multi_label", "flag", "whether several labels may be true"),
)
_ENTITIES = (
    Field("aggregation_strategy", "aggregation", "what carries an entity's label; simple by default"),
    Field("ignore_labels", "texts", "labels that are left out; O by default"),
    Field("stride", "whole", "tokens that neighbouring windows share"),
)
_ANSWERS = (
    _TOP,
    Field("topk", "whole", "as top_k"),
    Field("max_answer_len", "whole", "most tokens of an answer"),
    Field("handle_impossible_answer", "flag", "whether there may be no answer"),
    Field("align_to_words", "flag", "widen answers to whole words; true by default"),
    Field("doc_stride", "whole", "tokens that neighbouring windows share"),
    Field("max_seq_len", "whole", "most tokens of a window"),
)
_MASKS = (_TOP, Field("targets", "texts", "words to choose from"))
_INERT = (
    Field("batch_size", "whole", "accepted", effect=False),
    Field("padding", "any", "accepted", effect=False),
)


def _of(kind: str, value: Any, name: str) -> Any:
    _, words, check = KINDS[kind]
    found = check(value)
    if found is None:
        raise RefusedError(f"{name} is {shown(value, 60)}; expected {words}", "field", param=name)
    return found


def _given(call: Call, takes: tuple[Field, ...], *, above: bool = False) -> dict[str, Any]:
    """Return the parameters of a request that have a value.

    Args:
        call: the request.
        takes: the parameters of the task.
        above: whether they may also be fields of the request, as clients send those of vectors.

    Raises:
        RefusedError: a parameter that the task does not have.
    """
    known = [field.name for field in (*takes, *_INERT)]
    fields = {field.name: call.fields[field.name] for field in _VECTORS}
    given = {name: value for name, value in (call.fields["parameters"] or {}).items() if value is not None}
    beside = {name: value for name, value in fields.items() if value is not None}
    for path, names in (("parameters.", given), ("", beside)):
        for name in names:
            if name not in known or not (path or above):
                raise not_a_field(path + name, [path + one for one in known])
    return given | beside


async def _root(call: Call) -> Reply:
    inputs = call.fields["inputs"]
    if isinstance(inputs, dict) and "source_sentence" in inputs:
        return await similarity(call, read(PAIR, inputs, most=call.house.settings.max_inputs, path="inputs."),
                                _given(call, _SIMILARITY, above=True))  # fmt: skip
    single = not isinstance(inputs, list)
    answered = await _HEADS[call.info()["head"]](call, inputs, single)
    return answered if isinstance(answered, Reply) else Reply(answered)


async def _vectors(call: Call, inputs: Any, single: bool) -> Reply:
    given = _given(call, _VECTORS, above=True)
    options = {**shortening(call, given), **prompted(call, given)}
    options |= {name: given.get(name) for name in ("normalize", "dimensions", "route")}
    found = await call.ask("embed", _of("inputs", inputs, "inputs"), options)
    return Reply(found.arrays[0], found.arrays[0])


async def _classes(call: Call, inputs: Any, single: bool) -> Any:
    if (call.fields["parameters"] or {}).get("candidate_labels") is not None:
        given = _given(call, _ZERO_SHOT)
        options: dict[str, Any] = {"labels": given["candidate_labels"]}
        if "hypothesis_template" in given:
            options["template"] = given["hypothesis_template"]
        options["multi_label"] = given.get("multi_label") is True
        found = await call.ask("zero_shot", _of("texts", inputs, "inputs"), options)
        rows = [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]
        return rows[0] if single else rows
    items = _of("pairs", inputs, "inputs")
    given = _given(call, _CLASSES)
    options = {name: given.get(name) for name in ("function_to_apply", "top_k", "threshold")} | shortening(call, given)
    if options["truncate"] is None and given.get("truncation"):
        options["truncate"] = True
    found = await call.ask("classify", items, options)
    return [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]


async def _entities(call: Call, inputs: Any, single: bool) -> Any:
    given = _given(call, _ENTITIES)
    strategy = given.get("aggregation_strategy", "simple")
    options = {"aggregation": strategy, "ignore_labels": given.get("ignore_labels"), "stride": given.get("stride")}
    found = await call.ask("entities", _of("texts", inputs, "inputs"), options)
    name = "entity" if strategy == "none" else "entity_group"
    rows = [
        [{name: one["label"], **{n: one[n] for n in ("score", "word", "start", "end")}} for one in row]
        for row in found.data
    ]
    return rows[0] if single else rows


async def _answers(call: Call, inputs: Any, single: bool) -> Any:
    given = _given(call, _ANSWERS)
    top = given.get("top_k", given.get("topk"))
    options = {
        "top_k": top,
        "max_answer_length": given.get("max_answer_len"),
        "no_answer": given.get("handle_impossible_answer"),
        "whole_words": given.get("align_to_words"),
        "stride": given.get("doc_stride"),
        "window_tokens": given.get("max_seq_len"),
    }
    found = await call.ask("answer", _of("questions", inputs, "inputs"), options)
    rows = [
        [{"answer": one["text"], **{n: one[n] for n in ("score", "start", "end")}} for one in row] for row in found.data
    ]
    if top in (None, 1):
        return (rows[0][0] if rows[0] else {"answer": "", "score": 0.0, "start": 0, "end": 0}) if single else rows
    return rows[0] if single else rows


async def _masks(call: Call, inputs: Any, single: bool) -> Any:
    given = _given(call, _MASKS)
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

_PARAMETERS = {
    field.name: field
    for table in (_VECTORS, _CLASSES, _ZERO_SHOT, _ENTITIES, _ANSWERS, _MASKS, _INERT)
    for field in table
}
_ROOT = (
    Field("inputs", "any", "what the model's head takes", True),
    Field(
        "parameters", "object", "those of the task, as of transformers' pipelines", fields=tuple(_PARAMETERS.values())
    ),
    *_VECTORS,
    Field("options", "object", "accepted", effect=False),
    MODEL,
)

DOORS = (Door("/", "what the model's head gives", _ROOT, _root, group="Hugging Face Inference"),)
"""The root; with several models, ``/models/NAME`` is the root of each."""
