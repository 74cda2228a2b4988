"""Logits and token bookkeeping in, typed answers out.

One file a kind of answer: ``entities.py`` (token classification), ``spans.py`` (question answering),
``classes.py`` (classification, zero-shot, ranking), ``masks.py`` (masked tokens), ``pooling.py``
(embeddings); under them ``labels.py``, ``windows.py``, ``words.py`` and ``rows.py``; and
``compat/`` for the exact outputs of other libraries. Nothing here reads files, runs models or knows a
tokenizer.
"""
