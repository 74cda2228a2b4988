"""What callers give as texts: one or several, told apart without a guess; and the texts that have nothing to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flodl.errors import FlodlError
from flodl_hf.errors import InputTypeError, PredictError
from flodl_hf.inference.results.lists import Found
from flodl_hf.inference.stream import Job

__all__ = ["found_by", "plain_pairs", "prompted", "refuse_two_texts", "several"]

R = TypeVar("R")


def several(items: Any, method: str, *, mapping: bool = False) -> Any:
    """Return texts as a list where their number is known, and as an iterable where it is not; a string as it is.

    Lists are also what behaves like one: columns of pandas, polars, pyarrow and datasets, and arrays of numpy.

    Args:
        items: what the caller gave.
        method: the caller's word for what is done.
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
    """Return texts with a prompt before each, also in lower case; the tokenizer refuses what is no string."""
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
    """Return whether all items are tuples of two strings; asks without a step of the interpreter for each."""
    if set(map(type, items)) != {tuple} or set(map(len, items)) != {2}:
        return False
    return {kind for part in zip(*items, strict=True) for kind in set(map(type, part))} == {str}


def found_by(
    job: Job[Any, Any],
    kind: type[Found[Any]],
    *,
    blank: Callable[[Any], bool] | None = None,
    given: Callable[[Any], Any] = lambda item: item,
) -> Job[Any, Any]:
    """Return a job whose answers are of a kind that contains its text.

    Args:
        job: answers texts.
        kind: type of the answers.
        blank: whether an item has no answer; None answers all items, empty texts as transformers does.
        given: returns what an answer contains of its item.
    """

    def finish(chunk: list[Any], encoded: Any, running: Any) -> list[Any]:
        answers = job.finish(chunk, encoded, running)
        # A string is kept as it is.
        texts = chunk if set(map(type, chunk)) == {str} else list(map(given, chunk))
        return list(map(kind, answers, texts))

    found = Job(job.encode, job.start, finish)
    return found if blank is None else _skipping(found, lambda item: kind((), given(item)), blank)


def _skipping(job: Job[Any, R], nothing: Callable[[Any], R], blank: Callable[[Any], bool]) -> Job[Any, R]:
    """Return a job that does not run blank items.

    Args:
        job: answers the others.
        nothing: the answer to a blank item.
        blank: whether an item is blank.
    """

    def encode(chunk: list[Any]) -> Any:
        empty = list(map(blank, chunk))
        if not any(empty):
            return None, job.encode(chunk)
        read = [item for item, without in zip(chunk, empty, strict=True) if not without]
        try:
            return empty, job.encode(read) if read else None
        except FlodlError:
            job.encode(chunk)  # a fault names places in what was given
            raise

    def start(found: tuple[list[bool] | None, Any]) -> Any:
        empty, encoded = found
        return None if empty is not None and encoded is None else job.start(encoded)

    def finish(chunk: list[Any], found: tuple[list[bool] | None, Any], running: Any) -> list[R]:
        empty, encoded = found
        if empty is None:
            return job.finish(chunk, encoded, running)
        read = [item for item, without in zip(chunk, empty, strict=True) if not without]
        answers = iter(job.finish(read, encoded, running) if read else ())
        return [nothing(item) if without else next(answers) for item, without in zip(chunk, empty, strict=True)]

    return Job(encode, start, finish)
