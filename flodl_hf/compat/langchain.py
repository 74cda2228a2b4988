"""Embeddings, cross-encoders and document compressors for LangChain."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.cross_encoders import BaseCrossEncoder
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from pydantic import ConfigDict

from flodl_hf.compat import model_of

__all__ = ["FlodlCrossEncoder", "FlodlEmbeddings", "FlodlReranker"]


class FlodlEmbeddings(Embeddings):
    """Vectors of queries and documents.

    Args:
        model: a model, a folder or a Hub repository.
        **options: keywords of `encode` for each call, such as ``normalize_embeddings``.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model_of(model, "base")
        self.options = options

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector for each text."""
        return self.model.encode_document(texts, **self.options).tolist()

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        return self.model.encode_query(text, **self.options).tolist()


class FlodlCrossEncoder(BaseCrossEncoder):
    """Scores of pairs of texts, for LangChain's ``CrossEncoderReranker``.

    Args:
        model: a model with one label, a folder or a Hub repository.
    """

    def __init__(self, model: Any) -> None:
        self.model = model_of(model, "sequence_classification")

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        """Return one score for each pair."""
        return [labels[0].score for labels in self.model.predict([tuple(pair) for pair in text_pairs], truncate=True)]


class FlodlReranker(BaseDocumentCompressor):
    """Keeps the documents that fit a query best, with ``relevance_score`` in their metadata."""

    model: Any
    top_n: int = 3
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def model_post_init(self, context: Any) -> None:
        """Load the model of a folder or Hub repository."""
        self.model = model_of(self.model, "sequence_classification")

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        """Return the best documents, best first."""
        texts = [document.page_content for document in documents]
        return [
            Document(texts[found.index], metadata={**documents[found.index].metadata, "relevance_score": found.score})
            for found in self.model.rerank(query, texts, top_k=self.top_n, truncate=True)
        ]
