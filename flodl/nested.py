"""Nested batches: tensors in mappings, sequences, named tuples and dataclasses.

`torch.utils._pytree` supports exact types only; batches of users are mappings and dataclasses of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any


def map_leaves(value: Any, leaf: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda value: False) -> Any:
    """Return a copy of a nested value with ``leaf`` applied to each leaf.

    Mappings become dictionaries; sequences, named tuples and dataclasses keep their type.

    Args:
        is_leaf: whether a container counts as a leaf.
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
    """Yield the leaves of a nested value."""
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        yield value
        return
    for part in parts:
        yield from leaves(part)
