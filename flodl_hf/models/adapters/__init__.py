"""Adapters: small parts that learn beside weights which stay as they are, and the head that belongs to them.

`settings` says what an adapter is asked to be; `fresh` makes one, `attach` puts one into a model and takes it out
again; `folder` and `write` read and write peft's files, whose settings `peft_file` understands. An adapter always holds
the head that was trained with it. What adapters compute is in `flodl_hf.nn.adapter_layers` and `attention.prefixes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.models.adapters.settings import IA3, Lora, Prefix, Prompt

__all__ = ["IA3", "Lora", "Prefix", "Prompt"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from flodl_hf.models.adapters import settings

        return getattr(settings, name)
    raise AttributeError(f"module 'flodl_hf.models.adapters' has no attribute {name!r}")
