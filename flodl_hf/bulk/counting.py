"""How many tokens go through a model, told by its tokenizer: so that rates can be shown in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["counting_tokens"]


@contextmanager
def counting_tokens(model: Any, count: Callable[[int], None]) -> Iterator[None]:
    """Have ``count`` called with the tokens of everything that the model tokenizes meanwhile."""
    from flodl_hf.tokenizer import Tokenizer

    class Counting(Tokenizer):
        """The model's tokenizer, which besides counts."""

        def encode_rows(self, *args: Any, **options: Any) -> Any:
            windows = super().encode_rows(*args, **options)
            count(sum(len(row.ids) for group in windows for row in group))
            return windows

        def __reduce__(self) -> Any:
            return own.__reduce__()

    own = model.tokenizer
    counting = object.__new__(Counting)
    # A loaded tokenizer refuses new attributes; it and its double share the ones it has.
    counting.__dict__.update(own.__dict__)
    model.tokenizer = counting
    try:
        yield
    finally:
        model.tokenizer = own
