"""Logits and token bookkeeping in, typed answers out.

One file a kind of answer: ``entities.py`` (token classification), ``spans.py`` (question answering),
``classes.py`` (classification, zero-shot, ranking), ``masks.py`` (masked tokens), ``pooling.py``
(embeddings); under them ``labels.py``, ``constrained.py``, ``windows.py``, ``words.py`` and ``rows.py``; and
``compat/`` for the exact outputs of other libraries. Nothing here reads files, runs models or knows a
tokenizer.
"""

from flodl_hf.decode.classes import (
    Classification,
    Ranked,
    activation_for,
    contradiction_id,
    decode_classes,
    decode_ranking,
    decode_zero_shot,
    entailment_id,
)
from flodl_hf.decode.entities import Entity, decode_entities, decode_entities_batch
from flodl_hf.decode.labels import TagScheme, normalise_id2label
from flodl_hf.decode.masks import MaskFill, decode_masks, decode_targets
from flodl_hf.decode.pooling import finish_embeddings, pool_packed, pool_padded
from flodl_hf.decode.rows import TokenRow
from flodl_hf.decode.spans import Answer, decode_answers, decode_answers_batch
from flodl_hf.decode.windows import join_words, merge_windows

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
