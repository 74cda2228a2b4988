"""Logits and token bookkeeping in, typed answers out.

One file for each kind of answer: ``entities.py`` (token classification), ``spans.py`` (question answering),
``classes.py`` (classification, zero-shot, ranking), ``masks.py`` (masked tokens), ``pooling.py`` (embeddings). They use
``words.py`` and ``rows.py``; ``compat/`` returns the exact outputs of other libraries. Nothing here reads files, runs
models or knows a tokenizer.
"""
