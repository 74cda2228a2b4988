"""The child table of a graph: an ordinary ``_modules`` dictionary that keeps the call list in step.

The generated forward pass unpacks a list of modules instead of looking names up. Whatever way a child is
replaced (attribute, `add_module`, `set_submodule`, or a tool that writes ``_modules[name]`` itself), the
list has the new module at the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from flodl.errors import GraphError

__all__ = ["ChildTable"]


class ChildTable(dict[str, Any]):
    """Children by name, and the list of those that the forward pass calls.

    Args:
        names: children that are called, in call order.
        children: the children to begin with.
    """

    def __init__(self, names: Iterable[str], children: dict[str, Any]) -> None:
        super().__init__(children)
        self._names = tuple(names)
        self.steps: list[Callable[..., Any]] = [self._callable(name) for name in self._names]

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        super().__setitem__(name, module)
        self._refresh(name)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._refresh(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a child and return it."""
        found = super().pop(name, *default)
        self._refresh(name)
        return found

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several children."""
        for name, module in dict(*args, **kwargs).items():
            self[name] = module

    def clear(self) -> None:
        """Remove every child."""
        for name in list(self):
            del self[name]

    def _refresh(self, name: str) -> None:
        if name in self._names:
            self.steps[self._names.index(name)] = self._callable(name)

    def _callable(self, name: str) -> Callable[..., Any]:
        module = self.get(name)
        return _Removed(name) if module is None else module


class _Removed:
    """Stands in the call list for a child that is not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise GraphError(f"graph call: the child {self.name!r} was removed; put a module in its place", child=self.name)
