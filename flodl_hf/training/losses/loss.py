"""What a loss of vectors has to state: which data it takes, and whether its examples depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

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
"""What an example is: two texts that belong together; these and texts that do not; two texts with a number of how
alike they are; two texts that are alike (1) or not (0); two texts with the name of a class; a text of a class; a text;
a question with candidates and a teacher's scores; texts with a teacher's vectors."""


class VectorLoss(Protocol):
    """A loss of the vectors of a batch.

    Attributes:
        forms: the data that it takes.
        in_batch: whether the loss of an example depends on the others of its batch. Where not, a step is the same
            however its rows are cut; where it does, the same batch gives the same step on any number of ranks.
        by_guide: whether labels are the vectors of a guide, ``(examples, texts, size)``.

    A loss with the attribute ``ragged`` takes examples with different numbers of texts, and the keyword ``there``,
    ``(examples, texts)``, which is false for the texts that an example does not have.
    """

    forms: ClassVar[tuple[Form, ...]]
    in_batch: ClassVar[bool]
    by_guide: ClassVar[bool]

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            vectors: one ``(examples, size)`` for each text of an example: anchors, positives, negatives.
            labels: one for each example, where there are any.
            own: the examples of this rank, whose mean is enough; a loss may return that of all.
        """
        ...
