"""``pipeline(task, model)``: transformers' pipelines for encoders, with the same arguments and result keys.

Shapes, defaults and flaws are transformers' (version 5), so that existing code runs unchanged. A warning reports
truncated texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from flodl.errors import ConfigError, nearest
from flodl_hf.checkpoints.keywords import LOAD, device_of
from flodl_hf.errors import InputTypeError, MissingKeyError, PredictError, TextTooLongError, UnknownTaskError
from flodl_hf.families.schema.tasks import TASKS, WORDS, Task, find_task
from flodl_hf.heads.auto import load
from flodl_hf.heads.truncated import (
    cut_classes,
    cut_entities,
    cut_text,
    cut_zero_shot,
    encoded_text,
    most_tokens,
    too_long,
    truncates,
    warn_of_cut,
)
from flodl_hf.inference.inputs import as_text_list
from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["Pipeline"]

_LOADING = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "dtype", "attention", "num_labels")
_PASSED = ("framework", "feature_extractor", "image_processor", "processor", "use_fast", "num_workers", "config")


class Pipeline:
    """One task of one model, called as a pipeline of transformers is. Made by `pipeline`.

    Attributes:
        task: its name, without aliases.
        model: the model.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, task: str, model: EncoderModel, defaults: Mapping[str, Any]) -> None:
        self.task = task
        self.model: Any = model
        self._defaults = dict(defaults)
        self._known(self._defaults)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def _known(self, options: Mapping[str, Any]) -> None:
        known = [*_OPTIONS[self.task], *_RUNNING]
        wrong = [f"{name}{nearest(name, known)}" for name in options if name not in known]
        if wrong:
            raise InputTypeError(f"{self.task} has no keyword {'; '.join(wrong)}; it has {', '.join(known)}")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the results of transformers' pipeline for the same inputs and keywords.

        Args:
            *inputs: a text, a list or an iterator of texts, or a torch ``Dataset``, which gives an iterator; also
                as ``inputs=`` or ``sequences=``. Labels may follow the texts of zero-shot classification.
            **options: keywords of the task.

        Raises:
            PredictError: as the method of the model raises it; a ValueError.
            InputTypeError: the pipeline does not have a keyword; a TypeError.
        """
        inputs += tuple(options.pop(name) for name in _INPUTS if name in options)
        if self.task == "zero-shot-classification" and len(inputs) == 2:
            options.setdefault("candidate_labels", inputs[1])
            inputs = inputs[:1]
        self._known(options)
        if len(inputs) != 1 and (inputs or self.task != "question-answering"):
            raise PredictError(f"{self.task}: found {len(inputs)} inputs; expected a text, or a list of texts")
        found = _CALLS[self.task](self.model, tuple(map(_streamed, inputs)), {**self._defaults, **options})
        sized = inputs and _is_dataset(inputs[0]) and hasattr(inputs[0], "__len__")
        return _Stream(found, len(inputs[0])) if sized else found

    predict = transform = __call__

    def save_pretrained(self, folder: str | Path, **options: Any) -> Any:
        """Write the model and its tokenizer into a folder; see the method of the model."""
        return self.model.save_pretrained(folder, **options)

    def __repr__(self) -> str:
        name = self.model.source.name if self.model.source is not None else type(self.model).__name__
        return f"pipeline({self.task!r}, {name!r}) on {self.device}"


def pipeline(
    task: str | None = None,
    model: str | Path | EncoderModel | None = None,
    tokenizer: Any = None,
    *,
    device: Any = None,
    dtype: torch.dtype | str | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> Pipeline:
    """Return a pipeline with the results of transformers' pipeline.

    Args:
        task: "text-classification", "token-classification", "question-answering", "fill-mask",
            "zero-shot-classification", "feature-extraction", or another name of one; None uses the model's task.
        model: a folder, a name on the Hub, or a model.
        tokenizer: another tokenizer than the model's: a folder, a name or a
            `flodl_hf.tokenization.tokenizer.Tokenizer`.
        device: where the model goes: "cuda:0", 0, -1 for the CPU.
        dtype: of the weights; ``torch_dtype`` is the same.
        batch_size: bounds the memory of a batch; changes no answer.
        **options: keywords of loading (``revision``, ``token``, ``device_map``, ...), and of calls, which a call may
            replace (``top_k``, ``aggregation_strategy``, ``candidate_labels``, ...).

    Raises:
        UnknownTaskError: there is no such task for encoders.
        ConfigError: no model is named, or the model has another head.
    """
    if isinstance(task, EncoderModel) or model is None:
        raise ConfigError(
            'pipeline: no model is named; expected pipeline("text-classification", "a folder or a name on the Hub"): '
            "which model answers should not depend on a library's default",
            problems=["model"],
        )
    options = {name: value for name, value in options.items() if name not in _PASSED}
    loading = {name: options.pop(name) for name in list(options) if name in (*_LOADING, *LOAD)}
    loading |= options.pop("model_kwargs", None) or {}
    if dtype is not None:
        loading["dtype"] = dtype
    named = None if task is None else _pipeline_task(task)
    place = device_of(device)
    if isinstance(model, EncoderModel):
        if loading:
            raise ConfigError(
                f"pipeline: {', '.join(loading)} are options of loading, and this model is already loaded",
                problems=list(loading),
            )
        there = model if place is None else model.to(place)
    else:
        loading |= {} if place is None else {"device": place}
        there = load(model, **loading) if named is None else named.model.from_pretrained(model, **loading)
    head = getattr(there, "head", "base")
    found = _pipeline_task(head) if named is None else named
    if found.head != head:
        raise ConfigError(
            f"pipeline: {found.pipeline} needs a model for {found.head}; this one is for {head}", problems=[head]
        )
    if tokenizer is not None:
        from flodl_hf.tokenization.tokenizer import Tokenizer

        there.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_pretrained(tokenizer)
    if batch_size is not None:
        options["batch_size"] = batch_size
    assert found.pipeline is not None
    return Pipeline(found.pipeline, there, options)


def _pipeline_task(word: str) -> Task:
    task = find_task(str(word))
    if task is None or task.pipeline is None:
        known = list(dict.fromkeys(each.pipeline for each in TASKS if each.pipeline))
        words = [word.replace("_", "-") for word, each in WORDS.items() if each.pipeline]
        wrong = f"no task {word!r}{nearest(str(word), words)}" if task is None else f"{task.name} has no pipeline"
        raise UnknownTaskError(
            f"pipeline: {wrong}; expected one of {', '.join(known)}. Other tasks: load(model, head=...).",
            problems=[str(word)],
        )
    return task


# --- calls -------------------------------------------------------------------------------------------

_INPUTS = ("inputs", "sequences")
_RUNNING = ("batch_size", "num_workers", "precision", "progress", "padding")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "text-classification": ("top_k", "function_to_apply", "return_all_scores", "truncation", "max_length"),
    "token-classification": (
        "aggregation_strategy", "ignore_labels", "stride", "is_split_into_words", "delimiter", "grouped_entities",
        "offset_mapping",
    ),
    "question-answering": (
        "question", "context", "top_k", "topk", "doc_stride", "max_answer_len", "max_seq_len", "max_seq_length",
        "max_question_len",
        "handle_impossible_answer", "align_to_words",
    ),
    "fill-mask": ("top_k", "targets", "tokenizer_kwargs"),
    "zero-shot-classification": ("candidate_labels", "hypothesis_template", "multi_label", "truncation"),
    "feature-extraction": ("truncation", "return_tensors", "tokenize_kwargs"),
}  # fmt: skip


class _Stream(Iterator[Any]):
    """An iterator over the answers to a data set, with their number."""

    def __init__(self, answers: Iterator[Any], count: int) -> None:
        self._answers = answers
        self._count = count

    def __next__(self) -> Any:
        return next(self._answers)

    def __len__(self) -> int:
        return self._count


def _is_dataset(data: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(data, Dataset)


def _streamed(data: Any) -> Any:
    """Return an iterator over the items of a torch ``Dataset``; other inputs unchanged."""
    from torch.utils.data import IterableDataset

    if not _is_dataset(data):
        return data
    return iter(data) if isinstance(data, IterableDataset) else (data[place] for place in range(len(data)))


def _each(run: Callable[[Any], Any], texts: Any) -> Any:
    """Return the result for one text, or an iterator or a list of the results for several."""
    if isinstance(texts, (str, Mapping)):
        return run(texts)
    return map(run, texts) if isinstance(texts, Iterator) else [run(text) for text in texts]


def _classified(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    texts = as_text_list(inputs[0], "text-classification", mapping=True)
    single = isinstance(texts, (str, Mapping))
    texts = _each(_class_text, texts)
    everything = options.pop("return_all_scores", None)
    legacy = "top_k" not in options
    cut = {name: options.pop(name) for name in ("truncation", "max_length") if name in options}
    if legacy:
        options["top_k"] = None if everything else 1
    truncated = truncates({**cut, "padding": options.get("padding")})
    predict = partial(model.predict, compat="transformers", **options)
    if truncated:
        found: Any = _each(partial(cut_classes, model, cut=cut, options=options), texts)
    elif isinstance(texts, list) and len({isinstance(text, Mapping) for text in texts}) > 1:
        found = _each(predict, texts)
    else:
        found = predict(texts)
    if not legacy or everything:
        return found
    if single:
        return found if isinstance(texts, str) else found[0]
    return _each(itemgetter(0), found)


def _class_text(text: Any) -> Any:
    """Return a text, or a dictionary of two, as the model's method takes it.

    Raises:
        PredictError: a list or tuple of texts, which may be a pair or a batch.
    """
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], (list, tuple)) and len(text[0]) == 2:
        return {"text": text[0][0], "text_pair": text[0][1]}
    if isinstance(text, (list, tuple)):
        raise PredictError(
            f'text-classification: found a {type(text).__name__} as a text, expected a string or {{"text": ..., '
            '"text_pair": ...}. Pass a dictionary to classify two texts as a pair.',
            found=text,
        )
    # In transformers, an empty second text of a dictionary is no second text.
    alone = isinstance(text, Mapping) and text.get("text_pair", "given") == ""
    return {"text": text.get("text")} if alone else text


def _entities(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    texts = inputs[0]
    if options.pop("grouped_entities", False):
        options.setdefault("aggregation_strategy", "simple")
    _check_stride(model, options)
    for name, usual in (("aggregation_strategy", "none"), ("ignore_labels", ["O"])):
        options[name] = usual if options.get(name) is None else options[name]
    options["aggregation_strategy"] = str(options["aggregation_strategy"]).lower()
    if isinstance(texts, (list, tuple)) and not texts:
        raise PredictError("token-classification: found no texts, expected at least one. Leave the call out.")
    texts = as_text_list(texts, "token-classification")
    words_given = options.get("is_split_into_words")
    offsets = _first_offsets(texts, options)
    if not words_given and options.get("stride") is None:
        options.pop("stride", None)
        if isinstance(texts, str):
            return _several_entities(model, [texts], options, offsets)[0]
        if isinstance(texts, Iterator):
            return (_several_entities(model, [text], options, offsets)[0] for text in texts)
        return _several_entities(model, texts, options, offsets)
    found = model.predict(texts, compat="transformers", **options)
    # Given words come back as a list of one text.
    alone = words_given and isinstance(texts, (list, tuple)) and isinstance(texts[0], str)
    return [found] if alone else found


def _check_stride(model: Any, options: Mapping[str, Any]) -> None:
    """Raise on a stride that transformers refuses.

    Raises:
        PredictError: windows would not advance, or tokens are not grouped into entities.
    """
    stride, longest = options.get("stride"), model.tokenizer.model_max_length
    if stride is None:
        return
    if longest is not None and stride >= longest:
        raise PredictError(f"token-classification: found stride={stride}, expected less than {longest}. Choose less.")
    if options.get("aggregation_strategy") == "none":
        raise PredictError(
            'token-classification: found stride with aggregation_strategy="none". Choose a strategy that groups tokens.'
        )


def _first_offsets(texts: Any, options: dict[str, Any]) -> Any:
    """Remove ``offset_mapping`` from options and return its first text's, which transformers applies to every text.

    Raises:
        PredictError: the numbers of mappings and texts differ, or words or a stride are given too.
    """
    given = options.pop("offset_mapping", None)
    if not given:
        return None
    given = [given] if isinstance(given[0], tuple) else given
    if not isinstance(texts, Iterator) and len(given) != (1 if isinstance(texts, str) else len(texts)):
        raise PredictError(
            f"token-classification: found {len(given)} mappings in offset_mapping, expected one per text."
        )
    if options.get("is_split_into_words") or options.get("stride") is not None:
        raise PredictError(
            "token-classification: found offset_mapping with is_split_into_words or stride. Pass one of them."
        )
    return given[0]


def _several_entities(model: Any, texts: Any, options: dict[str, Any], offsets: Any) -> list[Any]:
    """Return the entities of texts; without ``stride`` the pipeline reads the first window of each alone."""
    texts = list(texts)
    long = {place for place, text in enumerate(texts) if isinstance(text, str) and too_long(model, text)}
    alone = range(len(texts)) if offsets else long
    rest = iter(
        model.predict([t for place, t in enumerate(texts) if place not in alone], compat="transformers", **options)
    )
    return [cut_entities(model, text, options, offsets) if n in alone else next(rest) for n, text in enumerate(texts)]


def _answered(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    question, context = options.pop("question", None), options.pop("context", None)
    if inputs:
        asked = inputs[0]
    elif isinstance(question, (list, tuple)):
        contexts = [context] * len(question) if isinstance(context, str) else list(context)
        asked = list(zip(question, contexts, strict=True))
    else:
        asked = {"question": question, "context": context}
    options.setdefault("max_answer_len", 15)
    if "max_seq_length" in options:
        options["max_seq_len"] = options.pop("max_seq_length")
    single = isinstance(asked, Mapping) or (isinstance(asked, list) and len(asked) == 1)
    pairs: Any = [asked] if isinstance(asked, Mapping) else asked
    pairs = map(_checked, pairs) if isinstance(pairs, Iterator) else list(map(_checked, pairs))
    found = model.answer_batch(pairs, compat="transformers-4.57", **options)
    return found[0] if single else found if isinstance(asked, Iterator) else list(found)


def _checked(item: Any) -> Any:
    """Return a question with its context.

    Raises:
        MissingKeyError: a dictionary has only one of them.
        PredictError: one of them is empty or None.
    """
    if isinstance(item, Mapping):
        for key in ("question", "context"):
            if key not in item:
                raise MissingKeyError(
                    f"question-answering: found the keys {list(item)}, expected 'question' and 'context'. Add {key!r}.",
                    field=key,
                )
            if item[key] is None or item[key] == "":
                raise PredictError(
                    f"question-answering: found {key}={item[key]!r}, expected a text. Leave this question out.",
                    field=key,
                )
    return item


def _filled(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    texts = inputs[0]
    cut = dict(options.pop("tokenizer_kwargs", None) or {})
    if options.get("top_k", 5) is None:
        del options["top_k"]
    wrong = [f"{key}={value!r}" for key, value in cut.items() if key not in ("truncation", "max_length", "padding")]
    if wrong:
        raise InputTypeError(f"fill-mask: tokenizer_kwargs has {', '.join(wrong)}; it takes truncation, max_length")
    if options.get("targets") is not None and not options["targets"]:
        raise PredictError(
            "fill-mask: no targets; expected words to choose from, or targets=None for the whole vocabulary"
        )
    if truncates(cut):
        run = partial(cut_text, model, most=cut.get("max_length") or most_tokens(model))
        texts = _each(run, texts)
    found = model.fill_mask(texts, compat="transformers", **options)
    return found[0] if isinstance(texts, list) and len(texts) == 1 else found


def _zero_shot(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    texts = inputs[0]
    if isinstance(texts, Iterator):
        return (_zero_shot(model, (text,), dict(options)) for text in texts)
    if "candidate_labels" not in options:
        raise PredictError("zero-shot-classification: no labels; expected candidate_labels=[...]")
    if texts == "" or (isinstance(texts, list) and "" in texts):
        raise PredictError("zero-shot-classification: found an empty text, expected a text. Leave it out.")
    options.pop("truncation", None)  # transformers ignores it: the text is truncated where necessary
    try:
        return model.zero_shot(texts, compat="transformers", **options)
    except TextTooLongError:
        pass
    # As in transformers, the text is truncated and the hypothesis is not.
    warn_of_cut("zero-shot-classification", "zero_shot of the model reads all of it")
    single = isinstance(texts, str)
    found = [cut_zero_shot(model, text, options) for text in ([texts] if single else texts)]
    return found[0] if single else found


def _features(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    texts = inputs[0]
    given = dict(options.get("tokenize_kwargs") or {})
    if options.get("truncation") is not None:
        if "truncation" in given:
            raise PredictError("feature-extraction: found truncation in tokenize_kwargs as well; pass it once")
        given["truncation"] = options["truncation"]
    model._ready("feature-extraction")

    def run(text: Any) -> Any:
        with torch.inference_mode():
            states = model(**encoded_text(model, text, **given)).last_hidden_state.cpu()
        return states if options.get("return_tensors") else states.tolist()

    return _each(run, texts)


_CALLS: dict[str, Callable[..., Any]] = {
    "text-classification": _classified,
    "token-classification": _entities,
    "question-answering": _answered,
    "fill-mask": _filled,
    "zero-shot-classification": _zero_shot,
    "feature-extraction": _features,
}
