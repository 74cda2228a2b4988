"""The child table of a graph, which keeps the call list of the forward pass up to date.

The generated forward pass unpacks a list of modules instead of looking names up. However a child is replaced
(attribute, `add_module`, `set_submodule`, or ``_modules[name]``), the list contains the new module at the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from flodl.errors import GraphError


class ChildTable(dict[str, Any]):
    """A dictionary of children that maintains the call list of the forward pass.

    Args:
        names: names of the called children, in call order.
        children: the first children.
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

    def _refresh(self, name: str) -> None:
        if name in self._names:
            self.steps[self._names.index(name)] = self._callable(name)

    def _callable(self, name: str) -> Callable[..., Any]:
        module = self.get(name)
        return partial(_refuse, name) if module is None else module


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise GraphError(f"graph call: the child {name!r} was removed. Set another module in its place.", child=name)
