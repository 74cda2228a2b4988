"""From texts to answers: batches are planned, packed and run, and results are returned in order.

options         the keywords that every call takes: precision, devices, token_budget, ...; precisions of devices
prepared_graph  the graph that predicts: fused and cast, remade when the model changes
inputs          user input as texts, and their tokens as arrays
token_table     rows of tokens as flat arrays
batch           one forward pass: rows by a token budget, the computation, and its results
engine          rows through a prepared graph; memory that runs out; how far answers depend on the batch
cuda_graphs     batches recorded as CUDA graphs
pipeline        the loop of a call: encode, forward pass, decode, window after window
classes         scores to labels and rankings
entities        scores and offsets to entities; words finds the words
spans           scores and offsets to answers
pooling         states of tokens to vectors of texts
metrics         figures of entities, answers and language models
results         lists of answers, as JSON and tables
transformers_results  results as transformers' pipelines give them
result_pages    results as HTML for notebooks
graph_model     a graph with its configuration, tokenizer and source
hidden_states   intermediate values of one call; embeddings instead of ids
similarity      how similar vectors are, one a text or one a token
search          the nearest vectors
mining          pairs of similar texts
communities     groups of similar texts
quantize        vectors in fewer bits
vector_files    vectors in files
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.inference.engine import Spread, spread
    from flodl_hf.inference.options import Precision, RunKeywords, RunOptions
    from flodl_hf.inference.prepared_graph import forget

__all__ = ["Precision", "RunKeywords", "RunOptions", "Spread", "forget", "spread"]

_MODULES = {
    "Precision": "options",
    "RunKeywords": "options",
    "RunOptions": "options",
    "Spread": "engine",
    "forget": "prepared_graph",
    "spread": "engine",
}


def __getattr__(name: str) -> Any:
    # Only on demand: decoding and similarity are used without the engine.
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
