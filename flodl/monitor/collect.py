"""Values that a step reports while it is computed: `log`, and the collector that stores them.

A value is stored as a sum and a weight on its device, so that it adds up over micro-batches, steps and ranks as metrics
do, and can be part of a captured step. The collector belongs to the thread that computes the step; without one (in
prediction, in evaluation, in the recomputation of checkpointed layers) nothing is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from flodl.errors import GraphError, nearest

Pair = tuple[Any, Any]
"""Sum and weight; each a number or a tensor ``()``."""


class Reduce(StrEnum):
    """How a tensor becomes one value."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    NORM = "norm"
    """The L2 norm of all elements."""


class Collector:
    """Values of one forward pass.

    Args:
        owners: dotted name of each graph that reports here, by ``id``.

    Attributes:
        pairs: ``name: (sum, weight)``.
    """

    def __init__(self, owners: Mapping[int, str] | None = None) -> None:
        self.owners = owners or {}
        self.pairs: dict[str, Pair] = {}

    def pack(self) -> dict[str, Pair]:
        """Return all pairs as copies, so that later writes to the tensors do not change them."""
        by_kind: dict[Any, list[Tensor]] = {}
        for pair in self.pairs.values():
            for value in pair:
                if isinstance(value, Tensor):
                    by_kind.setdefault((value.device, value.dtype), []).append(value)
        copies = {kind: iter(torch.stack(values).to(torch.float64).unbind()) for kind, values in by_kind.items()}

        def copied(value: Any) -> Any:
            return next(copies[value.device, value.dtype]) if isinstance(value, Tensor) else float(value)

        self.pairs = {name: (copied(total), copied(weight)) for name, (total, weight) in self.pairs.items()}
        return self.pairs

    def add(self, name: str, total: Any, weight: Any = 1.0) -> None:
        """Add a value as a sum and its weight."""
        before = self.pairs.get(name)
        self.pairs[name] = (total, weight) if before is None else (before[0] + total, before[1] + weight)

    def add_tensor(self, name: str, value: Tensor, how: Reduce = Reduce.MEAN) -> None:
        """Add a tensor reduced to one value; means are weighted by the number of elements."""
        weight = float(value.numel()) if how is Reduce.MEAN else 1.0
        if value.numel() == 1:
            self.add(name, value.detach().reshape(()))
        else:
            self.add(name, reduced(value, Reduce.SUM if how is Reduce.MEAN else how), weight)


COLLECTOR: ContextVar[Collector | None] = ContextVar("flodl_collector", default=None)


def current_collector() -> Collector | None:
    """Return the collector of this thread; None during a backward pass, which may recompute layers."""
    return COLLECTOR.get() if torch._C._current_graph_task_id() == -1 else None


def set_collector(collector: Collector | None) -> Collector | None:
    """Set the collector of this thread and return the previous one."""
    before = COLLECTOR.get()
    COLLECTOR.set(collector)
    return before


def log(name: str, value: float | Tensor, *, weight: float | Tensor = 1.0) -> None:
    """Report a value of the current training step from any module or training step.

    ::

        class Gated(nn.Module):
            def forward(self, x):
                gate = torch.sigmoid(self.router(x))
                flodl.monitor.log("gate", gate.mean(), weight=gate.numel())
                return gate * self.expert(x)

    A `flodl.train.Trainer` emits it in the event `flodl.train.Observed`: for each step, and averaged over the steps and
    ranks of an epoch. Tensors stay on their device and must not be overwritten in the rest of the forward pass. Several
    values of one name in a step are averaged by weight. Outside a training step nothing happens.

    Args:
        name: a dotted name, used in one place only.
        value: one number, or a tensor with one element.
        weight: number of items that the value is a mean of.

    Raises:
        GraphError: the name is empty, or the value is not one number.
    """
    if torch.compiler.is_compiling():
        return  # compiled code has no side effects
    collector = current_collector()
    if collector is None:
        return
    if not isinstance(name, str) or not name or not name.isprintable():
        raise GraphError(f"log: name is {name!r}, expected printable text", tag=str(name))
    value = one_value(value, f"log {name!r}", name)
    weight = weight.detach().reshape(()) if isinstance(weight, Tensor) else float(weight)
    one = isinstance(weight, float) and weight == 1.0
    collector.add(name, value if one else value * weight, weight)


def one_value(value: Any, source: str, tag: str) -> float | Tensor:
    """Return a value as a number or a tensor ``()`` without gradient.

    Raises:
        GraphError: it is neither a number nor a tensor with one element.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise GraphError(
                f"{source}: a tensor of shape {tuple(value.shape)}, expected one value. Reduce it, for example by "
                "collect_with(tag, reduce='mean') or value.mean().",
                tag=tag,
            )
        return value.detach().reshape(())
    if not isinstance(value, (int, float)):
        raise GraphError(f"{source}: found {type(value).__name__}, expected a number or a tensor", tag=tag)
    return value


def reduce_named(name: Reduce | str, verb: str = "collect_with") -> Reduce:
    """Return the reduction with this name.

    Raises:
        GraphError: there is none.
    """
    if name not in list(Reduce):
        raise GraphError(f"{verb}: no reduction {name!r}{nearest(str(name), list(Reduce))}")
    return Reduce(name)


def reduced(value: Tensor, how: Reduce) -> Tensor:
    """Return a tensor with elements as one value ``()``; half precision is added up in float32."""
    value = value.detach()
    if value.numel() == 1:
        return value.reshape(())
    if how in (Reduce.MAX, Reduce.MIN):
        return value.max() if how is Reduce.MAX else value.min()
    value = value if value.is_floating_point() else value.float()
    dtype = torch.float32 if value.dtype.itemsize < 4 else value.dtype
    if how is Reduce.NORM:
        return torch.linalg.vector_norm(value, dtype=dtype)
    return (torch.sum if how is Reduce.SUM else torch.mean)(value, dtype=dtype)
