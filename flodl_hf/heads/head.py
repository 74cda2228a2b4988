"""What a task has to state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flodl_hf.model import EncoderModel

__all__ = ["Head"]


@dataclass(frozen=True)
class Head:
    """One task.

    Args:
        name: our word for it, which families use as key.
        hf_suffix: what follows the class prefix in transformers' class names.
        model: the class of its models.
        short: the word for command lines and tables.
        labelled: the configuration's labels are the classifier's rows.
    """

    name: str
    hf_suffix: str
    model: type[EncoderModel]
    short: str
    labelled: bool = False
