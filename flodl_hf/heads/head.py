"""A task's names and the class of its models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_hf.families.schema.head_names import HeadNames

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["Head"]


@dataclass(frozen=True)
class Head:
    """One task.

    Args:
        names: what it is called.
        model: the class of its models.
    """

    names: HeadNames
    model: type[EncoderModel]

    @property
    def name(self) -> str:
        """Our word for it, which families use as key."""
        return self.names.name

    @property
    def hf_suffix(self) -> str:
        """What follows the class prefix in transformers' class names."""
        return self.names.hf_suffix

    @property
    def short(self) -> str:
        """The word for command lines and tables."""
        return self.names.short
