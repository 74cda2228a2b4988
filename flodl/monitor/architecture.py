"""The architecture of a model: a tree for the page with equal neighbours folded into one, a picture, and counts."""

from __future__ import annotations

import contextlib
import re
from itertools import groupby
from typing import Any

from torch import nn

from flodl.graph.picture import svg
from flodl.graph.tree import MAX_DEPTH, children_of, joined

MAX_PARTS = 64
"""Number of children that a part lists."""


def tree_of(module: nn.Module, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Return the tree of a model.

    A part has ``name`` (last segment of its path), ``path``, ``kind`` (its class), ``parameters``, ``learns`` (number
    of parameters that require gradients), ``parts``, and ``folded``: the paths of equal neighbours.
    """
    counts = [(p.numel(), p.requires_grad) for p in module.parameters()]
    kind = type(module).__name__
    part: dict[str, Any] = {
        "name": path.rpartition(".")[2] or kind, "path": path, "kind": kind,
        "parameters": sum(count for count, _ in counts), "learns": sum(count for count, learns in counts if learns),
    }  # fmt: skip
    label = getattr(module, "label", None)
    if isinstance(label, str) and label:
        part["label"] = label
    inside = [tree_of(child, joined(path, own), depth + 1) for own, child in children_of(module)]
    if inside and depth < MAX_DEPTH:
        groups = [list(group) for _, group in groupby(inside, _shape)]
        folded = [{**g[0], **({"folded": [one["path"] for one in g]} if len(g) > 1 else {})} for g in groups]
        part["parts"], part["left_out"] = folded[:MAX_PARTS], max(0, len(folded) - MAX_PARTS)
    return part


def _shape(part: dict[str, Any]) -> Any:
    """Return a value that is equal for parts that differ in numbers of their names only."""
    own = (re.sub(r"[0-9]+", "#", part["name"]), part["kind"], part["parameters"], part["learns"])
    return (*own, len(part.get("folded", ())), tuple(map(_shape, part.get("parts", ()))))


def picture_of(model: nn.Module) -> str:
    """Return the architecture as SVG text; empty if it cannot be drawn."""
    with contextlib.suppress(Exception):  # a picture must not end a run
        return svg(model)
    return ""


def facts_of(model: nn.Module) -> dict[str, Any]:
    """Return the class of a model, its numbers of parameters, and their bytes."""
    parameters = list(model.parameters())
    total, trainable = (sum(p.numel() for p in parameters if p.requires_grad or every) for every in (True, False))
    counts = {"parameters": total, "trainable": trainable, "frozen": total - trainable}
    return {"class": type(model).__name__, **counts, "bytes": sum(p.numel() * p.element_size() for p in parameters)}
