"""How many tokens go through models, told as they do: so that rates can be shown in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flodl_hf.runtime.pending import COUNTED

__all__ = ["counting_tokens"]


@contextmanager
def counting_tokens(count: Callable[[int], None]) -> Iterator[None]:
    """Have ``count`` called with the tokens, specials included, of all rows that this thread sends meanwhile."""
    before = COUNTED.set(count)
    try:
        yield
    finally:
        COUNTED.reset(before)
