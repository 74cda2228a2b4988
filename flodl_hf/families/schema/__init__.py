"""The records and tables that describe a family.

    record       `Family` and its parts: names of tensors, heads, tokenizer, tensors that are ignored or kept
    config_rows  how a key of ``config.json`` becomes a field, and the rules for other keys
    shared_keys  keys with the same meaning in every family: sizes, rotary positions, keys without effect
    tasks        the table of tasks

The families themselves are in `flodl_hf.families`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.families.schema.config_rows import IgnoredKey, Row
    from flodl_hf.families.schema.record import (
        Family,
        FamilyHead,
        FamilyTokenizer,
        Ignored,
        KeyRow,
        PassthroughTensor,
        Tie,
    )

_NAMES = {
    "config_rows": ("IgnoredKey", "Row"),
    "record": ("Family", "FamilyHead", "FamilyTokenizer", "Ignored", "KeyRow", "PassthroughTensor", "Tie"),
}

__all__ = [
    "Family",
    "FamilyHead",
    "FamilyTokenizer",
    "Ignored",
    "IgnoredKey",
    "KeyRow",
    "PassthroughTensor",
    "Row",
    "Tie",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: rows are read without the record, which imports torch.
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
