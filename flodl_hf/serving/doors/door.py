"""A door: a path, its fields, and what is answered there; and a call that came through it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flodl.errors import nearest, shown
from flodl_hf.serving.admission import Admission, OverloadedError, weigh
from flodl_hf.serving.doors.fields import Field
from flodl_hf.serving.faults import RefusedError, Style
from flodl_hf.serving.metrics import Metrics
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.traces import Trace, Traces
from flodl_hf.serving.workers import Answer, TaskError, Workers

__all__ = [
    "ACTIVATIONS",
    "MODEL",
    "OTHERS",
    "SHORTENED",
    "Call",
    "Door",
    "Gathered",
    "House",
    "Reply",
    "flagged",
    "is_blank",
    "is_raw",
    "shortening",
]

Gathered = Callable[[], Awaitable[tuple[Metrics, int, int]]]

MODEL = Field("model", "text", "which of the models that are served; needed where several could answer")
OTHERS = (
    *(Field(name, "text", "accepted", effect=False) for name in ("user", "request_id", "cache_salt")),
    Field("priority", "any", "accepted; the header x-priority decides", effect=False),
)
"""Fields that clients of OpenAI, Cohere and vLLM send and that change no number."""
SHORTENED = (
    Field("truncate_prompt_tokens", "tokens", "truncate texts to so many tokens, -1 to the model's length"),
    Field("truncation_side", "direction", "the end that truncation removes; by default as the tokenizer's folder"),
)
"""How requests of vLLM truncate texts."""
ACTIVATIONS = (
    Field("use_activation", "flag", "false returns scores as they leave the head"),
    Field("activation", "flag", "as use_activation"),
    Field("softmax", "flag", "as use_activation"),
    Field("raw_scores", "flag", "true returns scores as they leave the head"),
)
"""How requests of vLLM and infinity ask for scores without an activation."""


@dataclass(frozen=True)
class Reply:
    """What is answered.

    Attributes:
        data: JSON types; arrays in it are written as lists.
        vectors: the array that binary answers hold; None where there is none.
        text: all of it in the form that the call asks for, where a worker wrote it; ``data`` is None then.
    """

    data: Any
    vectors: np.ndarray | None = None
    text: bytes | memoryview | None = None


@dataclass(frozen=True)
class Door:
    """A path that is answered.

    Attributes:
        path: of the address.
        says: what it is for.
        fields: the table of fields of a request; others are refused.
        answer: what is done with a call.
        style: in whose words faults are told.
        group: whose convention it is.
    """

    path: str
    says: str
    fields: tuple[Field, ...]
    answer: Callable[[Call], Awaitable[Reply]]
    style: Style = "tei"
    group: str = "flodl-hf"


@dataclass
class House:
    """What all doors of a process share.

    Attributes:
        settings: what is served, and how.
        workers: what answers.
        admission: who is let in.
        metrics: what this process counted.
        traces: where traces go, or None.
        gathered: gives what all processes counted, how many they are, and how many were replaced; None where there is
            this one.
    """

    settings: Settings
    workers: Workers
    admission: Admission
    metrics: Metrics
    traces: Traces | None = None
    gathered: Gathered | None = None


@dataclass
class Call:
    """One request behind its door.

    Attributes:
        house: what doors share.
        door: where it came in.
        fields: what it says.
        key: whose it is.
        until: when its time is over, by ``time.monotonic``.
        path_model: the model of its path, or None.
        priority: 1 goes before others of its key, -1 behind them.
        trace: of OpenTelemetry, where there is one.
        form: the form of the answer.
    """

    house: House
    door: Door
    fields: Mapping[str, Any]
    key: str = ""
    until: float = float("inf")
    path_model: str | None = None
    priority: int = 0
    trace: Trace | None = None
    form: str = "application/json"
    model: str = ""
    tokens: int = 0
    windows: int = 0
    texts: int = 0
    characters: int = 0
    dropped: int = 0
    truncated: int = 0
    empty: int = 0
    waited_s: float = 0.0
    inferred_s: float = 0.0
    size: int = 0
    """About how many numbers and words its answer has."""
    started: float = field(default_factory=time.perf_counter)

    def info(self, *tasks: str) -> dict[str, Any]:
        """Return what is known of the model that is asked: the named one, or the one that has one of the tasks.

        Raises:
            RefusedError: there is none, or several, or the named one has no such head.
        """
        models = self.house.workers.models
        named = self.path_model or self.fields.get("model")
        if named is not None:
            if named not in models:
                raise RefusedError(
                    f"no model {shown(named, 60)} is served{nearest(named, list(models))}; expected one of "
                    f"{', '.join(models)}",
                    "model",
                    param="model",
                )
            if tasks and not _able(models[named], tasks):
                raise RefusedError(
                    f"the model {named!r} ({models[named]['head']}) has no head for {tasks[0]}; it answers "
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
                f"no model that is served has a head for {tasks[0] if tasks else 'this'}; there are {have}"
                if not able
                else f"several models could answer; name one in 'model': {', '.join(able)}",
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
        as_text: str | None = None,
    ) -> Answer:
        """Return a worker's answer.

        Args:
            task: of `flodl_hf.serving.tasks`.
            items: what is asked of.
            options: of the task.
            texts: how many texts these are where that is not the number of items.
            as_text: the form, JSON or MessagePack, in which the worker writes its data, which is then the one array of
                the answer.

        Raises:
            RefusedError: a limit is broken, or the worker did not answer.
        """
        house = self.house
        self.info(task)
        settings, admission = house.settings, house.admission
        count = texts or len(items)
        self.texts += count
        self.empty += sum(map(is_blank, items))
        if not items:
            raise RefusedError("there are no inputs; expected at least one", "empty")
        if count > settings.max_inputs:
            raise RefusedError(
                f"there are {count} inputs; expected at most {settings.max_inputs} in a request", "limit"
            )
        characters = weigh(items)
        self.characters += characters
        weight = admission.tokens_of(characters)
        if weight > settings.max_tokens:
            raise RefusedError(
                f"the inputs have about {weight} tokens; expected at most {settings.max_tokens} in a request", "limit"
            )
        try:
            with admission.entering(self.key, weight, self.until - time.monotonic()):
                found = await house.workers.ask(
                    task,
                    self.model,
                    items,
                    options or {},
                    key=self.key,
                    until=self.until,
                    weight=weight,
                    priority=self.priority,
                    traced=self.trace is not None and self.trace.recording,
                    as_text=as_text,
                )
        except OverloadedError as fault:
            raise RefusedError(fault.message, "overloaded", after_s=fault.after_s) from None
        except TaskError as fault:
            raise RefusedError(fault.message, fault.kind, after_s=1.0 if fault.kind == "ended" else None) from None
        if self.trace is not None:
            self.trace.worked(found.timeline)
        if task not in ("tokenize", "decode"):
            admission.learn(characters, found.tokens)
        self.size += characters + found.tokens + sum(array.size for array in found.arrays)
        self.tokens += found.tokens
        self.windows += found.rows
        self.dropped += found.dropped
        self.truncated += found.truncated
        self.waited_s += found.waited_s
        self.inferred_s += max(0.0, found.took_s - found.waited_s)
        return found

    async def passed_on(self, task: str, items: list[Any], options: dict[str, Any]) -> Reply:
        """Return what a worker answers as it is: nobody here reads it, and none of it is written twice.

        Args:
            task: of `flodl_hf.serving.tasks`.
            items: what is asked of.
            options: of the task.

        Raises:
            RefusedError: a limit is broken, or the worker did not answer.
        """
        found = await self.ask(task, items, options, as_text=self.form)
        return Reply(None, text=found.arrays[0].data)

    def usage(self) -> dict[str, int]:
        """Return what the call came to."""
        return {"tokens": self.tokens, "windows": self.windows, "dropped_tokens": self.dropped}


def shortening(call: Call, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of a task for texts that are too long.

    Args:
        call: the request.
        given: the fields; None takes those of the request.
    """
    given = call.fields if given is None else given
    size, truncate = given.get("truncate_prompt_tokens"), given.get("truncate")
    return {
        "truncate": truncate if size is None else True,
        "max_tokens": None if size == -1 else size,
        "side": given.get("truncation_side") or given.get("truncation_direction"),
        "windows": given.get("windows"),
    }


def is_raw(call: Call) -> bool:
    """Return whether scores are wanted as they leave the head."""
    given = call.fields
    return given.get("raw_scores") is True or any(given.get(field.name) is False for field in ACTIVATIONS[:3])


def flagged(record: dict[str, Any], empty: bool) -> dict[str, Any]:
    """Return a record of an answer, with ``"empty": true`` if there was nothing to read."""
    return {**record, "empty": True} if empty else record


def is_blank(item: Any) -> bool:
    """Return whether a text, or both texts of a pair, have nothing to read."""
    parts = [item] if isinstance(item, str) else item
    return not any(part.strip() if isinstance(part, str) else True for part in parts)


def _able(info: Mapping[str, Any], tasks: Sequence[str]) -> bool:
    """Return whether a model has one of some tasks."""
    return any(task in info["tasks"] for task in tasks)
