"""Counts of processed tokens and truncated texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flodl_hf.inference.batch import COUNTED, TRUNCATED

__all__ = ["counting_tokens"]


@contextmanager
def counting_tokens(count: Callable[[int], None], truncated: Callable[[int, int], None]) -> Iterator[None]:
    """Count the tokens that this thread sends to models.

    Args:
        count: called with the number of tokens of rows, including special tokens.
        truncated: called with the numbers of truncated texts and tokens.
    """
    counted, cut = COUNTED.set(count), TRUNCATED.set(truncated)
    try:
        yield
    finally:
        COUNTED.reset(counted)
        TRUNCATED.reset(cut)
