"""Texts as callers pass them: one or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from flodl_hf.errors import InputTypeError, PredictError

__all__ = ["FIRST_PLACE", "plain_pairs", "prompted", "refuse_two_texts", "several"]

FIRST_PLACE: ContextVar[int] = ContextVar("FIRST_PLACE", default=0)
"""Place in the whole input of the first item that is encoded, for error messages."""


def several(items: Any, method: str, *, mapping: bool = False) -> Any:
    """Return texts as a list where their number is known, and as an iterable where it is not; a string as it is.

    Lists are also what behaves like one: columns of pandas, polars, pyarrow and datasets, and arrays of numpy.

    Args:
        items: the caller's input.
        method: the name of the calling method.
        mapping: whether a dictionary is one item, as where pairs are.

    Raises:
        PredictError: a table instead of one of its columns, or a set, which has no order.
        InputTypeError: an object without texts.
    """
    if isinstance(items, str):
        return str(items)  # numpy's strings print as such in answers
    if isinstance(items, (list, tuple)) or (mapping and isinstance(items, Mapping)):
        return items
    found = type(items).__name__
    if isinstance(items, Mapping):
        raise PredictError(
            f"{method}: found a {found} with keys {[str(key) for key in items][:20]}; expected a string, or a list of "
            "them; give the texts alone",
            found=list(items),
        )
    if hasattr(items, "columns") or hasattr(items, "column_names"):
        # pyarrow's `columns` are the columns themselves.
        names = list(items.column_names if hasattr(items, "column_names") else items.columns)[:20]
        raise PredictError(
            f"{method}: found a whole table ({found} with columns {[str(n) for n in names]}); expected the texts; give "
            f"one of its columns",
            columns=names,
        )
    if isinstance(items, (set, frozenset)):
        raise PredictError(
            f"{method}: found a {found}, which has no order; expected a list of texts; pass list(...) of it"
        )
    for name in ("tolist", "to_pylist", "to_list"):
        if hasattr(items, name):
            return getattr(items, name)()
    if isinstance(items, (bytes, bytearray)) or not isinstance(items, Iterable):
        raise InputTypeError(f"{method}: found {found}; expected a string, or a list or iterator of them; pass texts")
    return list(items) if hasattr(items, "__len__") and not isinstance(items, Sequence) else items


def prompted(prompt: str, texts: Any, *, lower: bool = False) -> Any:
    """Return texts with a prompt before each, also in lower case; the tokenizer rejects values that are not strings."""
    found = [prompt + text if isinstance(text, str) else text for text in texts] if prompt else texts
    return [text.lower() if isinstance(text, str) else text for text in found] if lower else found


def refuse_two_texts(items: Any, method: str) -> None:
    """Raise on a tuple of two texts, which may be a pair or a list of two.

    Raises:
        PredictError: with both spellings.
    """
    if isinstance(items, tuple) and len(items) == 2 and all(isinstance(part, str) for part in items):
        raise PredictError(
            f"{method}: a tuple of two texts may be one pair or two texts; write {method}([(a, b)]) for one pair of "
            f"texts that belong together, {method}([a, b]) for two texts",
            found=items,
        )


def plain_pairs(items: Sequence[Any]) -> bool:
    """Return whether all items are tuples of two strings; checked without a Python loop."""
    if set(map(type, items)) != {tuple} or set(map(len, items)) != {2}:
        return False
    return {kind for part in zip(*items, strict=True) for kind in set(map(type, part))} == {str}
