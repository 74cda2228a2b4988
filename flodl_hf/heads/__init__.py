"""The tasks this package knows. A new one is a file in this folder, a name in the tuple below, and its names."""

from flodl_hf.heads import (
    base,
    masked_lm,
    multiple_choice,
    next_sentence,
    pretraining,
    question_answering,
    replaced_tokens,
    sequence_classification,
    token_classification,
)
from flodl_hf.heads.head import Head

__all__ = ["HEADS"]

HEADS: tuple[Head, ...] = (
    base.HEAD,
    sequence_classification.HEAD,
    token_classification.HEAD,
    question_answering.HEAD,
    masked_lm.HEAD,
    multiple_choice.HEAD,
    next_sentence.HEAD,
    pretraining.HEAD,
    replaced_tokens.HEAD,
)
