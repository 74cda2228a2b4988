"""Hugging Face Inference API at the root, and this library's own routes.

At the root, the model's head determines the task, as at endpoints of the Hub: ``inputs`` and ``parameters``, with
results like transformers' pipelines. `huggingface_hub.InferenceClient` uses this API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flodl_hf.serving.responses import RefusedError, Response
from flodl_hf.serving.routes.route import Field, Request, checked, is_blank, not_a_field, read, route
from flodl_hf.serving.routes.tei import (
    CUT,
    DIMENSIONS,
    DIRECTION,
    MODEL,
    NORMALIZE,
    PAIR,
    PROMPT,
    RANKED,
    RAW,
    ROUTE,
    TRUNCATE,
    WINDOWS,
    embedded,
    rank_texts,
    similarity,
    text_options,
    token_states,
)

_SIMILARITY = (TRUNCATE, DIRECTION, PROMPT)
_VECTORS = (*_SIMILARITY, NORMALIZE, DIMENSIONS, WINDOWS, ROUTE, Field("encoding_format", "float", "float"))
_TOP = Field("top_k", "whole", "maximum number of results of each input")
_CLASSES = (
    _TOP,
    Field("function_to_apply", "activation", "function from the head's outputs to scores"),
    Field("threshold", "thresholds", "minimum score, for all labels or by label"),
    CUT,
    Field("truncation", "flag", "alias of truncate"),
    DIRECTION,
)
_ZERO_SHOT = (
    Field("candidate_labels", "labels", "labels of zero-shot classification, for an NLI model"),
    Field("hypothesis_template", "text", "hypothesis, with {} for the label"),
    Field("multi_label", "flag", "score labels independently"),
)
_ENTITIES = (
    Field("aggregation_strategy", "aggregation", "token that determines an entity's label; default: simple"),
    Field("ignore_labels", "texts", "labels to omit; default: O"),
    Field("stride", "whole", "tokens that consecutive windows share"),
)
_ANSWERS = (
    _TOP,
    Field("topk", "whole", "alias of top_k"),
    Field("max_answer_len", "whole", "maximum tokens of an answer"),
    Field("handle_impossible_answer", "flag", "allow a result without an answer"),
    Field("align_to_words", "flag", "extend answers to whole words; default: true"),
    Field("doc_stride", "whole", "tokens that consecutive windows share"),
    Field("max_seq_len", "whole", "maximum tokens of a window"),
)
_MASKS = (_TOP, Field("targets", "texts", "words to choose from"))
_INERT = (
    Field("batch_size", "whole", "accepted", effect=False),
    Field("padding", "any", "accepted", effect=False),
)


def _given(request: Request, takes: tuple[Field, ...], *, above: bool = False) -> dict[str, Any]:
    """Return the parameters of a request that have a value.

    Args:
        request: the request.
        takes: the parameters of the task.
        above: whether they may also be top-level fields, as clients send them for vectors.

    Raises:
        RefusedError: the task has no such parameter.
    """
    known = [field.name for field in (*takes, *_INERT)]
    fields = {field.name: request.fields[field.name] for field in (*_VECTORS, *RANKED)}
    given = {name: value for name, value in (request.fields["parameters"] or {}).items() if value is not None}
    beside = {name: value for name, value in fields.items() if value is not None}
    for path, names in (("parameters.", given), ("", beside)):
        for name in names:
            if name not in known or not (path or above):
                raise not_a_field(path + name, [path + one for one in known])
    return given | beside


_PARAMETERS = {
    field.name: field
    for table in (_VECTORS, _CLASSES, _ZERO_SHOT, _ENTITIES, _ANSWERS, _MASKS, _INERT)
    for field in table
}
_ROOT = (
    Field("inputs", "any", "input of the model's head; for a ranking, query and texts instead"),
    Field("parameters", "object", "parameters of the task, as in transformers' pipelines",
          fields=tuple(_PARAMETERS.values())),
    *_VECTORS,
    *RANKED,
    Field("options", "object", "accepted", effect=False),
    MODEL,
)  # fmt: skip


@route("/invocations", "result of the model's head", *_ROOT, group="Amazon SageMaker")
@route("/", "result of the model's head", *_ROOT, group="Hugging Face Inference")
async def _root(request: Request) -> Response:
    inputs = request.fields["inputs"]
    if request.fields["query"] is not None:
        return await rank_texts(request)
    if inputs is None:
        raise RefusedError("inputs is missing, expected the input of the model's head", "field", param="inputs")
    if isinstance(inputs, dict) and "source_sentence" in inputs:
        given = read(PAIR, inputs, most=request.state.settings.max_inputs, path="inputs.")
        return await similarity(request, given, _given(request, _SIMILARITY, above=True))
    head = request.info()["head"]
    if head == "base":
        given = _given(request, _VECTORS, above=True)
        return await embedded(request, checked("inputs", inputs, "inputs"), given)
    zero_shot = (request.fields["parameters"] or {}).get("candidate_labels") is not None
    if head == "sequence_classification" and not zero_shot:
        return Response(await _classes(request, inputs))
    single = not isinstance(inputs, list)
    rows = await (_labels if zero_shot and head == "sequence_classification" else _HEADS[head])(request, inputs)
    return Response(rows[0] if single else rows)


async def _classes(request: Request, inputs: Any) -> Any:
    items = checked("pairs", inputs, "inputs")
    given = _given(request, (*_CLASSES, RAW), above=True)
    options = {**given, **text_options(given)}
    if options["truncate"] is None and given.get("truncation"):
        options["truncate"] = True
    found = await request.ask("classify", items, options)
    return [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]


async def _labels(request: Request, inputs: Any) -> Any:
    given = _given(request, _ZERO_SHOT)
    options = {"labels": given["candidate_labels"], "template": given.get("hypothesis_template")}
    options["multi_label"] = given.get("multi_label") is True
    found = await request.ask("zero_shot", checked("texts", inputs, "inputs"), options)
    return [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]


async def _entities(request: Request, inputs: Any) -> Any:
    given = _given(request, _ENTITIES)
    options = {**given, "aggregation": given.get("aggregation_strategy", "simple")}
    found = await request.ask("entities", checked("texts", inputs, "inputs"), options)
    name = "entity" if options["aggregation"] == "none" else "entity_group"
    kept = ("score", "word", "start", "end")
    return [[{name: one["label"], **{part: one[part] for part in kept}} for one in row] for row in found.data]


async def _answers(request: Request, inputs: Any) -> Any:
    given = _given(request, _ANSWERS)
    options = {ours: given.get(theirs) for ours, theirs in _ANSWER_OPTIONS.items()}
    options["top_k"] = top = given.get("top_k", given.get("topk"))
    found = await request.ask("answer", checked("questions", inputs, "inputs"), options)
    kept = ("score", "start", "end")
    rows = [[{"answer": one["text"], **{part: one[part] for part in kept}} for one in row] for row in found.data]
    if isinstance(inputs, list) or top not in (None, 1):
        return rows
    return [row[0] if row else {"answer": "", "score": 0.0, "start": 0, "end": 0} for row in rows]


_ANSWER_OPTIONS = {
    "max_answer_length": "max_answer_len", "no_answer": "handle_impossible_answer", "whole_words": "align_to_words",
    "stride": "doc_stride", "window_tokens": "max_seq_len",
}  # fmt: skip


async def _masks(request: Request, inputs: Any) -> Any:
    found = await request.ask("fill_mask", checked("texts", inputs, "inputs"), _given(request, _MASKS))
    rows = []
    for masks in found.data:
        words = [
            [
                {"score": one["score"], "token": one["token_ids"][0], "token_str": one["token"],
                 "sequence": one["sequence"]}
                for one in mask
            ]
            for mask in masks
        ]  # fmt: skip
        rows.append(words[0] if len(words) == 1 else words)
    return rows


_HEADS = {"token_classification": _entities, "question_answering": _answers, "masked_lm": _masks}


@route(
    "/vertex", "results of several requests to the root",
    Field("instances", "objects", "bodies of requests to the root", True),
    Field("parameters", "object", "accepted", effect=False), group="Google Vertex AI",
)  # fmt: skip
async def _vertex(request: Request) -> Response:
    """Return the result of each instance, which is the body of a request to the root."""
    instances, found = request.fields["instances"], []
    for number, instance in enumerate(instances):
        path = f"instances[{number}]."
        request.fields = read(_ROOT, instance, most=request.state.settings.max_inputs, path=path)
        found.append((await _root(request)).data)
    return Response({"predictions": found})


# ---- own routes ----------------------------------------------------------------------------------------

_READ_ALL = (
    Field("long_texts", "long texts in windows", "error refuses texts longer than one window; default: windows"),
    Field("truncate", "flag", "false is an alias of long_texts error"),
)


def _add(task: str, name: str, summary: str, *fields: Field) -> None:
    """Add the route of a task, which has its fields as options; ``name`` is the key of results."""

    @route(f"/v1/{task.replace('_', '-')}", summary, *fields, MODEL)
    async def answer(request: Request) -> Response:
        items = request.fields["inputs"]
        options = {**request.fields, "inputs": None, "long_texts": None, "truncate": _truncate(request.fields)}
        if task == "classify":
            options |= text_options(options) | {"function_to_apply": options["activation"]}
        elif task == "zero_shot":
            # Each pair of a text and a label is one input of the model.
            pairs, most = len(items) * len(options["labels"]), request.state.settings.max_inputs
            if not options["labels"]:
                raise RefusedError("labels is empty, expected at least one", "empty", param="labels")
            if pairs > most:
                raise RefusedError(
                    f"inputs and labels are {pairs} pairs, expected at most {most} in a request", "limit"
                )
        found = await request.ask(task, items, options)
        rows: Any = token_states(found) if task == "late_interaction" else found.data
        # An answer is empty if its context is.
        texts = [context for _, context in items] if task == "answer" else items
        results = [{name: row, "empty": is_blank(text)} for row, text in zip(rows, texts, strict=True)]
        usage = {"tokens": request.tokens, "windows": request.windows, "dropped_tokens": request.dropped}
        return Response({"model": request.model, "results": results, "usage": usage})


def _truncate(fields: Mapping[str, Any]) -> bool | None:
    """Return the option ``truncate`` of a task: True, False (long texts are refused), or None (its default)."""
    long_texts, truncate = fields.get("long_texts"), fields.get("truncate")
    if long_texts is None:
        return truncate
    if truncate is not None:
        raise RefusedError("found long_texts and truncate, expected only long_texts", "field", param="truncate")
    return {"truncate": True, "error": False}.get(long_texts)


_TEXTS = Field("inputs", "texts", "one text or several", True)


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
    *_READ_ALL,
)  # fmt: skip
_add(
    "answer", "answers", "answers to questions, best first, with offsets in the context",
    Field("inputs", "questions", "one or several questions with contexts", True),
    _TOP,
    Field("max_answer_length", "whole", "maximum tokens of an answer"),
    Field("no_answer", "flag", "allow a result without an answer"),
    *_READ_ALL,
)  # fmt: skip
_add(
    "fill_mask", "masks", "words for the masks of texts", _TEXTS, _TOP,
    Field("targets", "texts", "words to choose from"),
)  # fmt: skip
_add(
    "zero_shot", "labels", "scores of user-defined labels, by an NLI model", _TEXTS,
    Field("labels", "texts", "the labels", True),
    Field("template", "text", "hypothesis, with {} for the label"),
    Field("multi_label", "flag", "score labels independently"),
    *_READ_ALL,
)  # fmt: skip
_add(
    "late_interaction", "vectors", "a vector for each token, for late interaction", _TEXTS,
    Field("query", "flag", "whether the texts are queries"),
    Field("long_texts", "long tokens", "error refuses texts that would be truncated; default: truncate"),
    Field("truncate", "flag", "false is an alias of long_texts error"),
)  # fmt: skip
