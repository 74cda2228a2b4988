"""Text summaries of a graph: its tree and its parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from flodl.graph.core import GraphCore
from flodl.graph.fingerprint import structural_hash


def tree_summary(graph: GraphCore) -> str:
    """Return one line per graph, children indented: label, short hash, nodes, parameters, tags."""
    return "\n".join(_lines(graph, 0))


def _lines(graph: GraphCore, depth: int) -> list[str]:
    plan = graph.plan
    elements = sum(p.numel() for p in graph.parameters())
    tags = ", ".join(tag for tag in plan.tags if tag not in plan.internal)
    hidden = len(plan.internal)
    line = f"{'  ' * depth}{graph.label or '(unlabelled)'} [{structural_hash(graph)[:8]}]"
    line += f" {len(plan.calls)} modules, {elements:,} parameters"
    line += f", tags: {tags}" if tags else ""
    line += f", {hidden} internal" if hidden else ""
    return [line, *(below for child in graph.tree_children().values() for below in _lines(child, depth + 1))]


def param_summary(graph: GraphCore) -> str:
    """Return a table of the parameters of labelled children, the rest and the total.

    Counts are elements, tied parameters once; a parameter of two children counts for the first.
    """
    seen: set[int] = set()
    rows: list[tuple[str, list[nn.Parameter]]] = []
    for label, child in graph.tree_children().items():
        rows.append((label, _new(child.parameters(), seen)))
    rows.append(("(own)", _new(graph.parameters(), seen)))
    rows.append(("total", list(graph.parameters())))
    width = max(len(label) for label, _ in rows)
    lines = [f"{'part':<{width}}  {'elements':>14}  {'trainable':>14}  {'frozen':>14}  state"]
    for label, parameters in rows:
        total = sum(p.numel() for p in parameters)
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        state = "none" if not total else {total: "trainable", 0: "frozen"}.get(trainable, "partly frozen")
        lines.append(f"{label:<{width}}  {total:>14,}  {trainable:>14,}  {total - trainable:>14,}  {state}")
    return "\n".join(lines)


def _new(parameters: Iterable[nn.Parameter], seen: set[int]) -> list[nn.Parameter]:
    found = [p for p in parameters if id(p) not in seen]
    seen.update(map(id, found))
    return found
