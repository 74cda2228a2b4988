"""The model that people use: `flodl_hf.inference.graph_model` with the methods that they know.

encoder_model  the class that all tasks share: made, loaded, run, written
opening        `from_pretrained` and its keywords
pretrained     from a name to a filled model: the way through all files of a folder
filling        stored values: one dtype, finite, ties compared, put into the model
building       the graph of a configuration and a task: put together, tied, given values
adapted        methods for adapters
transformers_methods  methods that people know from transformers' models
outputs        what calls return
freezing       which parts learn, by short paths
other_tasks    what is said where a method is another model's
protein_contacts      which residues of a protein touch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["EncoderModel"]


def __getattr__(name: str) -> Any:
    # Only on demand: families and files use modules of this room without the rest of it.
    if name in __all__:
        return getattr(import_module("flodl_hf.models.encoder_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
