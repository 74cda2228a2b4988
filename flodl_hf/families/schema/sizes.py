"""The sizes that every encoder has: their fields, and their rows under the keys that most files have."""

from __future__ import annotations

from dataclasses import dataclass

from flodl_hf.families.schema.config_rows import Row, count

__all__ = ["BASE_SIZES", "SIZES", "EncoderSizes"]


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """What the settings of every family begin with."""

    vocab_size: int
    """Rows of the word table."""
    hidden_size: int
    """Width of a token's state."""
    num_layers: int
    """Blocks in the stack."""
    num_heads: int
    """Attention heads of a block; divides ``hidden_size``."""
    intermediate_size: int
    """Width inside the feed-forward part."""


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
"""What most families of transformers take where a file leaves these out."""
