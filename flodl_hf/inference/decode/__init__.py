"""Logits and token bookkeeping in, typed answers out.

One file a kind of answer: ``entities.py`` (token classification), ``spans.py`` (question answering),
``classes.py`` (classification, zero-shot, ranking), ``masks.py`` (masked tokens), ``pooling.py``
(embeddings); under them ``labels.py``, ``constrained.py``, ``windows.py``, ``words.py`` and ``rows.py``; and
``compat/`` for the exact outputs of other libraries. Nothing here reads files, runs models or knows a
tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.inference.decode.classes import (
        Classification,
        Ranked,
        activation_for,
        contradiction_id,
        decode_classes,
        decode_ranking,
        decode_zero_shot,
        entailment_id,
    )
    from flodl_hf.inference.decode.entities import Entity, decode_entities, decode_entities_batch
    from flodl_hf.inference.decode.labels import TagScheme, normalise_id2label
    from flodl_hf.inference.decode.masks import MaskFill, decode_masks, decode_targets
    from flodl_hf.inference.decode.pooling import finish_embeddings, pool_packed, pool_padded
    from flodl_hf.inference.decode.rows import TokenRow
    from flodl_hf.inference.decode.spans import Answer, decode_answers, decode_answers_batch
    from flodl_hf.inference.decode.windows import join_words, merge_windows

__all__ = [
    "Answer",
    "Classification",
    "Entity",
    "MaskFill",
    "Ranked",
    "TagScheme",
    "TokenRow",
    "activation_for",
    "contradiction_id",
    "decode_answers",
    "decode_answers_batch",
    "decode_classes",
    "decode_entities",
    "decode_entities_batch",
    "decode_masks",
    "decode_ranking",
    "decode_targets",
    "decode_zero_shot",
    "entailment_id",
    "finish_embeddings",
    "join_words",
    "merge_windows",
    "normalise_id2label",
    "pool_packed",
    "pool_padded",
]

# One answer needs one kind of decoding, and the first answer waits for its imports.
_FILES = {
    "classes": (
        "Classification",
        "Ranked",
        "activation_for",
        "contradiction_id",
        "decode_classes",
        "decode_ranking",
        "decode_zero_shot",
        "entailment_id",
    ),
    "entities": ("Entity", "decode_entities", "decode_entities_batch"),
    "labels": ("TagScheme", "normalise_id2label"),
    "masks": ("MaskFill", "decode_masks", "decode_targets"),
    "pooling": ("finish_embeddings", "pool_packed", "pool_padded"),
    "rows": ("TokenRow",),
    "spans": ("Answer", "decode_answers", "decode_answers_batch"),
    "windows": ("join_words", "merge_windows"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    if name in _FILES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
