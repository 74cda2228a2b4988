"""Annotations (words with tags, character spans, answers) to labels of tokens, and predictions back to annotations.

Uses offsets and word numbers of tokenized rows only, without tokenizer and model.
"""

from flodl_hf.tokenization.alignment.answers import answer_positions, answer_span
from flodl_hf.tokenization.alignment.masking import chosen_tokens, mask_tokens, num_masked
from flodl_hf.tokenization.alignment.tags import (
    IGNORE,
    SpanTags,
    TextSpan,
    align_tags,
    read_spans,
    read_tags,
    tags_of_spans,
)
from flodl_hf.tokenization.alignment.units import Extent, TokenWindow, Units, join_words, token_units, word_units

__all__ = [
    "IGNORE",
    "Extent",
    "SpanTags",
    "TextSpan",
    "TokenWindow",
    "Units",
    "align_tags",
    "answer_positions",
    "answer_span",
    "chosen_tokens",
    "join_words",
    "mask_tokens",
    "num_masked",
    "read_spans",
    "read_tags",
    "tags_of_spans",
    "token_units",
    "word_units",
]
