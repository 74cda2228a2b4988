"""Interface of losses of vectors: accepted data, and whether examples depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor

__all__ = ["Form", "VectorLoss"]

Form = Literal[
    "pairs",
    "triplets",
    "scored",
    "binary",
    "pair_classes",
    "classes",
    "texts",
    "teacher_scores",
    "teacher_vectors",
]
"""Form of an example: related texts; related and unrelated texts; two texts with a similarity; two texts that are
similar (1) or not (0); two texts with a class name; a text with a class; a text; a question with candidates and
scores of a teacher; texts with vectors of a teacher."""


class VectorLoss:
    """Base class of losses of the vectors of a batch.

    Attributes:
        forms: accepted forms of data.
        in_batch: whether the loss of an example depends on the other examples of its batch. If not, a step is the same
            for any micro-batch size; if so, the same batch gives the same step on any number of ranks.
        by_guide: whether labels are the vectors of a guide, ``(examples, texts, size)``.
        ragged: whether examples may have different numbers of texts; the keyword ``there``, ``(examples, texts)``, is
            false for missing texts.
    """

    forms: ClassVar[tuple[Form, ...]] = ()
    in_batch: ClassVar[bool] = False
    by_guide: ClassVar[bool] = False
    ragged: ClassVar[bool] = False

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return []

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            vectors: one ``(examples, size)`` for each text of an example: anchors, positives, negatives.
            labels: one for each example, if there are any.
            own: the examples of this rank, whose mean is sufficient; a loss may return the mean of all.
        """
        raise NotImplementedError
