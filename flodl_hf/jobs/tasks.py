"""Tasks of file jobs: the model's method, the columns of its results, and the conversion of a result to values.

Each task uses the model's public methods. `columns` selects the texts, `write` formats the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flodl.errors import FlodlError, nearest
from flodl_hf.checkpoints.keywords import replace_long_texts
from flodl_hf.errors import PredictError
from flodl_hf.families.schema.tasks import TASKS
from flodl_hf.heads.prediction_keywords import budget_of
from flodl_hf.inference.options import check_name
from flodl_hf.inference.results import is_empty
from flodl_hf.jobs.columns import Choice
from flodl_hf.jobs.tables import Kind

VECTOR = "vector"
"""Column of vectors of `encode_file`."""

LABEL = {"label": "text", "score": "float"}
ENTITY = {"label": "text", "score": "float", "word": "text", "start": "int", "end": "int"}
SPAN = {"text": "text", "score": "float", "start": "int", "end": "int"}
FILL = {"token": "text", "score": "float", "sequence": "text"}


@dataclass(frozen=True)
class Answerer:
    """One task of a model.

    Attributes:
        columns: type of each result column.
        run: function from inputs to their results, in order.
        values: function from a result to one value for each column.
        strict: whether inputs longer than a window are refused.
        empty: whether an input is counted as empty.
    """

    columns: dict[str, Kind]
    run: Callable[[Sequence[Any]], Iterator[Any]]
    values: Callable[[Any], tuple[Any, ...]]
    strict: bool = False
    empty: Callable[[Any], bool] = is_empty


def _second_is_empty(item: tuple[str, str]) -> bool:
    return is_empty(item[1])


def answerer_for(model: Any, choice: Choice, options: Mapping[str, Any], caller: str) -> Answerer:
    """Return the task of a job.

    Args:
        model: the model.
        choice: the columns.
        options: options of the model's method, of `with_old_names`: ``top_k``, ``threshold``, ...; None is ignored.
        caller: name of the called function, for errors.

    Raises:
        PredictError: the method has no such option, or the model does not support the task.
    """
    given = {name: value for name, value in options.items() if value is not None}
    stored = given.pop("store", None) if choice.task == "vectors" else None
    if stored is not None and (recipe := model.sentence_recipe) is not None and recipe.splade is not None:
        raise PredictError(
            f"{caller}: found a model of sparse vectors (SPLADE), expected dense ones. Use embed_sparse in Python, or "
            "flodl-hf serve.",
            head=model.head,
        )
    method = method_of(model, choice.task, stored=stored is not None)
    known = _keywords(method, choice.task)
    wrong = [f"{name}{nearest(name, known)}" for name in given if name not in known]
    if wrong:
        raise PredictError(
            f"{caller}: {model.head} has no option {'; '.join(wrong)}; it has {', '.join(known)}",
            problems=wrong,
        )
    try:
        budget_of(given.get("batch_size"), model)
    except ValueError as fault:
        raise PredictError(f"{caller}: batch_size={given['batch_size']!r}; {fault}", problems=["batch_size"]) from None
    strict = bool(given.get("strict"))
    if choice.task == "relevance":
        if model.num_labels != 1:
            raise PredictError(f"{caller}: the model has {model.num_labels} labels, ranking by a query needs one label")
        return Answerer(
            {"score": "float"},
            # The job reports the progress.
            lambda items: iter(_relevance(partial(method, **given, progress=False), items)),
            lambda result: (result,),
            strict,
            _second_is_empty,
        )
    if stored is not None:
        return _stored(method, stored, given, strict)
    several = choice.task == "classes" and model.config.problem_type == "multi_label_classification"
    # A tuned threshold between two labels selects one of them.
    tuned = given.get("threshold") == "tuned" and not several
    alone = tuned or ("threshold" not in given and given.get("top_k", None if several else 1) == 1)
    if choice.task == "classes" and alone:
        given["top_k"] = 1

    def run(items: Sequence[Any]) -> Iterator[Any]:
        return method(iter(items), **given)

    if choice.task == "masks":
        return Answerer({"masks": [[FILL]]}, run, lambda result: ([_records(fills, FILL) for fills in result],))
    if choice.task == "vectors":
        return Answerer({"embedding": "vector"}, run, lambda result: (result.float().numpy(),), strict)
    if choice.task == "classes" and alone:
        return Answerer(dict(LABEL), run, _best, strict)
    if choice.task == "answers" and given.get("top_k", 1) == 1:
        columns: dict[str, Kind] = {"answer": "text", "score": "float", "start": "int", "end": "int"}
        return Answerer(columns, run, _best_answer, strict, _second_is_empty)
    column, kinds = {"classes": ("labels", LABEL), "answers": ("answers", SPAN), "entities": ("entities", ENTITY)}[
        choice.task
    ]
    empty = _second_is_empty if choice.task == "answers" else is_empty
    return Answerer({column: [kinds]}, run, lambda result: (_records(result, kinds),), strict, empty)


def with_old_names(model: Any, task: str, options: Mapping[str, Any], caller: str) -> dict[str, Any]:
    """Return options with one spelling of ``long_texts`` and ``precision``, so that jobs of all have one identity.

    Raises:
        PredictError: the model's method does not support the value.
    """
    options = {**options, "precision": check_name(options.get("precision"))} if "precision" in options else options
    method = method_of(model, task, stored=options.get("store") is not None)
    return replace_long_texts(caller, options, inspect.signature(method).parameters)


def method_of(model: Any, task: str, *, stored: bool) -> Any:
    """Return the model's method for a task; ``encode`` for ``stored`` vectors."""
    return getattr(model, "encode" if stored else next(each.methods[0] for each in TASKS if each.answers == task))


def _keywords(method: Any, task: str) -> list[str]:
    """Return the options of a method that apply to rows of a file."""
    parameters = inspect.signature(method).parameters
    # Options of the result's form do not apply to columns, and a row's score has no rank.
    left_out = {"compat", "words", "convert_to_tensor", "convert_to_numpy", "output_value", "batch_size"} | (
        {"top_k"} if task == "relevance" else set()
    )
    known = [n for n, p in parameters.items() if p.default is not inspect.Parameter.empty and n not in left_out]
    known.append("batch_size")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        from flodl_hf.inference.options import RunKeywords

        # Options of the run; jobs distribute devices by process.
        known += [name for name in RunKeywords.__annotations__ if name not in ("devices", "progress")]
    return known


def _stored(encode: Any, precision: str, options: dict[str, Any], strict: bool) -> Answerer:
    """Return vectors as arrays; those for int8 are quantized later, see `flodl_hf.jobs.vectors`."""
    from flodl_hf.inference.quantize import quantize_embeddings

    first = "float32" if precision in ("int8", "uint8") else precision
    # With ``store``, ``precision`` is the precision of the computation, as for other tasks.
    encode = partial(encode, store="float32", **options)
    (one,) = quantize_embeddings(encode(["a"]), first)

    def run(items: Sequence[Any]) -> Iterator[Any]:
        whole = encode(list(items), progress=False)
        sound = np.isfinite(whole).all(1)
        # Vectors with NaN are detected by the writer, with their row.
        yield from (
            quantize_embeddings(whole, first)
            if sound.all()
            else (
                quantize_embeddings(row[None], first)[0] if good else row
                for row, good in zip(whole, sound, strict=True)
            )
        )

    return Answerer({VECTOR: f"vector:{precision}:{len(one)}"}, run, lambda result: (result,), strict)


def _best(results: Sequence[Any]) -> tuple[str | None, float | None]:
    return (results[0].label, results[0].score) if results else (None, None)


def _best_answer(results: Sequence[Any]) -> tuple[Any, ...]:
    # No result, and "no answer" with its probability, are null.
    if not results or results[0].no_answer:
        return None, results[0].score if results else None, None, None
    return results[0].text, results[0].score, results[0].start, results[0].end


def _records(results: Sequence[Any], kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in kinds} for one in results]


def _relevance(rerank: Any, items: Sequence[tuple[str, str]]) -> list[float]:
    """Return the score of each pair of query and document, as `rerank` computes it for the documents of a query."""
    queries: dict[str, list[int]] = {}
    for place, (query, _) in enumerate(items):
        queries.setdefault(query, []).append(place)
    scores = [0.0] * len(items)
    for query, places in queries.items():
        for ranked in rerank(query, [items[place][1] for place in places]):
            scores[places[ranked.index]] = ranked.score
    return scores


def faulty_items(model: Any, answerer: Answerer, items: Sequence[Any]) -> dict[int, str]:
    """Return the indices of inputs that the model refuses, with the reasons.

    Called after a run over ``items`` failed; an error without any refused input has another cause.
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
    # One pass of the tokenizer instead of a bisection, since many long texts may occur.
    found: dict[int, str] = {}
    for place, item in enumerate(items):
        texts, pairs = ([item], None) if isinstance(item, str) else ([item[0]], [item[1]])
        try:
            (windows,) = model.tokenizer.encode_rows(texts, pairs, offsets=False)
        except FlodlError:
            continue  # the bisection reports the error
        if (tokens := len(windows[0].ids)) > model.max_tokens:
            found[place] = f"the text has {tokens} tokens, expected at most {model.max_tokens} (long_texts is 'error')"
    return found
