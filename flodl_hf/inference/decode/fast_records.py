"""Create many frozen records together, at the cost of ordinary ones.

A frozen dataclass sets each field through ``object.__setattr__``, which makes it three times as slow to make as
one that may change; answers come by the hundred thousand. So they are made as what may change and then become what
they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import fields, make_dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np

__all__ = ["Record", "made", "pairs_of"]

T = TypeVar("T")


NAMES = {"entity": "label", "entity_group": "label", "answer": "text", "token_str": "token"}
"""Names of transformers' pipelines for fields of records."""


class Record:
    """A record with fields that can also be read by key, as in transformers' pipelines: ``record["score"]``."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        known = self.keys()
        ours = name if name in known else NAMES.get(name)
        if ours not in known:
            raise KeyError(f"{name!r}; expected one of {', '.join(known)}")
        return getattr(self, ours)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(field.name for field in fields(self))  # type: ignore[arg-type]


@cache
def _draft(kind: type) -> Any:
    names = [(field.name, Any) for field in fields(kind)]
    # Of the same slots, which is what lets an instance become one of ``kind``.
    return make_dataclass(
        f"_{kind.__name__}", names, bases=kind.__bases__, slots=True, eq=False, repr=False, match_args=False
    )


def made(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """Return ``[kind(*values) for values in zip(*columns)]``, without the checks in ``__post_init__``.

    Args:
        kind: a dataclass with slots.
        columns: the values of each of its fields, in order.
    """
    found = list(map(_draft(kind), *columns))
    for record in found:
        record.__class__ = kind
    return found


class _Pairs(dict[int, tuple[int, int]]):
    """Pairs by a number that encodes both; created on demand."""

    def __missing__(self, key: int) -> tuple[int, int]:
        first, second = divmod(key, _APART)
        found = self[key] = (first, second)
        return found


_APART = 1 << 32
# Words and tokens of texts of ordinary length; entries beyond that are evicted periodically.
_MOST_PAIRS = 1 << 16
_PAIRS = threading.local()


def pairs_of(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int]]:
    """Return ``list(zip(first, second))`` of integers, equal pairs being one object.

    Spans of words repeat from text to text, and each new tuple is one more object for the collector of cycles to
    traverse: with a large program's heap, that is most of the cost of an answer.

    Args:
        first: integers, ``(n,)``.
        second: integers from 0 to 2**32, ``(n,)``.
    """
    known: _Pairs = _PAIRS.__dict__.setdefault("known", _Pairs())
    if len(known) > _MOST_PAIRS:
        known.clear()
    return list(map(known.__getitem__, (first * _APART + second).tolist()))
