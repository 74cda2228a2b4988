"""Texts that are truncated to one window, and the results of pipelines of transformers for them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flodl_hf.heads.prediction_keywords import ZERO_SHOT
from flodl_hf.inference.inputs import Encoded
from flodl_hf.inference.token_table import table_of
from flodl_hf.inference.transformers_results import text_classification, zero_shot_classification


def truncates(kwargs: Mapping[str, Any]) -> bool:
    """Return whether options of a tokenizer truncate texts: ``max_length`` does so without ``truncation``."""
    truncation = kwargs.get("truncation")
    if truncation is None:
        return kwargs.get("max_length") is not None and not kwargs.get("padding")
    return truncation not in (False, "do_not_truncate")


def most_tokens(model: Any) -> int | None:
    """Return the most tokens of a truncated text: as in transformers the tokenizer's, unless positions are fewer."""
    embeddings = dict(model.graph.get_submodule("encoder.embeddings").named_children())
    limited = {"position", "rotary"} & embeddings.keys()
    return model.max_tokens if limited else model.tokenizer.model_max_length


def encoded_text(model: Any, text: Any, pair: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """Return the tensors of one text on the model's device, made with the given options of the tokenizer."""
    if kwargs.get("max_length") is None and (truncates(kwargs) or kwargs.get("padding") == "max_length"):
        kwargs["max_length"] = most_tokens(model)
    encoded = model.tokenizer(text, pair, return_tensors="pt", **kwargs)
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * model.config.uses_token_types
    return {name: encoded[name].to(model.device) for name in names if name in encoded}


def cut_classes(model: Any, text: Any, cut: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """Return the classes of a text that is truncated to one window, as transformers truncates it."""
    pair = (text["text"], text.get("text_pair")) if isinstance(text, Mapping) else (text, None)
    with torch.inference_mode():
        logits = model(**encoded_text(model, *pair, **cut)).logits
    (found,) = text_classification(
        logits, model.config.labels, problem_type=model.config.problem_type, top_k=options.get("top_k", 1),
        function_to_apply=options.get("function_to_apply"),
    )  # fmt: skip
    return found


def too_long(model: Any, text: str) -> bool:
    """Return whether a text has more tokens than the model's longest row."""
    most = model.max_tokens
    # Every token of ASCII text, special ones aside, has at least one character.
    short = text.isascii() and len(text) + 8 <= (most or 0)
    if most is None or short:
        return False
    return len(model.tokenizer(text, truncation=True, max_length=most + 1)["input_ids"]) > most


def cut_entities(model: Any, text: str, options: dict[str, Any], offsets: Any) -> list[Any]:
    """Return the entities of a text that is truncated to one window, with other offsets of its tokens if given."""
    ((row,),) = model.tokenizer.encode_rows([text], max_tokens=most_tokens(model), snap=False, overflow="truncate")
    if row.truncated:
        warn_of_cut("token-classification", "stride= reads all of it")
    row = row if offsets is None else replace(row, offsets=offsets)
    with torch.inference_mode():
        ids = torch.tensor([list(row.ids)], device=model.device)
        types = torch.tensor([list(row.type_ids)], device=model.device)
        given = {"token_type_ids": types} if model._reads_types else {}
        logits = model(ids, **given).logits[0]
    ignored = options.get("ignore_labels", ["O"])
    strategy = options["aggregation_strategy"]
    encoded = Encoded(table_of([row], [0]), 1, [row])
    return model._as_transformers([logits], encoded, [text], None, strategy, ignored)[0]


def cut_text(model: Any, text: str, most: int | None) -> str:
    """Return the start of a text with at most ``most`` tokens, special tokens included."""
    offsets = model.tokenizer(text, truncation=True, max_length=most, return_offsets_mapping=True)["offset_mapping"]
    return text[: max(end for _, end in offsets)]


def cut_zero_shot(model: Any, text: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the labels of a text that is truncated so that it fits together with each hypothesis."""
    labels = ZERO_SHOT["candidate_labels"].value(options["candidate_labels"], model)
    template = options.get("hypothesis_template", "This example is {}.")
    with torch.inference_mode():
        pairs = [encoded_text(model, text, template.format(label), truncation="only_first") for label in labels]
        logits = torch.cat([model(**pair).logits for pair in pairs])
    multi = bool(options.get("multi_label"))
    return zero_shot_classification(logits, [text], labels, model.config.labels, multi_label=multi)[0]


def warn_of_cut(task: str, instead: str) -> None:
    """Warn that a text is truncated, and name what reads all of it."""
    warnings.warn(
        f"{task}: a text is longer than the model's limit and is truncated, as in transformers; {instead}", stacklevel=4
    )
