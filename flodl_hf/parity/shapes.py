"""Configurations of the cells: tiny ones for tests, and base sizes.

Sizes common to all families are listed here by field; a family's rows map them to ``config.json``, and
its record adds family-specific settings, in one variant or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flodl_hf.families.schema import Family

_TINY = {
    "vocab_size": 640, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "max_positions": 70,
    "type_vocab_size": 2,
}  # fmt: skip
_REAL = {
    "vocab_size": 30522, "hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072,
    "max_positions": 512, "type_vocab_size": 2,
}  # fmt: skip


def _variants(family: Family, size: str) -> Mapping[str, Mapping[str, Any]]:
    return family.tiny if size == "tiny" else family.real


def variants_of(family: Family, size: str) -> tuple[str, ...]:
    """Return the names of a family's variants at a size, "tiny" or "real"; none where it states none."""
    return tuple(_variants(family, size))


def settings_of(family: Family, size: str, variant: str = "base") -> dict[str, Any]:
    """Return keyword arguments of the family's configuration class in transformers."""
    sizes = _TINY if size == "tiny" else _REAL
    common = {row.key: sizes[row.field] for row in family.rows if row.field in sizes}
    return common | dict(_variants(family, size)[variant])
