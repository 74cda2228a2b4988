"""Runs of equal blocks in a plan: a layer that comes twelve times in a row, or a layer of several nodes.

Two blocks are equal where their modules have one class and as many parameters, read one another in the same way, and
take the same values from outside. Only the last block may be read by what comes after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from flodl.graph.core import GraphCore
from flodl.graph.nodes import Node, Plan

__all__ = ["Run", "runs_of"]

LONGEST = 24
"""Most nodes of one block."""


@dataclass(frozen=True)
class Run:
    """Equal blocks one after the other.

    Attributes:
        blocks: indices of nodes, block by block.
    """

    blocks: tuple[tuple[int, ...], ...]


def runs_of(graph: GraphCore) -> list[Run]:
    """Return the runs of a graph's plan, in its order; no node is in two of them."""
    plan, order = graph.plan, graph.plan.order
    reader = _Reader(graph)
    found: list[Run] = []
    start = 0
    while start < len(order):
        best = (0, 0)
        for period in range(1, min(LONGEST, (len(order) - start) // 2) + 1):
            count = reader.times(start, period)
            if count > 1 and count * period > best[0] * best[1]:
                best = count, period
        count, period = best
        if count:
            at = range(start, start + count * period, period)
            found.append(Run(tuple(tuple(order[i : i + period]) for i in at)))
        start += max(1, count * period)
    assert len({i for run in found for block in run.blocks for i in block}) <= len(plan.nodes)
    return found


class _Reader:
    """What is compared of a plan's nodes."""

    def __init__(self, graph: GraphCore) -> None:
        self.plan = graph.plan
        self.place = {index: i for i, index in enumerate(self.plan.order)}
        self.alone = _alone(self.plan)
        self.looks = {node.index: _look(node, graph) for node in self.plan.nodes}
        self.readers: dict[int, list[int]] = {}
        for node in self.plan.nodes:
            for source in (*node.inputs, *(given.source for given in node.references)):
                self.readers.setdefault(source, []).append(node.index)

    def times(self, start: int, period: int) -> int:
        """Return how many equal blocks of so many nodes begin at a place of the order."""
        order, count = self.plan.order, 1
        if any(i in self.alone for i in order[start : start + period]):
            return 0
        while (count + 1) * period <= len(order) - start:
            at = start + count * period
            pairs = zip(order[start : start + period], order[at : at + period], strict=True)
            if not all(self._alike(a, b, count * period) for a, b in pairs):
                break
            count += 1
        while count > 1 and self._read_outside(start, period, count):
            count -= 1
        return count

    def _alike(self, a: int, b: int, shift: int) -> bool:
        if b in self.alone or self.looks[a] != self.looks[b]:
            return False
        one, two = self.plan.nodes[a], self.plan.nodes[b]
        if len(one.inputs) != len(two.inputs) or len(one.references) != len(two.references):
            return False
        sources = [*zip(one.inputs, two.inputs, strict=True)]
        for given, taken in zip(one.references, two.references, strict=True):
            if given.keyword != taken.keyword:
                return False
            sources.append((given.source, taken.source))
        return all(x == y or self.place[y] - self.place[x] == shift for x, y in sources)

    def _read_outside(self, start: int, period: int, count: int) -> bool:
        """Return whether something after the run reads a block that is not the last."""
        end = start + count * period
        inner = self.plan.order[start : end - period]
        return any(self.place[reader] >= end for i in inner for reader in self.readers.get(i, ()))


def _alone(plan: Plan) -> set[int]:
    """Return nodes that are never folded: inputs, and what reads or writes a value of the call before."""
    found = {given.node for given in plan.inputs} | {plan.tags[tag] for tag in plan.memory}
    return found | {node.index for node in plan.nodes if node.kind == "state_read"}


def _look(node: Node, graph: GraphCore) -> Any:
    module: nn.Module | None = getattr(graph, node.name) if node.name else None
    shapes = () if module is None else tuple(tuple(p.shape) for p in module.parameters())
    return node.kind, type(module).__name__, node.mode, bool(node.tags), shapes
