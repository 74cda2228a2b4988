"""What is lost when vectors are cut: the same figures at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flodl_hf.inference.search import as_vectors

__all__ = ["matryoshka_curve"]


def matryoshka_curve(
    figures: Callable[..., Mapping[str, float]],
    vectors: Sequence[Any],
    dims: Sequence[int],
    *further: Any,
    **named: Any,
) -> dict[int, dict[str, float]]:
    """Return the figures of vectors cut to each size.

    ::

        matryoshka_curve(retrieval_figures, [queries, corpus], [256, 128, 64], relevant)

    Args:
        figures: a function of this room.
        vectors: what it takes first, each ``(n, size)``.
        dims: sizes.
        *further: what it takes after the vectors.
        **named: what it takes by name.
    """
    whole = [as_vectors(part, "vectors") for part in vectors]
    return {dim: dict(figures(*(part[:, :dim] for part in whole), *further, **named)) for dim in dims}
