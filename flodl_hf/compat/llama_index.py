"""An embedding and a reranker for LlamaIndex."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from flodl_hf.compat import model_of

__all__ = ["FlodlEmbedding", "FlodlReranker"]


class FlodlEmbedding(BaseEmbedding):
    """Vectors of queries and texts.

    Args:
        model: a model, a folder or a Hub repository.
        **options: fields of LlamaIndex's class, such as ``embed_batch_size``.
    """

    _model: Any = PrivateAttr()

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model_name=str(model) if isinstance(model, str) else type(model).__name__, **options)
        self._model = model_of(model, "base")

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._model.encode_query(query).tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._model.encode_document(texts).tolist()


class FlodlReranker(BaseNodePostprocessor):
    """Keeps the nodes that fit a query best, with the scores of a cross-encoder.

    Args:
        model: a model with one label, a folder or a Hub repository.
        top_n: most nodes.
    """

    top_n: int = 3
    _model: Any = PrivateAttr()

    def __init__(self, model: Any, top_n: int = 3) -> None:
        super().__init__(top_n=top_n)  # pyright: ignore[reportCallIssue]
        self._model = model_of(model, "sequence_classification")

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ValueError("FlodlReranker: found no query, expected query_bundle. Pass the query of the nodes.")
        texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
        ranked = self._model.rerank(query_bundle.query_str, texts, top_k=self.top_n, truncate=True)
        return [NodeWithScore(node=nodes[found.index].node, score=found.score) for found in ranked]
