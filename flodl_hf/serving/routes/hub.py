"""Hugging Face Inference API at the root: ``inputs`` and ``parameters``, with results like transformers' pipelines.

The model's head determines the task, as at endpoints of the Hub; `huggingface_hub.InferenceClient` uses this API.
"""

from __future__ import annotations

from typing import Any

from flodl.errors import shown
from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.fields import KINDS, Field, not_a_field, read
from flodl_hf.serving.routes.ranking import RANKED, rank_texts
from flodl_hf.serving.routes.route import MODEL, Request, Response, Route, truncation_options
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


async def _vectors(request: Request, inputs: Any, single: bool) -> Response:
    given = _given(request, _VECTORS, above=True)
    options = {**truncation_options(request, given), **prompt_option(request, given)}
    options |= {name: given.get(name) for name in ("normalize", "dimensions", "route")}
    found = await request.ask("embed", _of("inputs", inputs, "inputs"), options)
    return Response(found.arrays[0], found.arrays[0])


async def _classes(request: Request, inputs: Any, single: bool) -> Any:
    if (request.fields["parameters"] or {}).get("candidate_labels") is not None:
        given = _given(request, _ZERO_SHOT)
        options: dict[str, Any] = {"labels": given["candidate_labels"]}
        if "hypothesis_template" in given:
            options["template"] = given["hypothesis_template"]
        options["multi_label"] = given.get("multi_label") is True
        found = await request.ask("zero_shot", _of("texts", inputs, "inputs"), options)
        rows = [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]
        return rows[0] if single else rows
    items = _of("pairs", inputs, "inputs")
    given = _given(request, (*_CLASSES, RAW), above=True)
    options = {name: given.get(name) for name in ("function_to_apply", "top_k", "threshold")} | truncation_options(
        request, given
    )
    options["raw"] = given.get("raw_scores")
    if options["truncate"] is None and given.get("truncation"):
        options["truncate"] = True
    found = await request.ask("classify", items, options)
    return [[{"label": one["label"], "score": one["score"]} for one in row] for row in found.data]


async def _entities(request: Request, inputs: Any, single: bool) -> Any:
    given = _given(request, _ENTITIES)
    strategy = given.get("aggregation_strategy", "simple")
    options = {"aggregation": strategy, "ignore_labels": given.get("ignore_labels"), "stride": given.get("stride")}
    found = await request.ask("entities", _of("texts", inputs, "inputs"), options)
    name = "entity" if strategy == "none" else "entity_group"
    rows = [
        [{name: one["label"], **{n: one[n] for n in ("score", "word", "start", "end")}} for one in row]
        for row in found.data
    ]
    return rows[0] if single else rows


async def _answers(request: Request, inputs: Any, single: bool) -> Any:
    given = _given(request, _ANSWERS)
    top = given.get("top_k", given.get("topk"))
    options = {
        "top_k": top,
        "max_answer_length": given.get("max_answer_len"),
        "no_answer": given.get("handle_impossible_answer"),
        "whole_words": given.get("align_to_words"),
        "stride": given.get("doc_stride"),
        "window_tokens": given.get("max_seq_len"),
    }
    found = await request.ask("answer", _of("questions", inputs, "inputs"), options)
    rows = [
        [{"answer": one["text"], **{n: one[n] for n in ("score", "start", "end")}} for one in row] for row in found.data
    ]
    if top in (None, 1):
        return (rows[0][0] if rows[0] else {"answer": "", "score": 0.0, "start": 0, "end": 0}) if single else rows
    return rows[0] if single else rows


async def _masks(request: Request, inputs: Any, single: bool) -> Any:
    given = _given(request, _MASKS)
    options = {"top_k": given.get("top_k"), "targets": given.get("targets")}
    found = await request.ask("fill_mask", _of("texts", inputs, "inputs"), options)
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


async def _vertex(request: Request) -> Response:
    """Return the result of each instance, which is the body of a request to the root."""
    instances, found = request.fields["instances"], []
    for number, instance in enumerate(instances):
        path = f"instances[{number}]."
        request.fields = read(_ROOT, instance, most=request.state.settings.max_inputs, path=path)
        found.append((await _root(request)).data)
    return Response({"predictions": found})


ROUTES = (
    *(
        Route(path, "result of the model's head", _ROOT, _root, group=group)
        for path, group in (("/", "Hugging Face Inference"), ("/invocations", "Amazon SageMaker"))
    ),
    Route(
        "/vertex",
        "results of several requests to the root",
        (
            Field("instances", "objects", "bodies of requests to the root", True),
            Field("parameters", "object", "accepted", effect=False),
        ),
        _vertex,
        group="Google Vertex AI",
    ),
)
"""The root routes; with several models, ``/models/NAME`` is the root of each."""
