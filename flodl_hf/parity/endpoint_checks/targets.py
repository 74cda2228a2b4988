"""Interface of the compared targets: one row of numbers for each item.

A row is a vector, a score for each label, or the relevance of a document. HTTP interfaces are in
`flodl_hf.parity.endpoint_checks.http`, folders in `flodl_hf.parity.endpoint_checks.folder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from flodl.errors import FlodlError

QUERY = "where does the river rise"
"""Query of every ranking."""


class TargetError(FlodlError):
    """A target that does not answer.

    Attributes:
        status: of HTTP; 0 where nothing came, or where it is no endpoint.
    """

    status: int


class Target(Protocol):
    """A target that is compared with a model."""

    name: str
    """Its name in a report."""
    scales: bool
    """Whether it scales vectors to length 1 regardless of the folder, unless disabled in the request."""

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
        """Return the ids of texts with special tokens, or None if the target does not provide them.

        Raises:
            TargetError: the target does not respond.
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
