"""Modules inside a model and their dotted paths, in graphs in the order of the plan."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from flodl.graph.core import GraphCore

MAX_DEPTH = 6
"""Levels below the model that `modules_of` returns."""


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the direct children with their names, in graphs in the order of the plan."""
    if isinstance(module, GraphCore):
        for name in dict.fromkeys(node.name for node in module.plan.nodes if node.name):
            yield name, getattr(module, name)
        return
    yield from module.named_children()


def modules_of(model: nn.Module, path: str = "", depth: int = 0) -> list[tuple[str, nn.Module]]:
    """Return the modules inside a model by path, parents before children, down to `MAX_DEPTH`."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in children_of(model) if depth < MAX_DEPTH else ():
        below = joined(path, name)
        found += [(below, child), *modules_of(child, below, depth + 1)]
    return found


def joined(path: str, name: str) -> str:
    """Return a path that is one segment longer."""
    return f"{path}.{name}" if path else name
