"""Classes for other libraries, one module a library; each module imports its library, so import it when it is used.

langchain    embeddings, a cross-encoder and a document compressor
llama_index  an embedding and a postprocessor that reranks nodes
haystack     embedders of texts and documents, and a ranker
chroma       an embedding function
mteb         an encoder and a cross-encoder to evaluate
setfit       a SetFitModel with a body of this package
spacy        pipeline components for entities and text categories
sklearn      a transformer of texts into vectors and a classifier
sentence_transformers  the classes of `flodl_hf.sentence_transformers`
tuning       a callback that reports steps to Optuna and Ray Tune
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel


def model_of(model: str | Path | EncoderModel, head: str, **options: Any) -> Any:
    """Return a model: the given one, or the loaded model of a folder or Hub repository.

    Args:
        model: a model, a folder or a Hub repository.
        head: the head to load, as of `flodl_hf.load`.
        **options: further keywords of `flodl_hf.load`, for a folder or repository.
    """
    from flodl_hf.auto import load

    return load(model, head=head, **options) if isinstance(model, (str, Path)) else model
