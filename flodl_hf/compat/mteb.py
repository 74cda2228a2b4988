"""Models for ``mteb.evaluate``, computed here, with the prompts and scores of mteb's own classes."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from mteb.models.sentence_transformer_wrapper import CrossEncoderWrapper, SentenceTransformerEncoderWrapper

from flodl_hf.compat.sentence_transformers_classes import CrossEncoder, SentenceTransformer

__all__ = ["FlodlCrossEncoder", "FlodlEncoder"]


class FlodlEncoder(SentenceTransformerEncoderWrapper):
    """An encoder of texts for mteb.

    Args:
        model: a folder or a Hub repository.
        model_prompts: prompts by task or by "query" and "document"; None for the folder's.
        **options: keywords of `flodl_hf.compat.sentence_transformers.SentenceTransformer`.
    """

    def __init__(self, model: str, model_prompts: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__(SentenceTransformer(model, **options), model_prompts=model_prompts)


class FlodlCrossEncoder(CrossEncoderWrapper):
    """A cross-encoder for mteb's tasks of reranking.

    Args:
        model: a folder or a Hub repository.
        **options: keywords of `flodl_hf.compat.sentence_transformers.CrossEncoder`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(CrossEncoder(model, **options))
