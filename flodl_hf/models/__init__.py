"""Models: `flodl_hf.inference.graph_model` with the methods for users.

encoder_model         the base class of all tasks
opening               `from_pretrained` and its keywords
pretrained            from the name of a folder to a model with weights and a tokenizer
building              the graph of a configuration and a task, matched with stored tensors and filled with them
saving                a model written as a folder
adapters              adapters created, attached, read and written
adapted               methods for adapters
transformers_methods  methods of transformers' models
outputs               return values of calls
protein_contacts      contacts between residues of a protein
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["EncoderModel"]


def __getattr__(name: str) -> Any:
    # Imported on first use: other packages need single modules of this one.
    if name in __all__:
        return getattr(import_module("flodl_hf.models.encoder_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
