"""From raw text to answers at speed: planning, packing, running and putting results back in order.

plan      which rows run together: sorted by length, cut by a token budget
engine    rows through the model without filling, scores back in the order of the rows
stream    any iterable in, an iterator out, in constant memory
inputs    what users pass as texts: strings, pairs, words
"""

from flodl_hf.runtime.engine import Engine
from flodl_hf.runtime.plan import plan_batches

__all__ = ["Engine", "plan_batches"]
