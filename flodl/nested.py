"""Nested batches: tensors in mappings, sequences, named tuples and dataclasses, walked in one way.

`torch.utils._pytree` knows exact types only; batches of users are mappings and dataclasses of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

__all__ = ["leaves", "map_leaves"]


def map_leaves(value: Any, leaf: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda value: False) -> Any:
    """Return a copy of ``value`` with ``leaf(part)`` in place of each part that holds no others.

    Mappings become dictionaries; sequences, named tuples and dataclasses keep their type.

    Args:
        is_leaf: whether a part is not looked into, though it may hold others.
    """
    if is_leaf(value):
        return leaf(value)
    if isinstance(value, Mapping):
        return {name: map_leaves(part, leaf, is_leaf) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [map_leaves(part, leaf, is_leaf) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: map_leaves(getattr(value, f.name), leaf, is_leaf) for f in fields(value) if f.init}
        )
    return leaf(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the parts of ``value`` that hold no others."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value
