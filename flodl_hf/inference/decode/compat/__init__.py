"""Answers exactly as other libraries give them, key by key, for callers who depend on the habit.

``token_classification.py``, ``text_classification.py``, ``fill_mask.py`` follow the pipelines of transformers
5; ``question_answering.py`` follows the pipeline that transformers shipped up to 4.57 and has since removed.
Strings that only a tokenizer can make come in as callables.
"""
