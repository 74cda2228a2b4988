"""How many tokens go through a model, told by its tokenizer: so that rates can be shown in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["counting_tokens"]


@contextmanager
def counting_tokens(model: Any, count: Callable[[int], None]) -> Iterator[None]:
    """Have ``count`` called with the tokens of everything that the model tokenizes meanwhile.

    A text that does not fit into one row is counted by its windows, where it is cut into them.
    """
    own = model.tokenizer
    limit = model.max_tokens or float("inf")

    class CountingBackend(type(own._backend)):
        def encodings(self, texts: Any, pairs: Any = None, **options: Any) -> Any:
            found = super().encodings(texts, pairs, **options)
            lengths = [len(encoding) for encoding in found]
            if pairs is None or max(lengths, default=0) <= limit:
                count(sum(length for length in lengths if length <= limit))
            return found

    class CountingTokenizer(type(own)):
        def encode_rows(self, *args: Any, **options: Any) -> Any:
            windows = own.encode_rows(*args, **options)
            count(sum(len(row.ids) for group in windows for row in group))
            return windows

        def __reduce__(self) -> Any:
            return own.__reduce__()

    # Loaded tokenizers refuse new attributes; a double shares those of its original.
    backend = _double(own._backend, CountingBackend)
    model.tokenizer = _double(own, CountingTokenizer, _backend=backend)
    try:
        yield
    finally:
        model.tokenizer = own


def _double(original: Any, kind: type, **other: Any) -> Any:
    double = object.__new__(kind)
    for name in getattr(original, "__slots__", ()):
        object.__setattr__(double, name, getattr(original, name))
    double.__dict__.update(getattr(original, "__dict__", {}), **other)
    return double
