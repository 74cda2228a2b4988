"""What can be asked in place of a model: one row of numbers for each item.

A row is a vector, a score for each label, or how well a document fits. How an interface is spoken stands in
`flodl_hf.parity.endpoint_checks.http`, how a folder is read in `flodl_hf.parity.endpoint_checks.folder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from flodl.errors import FlodlError

__all__ = ["QUERY", "Target", "TargetError", "by_label"]

QUERY = "where does the river rise"
"""What is looked for wherever documents are ranked."""


class TargetError(FlodlError):
    """A target that does not answer.

    Attributes:
        status: of HTTP; 0 where nothing came, or where it is no endpoint.
    """

    status: int


class Target(Protocol):
    """What is compared with a model."""

    name: str
    """What it is called in a report."""
    scales: bool
    """Whether it scales vectors to length 1 whatever the folder says, unless it is asked not to."""

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item, ``(items, numbers)``.

        Args:
            items: texts; documents where they are ranked.
            **options: ``normalize`` and ``prompt_name``, where the target has such.

        Raises:
            TargetError: it does not answer, or has no such option.
        """
        ...

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of texts with special tokens, or None where the target does not say.

        Raises:
            TargetError: it does not answer.
        """
        ...


def by_label(rows: Sequence[Sequence[tuple[str, float]]], labels: Sequence[str]) -> np.ndarray:
    """Return scores in the order of ``labels``; NaN where a label has none.

    ``LABEL_3`` is the label with the id 3, as files without names of labels have it.

    Raises:
        TargetError: a label is none of those.
    """
    found = np.full((len(rows), len(labels)), np.nan)
    numbered = {f"LABEL_{i}": i for i in range(len(labels))} | {name: i for i, name in enumerate(labels)}
    for place, row in enumerate(rows):
        for label, score in row:
            if label not in numbered:
                raise TargetError(f"the label {label!r} is none of the model's; expected {', '.join(labels)}", status=0)
            found[place, numbered[label]] = score
    return found
