"""Memory layouts of the tokens of a batch.

layouts  `Padded` and `Packed`, and the few operations that depend on which it is
buckets  packed batches brought to a few shapes, so that a pass can be recorded
segments maximum values of concatenated texts
"""

from flodl_hf.nn.layout.layouts import Layout, Packed, Padded

__all__ = ["Layout", "Packed", "Padded"]
