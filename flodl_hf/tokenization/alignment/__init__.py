"""Annotations (words with tags, character spans, answers) to labels of tokens, and predictions back to annotations.

Uses offsets and word numbers of tokenized rows only, without tokenizer and model.
"""

from flodl_hf.tokenization.alignment.tags import align_tags, read_tags
from flodl_hf.tokenization.alignment.units import join_words, word_units

__all__ = ["align_tags", "join_words", "read_tags", "word_units"]
