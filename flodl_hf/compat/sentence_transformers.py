"""SentenceTransformer, CrossEncoder and SparseEncoder with the interface of sentence-transformers, computed here.

With the library installed they are subclasses of its classes, so that other libraries accept them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["CrossEncoder", "SentenceTransformer", "SparseEncoder"]

if TYPE_CHECKING:
    from flodl_hf.compat.sentence_transformers_classes import CrossEncoder, SentenceTransformer, SparseEncoder
else:
    try:
        from flodl_hf.compat.sentence_transformers_classes import CrossEncoder, SentenceTransformer, SparseEncoder
    except ImportError as _missing:
        _REASON = _missing

        class SentenceTransformer:
            """A class that needs sentence-transformers, and raises that it is not installed."""

            def __init__(self, *args: Any, **options: Any) -> None:
                raise ImportError(
                    f"{type(self).__name__}: found no sentence-transformers 6 ({_REASON}), expected the library. "
                    "Run: pip install 'sentence-transformers>=6'. flodl_hf.load(folder) returns a model with encode, "
                    "predict and rerank without it."
                ) from _REASON

        CrossEncoder = type("CrossEncoder", (SentenceTransformer,), {})
        SparseEncoder = type("SparseEncoder", (SentenceTransformer,), {})
