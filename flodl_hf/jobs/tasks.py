"""What each task gives for a row: the model's method, the columns of its answer, and an answer as their values.

Every task goes through the model's public methods with an iterator in and an iterator out. Which texts these are is
decided in `columns`; how values are written, in `write`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flodl.errors import FlodlError, nearest
from flodl_hf.errors import PredictError
from flodl_hf.families.schema.tasks import TASKS
from flodl_hf.inference.results.lists import is_empty
from flodl_hf.jobs.columns import Choice
from flodl_hf.jobs.tables import Kind

__all__ = ["VECTOR", "Answerer", "answerer_for", "faulty_items", "method_of"]

VECTOR = "vector"
"""The column of vectors that are stored as `encode_file` was asked to."""

LABEL = {"label": "text", "score": "float"}
ENTITY = {"label": "text", "score": "float", "word": "text", "start": "int", "end": "int"}
SPAN = {"text": "text", "score": "float", "start": "int", "end": "int"}
FILL = {"token": "text", "score": "float", "sequence": "text"}


@dataclass(frozen=True)
class Answerer:
    """One task of one model.

    Attributes:
        columns: what each column of an answer holds.
        run: answers of some items, in their order.
        values: an answer as one value for each column.
        strict: whether items longer than a window are refused.
        empty: whether an item is counted as empty.
    """

    columns: dict[str, Kind]
    run: Callable[[Sequence[Any]], Iterator[Any]]
    values: Callable[[Any], tuple[Any, ...]]
    strict: bool = False
    empty: Callable[[Any], bool] = is_empty


def _second_is_empty(item: tuple[str, str]) -> bool:
    return is_empty(item[1])


def answerer_for(model: Any, choice: Choice, options: Mapping[str, Any]) -> Answerer:
    """Return the task that a model does.

    Args:
        model: the model.
        choice: what is read.
        options: of the model's method: ``top_k``, ``strict``, ``threshold`` and so on; None is as good as not given.

    Raises:
        PredictError: the method has no such option, or the model is not made for the task.
    """
    given = {name: value for name, value in options.items() if value is not None}
    stored = given.pop("store", None) if choice.task == "vectors" else None
    method = method_of(model, choice.task, stored=stored is not None)
    known = _keywords(method, choice.task)
    wrong = [f"{name}{nearest(name, known)}" for name in given if name not in known]
    if wrong:
        raise PredictError(
            f"predict_file: {model.head} has no option {'; '.join(wrong)}; it has {', '.join(known)}", problems=wrong
        )
    strict = bool(given.get("strict"))
    if choice.task == "relevance":
        if model.num_labels != 1:
            raise PredictError(
                f"predict_file: the model has {model.num_labels} labels; ranking by a query needs a model of one label"
            )
        return Answerer(
            {"score": "float"},
            # The run over the file shows how far it is.
            lambda items: iter(_relevance(partial(method, **given, progress=False), items)),
            lambda found: (found,),
            strict,
            _second_is_empty,
        )
    if stored is not None:
        return _stored(method, stored, given)
    if choice.task == "classes":
        return _classes(model, method, given, strict)
    if choice.task == "answers":
        return _answers(method, given, strict)

    def run(items: Sequence[Any]) -> Iterator[Any]:
        return method(iter(items), **given)

    if choice.task == "entities":
        return Answerer({"entities": [ENTITY]}, run, lambda found: (_records(found, ENTITY),), strict)
    if choice.task == "masks":
        return Answerer({"masks": [[FILL]]}, run, lambda found: ([_records(fills, FILL) for fills in found],))
    return Answerer({"embedding": "vector"}, run, lambda found: (found.float().numpy(),), strict)


def method_of(model: Any, task: str, *, stored: bool) -> Any:
    """Return the method of a model that does a task; ``stored`` vectors are made by ``encode``."""
    return getattr(model, "encode" if stored else next(each.methods[0] for each in TASKS if each.answers == task))


def _keywords(method: Any, task: str) -> list[str]:
    """Return the options of a method that make sense for rows of a file."""
    parameters = inspect.signature(method).parameters
    # Options of the form of the answers are left out, because columns have their own; a row's score has no rank.
    left_out = {"compat", "words", "convert_to_tensor", "convert_to_numpy", "output_value", "batch_size"} | (
        {"top_k"} if task == "relevance" else set()
    )
    known = [n for n, p in parameters.items() if p.default is not inspect.Parameter.empty and n not in left_out]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        from flodl_hf.inference.options import RunKeywords

        # How it runs; devices are shared out by process here.
        known += [name for name in RunKeywords.__annotations__ if name not in ("devices", "progress")]
    return known


def _stored(encode: Any, precision: str, given: dict[str, Any]) -> Answerer:
    """Return vectors as arrays; those that become bytes later are integers, see `flodl_hf.jobs.vectors`."""
    from flodl_hf.inference.quantize import quantize_embeddings

    first = "float32" if precision in ("int8", "uint8") else precision
    # With ``store``, ``precision`` is the precision of the computation, as for other tasks.
    encode = partial(encode, store="float32", **given)
    (one,) = quantize_embeddings(encode(["a"]), first)

    def run(items: Sequence[Any]) -> Iterator[Any]:
        whole = encode(list(items), progress=False)
        sound = np.isfinite(whole).all(1)
        # What is no number shows where it is written, with its row.
        yield from (
            quantize_embeddings(whole, first)
            if sound.all()
            else (
                quantize_embeddings(row[None], first)[0] if good else row
                for row, good in zip(whole, sound, strict=True)
            )
        )

    return Answerer({VECTOR: f"vector:{precision}:{len(one)}"}, run, lambda found: (found,))


def _classes(model: Any, method: Any, given: dict[str, Any], strict: bool) -> Answerer:
    """Return one label and its score where a text has one; else a list."""
    several = model.config.problem_type == "multi_label_classification" or "threshold" in given
    alone = given.get("top_k", None if several else 1) == 1 and "threshold" not in given
    # The model's own threshold between two labels gives one of them.
    alone |= given.get("threshold") == "tuned" and model.config.problem_type != "multi_label_classification"
    if alone:
        given = {**given, "top_k": 1}

    def run(items: Sequence[Any]) -> Iterator[Any]:
        return method(iter(items), **given)

    if alone:
        return Answerer(dict(LABEL), run, _best, strict)
    return Answerer({"labels": [LABEL]}, run, lambda found: (_records(found, LABEL),), strict)


def _best(found: Sequence[Any]) -> tuple[str | None, float | None]:
    return (found[0].label, found[0].score) if found else (None, None)


def _answers(method: Any, given: dict[str, Any], strict: bool) -> Answerer:
    def run(items: Sequence[Any]) -> Iterator[Any]:
        return method(iter(items), **given)

    def best(found: Sequence[Any]) -> tuple[Any, ...]:
        # Nothing, or the statement that there is no answer, is null with its probability.
        if not found or found[0].no_answer:
            return None, found[0].score if found else None, None, None
        return found[0].text, found[0].score, found[0].start, found[0].end

    if given.get("top_k", 1) == 1:
        columns: dict[str, Kind] = {"answer": "text", "score": "float", "start": "int", "end": "int"}
        return Answerer(columns, run, best, strict, _second_is_empty)
    return Answerer({"answers": [SPAN]}, run, lambda found: (_records(found, SPAN),), strict, _second_is_empty)


def _records(found: Sequence[Any], kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in kinds} for one in found]


def _relevance(rerank: Any, items: Sequence[tuple[str, str]]) -> list[float]:
    """Return the score of each pair of query and document, as ranking the documents of a query gives it."""
    queries: dict[str, list[int]] = {}
    for place, (query, _) in enumerate(items):
        queries.setdefault(query, []).append(place)
    scores = [0.0] * len(items)
    for query, places in queries.items():
        for ranked in rerank(query, [items[place][1] for place in places]):
            scores[places[ranked.index]] = ranked.score
    return scores


def faulty_items(model: Any, answerer: Answerer, items: Sequence[Any]) -> dict[int, str]:
    """Return the places of items that the model refuses, each with its reason.

    Called when a run over ``items`` failed; what is not refused alone is no item's fault.
    """
    found: dict[int, str] = {}
    if answerer.strict and model.max_tokens is not None:
        found = _too_long(model, items)
    rest = [place for place in range(len(items)) if place not in found]
    stack = [rest] if rest else []
    while stack:
        places = stack.pop()
        try:
            for _ in answerer.run([items[place] for place in places]):
                pass
        except FlodlError as fault:
            if len(places) == 1:
                found[places[0]] = str(fault).removeprefix("text 0: ")
            else:
                half = len(places) // 2
                stack += [places[half:], places[:half]]
    return found


def _too_long(model: Any, items: Sequence[Any]) -> dict[int, str]:
    # One pass of the tokenizer instead of a search: where texts are long, many are.
    found: dict[int, str] = {}
    for place, item in enumerate(items):
        texts, pairs = ([item], None) if isinstance(item, str) else ([item[0]], [item[1]])
        try:
            (windows,) = model.tokenizer.encode_rows(texts, pairs, offsets=False)
        except FlodlError:
            continue  # the search will say what is wrong with it
        if (tokens := len(windows[0].ids)) > model.max_tokens:
            found[place] = f"the text has {tokens} tokens, {model.max_tokens} fit into one window, and strict is set"
    return found
