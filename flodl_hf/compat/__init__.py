"""Interfaces of other libraries, in one module for each library.

Most modules import their library: import a module only if its library is installed.

pipelines     `flodl_hf.pipeline`, with the arguments and results of transformers' pipelines
transformers  models, tokenizers and pipelines as objects of transformers' classes
sentence_transformers  `SentenceTransformer`, `CrossEncoder` and `SparseEncoder`; their library must be installed
sentence_transformers_classes  these three as subclasses of the library's; BERTopic and KeyBERT check the module name
langchain     embeddings, a cross-encoder and a document compressor
llama_index   an embedding and a postprocessor that reranks nodes
haystack      embedders of texts and documents, and a ranker
chroma        an embedding function
mteb          an encoder and a cross-encoder to evaluate
setfit        a SetFitModel with a body of this package
spacy         pipeline components for entities and text categories
sklearn       a transformer of texts into vectors and a classifier
tuning        callbacks that report evaluations to Optuna and Ray Tune
other_names   names of other libraries and their equivalents here, for error messages
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
    from flodl_hf.heads.auto import load

    return load(model, head=head, **options) if isinstance(model, (str, Path)) else model
