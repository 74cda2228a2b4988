"""Training without labels: a decoder reconstructs a text from the vector of its damaged version.

TSDAE (Wang et al. 2021, arXiv:2104.06979), under sentence-transformers' name. What decodes is
`flodl_hf.training.vectors.decoder`; here are its settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flodl_hf.training.losses.loss import Form, VectorLoss

__all__ = ["DENOISING", "DenoisingAutoEncoderLoss", "denoises"]


@dataclass(frozen=True)
class DenoisingAutoEncoderLoss(VectorLoss):
    """A decoder predicts the words of a text from the vector of its damaged version.

    Of texts alone words are deleted, others in each epoch; of pairs the first is the damaged text.

    Attributes:
        del_ratio: the share of words that are deleted.
    """

    del_ratio: float = 0.6

    forms: ClassVar[tuple[Form, ...]] = ("texts", "pairs")

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        right = 0 <= self.del_ratio < 1
        return [] if right else [f"del_ratio is {self.del_ratio}; expected 0 or more and less than 1"]


DENOISING: dict[str, Any] = {"DenoisingAutoEncoderLoss": DenoisingAutoEncoderLoss}
"""By name."""


def denoises(word: Any) -> bool:
    """Return whether a word names this loss."""
    if not isinstance(word, str):
        return False
    plain = word.lower().replace("_", "").replace("-", "").removesuffix("loss")
    return plain in ("denoisingautoencoder", "denoising", "tsdae")
