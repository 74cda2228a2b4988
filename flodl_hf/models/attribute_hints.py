"""Error text for a method that a model lacks: the classes that have it, and the methods of this model."""

from __future__ import annotations

import warnings
from functools import partial
from importlib import import_module
from typing import Any

from flodl.errors import nearest
from flodl_hf.families.schema.tasks import HEADS, Task

RENAMED = {"without_adapter": "disable_adapter"}
"""Former names of methods, which warn for one release."""

METHODS: dict[str, list[Task]] = {
    method: [head for head in HEADS if method in head.methods]
    for method in dict.fromkeys(method for head in HEADS for method in head.methods)
}
"""Each method that takes texts, and the tasks that have it."""

FAMILIAR = {
    "entities": "entities are what predict finds, of AutoModelForTokenClassification",
    "classify": "labels are what predict finds, of AutoModelForSequenceClassification",
    "rank": "rerank orders texts by a query, of AutoModelForSequenceClassification",
    "get_sentence_embedding_dimension": "config.hidden_size is the width of its states",
    "get_max_seq_length": "max_seq_length is the number of tokens that longer texts are truncated to",
    "save": "save_pretrained writes a folder",
    "tokenize": "tokenizer(texts, padding=True, return_tensors='pt') returns the inputs of a call",
    "encode_multi_process": "encode(texts, devices=[...]) uses several devices",
    "start_multi_process_pool": "encode(texts, devices=[...]) uses several devices",
    **dict.fromkeys(
        ("classifier", "score", "qa_outputs", "cls", "lm_head"),
        "graph.get_submodule('head') is the head, and freeze=['encoder'] trains it alone",
    ),
    **dict.fromkeys(
        (
            "bert",
            "roberta",
            "distilbert",
            "electra",
            "deberta",
            "albert",
            "mpnet",
            "xlm_roberta",
            "camembert",
            "encoder",
            "embeddings",
            "transformer",
            "pooler",
        ),
        "base_model is the model without its head, and graph.get_submodule('encoder') its encoder",
    ),
    "generate": "encoders generate no text; fill_mask finds the word behind a mask, of AutoModelForMaskedLM",
}
"""What other libraries' models have, and what stands for it here."""


def method_named(model: Any, name: str) -> Any:
    """Return a method that only the family of the model has, or one by its former name; None if there is none."""
    if name in RENAMED:
        warnings.warn(f"{name} is now {RENAMED[name]}", DeprecationWarning, stacklevel=3)
        return getattr(model, RENAMED[name])
    config = model.__dict__.get("config")
    if config is None or name not in config.family.methods:
        return None
    module, _, function = config.family.methods[name].partition(":")
    return partial(getattr(import_module(module), function), model)


def attribute_error_message(kind: type, name: str) -> str:
    """Return the message for an attribute that a class of models does not have."""
    plain = f"{kind.__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):
        return plain
    own = [method for method in METHODS if hasattr(kind, method)]
    if name in METHODS:
        classes = " or ".join(f"AutoModel{head.hf_suffix.removeprefix('Model')}" for head in METHODS[name][:2])
        return f"{plain}; expected one of {', '.join(own)}, which answer texts: {name} is a method of {classes}"
    if name in FAMILIAR:
        return f"{plain}; {FAMILIAR[name]}"
    return plain + nearest(name, [known for known in dir(kind) if not known.startswith("_")])
