"""One case: an input, what the original library returns for it, and what this library returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from flodl.errors import FlodlError

__all__ = ["CLOSE", "Case", "Outcome", "compare", "plain"]

CLOSE = 1e-5
# Errors by which a library does not refuse an input, but fails on it.
INTERNAL = (IndexError, AttributeError, RuntimeError, UnboundLocalError, AssertionError)


@dataclass(frozen=True)
class Case:
    """An input with both sides as functions without arguments.

    Args:
        name: group of the setting and the input, for reports.
        theirs: returns what the original library returns, or raises its error.
        ours: the same with this library.
        close: the largest difference of numbers, relative and absolute.
        refused: a text that the refusal contains; None if both sides return a result.
    """

    name: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    close: float = CLOSE
    refused: str | None = None


@dataclass
class Outcome:
    """The result of a case.

    Attributes:
        case: name of the case.
        kind: "equal" results; "failed", an error on both sides; "refused" by this library alone; "more", a result of this
            library where the original one ends with an internal error; or "different".
        theirs: the result or error of the original library, of cases that are not equal.
        ours: the same of this library.
    """

    case: str
    kind: Literal["equal", "failed", "refused", "more", "different"]
    theirs: Any = field(default=None, repr=False)
    ours: Any = field(default=None, repr=False)


def plain(value: Any) -> Any:
    """Return a value as lists, dictionaries and scalars; tensors and arrays keep a mark of their type."""
    if isinstance(value, torch.Tensor):
        value = value.to_dense() if value.is_sparse else value
        return {"tensor of": str(value.dtype), "values": value.detach().tolist()}
    if isinstance(value, np.ndarray):
        return {"array of": str(value.dtype), "values": value.tolist()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def same(ours: Any, theirs: Any, close: float) -> bool:
    """Return whether two plain values are equal, numbers up to a bound."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key], close) for key in theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(same(a, b, close) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == theirs or math.isclose(ours, theirs, rel_tol=close, abs_tol=close)
    return type(ours) is type(theirs) and ours == theirs


def compare(case: Case) -> Outcome:
    """Run both sides; see `Outcome`."""
    theirs, failed = _result(case.theirs)
    ours, error = _result(case.ours)
    if case.refused is not None:
        right = isinstance(error, FlodlError) and case.refused in str(error)
        return Outcome(case.name, "refused" if right else "different", f"a refusal of {case.refused}", ours)
    if error is not None and failed is None:
        return Outcome(case.name, "refused" if isinstance(error, FlodlError) else "different", theirs, ours)
    if error is None and failed is not None:
        return Outcome(case.name, "more" if isinstance(failed, INTERNAL) else "different", theirs, ours)
    if failed is not None:
        return Outcome(case.name, "failed", theirs, ours)
    return (
        Outcome(case.name, "equal") if same(ours, theirs, case.close) else Outcome(case.name, "different", theirs, ours)
    )


def _result(side: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return plain(side()), None
    except Exception as error:
        return f"{type(error).__name__}: {error}", error
