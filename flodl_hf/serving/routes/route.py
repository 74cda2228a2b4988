"""Routes, their fields, the state that they share, and requests to them.

Fields of a request are checked by their JSON schema and brought to one form. Fields that a route does not have are
refused with status 422.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from flodl.errors import nearest, shown
from flodl_hf.serving.admission import Admission, SharedCounters, count_characters
from flodl_hf.serving.metrics import Metrics
from flodl_hf.serving.responses import RefusedError, Response, Style
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.traces import Trace, Traces
from flodl_hf.serving.workers import Workers

# ---- kinds of fields -----------------------------------------------------------------------------------

_STRING = {"type": "string"}
_LIST = {"type": "array", "items": _STRING}
_STRINGS = {"oneOf": [_STRING, _LIST]}
_NUMBERS = {"type": "array", "items": {"type": "integer"}}
_WHOLE = {"type": "integer", "minimum": 1}
_PAIR = {"type": "array", "items": _STRING, "minItems": 2, "maxItems": 2}
_OBJECT = {"type": "object"}


def _record(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, _STRING), "required": list(names)}


_QUESTION = _record("question", "context")


def _words(*words: str) -> tuple[dict[str, Any], str]:
    return {"type": "string", "enum": list(words)}, f"one of {', '.join(words)}"


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "text": (_STRING, "a string"),
    "texts": (_STRINGS, "a string or a list of strings"),
    "inputs": (
        {"oneOf": [_STRING, _NUMBERS, {"type": "array", "items": {"oneOf": [_STRING, _NUMBERS]}}]},
        "a string, a list of ids, or a list of strings and lists of ids",
    ),
    "rows": ({"oneOf": [_NUMBERS, {"type": "array", "items": _NUMBERS}]}, "a list of ids or several"),
    "pairs": (
        {"oneOf": [_STRING, {"type": "array", "items": {"oneOf": [_STRING, _PAIR]}}]},
        "a string, or a list of strings and pairs of them",
    ),
    "documents": (
        {"type": "array", "items": {"oneOf": [_STRING, _record("text")]}},
        'a list of strings or of {"text": ...}',
    ),
    "questions": (
        {"oneOf": [_QUESTION, {"type": "array", "items": {"oneOf": [_QUESTION, _PAIR]}}]},
        '{"question": ..., "context": ...}, or a list of such, or of pairs',
    ),
    "whole": (_WHOLE, "an integer from 1"),
    "thresholds": (
        {"oneOf": [{"type": "number"}, {"type": "object", "additionalProperties": {"type": "number"}}]},
        "a number, or a number for each label",
    ),
    "flag": ({"type": "boolean"}, "true or false"),
    "object": (_OBJECT, "an object"),
    "objects": ({"type": "array", "items": _OBJECT}, "a list of objects"),
    "any": ({}, "anything"),
    "tokens": ({"oneOf": [{"const": -1}, _WHOLE]}, "-1, or an integer from 1"),
    "labels": (_STRINGS, "a list of labels, or comma-separated labels"),
    "true": ({"const": True}, "true, the only value that is supported"),
    "text fields": ({"const": ["text"]}, '["text"]'),
    "direction": _words("left", "right"),
    "float": _words("float"),
    "float32": _words("float32"),
    "endianness": _words("native", "little"),
    "modality": _words("text"),
    "pooling task": _words("embed", "token_embed", "classify"),
    "encoding": _words("float", "base64"),
    "encodings": (
        {"type": "array", "items": {"enum": ["float", "base64"]}, "minItems": 1}, "a list of float and base64"
    ),
    "truncated side": _words("none", "start", "end"),
    "input_type": _words(
        "query", "document", "passage", "search_query", "search_document", "classification", "clustering"
    ),
    "aggregation": _words("first", "average", "max", "simple", "none"),
    "activation": _words("softmax", "sigmoid", "none"),
    "long texts": _words("windows", "truncate", "error"),
    "long texts in windows": _words("windows", "error"),
    "long tokens": _words("truncate", "error"),
}  # fmt: skip
"""JSON schema and description of each kind of value."""
_LISTED = ("inputs", "rows", "pairs", "documents", "questions", "objects", "any")
_TYPES = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,)
}  # fmt: skip


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value has a JSON schema; of long lists, one member of each type is enough if types decide."""
    if "oneOf" in schema:
        return any(_fits(value, one) for one in schema["oneOf"])
    if "const" in schema:
        return value == schema["const"] and type(value) is type(schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    if "type" not in schema:
        return True
    if type(value) not in _TYPES[schema["type"]] or ("minimum" in schema and value < schema["minimum"]):
        return False
    if schema["type"] == "object":
        named, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        return all(_fits(value.get(name), one) for name, one in named.items()) and (
            not others or all(_fits(part, others) for part in value.values())
        )
    if schema["type"] == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return False
        types = set(map(type, value))
        members = value if types & {list, dict} or "enum" in schema["items"] else [kind() for kind in types]
        return all(_fits(part, schema["items"]) for part in members)
    return True


def checked(kind: str, value: Any, name: str) -> Any:
    """Return the value of a field in the form that routes read.

    Raises:
        RefusedError: the value is not of the kind; of a list, the message has the first invalid member.
    """
    # Most values are texts, whose schemas need no look.
    if kind in ("texts", "inputs", "pairs"):
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and set(map(type, value)) == {str}:
            return value
    schema, words = KINDS[kind]
    found = value.lower() if isinstance(value, str) and "enum" in schema else value
    if not _fits(found, schema):
        wrong = f" is {shown(value, 60)}"
        if isinstance(value, list) and kind in (*_LISTED, "texts"):
            for at, part in enumerate(islice(value, 10_000)):
                if not _fits([part], schema):
                    wrong = f": entry {at} is {shown(part, 60)}"
                    break
        raise RefusedError(f"{name}{wrong}, expected {words}", "field", param=name)
    if isinstance(value, str) and kind == "labels":
        return [label.strip() for label in value.split(",")]
    if kind == "documents":
        return [one if isinstance(one, str) else one["text"] for one in value]
    if kind == "questions":
        listed = value if isinstance(value, list) else [value]
        return [[one["question"], one["context"]] if isinstance(one, dict) else one for one in listed]
    if kind in ("inputs", "rows") and set(map(type, value)) <= {int} and (value or kind == "rows"):
        return [value]  # ids of one text
    return found


@dataclass(frozen=True)
class Field:
    """A field of a request.

    Attributes:
        name: its name in JSON.
        kind: a name of `KINDS`.
        description: its description.
        required: whether it is required.
        effect: False for a field that clients send and that does not change results.
        fields: the fields of an object.
    """

    name: str
    kind: str
    description: str
    required: bool = False
    effect: bool = True
    fields: tuple[Field, ...] = ()


def schema_of(fields: Sequence[Field]) -> dict[str, Any]:
    """Return the JSON schema of an object with only these fields."""
    properties = {
        one.name: {
            **KINDS[one.kind][0],
            "description": one.description,
            **(schema_of(one.fields) if one.fields else {}),
        }
        for one in fields
    }
    required = [one.name for one in fields if one.required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def read(fields: Sequence[Field], body: Any, *, most: int, path: str = "") -> dict[str, Any]:
    """Return the normalized fields of a request; absent and null fields are None.

    Args:
        fields: the fields of the route.
        body: the JSON value.
        most: maximum number of inputs; longer lists are refused before their members are checked.
        path: prefix of field names in messages.

    Raises:
        RefusedError: a field is missing, invalid or unknown.
    """
    if not isinstance(body, Mapping):
        raise RefusedError(f"found {shown(body, 60)}, expected a JSON object with fields", "body")
    found: dict[str, Any] = {}
    known = [one.name for one in fields]
    for one in fields:
        name, value = path + one.name, body.get(one.name)
        if value is None:
            if one.required:
                others = [shown(name, 40) for name in islice(body, 9) if name not in known]
                unknown = f" (unknown: {', '.join(others[:3])})" if others else ""
                message = f"{name} is missing{unknown}, expected {KINDS[one.kind][1]}"
                raise RefusedError(message, "field", param=name)
            found[one.name] = None
            continue
        if one.kind in _LISTED and isinstance(value, list) and len(value) > most and type(value[0]) is not int:
            message = f"{name} has {len(value)} inputs, expected at most {most} in a request"
            raise RefusedError(message, "limit", param=name)
        found[one.name] = checked(one.kind, value, name)
        if one.fields:
            found[one.name] = read(one.fields, value, most=most, path=f"{name}.")
    for name, value in body.items():
        if name not in found and value is not None:
            raise not_a_field(path + name, [path + name for name in known])
    return found


def not_a_field(name: str, known: Sequence[str]) -> RefusedError:
    """Return the error for a field that the route, or the task of the model, does not have."""
    return RefusedError(
        f"unknown field {shown(name, 60)}{nearest(name, known)}, expected {', '.join(known)}", "unknown", param=name
    )


# ---- routes and requests -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """A POST route.

    Attributes:
        path: path of the URL.
        summary: summary for the OpenAPI document.
        fields: accepted fields; others are refused.
        answer: function that answers a request.
        style: form of error responses.
        group: name of the API convention.
    """

    path: str
    summary: str
    fields: tuple[Field, ...]
    answer: Callable[[Request], Awaitable[Response]]
    style: Style = "tei"
    group: str = "flodl-hf"


ROUTES: list[Route] = []
"""All POST routes, which the other modules of this package add."""


def route(paths: str, summary: str, *fields: Field, **more: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds the routes of a function.

    Args:
        paths: paths of the routes, separated by spaces.
        summary: their summary.
        *fields: their fields.
        **more: further attributes of `Route`.
    """

    def add(answer: Any) -> Any:
        ROUTES.extend(Route(path, summary, fields, answer, **more) for path in paths.split())
        return answer

    return add


@dataclass(frozen=True)
class Answer:
    """Result of a task: JSON types, and arrays in addition to them."""

    data: Any
    arrays: list[np.ndarray]


class AppState:
    """State that all routes of a process share.

    Args:
        settings: the server's settings.
        counters: counters of current requests; None creates counters for this process only.
        collect_metrics: function that returns the metrics of all HTTP processes, their number, and the number of
            replaced ones; None if there is one process.

    Raises:
        ConfigError: traces cannot be sent.

    Attributes:
        workers: the workers.
        admission: limits of current requests.
        metrics: metrics of this process.
        traces: exporter of traces, or None.
    """

    def __init__(
        self, settings: Settings, counters: SharedCounters | None = None,
        collect_metrics: Callable[[], Awaitable[tuple[Metrics, int, int]]] | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.collect_metrics = settings, collect_metrics
        self.metrics = metrics = Metrics()
        self.admission = Admission(settings, counters)
        self.traces = None if settings.otlp_endpoint is None else Traces(settings.otlp_endpoint)
        self.workers = Workers(settings, self._on_batches)
        names = "te_batch_next_size", "te_batch_next_tokens", "flodl_batch_seconds"
        self._of_batches = tuple(map(metrics.metric, names))
        self._queue, self._fill = metrics.metric("flodl_queue_tokens"), metrics.metric("flodl_batch_fill")

    def _on_batches(self, ran: list[Any], queued: int) -> None:
        """Count (rows, tokens, seconds) of finished batches, and set the number of queued tokens."""
        self._queue.value = queued
        if not ran:
            return
        workers, most = self.workers, self.workers.max_batch_tokens
        self.admission.rate, self.admission.full = workers.rate, most * len(workers.active)
        self.metrics.last_batch = time.monotonic()
        for batch in ran:
            for metric, value in zip(self._of_batches, batch, strict=True):
                metric.add(value)
            self._fill.value = batch[1] / most


@dataclass
class Request:
    """One parsed request.

    Attributes:
        state: the shared state.
        route: the route.
        fields: the fields of the body.
        key: identifier of the API key.
        until: deadline, by ``time.monotonic``.
        path_model: model name in the path, or None.
        priority: 1 is processed before other requests of the key, -1 after them.
        trace: OpenTelemetry trace, or None.
        size: approximate number of numbers and words of the response.
    """

    state: AppState
    route: Route
    fields: Mapping[str, Any]
    key: str = ""
    until: float = float("inf")
    path_model: str | None = None
    priority: int = 0
    trace: Trace | None = None
    model: str = ""
    tokens: int = 0
    windows: int = 0
    texts: int = 0
    characters: int = 0
    dropped: int = 0
    truncated: int = 0
    empty: int = 0
    waited_s: float = 0.0
    tokenized_s: float = 0.0
    inferred_s: float = 0.0
    size: int = 0

    def info(self, *tasks: str) -> dict[str, Any]:
        """Return information about the requested model: the named one, or the only one with one of some tasks.

        Raises:
            RefusedError: no model or several models match, or the named one has no such head.
        """
        models = self.state.workers.models
        name = self.path_model or self.fields.get("model")
        if name is not None:
            name = model_named(models, name)
        listed = models if name is None else (name,)
        able = [one for one in listed if not tasks or any(task in models[one]["tasks"] for task in tasks)]
        if len(able) == 1:
            self.model = able[0]
            return models[able[0]]
        task = tasks[0] if tasks else "this route"
        if name is not None:
            message = f"the model {name!r} ({models[name]['head']}) has no head for {task}; its tasks are "
            message += ", ".join(models[name]["tasks"])
        elif able:
            message = f"several models have the required head; expected 'model' to name one of {', '.join(able)}"
        else:
            have = ", ".join(f"{one} ({info['head']})" for one, info in models.items())
            message = f"no served model has a head for {task}; served: {have}"
        raise RefusedError(message, "model" if able else "head", param="model")

    async def ask(
        self, task: str, items: list[Any], options: dict[str, Any] | None = None, *, texts: int = 0
    ) -> Answer:
        """Run a task in a worker and return its result.

        Args:
            task: a name of `flodl_hf.serving.tasks.TASKS`.
            items: the inputs.
            options: options of the task.
            texts: number of texts, if it differs from the number of items.

        Raises:
            RefusedError: a limit is exceeded, or the worker did not answer.
        """
        state = self.state
        self.info(task)
        settings, admission = state.settings, state.admission
        count = texts or len(items)
        self.texts += count
        self.empty += sum(map(is_blank, items))
        if not items:
            raise RefusedError("found no inputs, expected at least one", "empty")
        if count > settings.max_inputs:
            raise RefusedError(f"found {count} inputs, expected at most {settings.max_inputs} in a request", "limit")
        characters = count_characters(items)
        self.characters += characters
        weight = int(characters / admission.characters_per_token) + 1
        if weight > settings.max_tokens:
            raise RefusedError(
                f"the inputs have about {weight} tokens, expected at most {settings.max_tokens} in a request", "limit"
            )
        message = {
            "task": task, "model": self.model, "items": items, "options": options or {}, "key": self.key,
            "priority": self.priority, "characters": characters,
        }  # fmt: skip
        if self.trace is not None and self.trace.recording:
            message["traced"] = True
        with admission.admit(self.key, weight, self.until - time.monotonic()):
            reply, arrays = await state.workers.ask(message, self.until, weight)
        if self.trace is not None:
            self.trace.add_steps(reply.get("timeline", ()))
        if reply["tokens"] > 16:  # not for tokenize and decode
            measured = min(20.0, max(0.5, characters / reply["tokens"]))
            admission.characters_per_token += 0.05 * (measured - admission.characters_per_token)
        self.size += characters + reply["tokens"] + sum(array.size for array in arrays)
        self.tokens += reply["tokens"]
        self.windows += reply["rows"]
        self.dropped += reply["dropped"]
        self.truncated += reply["truncated"]
        self.waited_s += reply["waited_s"]
        self.tokenized_s += reply["tokenized_s"]
        self.inferred_s += max(0.0, reply["took_s"] - reply["waited_s"] - reply["tokenized_s"])
        return Answer(reply["data"], arrays)

    def token_usage(self, **more: int) -> dict[str, int]:
        """Return the counts of tokens in the form of OpenAI, with further ones at the end."""
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens, **more}


def model_named(models: Mapping[str, Any], name: str) -> str:
    """Return the served model of a name in a request: any name if there is one model, or one named "*".

    Raises:
        RefusedError: no model has the name.
    """
    if name in models:
        return name
    if "*" in models or len(models) == 1:
        return "*" if "*" in models else next(iter(models))
    raise RefusedError(
        f"model {shown(name, 60)} is not served{nearest(name, list(models))}, expected one of {', '.join(models)}",
        "model", param="model",
    )  # fmt: skip


def with_empty_flag(record: dict[str, Any], empty: bool) -> dict[str, Any]:
    """Return a record, with ``"empty": true`` for an empty input."""
    return {**record, "empty": True} if empty else record


def is_blank(item: Any) -> bool:
    """Return whether a text, or both texts of a pair, are blank."""
    if isinstance(item, str):
        return not item.strip()
    return not any(part.strip() if isinstance(part, str) else True for part in item)
