"""Hugging Face Inference API at the root: ``inputs`` and ``parameters``, with results like transformers' pipelines.

The model's head determines the task, as at endpoints of the Hub; `huggingface_hub.InferenceClient` uses this API.
"""

from __future__ import annotations

from typing import Any

from flodl.errors import shown
from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.fields import KINDS, Field, not_a_field, read
from flodl_hf.serving.routes.ranking import RANKED, rank_texts
from flodl_hf.serving.routes.route import MODEL, Request, Response, Route, add_route, text_options
from flodl_hf.serving.routes.tei import (
    CUT,
    DIMENSIONS,
    DIRECTION,
    NORMALIZE,
    PAIR,
    PROMPT,
    RAW,
    ROUTE,
    TRUNCATE,
    WINDOWS,
    prompt_option,
    similarity,
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


def _of(kind: str, value: Any, name: str) -> Any:
    _, words, check = KINDS[kind]
    found = check(value)
    if found is None:
        raise RefusedError(f"{name} is {shown(value, 60)}, expected {words}", "field", param=name)
    return found


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
    Field(
        "parameters",
        "object",
        "parameters of the task, as in transformers' pipelines",
        fields=tuple(_PARAMETERS.values()),
    ),
    *_VECTORS,
    *RANKED,
    Field("options", "object", "accepted", effect=False),
    MODEL,
)

ROUTES: list[Route] = []
"""The root routes; with several models, ``/models/NAME`` is the root of each."""


@add_route(ROUTES, "/invocations", "result of the model's head", *_ROOT, group="Amazon SageMaker")
@add_route(ROUTES, "/", "result of the model's head", *_ROOT, group="Hugging Face Inference")
async def _root(request: Request) -> Response:
    inputs = request.fields["inputs"]
    if request.fields["query"] is not None:
        return await rank_texts(request)
    if inputs is None:
        raise RefusedError("inputs is missing, expected the input of the model's head", "field", param="inputs")
    if isinstance(inputs, dict) and "source_sentence" in inputs:
        return await similarity(request, read(PAIR, inputs, most=request.state.settings.max_inputs, path="inputs."),
                                _given(request, _SIMILARITY, above=True))  # fmt: skip
    single = not isinstance(inputs, list)
    answered = await _HEADS[request.info()["head"]](request, inputs, single)
    return answered if isinstance(answered, Response) else Response(answered)


async def _vectors(request: Request, inputs: Any, single: bool) -> Any:
    given = _given(request, _VECTORS, above=True)
    options = {**text_options(given), **prompt_option(request, given)}
    options |= {name: given.get(name) for name in ("normalize", "dimensions", "route")}
    found = await request.ask("embed", _of("inputs", inputs, "inputs"), options)
    return Response(found.arrays[0], found.arrays[0])


async def _classes(request: Request, inputs: Any, single: bool) -> Any:
    if (request.fields["parameters"] or {}).get("candidate_labels") is not None:
        given = _given(request, _ZERO_SHOT)
        options = {"labels": given["candidate_labels"], "template": given.get("hypothesis_template")}
        options["multi_label"] = given.get("multi_label") is True
        found = await request.ask("zero_shot", _of("texts", inputs, "inputs"), options)
    else:
        single = False
        items = _of("pairs", inputs, "inputs")
        given = _given(request, (*_CLASSES, RAW), above=True)
        options = {**given, **text_options(given)}
        if options["truncate"] is None and given.get("truncation"):
            options["truncate"] = True
        found = await request.ask("classify", items, options)
    rows = [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]
    return rows[0] if single else rows


async def _entities(request: Request, inputs: Any, single: bool) -> Any:
    given = {"aggregation_strategy": "simple", **_given(request, _ENTITIES)}
    options = {**given, "aggregation": given["aggregation_strategy"]}
    found = await request.ask("entities", _of("texts", inputs, "inputs"), options)
    name = "entity" if options["aggregation"] == "none" else "entity_group"
    rows = [[{name: one["label"], **_picked(one, "word")} for one in row] for row in found.data]
    return rows[0] if single else rows


def _picked(one: dict[str, Any], *more: str) -> dict[str, Any]:
    return {name: one[name] for name in ("score", *more, "start", "end")}


async def _answers(request: Request, inputs: Any, single: bool) -> Any:
    given = _given(request, _ANSWERS)
    options = {ours: given.get(theirs) for ours, theirs in _ANSWER_OPTIONS.items()}
    options["top_k"] = top = given.get("top_k", given.get("topk"))
    found = await request.ask("answer", _of("questions", inputs, "inputs"), options)
    rows = [[{"answer": one["text"], **_picked(one)} for one in row] for row in found.data]
    if not single:
        return rows
    if top not in (None, 1):
        return rows[0]
    return rows[0][0] if rows[0] else {"answer": "", "score": 0.0, "start": 0, "end": 0}


_ANSWER_OPTIONS = {
    "max_answer_length": "max_answer_len", "no_answer": "handle_impossible_answer", "whole_words": "align_to_words",
    "stride": "doc_stride", "window_tokens": "max_seq_len",
}  # fmt: skip


async def _masks(request: Request, inputs: Any, single: bool) -> Any:
    found = await request.ask("fill_mask", _of("texts", inputs, "inputs"), _given(request, _MASKS))
    rows = [[[_word(one) for one in mask] for mask in masks] for masks in found.data]
    plain = [masks[0] if len(masks) == 1 else masks for masks in rows]
    return plain[0] if single else plain


def _word(one: dict[str, Any]) -> dict[str, Any]:
    token = {"token": one["token_ids"][0], "token_str": one["token"]}
    return {"score": one["score"], **token, "sequence": one["sequence"]}


_HEADS = {
    "base": _vectors,
    "sequence_classification": _classes,
    "token_classification": _entities,
    "question_answering": _answers,
    "masked_lm": _masks,
}


@add_route(
    ROUTES, "/vertex", "results of several requests to the root",
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
