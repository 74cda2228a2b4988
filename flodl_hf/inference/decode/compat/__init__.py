"""Answers exactly as other libraries give them, key by key, for callers who depend on the habit.

``token_classification.py``, ``text_classification.py``, ``fill_mask.py`` follow the pipelines of transformers
5; ``question_answering.py`` follows the pipeline that transformers shipped up to 4.57 and has since removed.
Strings that only a tokenizer can make come in as callables.
"""

from flodl_hf.inference.decode.compat.fill_mask import fill_mask
from flodl_hf.inference.decode.compat.question_answering import question_answering
from flodl_hf.inference.decode.compat.text_classification import (
    feature_extraction,
    text_classification,
    zero_shot_classification,
)
from flodl_hf.inference.decode.compat.token_classification import token_classification

__all__ = [
    "feature_extraction",
    "fill_mask",
    "question_answering",
    "text_classification",
    "token_classification",
    "zero_shot_classification",
]
