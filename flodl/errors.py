"""The errors this project raises on purpose, and what each of them carries.

    FlodlError
    ├── GraphError            a graph that cannot be built, addressed or run
    │   ├── GraphBuildError   every fault found by ``build()``, at once (``.faults``)
    │   └── GraphPathError    a dotted path that leads nowhere (``.path``, ``.segment``)
    ├── ConfigError           a missing, wrong or unknown value of a configuration (``.problems``); a ValueError
    ├── CheckpointError       a weight file that is damaged or does not fit the model (``.problems``)
    │   └── UnsafeFileError   a file whose contents would run code, or that points outside its folder
    ├── DataError             a data file or a batch that is not what training needs
    ├── TrainError            a training run that cannot start or go on
    └── DeviceError           a device that is absent or not able to do what was asked

    KeyboardInterrupt
    └── TrainInterrupted      Ctrl-C ended a training run (``.step``, ``.folder``, ``.trained``, ``.result``)

Messages have four beats: where it happened, what was found, what was expected, what to do.
Faults of one kind are collected and raised once; the parts are kept as attributes so that
programs and tests read fields and not prose. Every error survives pickling, because training
sends them between processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "FlodlError",
    "GraphBuildError",
    "GraphError",
    "GraphPathError",
    "TrainError",
    "TrainInterrupted",
    "UnsafeFileError",
    "capped",
    "nearest",
    "printable",
    "shown",
    "visible",
]


class FlodlError(RuntimeError):
    """Any error that this project raises on purpose.

    Args:
        message: the four beats in plain words.
        **details: what a program may want to read; each becomes an attribute.
    """

    def __init__(self, message: str, **details: Any) -> None:
        message = visible(message)
        super().__init__(message)
        self.message = message
        self.details = details
        for name, value in details.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that were never set; the annotation lets callers read details by name.
        raise AttributeError(f"{type(self).__name__} carries no {name!r}; it has {sorted(vars(self))}")

    def __str__(self) -> str:
        return self.message  # KeyError shows its message as Python writes it

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details)


def _rebuild(kind: type[FlodlError], message: str, details: dict[str, Any]) -> FlodlError:
    return kind(message, **details)


class GraphError(FlodlError):
    """A graph that cannot be built, addressed or run."""


class GraphBuildError(GraphError):
    """Every fault that ``build()`` found, each naming its step; ``faults`` lists them."""


class GraphPathError(GraphError):
    """A dotted path that leads nowhere; ``path`` is the whole path, ``segment`` the failing part."""


class ConfigError(FlodlError, ValueError):
    """A configuration with missing, wrong or unsupported values; a ValueError."""


class CheckpointError(FlodlError):
    """A weight file that is damaged, or that does not fit the model it is loaded into."""


class UnsafeFileError(CheckpointError):
    """A file that would run code when read, or that points outside its own folder."""


class DataError(FlodlError):
    """A data file or a batch that is not what training needs."""


class TrainError(FlodlError):
    """A training run that cannot start or cannot go on."""


class TrainInterrupted(KeyboardInterrupt):
    """Ctrl-C (SIGINT) ended a training run. The step was finished and its state was saved before.

    The model that was given to the run, where it was trained in this process, has the trained weights.

    Attributes:
        step: optimiser steps taken.
        folder: folder of the checkpoints; None where the run has none.
        trained: the weights at that step, a `flodl.train.Trained`; None where ranks ended before they trained.
        result: a partial result that the caller of the trainer attached; None where there is none.
    """

    def __init__(self, *, step: int = 0, folder: str | None = None, trained: Any = None) -> None:
        self.step, self.folder, self.trained = step, folder, trained
        self.result: Any = None
        super().__init__()

    def __str__(self) -> str:
        weights = "result.model" if self.result is not None else "trained"
        how = "" if self.trained is None else f" The weights are in the attribute `{weights}` of this exception."
        saved = f" Run it again with resume=True to continue from {self.folder}." if self.folder else ""
        return f"stopped after step {self.step}.{saved}{how}"


class DeviceError(FlodlError):
    """A device that is absent, or that cannot do what was asked of it."""


def capped(items: Sequence[str], limit: int = 20, indent: str = "  ") -> str:
    """Return ``items`` one to a line, at most ``limit`` of them, the rest as a count."""
    lines = [f"{indent}{item}" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"{indent}... and {len(items) - limit} more")
    return "\n".join(lines)


# Spellings of more characters are compared with none: that takes seconds for what a stranger may send.
NEAREST = 500


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the closest known spelling, or an empty string."""
    if len(name) > NEAREST:
        return ""
    match = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {match[0]!r}?" if match else ""


# What moves a terminal's cursor or its direction of writing, and what no terminal can be sent: names and values in
# files come from strangers. Line ends and tabs stay.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, form: str | None = None) -> str:
    """Return ``text`` with control characters written out: safe to print whatever it quotes.

    Args:
        text: any.
        form: how one is written, by its number; JSON wants ``"\\\\u{:04x}"``, None is as Python writes it.
    """
    if form is not None:
        return _HIDDEN.sub(lambda found: form.format(ord(found[0])), text)
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def printable(text: str, limit: int = 120) -> str:
    """Return ``text`` quoted, without control characters and cut to ``limit``: safe to print from any file."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return repr(shown)


def shown(value: object, limit: int = 120) -> str:
    """Return a value as Python writes it, cut to ``limit``: for messages about values rather than texts."""
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > limit:
        value = value[:limit]  # written out it is longer than the limit all the same
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
