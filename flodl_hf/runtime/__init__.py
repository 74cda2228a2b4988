"""From raw text to answers at speed: planning, packing, running and putting results back in order.

options      the keywords that every call takes: precision, devices, token_budget, ...
precision    which precisions there are and which device has them
prepared     the graph that predicts: fused and cast, remade when the model changes
inputs       what users pass as texts, and their tokens as arrays
token_table  rows of tokens as flat arrays
plan         which rows run together: sorted by length, cut by a token budget
passes       what a batch computes: scores, states, pooled vectors
batch        rows of a table end to end, as an engine hands them on
pending      results on their way home
engine       rows through a prepared graph; memory that runs out
cuda_graphs  batches recorded as CUDA graphs
fleet        several devices with one queue
stream       any iterable in, an iterator out, in constant memory
session      one call: its options, engines and stream
spread       how far answers depend on what else is in the batch
"""

from flodl_hf.runtime.engine import Engine
from flodl_hf.runtime.options import RunKeywords, RunOptions
from flodl_hf.runtime.plan import plan_batches
from flodl_hf.runtime.precision import Precision
from flodl_hf.runtime.prepared import forget, prepared
from flodl_hf.runtime.session import Session
from flodl_hf.runtime.spread import Spread, spread

__all__ = [
    "Engine",
    "Precision",
    "RunKeywords",
    "RunOptions",
    "Session",
    "Spread",
    "forget",
    "plan_batches",
    "prepared",
    "spread",
]
