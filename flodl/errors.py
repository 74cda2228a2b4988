"""The error classes of this project and their attributes.

    FlodlError
    ├── GraphError            a graph that cannot be built, addressed or run
    │   ├── GraphBuildError   all faults found by ``build()`` (``.faults``)
    │   └── GraphPathError    a dotted path that names nothing (``.path``, ``.segment``)
    ├── ConfigError           a missing, wrong or unknown value of a configuration (``.problems``); a ValueError
    ├── CheckpointError       a weight file that is damaged or does not fit the model (``.problems``)
    │   └── UnsafeFileError   a file that would run code, or that points outside its folder
    ├── DataError             an invalid data file or batch
    ├── TrainError            a training run that cannot start or continue
    └── DeviceError           a device that is absent or lacks a function

    KeyboardInterrupt
    └── TrainInterrupted      Ctrl-C ended a training run (``.step``, ``.folder``, ``.trained``, ``.result``)

Messages have four parts: the failed operation, the found and the expected value, and the remedy. Faults of one kind
are collected and raised together. Their data are attributes, for programs and tests. Every error can be pickled,
because training sends errors between processes.
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
]


class FlodlError(RuntimeError):
    """Base class of the errors of this project.

    Args:
        message: the message.
        **details: data about the error; each becomes an attribute.
    """

    def __init__(self, message: str, **details: Any) -> None:
        message = visible(message)
        super().__init__(message)
        self.message = message
        self.details = details
        for name, value in details.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Called only for missing names; the annotation lets type checkers accept details.
        raise AttributeError(f"{type(self).__name__} has no {name!r}, only {sorted(vars(self))}")

    def __str__(self) -> str:
        return self.message  # KeyError would show the repr of its message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details)


def _rebuild(kind: type[FlodlError], message: str, details: dict[str, Any]) -> FlodlError:
    return kind(message, **details)


class GraphError(FlodlError):
    """A graph that cannot be built, addressed or run."""


class GraphBuildError(GraphError):
    """All faults that ``build()`` found, in ``faults``."""


class GraphPathError(GraphError):
    """A dotted path that names nothing; ``path`` is the whole path, ``segment`` the failing part."""


class ConfigError(FlodlError, ValueError):
    """A configuration with missing, wrong or unsupported values; a ValueError."""


class CheckpointError(FlodlError):
    """A weight file that is damaged or does not fit the model."""


class UnsafeFileError(CheckpointError):
    """A file that would run code, or that points outside its folder."""


class DataError(FlodlError):
    """An invalid data file or batch."""


class TrainError(FlodlError):
    """A training run that cannot start or continue."""


class TrainInterrupted(KeyboardInterrupt):
    """Ctrl-C (SIGINT) ended a training run after a complete, saved step.

    A model that was trained in this process has the trained weights.

    Attributes:
        step: number of optimiser steps.
        folder: folder of the checkpoints, or None.
        trained: the weights at that step, a `flodl.train.Trained`; None if no rank had started to train.
        result: a partial result attached by the caller of the trainer, or None.
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
    """A device that is absent or lacks a function."""


def capped(items: Sequence[str], limit: int = 20, indent: str = "  ") -> str:
    """Return items one per line, at most ``limit``, with the omitted count."""
    lines = [f"{indent}{item}" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"{indent}... and {len(items) - limit} more")
    return "\n".join(lines)


# Comparing longer names, which untrusted input may contain, would take seconds.
MAX_COMPARED_CHARS = 500


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` with the most similar known name, or an empty string."""
    if len(name) > MAX_COMPARED_CHARS:
        return ""
    match = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {match[0]!r}?" if match else ""


# Control characters that move the cursor or change the direction of writing, and lone surrogates. Names and values in
# files are untrusted. Line ends and tabs are kept.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, form: str | None = None) -> str:
    """Return ``text`` with control characters escaped, so that it is safe to print.

    Args:
        text: any text.
        form: format of a code point, ``"\\\\u{:04x}"`` for JSON; None for Python's.
    """
    if form is not None:
        return _HIDDEN.sub(lambda match: form.format(ord(match[0])), text)
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def printable(text: str, limit: int = 120) -> str:
    """Return the repr of untrusted text, cut to ``limit`` characters."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return repr(shown)


def shown(value: object, limit: int = 120) -> str:
    """Return the repr of a value, cut to ``limit`` characters."""
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > limit:
        value = value[:limit]  # its repr is longer than the limit
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
