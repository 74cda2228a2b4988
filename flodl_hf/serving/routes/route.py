"""Routes, the state that they share, and requests to them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flodl.errors import nearest, shown
from flodl_hf.serving.admission import Admission, count_characters
from flodl_hf.serving.http_errors import RefusedError, Style
from flodl_hf.serving.metrics import Metrics
from flodl_hf.serving.routes.fields import Field
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.traces import Trace, Traces
from flodl_hf.serving.workers import Answer, Workers

CollectMetrics = Callable[[], Awaitable[tuple[Metrics, int, int]]]

MODEL = Field("model", "text", "name of a served model; required if several models have the head")
OTHERS = (
    *(Field(name, "text", "accepted", effect=False) for name in ("user", "request_id", "cache_salt")),
    Field("priority", "any", "accepted without effect; see the header x-priority", effect=False),
)
"""Fields that clients of OpenAI, Cohere and vLLM send and that do not change results."""
SHORTENED = (
    Field(
        "truncate_prompt_tokens", "tokens", "truncate texts to this number of tokens; -1 is the model's maximum length"
    ),
    Field("truncation_side", "direction", "side that truncation removes; default: the tokenizer's setting"),
)
"""vLLM's fields for truncation."""
ACTIVATIONS = (
    Field("use_activation", "flag", "false returns the head's raw scores"),
    Field("activation", "flag", "alias of use_activation"),
    Field("softmax", "flag", "alias of use_activation"),
    Field("raw_scores", "flag", "true returns the head's raw scores"),
)
"""Fields of vLLM and infinity for scores without an activation."""


@dataclass(frozen=True)
class Response:
    """Result of a route.

    Attributes:
        data: JSON types; arrays in it are encoded as lists.
        vectors: the array of binary responses, or None.
    """

    data: Any
    vectors: np.ndarray | None = None


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


Answering = Callable[["Request"], Awaitable[Response]]


def add_route(
    routes: list[Route], paths: str, summary: str, *fields: Field, **more: Any
) -> Callable[[Answering], Answering]:
    """Return a decorator that adds the routes of a function to a list.

    Args:
        routes: the list.
        paths: paths of the routes, separated by spaces.
        summary: their summary.
        *fields: their fields.
        **more: further attributes of `Route`.
    """

    def add(answer: Answering) -> Answering:
        routes.extend(Route(path, summary, fields, answer, **more) for path in paths.split())
        return answer

    return add


@dataclass
class AppState:
    """State that all routes of a process share.

    Attributes:
        settings: the server's settings.
        workers: the workers.
        admission: limits of current requests.
        metrics: metrics of this process.
        traces: exporter of traces, or None.
        collect_metrics: function that returns the metrics of all HTTP processes, their number, and the number of
            replaced ones; None if there is one process.
    """

    settings: Settings
    workers: Workers
    admission: Admission
    metrics: Metrics
    traces: Traces | None = None
    collect_metrics: CollectMetrics | None = None


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
    """Approximate number of numbers and words of the response."""
    started: float = field(default_factory=time.perf_counter)

    def info(self, *tasks: str) -> dict[str, Any]:
        """Return information about the requested model: the named one, or the only one with one of some tasks.

        Raises:
            RefusedError: no model or several models match, or the named one has no such head.
        """
        models = self.state.workers.models
        named = self.path_model or self.fields.get("model")
        if named is not None:
            named = model_named(models, named)
            if tasks and not _able(models[named], tasks):
                raise RefusedError(
                    f"the model {named!r} ({models[named]['head']}) has no head for {tasks[0]}; its tasks are "
                    f"{', '.join(models[named]['tasks'])}",
                    "head",
                    param="model",
                )
            self.model = named
            return models[named]
        able = [name for name, info in models.items() if not tasks or _able(info, tasks)]
        if len(able) != 1:
            have = ", ".join(f"{name} ({info['head']})" for name, info in models.items())
            raise RefusedError(
                f"no served model has a head for {tasks[0] if tasks else 'this route'}; served: {have}"
                if not able
                else f"several models have the required head; expected 'model' to name one of {', '.join(able)}",
                "model" if able else "head",
                param="model",
            )
        self.model = able[0]
        return models[able[0]]

    async def ask(
        self,
        task: str,
        items: list[Any],
        options: dict[str, Any] | None = None,
        *,
        texts: int = 0,
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
        weight = admission.tokens_of(characters)
        if weight > settings.max_tokens:
            raise RefusedError(
                f"the inputs have about {weight} tokens, expected at most {settings.max_tokens} in a request", "limit"
            )
        traced = self.trace is not None and self.trace.recording
        with admission.admit(self.key, weight, self.until - time.monotonic()):
            found = await state.workers.ask(
                task, self.model, items, options or {},
                key=self.key, until=self.until, weight=weight, priority=self.priority, traced=traced,
            )  # fmt: skip
        message = found.message
        if self.trace is not None:
            self.trace.add_steps(message.get("timeline", ()))
        if task not in ("tokenize", "decode"):
            admission.update_estimate(characters, message["tokens"])
        self.size += characters + message["tokens"] + sum(array.size for array in found.arrays)
        self.tokens += message["tokens"]
        self.windows += message["rows"]
        self.dropped += message["dropped"]
        self.truncated += message["truncated"]
        self.waited_s += message["waited_s"]
        self.tokenized_s += message["tokenized_s"]
        self.inferred_s += max(0.0, message["took_s"] - message["waited_s"] - message["tokenized_s"])
        return found

    def token_usage(self, **more: int) -> dict[str, int]:
        """Return the counts of tokens in the form of OpenAI, with further ones at the end."""
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens, **more}

    def usage(self) -> dict[str, int]:
        """Return the counts of tokens of the request."""
        return {"tokens": self.tokens, "windows": self.windows, "dropped_tokens": self.dropped}


def model_named(models: Mapping[str, Any], name: str) -> str:
    """Return the served model of a name in a request: any name if there is one model, or one named "*".

    Raises:
        RefusedError: no model has the name.
    """
    if name in models:
        return name
    if len(models) == 1 or "*" in models:
        return "*" if "*" in models else next(iter(models))
    raise RefusedError(
        f"model {shown(name, 60)} is not served{nearest(name, list(models))}, expected one of {', '.join(models)}",
        "model", param="model",
    )  # fmt: skip


def text_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a task for texts that are too long, and for scores without an activation.

    Args:
        fields: fields of a request.
    """
    size, truncate = fields.get("truncate_prompt_tokens"), fields.get("truncate")
    activations = fields.get("use_activation"), fields.get("activation"), fields.get("softmax")
    return {
        "truncate": truncate if size is None else True,
        "max_tokens": None if size == -1 else size,
        "side": fields.get("truncation_side") or fields.get("truncation_direction"),
        "windows": fields.get("windows"),
        "raw": fields.get("raw_scores") is True or False in activations,
    }


def with_empty_flag(record: dict[str, Any], empty: bool) -> dict[str, Any]:
    """Return a record, with ``"empty": true`` for an empty input."""
    return {**record, "empty": True} if empty else record


def is_blank(item: Any) -> bool:
    """Return whether a text, or both texts of a pair, are blank."""
    if isinstance(item, str):
        return not item.strip()
    return not any(part.strip() if isinstance(part, str) else True for part in item)


def _able(info: Mapping[str, Any], tasks: Sequence[str]) -> bool:
    """Return whether a model has one of some tasks."""
    return any(task in info["tasks"] for task in tasks)
