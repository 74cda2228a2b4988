"""The sizes of every encoder: their fields, and rows with the keys of most files."""

from __future__ import annotations

from dataclasses import dataclass

from flodl_hf.families.schema.config_rows import Row, count

__all__ = ["BASE_SIZES", "SIZES", "EncoderSizes"]


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """The first settings of every family."""

    vocab_size: int
    """Rows of the word table."""
    hidden_size: int
    """Width of a token's state."""
    num_layers: int
    """Blocks in the stack."""
    num_heads: int
    """Attention heads of a block; divides ``hidden_size``."""
    intermediate_size: int
    """Width inside the feed-forward layer."""


# fmt: off
SIZES = (
    Row("vocab_size",        "vocab_size",          count(most=10_000_000)),
    Row("hidden_size",       "hidden_size",         count()),
    Row("num_layers",        "num_hidden_layers",   count(most=1024)),
    Row("num_heads",         "num_attention_heads", count(most=4096)),
    Row("intermediate_size", "intermediate_size",   count(most=1_000_000)),
)
# fmt: on

BASE_SIZES = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072}
"""The defaults of most families of transformers."""
