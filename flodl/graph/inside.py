"""The modules inside of a model by dotted path, those of a graph in the order of its plan."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from flodl.graph.core import GraphCore

__all__ = ["DEEPEST", "children_of", "joined", "parts_of"]

DEEPEST = 6
"""Levels below the model that are looked at."""


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules directly inside by name; a graph's in the order in which its plan runs them."""
    if isinstance(module, GraphCore):
        seen: set[str] = set()
        for node in module.plan.nodes:
            if node.name and node.name not in seen:
                seen.add(node.name)
                yield node.name, getattr(module, node.name)
        return
    yield from module.named_children()


def parts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules inside by path, parents before children, the deepest left out."""
    found: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, path: str, depth: int) -> None:
        for own, child in children_of(module) if depth < DEEPEST else ():
            below = joined(path, own)
            found.append((below, child))
            walk(child, below, depth + 1)

    walk(model, "", 0)
    return found


def joined(path: str, name: str) -> str:
    """Return a path one segment longer."""
    return f"{path}.{name}" if path else name
