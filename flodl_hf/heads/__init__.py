"""The tasks this package knows. A new one is a file in this folder, a name in the tuple below, and its names."""

from flodl_hf.heads import (
    base,
    masked_lm,
    question_answering,
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
)
