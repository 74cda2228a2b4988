"""The architecture of a model as a tree that a page can draw: parts by name, equal neighbours folded into one.

A graph's parts are its nodes in the order of their plan, with the words that its pictures use; any other module's are
its children.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from flodl.graph.modules import MAX_DEPTH, children_of, joined

__all__ = ["facts_of", "tree_of"]

MOST_PARTS = 64
"""Parts of one module that are shown; of more, the rest is counted."""


def tree_of(model: nn.Module) -> dict[str, Any]:
    """Return the tree of a model.

    A part has ``name`` (its path's last word), ``path``, ``kind`` (its class), ``parameters``, ``learns`` (how many of
    them do), ``parts``, and where neighbours are alike, ``folded``: the names of all that this one stands for.
    """
    return _part(model, "", type(model).__name__, 0)


def _part(module: nn.Module, path: str, name: str, depth: int) -> dict[str, Any]:
    counts = [(p.numel(), p.requires_grad) for p in module.parameters()]
    part: dict[str, Any] = {
        "name": name,
        "path": path,
        "kind": type(module).__name__,
        "parameters": sum(count for count, _ in counts),
        "learns": sum(count for count, learns in counts if learns),
    }
    label = getattr(module, "label", None)
    if isinstance(label, str) and label:
        part["label"] = label
    if depth < MAX_DEPTH:
        inside = [_part(child, joined(path, own), own, depth + 1) for own, child in children_of(module)]
        if inside:
            folded = list(_folded(inside))
            part["parts"] = folded[:MOST_PARTS]
            if len(folded) > MOST_PARTS:
                part["left_out"] = len(folded) - MOST_PARTS
    return part


def _folded(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield parts, neighbours of one shape as one that knows the names of all."""
    run: list[dict[str, Any]] = []
    for part in [*parts, None]:
        if run and (part is None or _shape(part) != _shape(run[0])):
            first = run[0]
            if len(run) > 1:
                first = {**first, "folded": [one["path"] for one in run]}
            yield first
            run = []
        if part is not None:
            run.append(part)


def _shape(part: dict[str, Any]) -> Any:
    inside = tuple(_shape(one) for one in part.get("parts", ()))
    return (
        re.sub(r"[0-9]+", "#", part["name"]),
        part["kind"],
        part["parameters"],
        part["learns"],
        len(part.get("folded", ())),
        inside,
    )


def facts_of(model: nn.Module) -> dict[str, Any]:
    """Return how many parameters a model has, how many of them learn, and the bytes they take."""
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "frozen": sum(p.numel() for p in parameters if not p.requires_grad),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
    }
