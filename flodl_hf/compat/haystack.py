"""Embedders and a ranker for Haystack's pipelines."""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

from haystack import Document, component

from flodl_hf.compat import model_of

__all__ = ["FlodlDocumentEmbedder", "FlodlRanker", "FlodlTextEmbedder"]


@component
class FlodlTextEmbedder:
    """The vector of a query.

    Args:
        model: a model, a folder or a Hub repository.
    """

    def __init__(self, model: Any) -> None:
        self.model = model_of(model, "base")

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """Return the vector of a text."""
        return {"embedding": self.model.encode_query(text).tolist()}


@component
class FlodlDocumentEmbedder:
    """The vectors of documents.

    Args:
        model: a model, a folder or a Hub repository.
    """

    def __init__(self, model: Any) -> None:
        self.model = model_of(model, "base")

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Return the documents with their vectors."""
        vectors = self.model.encode_document([document.content or "" for document in documents])
        pairs = zip(documents, vectors.tolist(), strict=True)
        return {"documents": [replace(document, embedding=vector) for document, vector in pairs]}


@component
class FlodlRanker:
    """The documents that fit a query best, with the scores of a cross-encoder.

    Args:
        model: a model with one label, a folder or a Hub repository.
        top_k: most documents; None for all.
    """

    def __init__(self, model: Any, top_k: int | None = None) -> None:
        self.model = model_of(model, "sequence_classification")
        self.top_k = top_k

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document]) -> dict[str, Any]:
        """Return the best documents with their scores, best first."""
        texts = [document.content or "" for document in documents]
        ranked = self.model.rerank(query, texts, top_k=self.top_k, truncate=True)
        return {"documents": [replace(documents[found.index], score=found.score) for found in ranked]}
