"""Tasks of a worker: calls of the model's public methods, with results as JSON types and arrays.

Results agree with ``predict``, ``embed`` and the other methods. Routes select the task (`flodl_hf.serving.routes`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from flodl_hf.checkpoints.sentence.recipe import recipe_on
from flodl_hf.errors import PredictError, TextTooLongError, TokenizerError
from flodl_hf.families.schema.tasks import HEADS, task_named
from flodl_hf.serving.request import WorkerRequest

Done = tuple[Any, list[np.ndarray]]
"""JSON types, and arrays in addition to them."""


def _score_options(options: Mapping[str, Any]) -> dict[str, bool]:
    """Return options of scores: long texts are read in windows unless ``truncate`` is given."""
    truncate = options.get("truncate")
    return {} if truncate is None else {"truncate": True} if truncate else {"strict": True}


def _vector_options(options: Mapping[str, Any]) -> dict[str, bool]:
    """Return options of vectors: long texts are refused unless ``truncate`` or ``windows`` is true."""
    windows = options.get("windows") is True
    return {"windows": windows, "strict": not windows and not options.get("truncate")}


def _window_options(options: Mapping[str, Any], task: str) -> dict[str, bool]:
    if options.get("truncate"):
        raise PredictError(
            f"{task}: found truncate=true, but this task reads whole texts in windows. Omit it, or pass false to "
            "refuse texts that exceed one window."
        )
    return {} if options.get("truncate") is None else {"strict": True}


def _given(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}


def _limit(model: Any) -> int | None:
    recipe = model.sentence_recipe
    return model._most_tokens(recipe.max_tokens if recipe is not None and model.head == "base" else None)


# ---- vectors -------------------------------------------------------------------------------------------


def _embed(model: Any, items: list[Any], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return vectors of texts and of rows of ids; with a prompt, ids are decoded to text, as in TEI."""
    from flodl_hf.heads.vectors import keywords_for

    if (kind := options.get("kind")) is not None:
        options = keywords_for(kind, model, options)  # prompt and route of queries or documents
    size = options.get("dimensions")
    width = _width(model, options.get("route"))
    if size is not None and size > width:
        raise PredictError(f"embed: found dimensions={size}, expected at most {width}, the size of the vectors")
    given = {"truncate_dim": size, "normalize": options.get("normalize")} | _given(options, "route", "task")
    prompt = options.get("prompt")
    places = [place for place, item in enumerate(items) if isinstance(item, list)]
    words = model.on_route(options.get("route")).config.encoder.vocab_size
    for place in places:
        if not items[place] or min(items[place]) < 0 or max(items[place]) >= words:
            raise TokenizerError(f"input {place}: expected ids from 0 to {words - 1}, at least one")
    if prompt and places:
        decode = partial(model.tokenizer.decode, skip_special_tokens=True)
        items, places = [item if isinstance(item, str) else decode(item) for item in items], []
    texts = [item for item in items if isinstance(item, str)]
    found = []
    if texts or not places:
        found.append(model.embed(texts, **given, prompt=prompt, **_vector_options(options)).numpy())
    if places:
        found.append(_embed_ids(model, [items[place] for place in places], places, options, request))
    if len(found) == 1:
        return {}, found
    order = np.argsort([*(place for place, item in enumerate(items) if isinstance(item, str)), *places])
    return {}, [np.concatenate(found)[order]]


def _embed_ids(
    model: Any, rows: list[list[int]], places: list[int], options: Mapping[str, Any], request: WorkerRequest
) -> np.ndarray:
    from flodl_hf.inference.batch import Pooled
    from flodl_hf.inference.inputs import Encoded
    from flodl_hf.inference.pipeline import Session
    from flodl_hf.inference.pooling import check_pooling
    from flodl_hf.inference.token_table import Frame, framed
    from flodl_hf.inference.vectors import Vectors

    recipe, normalize = recipe_on(model.sentence_recipe, options.get("route")), options.get("normalize")
    model = model.on_route(options.get("route"))
    model._ready("embed")
    if recipe is not None and (recipe.dense or recipe.changes_states):
        raise PredictError("embed: this model has modules that need texts. Send texts, not ids.")
    limit = min((size for size in (_limit(model), options.get("max_tokens")) if size), default=None)
    over = [max(0, len(row) - limit) if limit else 0 for row in rows]
    if limit and any(over):
        if not options.get("truncate"):
            place, row = next(found for found, more in zip(zip(places, rows, strict=True), over, strict=True) if more)
            raise TextTooLongError(
                f"input {place} has {len(row)} ids, expected at most {limit}. Shorten it, or send truncate: true.",
                found=len(row), expected=limit,
            )  # fmt: skip
        left = (options.get("side") or model.tokenizer.truncation_side) == "left"
        rows = [row[-limit:] if left else row[:limit] for row in rows]
        request.count_truncated(sum(map(bool, over)), sum(over))
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.concatenate([np.asarray(row, np.int32) for row in rows])
    encoded = Encoded(framed(Frame((), (), (), (0, 0, 0, 0, 0), False), (ids, counts)), len(rows))
    wanted = normalize if normalize is not None else (recipe.normalize if recipe else True)
    names = check_pooling(recipe.pooling if recipe else "mean")
    pending = Session(model, {}).start(encoded.table, Pooled(names, options.get("dimensions"), wanted))
    return Vectors(len(rows), normalize=wanted).take([""] * len(rows), encoded, pending).numpy()


def _width(model: Any, route: str | None = None) -> int:
    recipe = recipe_on(model.sentence_recipe, route)
    wide = model.on_route(route).config.encoder.hidden_size
    return recipe.width(wide) if recipe is not None else wide


def _embed_sparse(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return weights of words by their ids."""
    found = model.embed_sparse(items, **_vector_options(options))
    return [
        [{"index": index, "value": value} for index, value in zip(ids.tolist(), weights.tolist(), strict=True)]
        for ids, weights in zip(found.ids, found.weights, strict=True)
    ], []


def _late_interaction(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return a vector for each token, with the folder's markers and lengths."""
    query = options.get("query") is True
    late = model.sentence_recipe.late
    limit = min(
        (n for n in (late.query_length if query else late.document_length, model.max_tokens) if n), default=None
    )
    if limit is not None:
        from flodl_hf.inference.inputs import encode

        lengths = encode(model.tokenizer, items, max_tokens=None).table.lengths
        marker = (late.query_marker if query else late.document_marker) is not None
        over = np.maximum(0, lengths + marker - limit)
        if options.get("truncate") is False and over.any():
            raise TextTooLongError(
                f"input {int(over.argmax())} has {int(over.max())} tokens more than the model's limit of {limit}. Omit "
                "truncate to truncate it."
            )
        request.count_truncated(int((over > 0).sum()), int(over.sum()))
    found = [one.float().numpy() for one in model.embed_tokens(items, query=query)]
    return {"lengths": [len(one) for one in found]}, [np.concatenate(found)]


def _embed_all(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return the states of all tokens, in the order of the windows."""
    import torch

    from flodl_hf.inference.batch import States
    from flodl_hf.inference.inputs import encode
    from flodl_hf.inference.pipeline import Session
    from flodl_hf.inference.pooling import finish_embeddings

    tokenizer = model._ready("embed_all")
    how = _vector_options(options)
    encoded = encode(tokenizer, items, max_tokens=_limit(model), strict=how["strict"], truncate=not how["windows"])
    request.count_truncated(encoded.truncated, encoded.dropped)
    placed = Session(model, {}).start(encoded.table, States()).placed()
    rows = placed.rows(encoded.table)
    order = np.lexsort((encoded.table.window, encoded.table.owners))
    lengths = np.bincount(encoded.table.owners, weights=encoded.table.lengths, minlength=len(items)).astype(int)
    states = finish_embeddings(
        torch.cat([rows[i] for i in order]), truncate_dim=options.get("dimensions"),
        normalize=options.get("normalize") is True,
    )  # fmt: skip
    return {"lengths": lengths.tolist()}, [states.numpy()]


def _similarity(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return the similarity of the first text and each other text."""
    vectors, similarity = _compared(model, items, options, request)
    return similarity(vectors[:1], vectors[1:])[0].tolist(), []


def _compared(
    model: Any, texts: list[str], options: Mapping[str, Any], request: WorkerRequest
) -> tuple[np.ndarray, Callable[..., Any]]:
    """Return the vectors of texts, and the similarity of two of them by the measure of the model."""
    from flodl_hf.inference.similarity import measure_of, similarity_of

    _, (vectors,) = _embed(model, texts, {**options, "dimensions": None}, request)
    recipe = model.sentence_recipe
    return vectors, partial(similarity_of, measure=measure_of(recipe.files if recipe else {}))


# ---- scores --------------------------------------------------------------------------------------------


def _classify(model: Any, items: list[Any], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return labels with scores of texts and pairs."""
    given = _given(options, "top_k", "threshold", "function_to_apply")
    if options.get("raw"):
        given["function_to_apply"] = "none"
    return predicted_rows(partial(model.predict, **given, **_score_options(options)), items), []


def predicted_rows(predict: Callable[[list[Any]], Any], items: Sequence[Any]) -> list[Any]:
    """Return the results of texts and pairs as JSON types; a call of ``predict`` has either texts or pairs."""
    found: list[Any] = [None] * len(items)
    for of_texts in (True, False):
        places = [place for place, item in enumerate(items) if isinstance(item, str) is of_texts]
        inputs = [items[place] if of_texts else tuple(items[place]) for place in places]
        for place, one in zip(places, predict(inputs) if inputs else (), strict=True):
            found[place] = one.to_rows()
    return found


def _rerank(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return the relevance of each text for the first one, by the model's score or by vectors."""
    query, documents = items[0], items[1:]
    given = {"function_to_apply": "none"} if options.get("raw") else {}
    if most := options.get("max_tokens_per_doc"):
        documents = _shortened(model, request, documents, most)
    found = model.rerank(query, documents, **given, **_score_options(options))
    return [{"index": one.index, "score": one.score, "windows": one.windows} for one in found], []


def _shortened(model: Any, request: WorkerRequest, texts: list[str], most: int) -> list[str]:
    """Return texts truncated to a number of tokens."""
    out = []
    for text, (row,) in zip(texts, model.tokenizer.encode_rows(texts, add_special_tokens=False), strict=True):
        request.count_truncated(int(len(row.ids) > most), max(0, len(row.ids) - most))
        out.append(text if len(row.ids) <= most else text[: row.offsets[most - 1][1]])
    return out


def _score(model: Any, items: list[list[str]], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return a score for each pair: the cross-encoder's, or the similarity of vectors."""
    if model.head == "base":
        texts = list(dict.fromkeys(text for pair in items for text in pair))
        place = {text: i for i, text in enumerate(texts)}
        vectors, similarity = _compared(model, texts, options, request)
        return [similarity(vectors[place[a]], vectors[place[b]]).item() for a, b in items], []
    scores = [0.0] * len(items)
    queries: dict[str, list[int]] = {}
    for place_, (query, _) in enumerate(items):
        queries.setdefault(query, []).append(place_)
    for query, places in queries.items():
        found, _ = _rerank(model, [query, *(items[i][1] for i in places)], options, request)
        for one in found:
            scores[places[one["index"]]] = one["score"]
    return scores, []


def _entities(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return entities of texts."""
    given = _given(options, "aggregation", "ignore_labels", "constrained", "stride")
    found = model.predict(items, **given, **_window_options(options, "entities"))
    return [one.to_rows() for one in found], []


def _answer(model: Any, items: list[list[str]], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return answers to questions about contexts."""
    given = _given(options, "top_k", "max_answer_length", "no_answer", "stride", "window_tokens", "whole_words")
    found = model.answer_batch([tuple(item) for item in items], **given, **_window_options(options, "answer"))
    return [one.to_rows() for one in found], []


def _fill_mask(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return words for the masks of texts."""
    _window_options(options, "fill_mask")
    found = model.fill_mask(items, **_given(options, "top_k", "targets"))
    return [one.to_dict()["masks"] for one in found], []


def _zero_shot(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return scores of user-defined labels."""
    given = _given(options, "template", "multi_label")
    found = model.zero_shot(items, options["labels"], **given, **_window_options(options, "zero_shot"))
    return [one.to_rows() for one in found], []


# ---- tokens --------------------------------------------------------------------------------------------


def _tokenize(model: Any, items: list[str], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return tokens of texts with their offsets."""
    tokenizer = model._ready("tokenize", untrained=True)
    special = options.get("special")
    found = []
    for text, (row,) in zip(items, tokenizer.encode_rows(items, add_special_tokens=special is not False), strict=True):
        words = tokenizer.convert_ids_to_tokens(list(row.ids))
        found.append(
            [
                {
                    "id": number,
                    "text": word if added else text[start:stop],
                    "special": bool(added),
                    "start": None if added else start,
                    "stop": None if added else stop,
                }
                for number, word, added, (start, stop) in zip(row.ids, words, row.special, row.offsets, strict=True)
            ]
        )
    return found, []


def _decode(model: Any, items: list[list[int]], options: Mapping[str, Any], request: WorkerRequest) -> Done:
    """Return texts of ids."""
    tokenizer = model._ready("decode", untrained=True)
    for place, row in enumerate(items):
        if wrong := [number for number in row if not 0 <= number < tokenizer.vocab_size]:
            raise TokenizerError(f"ids {place}: found id {wrong[0]}, expected 0 to {tokenizer.vocab_size - 1}")
    skip = options.get("special") is not False
    return [tokenizer.decode(row, skip_special_tokens=skip) for row in items], []


TASKS: dict[str, Callable[[Any, list[Any], Mapping[str, Any], WorkerRequest], Done]] = {
    "embed": _embed,
    "embed_all": _embed_all,
    "embed_sparse": _embed_sparse,
    "late_interaction": _late_interaction,
    "similarity": _similarity,
    "classify": _classify,
    "rerank": _rerank,
    "score": _score,
    "zero_shot": _zero_shot,
    "entities": _entities,
    "answer": _answer,
    "fill_mask": _fill_mask,
    "tokenize": _tokenize,
    "decode": _decode,
}
"""Function of each task by name; ``routes`` of `Task` lists the tasks of a head."""
FOR_ALL = ("tokenize", "decode")
"""Tasks that need no head."""


def check_head(name: str, head: str) -> None:
    """Raise if no route supports a model's head.

    Args:
        name: name of the model.
        head: its head.

    Raises:
        PredictError: no route supports it.
    """
    heads = [task.name for task in HEADS if task.routes]
    if head not in heads:
        raise PredictError(
            f"{name}: found the head {head}, which no route supports, expected one of {', '.join(heads)}. Load "
            "the model in Python, or serve only its encoder: --head base",
            head=head,
        )


def describe(model: Any) -> dict[str, Any]:
    """Return information about a model as JSON types: head, sizes, labels."""
    config, recipe = model.config, model.sentence_recipe
    tokenizer = model.tokenizer
    # Values of the field "route".
    routes = [] if recipe is None else list(dict.fromkeys((*recipe.routes, *recipe.kinds)))
    first = next(iter(routes), None) if recipe is not None and recipe.usual_route is None else None
    return {
        "head": model.head,
        "model_type": config.family.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_tokens": _limit(model),
        "operations": operations_of_token(model),
        "width": _width(model, first),
        "labels": list(config.labels) if model.head in ("sequence_classification", "token_classification") else [],
        "pooling": list(recipe.pooling) if recipe else ["mean"],
        "normalize": recipe.normalize if recipe else True,
        "prompts": dict(recipe.prompts) if recipe else {},
        "routes": routes,
        "mask": tokenizer.mask_token if tokenizer is not None else None,
        "tasks": [name for name in TASKS if _has(model, name)],
    }


def _has(model: Any, task: str) -> bool:
    if task not in (*FOR_ALL, *task_named(model.head).routes):
        return False
    recipe = model.sentence_recipe
    if task == "late_interaction":
        return recipe is not None and recipe.late is not None
    if task == "embed_sparse":
        return model.head == "masked_lm" or (recipe is not None and recipe.lexical is not None)
    if task in ("rerank", "score") and model.head == "sequence_classification":
        return model.num_labels == 1
    if task == "zero_shot":
        return any("entail" in label.lower() for label in model.config.labels)
    return True


def warm_items(model: Any) -> tuple[str, list[Any]]:
    """Return a task of the model and inputs for warm-up."""
    texts = ["warm " * size for size in (2, 24, 100, 400)]
    if model.head == "question_answering":
        return "answer", [["what", text] for text in texts]
    if model.head == "masked_lm":
        mask = model.tokenizer.mask_token if model.tokenizer is not None else ""
        return "fill_mask", [f"{text}{mask}" for text in texts]
    if model.head == "base" and model.sentence_recipe is not None and model.sentence_recipe.usual_route is None:
        return "embed" if not model.sentence_recipe.routes else "embed_all", texts
    return {"base": "embed", "token_classification": "entities"}.get(model.head, "classify"), texts


# ---- speed of the device --------------------------------------------------------------------------------

# Large enough to occupy the device, small enough to finish quickly.
CUDA_SIZE, CPU_SIZE = 4096, 512
REPEATS = 5


def measure_peak(device: Any, dtype: Any) -> float:
    """Return the operations per second of a matrix product, the best of several runs; multiply and add count as two.

    Args:
        device: the device.
        dtype: type of the matrices.
    """
    import torch

    cuda = device.type == "cuda"
    size, times = (CUDA_SIZE, 10) if cuda else (CPU_SIZE, 1)
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    best = math.inf
    with torch.inference_mode():
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        product = torch.empty_like(matrix)
        ways: list[Callable[[], Any]] = [lambda: torch.mm(matrix, matrix, out=product)]
        if device.type == "cpu":
            from flodl_hf.nn.backends.cpu import OneDnnLinear, has_onednn

            # On other processors than Intel's, torch's product reaches about half of oneDNN's speed.
            if has_onednn(dtype):
                linear = OneDnnLinear(matrix, None, at_once=True)
                ways.append(lambda: linear(matrix))
        for way in ways * REPEATS:
            wait()
            started = time.perf_counter()
            for _ in range(times):
                way()
            wait()
            best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 * times / best


def operations_of_token(model: Any) -> int:
    """Return the operations of an encoder's projections for one token, without attention."""
    from torch import nn

    from flodl_hf.nn.layers import EncoderLayer

    def weights(module: Any) -> int:
        return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))

    encoder = model.graph.get_submodule("encoder")
    layers = [part for part in encoder.modules() if isinstance(part, EncoderLayer)]
    # Layers with shared weights are one module, called once for each layer of the configuration.
    again = model.config.num_layers / len(layers) - 1 if layers else 0
    return round(weights(encoder) + again * sum(map(weights, layers))) * 2
