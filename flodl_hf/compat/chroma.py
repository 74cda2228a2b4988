"""An embedding function for Chroma."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from chromadb.api.types import Documents, EmbeddingFunction, Embeddings

from flodl_hf.compat import model_of

__all__ = ["FlodlEmbeddingFunction"]


class FlodlEmbeddingFunction(EmbeddingFunction[Documents]):
    """Vectors of documents and queries.

    Args:
        model: a folder or a Hub repository, which a collection stores; or a model.
    """

    def __init__(self, model: Any) -> None:
        self.name_or_path = model if isinstance(model, str) else str(getattr(model.source, "name", ""))
        self.model = model_of(model, "base")

    def __call__(self, input: Documents) -> Embeddings:
        """Return one vector for each document."""
        return list(self.model.encode_document(list(input)))

    def embed_query(self, input: Documents) -> Embeddings:
        """Return one vector for each query."""
        return list(self.model.encode_query(list(input)))

    @staticmethod
    def name() -> str:
        """Return the name that a collection stores."""
        return "flodl-hf"

    def get_config(self) -> dict[str, Any]:
        """Return the values from which a collection makes the function again."""
        return {"model": self.name_or_path}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> FlodlEmbeddingFunction:
        """Return the function of a stored collection."""
        return FlodlEmbeddingFunction(config["model"])
