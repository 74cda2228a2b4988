"""Adapters: small parts that learn beside weights which stay as they are, and the head that belongs to them.

Four rooms. `settings` says what an adapter is asked to be, `lora` computes, `attach` puts one into a model and takes it
out again, `folder` reads and writes peft's files, whose settings `peft_file` understands. An adapter always holds the
head that was trained with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.adapters.settings import Lora

__all__ = ["Lora"]


def __getattr__(name: str) -> Any:
    if name == "Lora":
        from flodl_hf.adapters.settings import Lora

        return Lora
    raise AttributeError(f"module 'flodl_hf.adapters' has no attribute {name!r}")
