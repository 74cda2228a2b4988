"""Values that a step tells of itself while it is computed: `log`, and what takes them in.

A value is kept as a sum and a weight on its device, so that it adds up over micro-batches, steps and ranks as metrics
do, and so that a recorded step can hold it. Who takes values in is known to the thread that computes the step; where
nobody does (in prediction, in evaluation, in a backward pass that computes layers again) telling costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from flodl.errors import GraphError, nearest

__all__ = ["Reduce", "Seen", "hear", "log", "one_value", "reduce_named", "reduced", "seeing"]

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


_ADDED = (Reduce.MEAN, Reduce.SUM, Reduce.NORM)


class Adder(Protocol):
    """Adds up tensors on their device, together at the end."""

    def takes(self, value: Tensor) -> bool:
        """Return whether it adds up such a tensor."""
        ...

    def add(self, value: Tensor, *, squared: bool) -> None:
        """Begin with a tensor, or with its norm where ``squared``."""
        ...

    def finish(self) -> Tensor:
        """Return sums and norms in the order of adding, float64 ``(count,)``, in memory of their own."""
        ...

    def clear(self) -> None:
        """Forget what was begun."""
        ...


class Seen:
    """What was told of in one forward pass.

    Args:
        owners: the dotted name of each graph whose observer tells here, by ``id``.
        adder: adds up tensors that it takes; without one torch does.

    Attributes:
        pairs: ``name: (sum, weight)``.
    """

    def __init__(self, owners: Mapping[int, str] | None = None, adder: Adder | None = None) -> None:
        self.owners = owners or {}
        self.pairs: dict[str, Pair] = {}
        self._adder = adder
        self._begun: list[tuple[str, float]] = []  # in the adder's order
        if adder is not None:
            adder.clear()  # of a forward pass that failed

    def names(self) -> set[str]:
        """Return what was told so far."""
        return {*self.pairs, *(name for name, _ in self._begun)}

    def pack(self) -> dict[str, Pair]:
        """Return all pairs, tensors among them copied together, so that later writes do not reach them."""
        kept: dict[Any, list[Tensor]] = {}
        for pair in self.pairs.values():
            for value in pair:
                if isinstance(value, Tensor):
                    kept.setdefault((value.device, value.dtype), []).append(value)
        copies = {kind: iter(torch.stack(values).to(torch.float64).unbind()) for kind, values in kept.items()}

        def copied(value: Any) -> Any:
            return next(copies[value.device, value.dtype]) if isinstance(value, Tensor) else float(value)

        self.pairs = {name: (copied(total), copied(weight)) for name, (total, weight) in self.pairs.items()}
        if self._adder is not None and self._begun:
            for (name, weight), total in zip(self._begun, self._adder.finish().unbind(), strict=True):
                self.add(name, total, weight)
            self._begun.clear()
        return self.pairs

    def add(self, name: str, total: Any, weight: Any = 1.0) -> None:
        """Take in a value as a sum and its weight."""
        before = self.pairs.get(name)
        self.pairs[name] = (total, weight) if before is None else (before[0] + total, before[1] + weight)

    def add_tensor(self, name: str, value: Tensor, how: Reduce = Reduce.MEAN) -> None:
        """Take in a tensor reduced to one value; means are weighted by elements, so that uneven batches count right."""
        if value.numel() == 1:
            self.add(name, value.detach().reshape(()))
        elif self._adder is not None and how in _ADDED and self._adder.takes(value):
            weight = float(value.numel()) if how is Reduce.MEAN else 1.0
            self._adder.add(value, squared=how is Reduce.NORM)
            self._begun.append((name, weight))
        elif how is Reduce.MEAN:
            self.add(name, reduced(value, Reduce.SUM), float(value.numel()))
        else:
            self.add(name, reduced(value, how))


_seen: ContextVar[Seen | None] = ContextVar("flodl_seen", default=None)


def seeing() -> Seen | None:
    """Return what takes in values now; None where nobody does."""
    # Layers that are computed again for a backward pass have told of themselves already.
    if torch._C._current_graph_task_id() != -1:
        return None
    return _seen.get()


def hear(seen: Seen | None) -> Seen | None:
    """Have ``seen`` take in what this thread tells from now on; return who did so before."""
    before = _seen.get()
    _seen.set(seen)
    return before


def log(name: str, value: float | Tensor, *, weight: float | Tensor = 1.0) -> None:
    """Tell a value of the step that is computed now, from inside any module or training step.

    ::

        class Gated(nn.Module):
            def forward(self, x):
                gate = torch.sigmoid(self.router(x))
                flodl.monitor.log("gate", gate.mean(), weight=gate.numel())
                return gate * self.expert(x)

    A `flodl.train.Trainer` tells it in the event `flodl.train.Observed`: of each step, and merged over the steps and
    ranks of an epoch. Tensors stay on their device until then, and must not be written to in the rest of the forward
    pass. Told several times in a step, a value is the mean by weight. Without a trainer that trains, nothing happens.

    Args:
        name: a dotted name; it should be told by one place only.
        value: one number, or a tensor that holds one.
        weight: what the value is a mean over.

    Raises:
        GraphError: the name is empty, or the value is not one number.
    """
    if torch.compiler.is_compiling():
        return  # what a compiler traces is translated without side effects
    seen = seeing()
    if seen is None:
        return
    if not isinstance(name, str) or not name or not name.isprintable():
        raise GraphError(f"log: found the name {name!r}; expected a text that can be printed", tag=str(name))
    value = one_value(value, f"log {name!r}", name)
    weight = weight.detach().reshape(()) if isinstance(weight, Tensor) else float(weight)
    one = isinstance(weight, float) and weight == 1.0
    seen.add(name, value if one else value * weight, weight)


def one_value(value: Any, where: str, tag: str) -> float | Tensor:
    """Return a value as a number, or a tensor ``()`` without history.

    Raises:
        GraphError: it is neither a number nor a tensor with one element.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise GraphError(
                f"{where}: a tensor of shape {tuple(value.shape)}, expected one value; reduce it, for example by "
                "collect_with(tag, Reduce.MEAN) or value.mean()",
                tag=tag,
            )
        return value.detach().reshape(())
    if not isinstance(value, (int, float)):
        raise GraphError(f"{where}: found a {type(value).__name__}; expected a number or a tensor", tag=tag)
    return value


def reduce_named(name: Reduce | str, verb: str = "collect_with") -> Reduce:
    """Return the reduction of this name.

    Raises:
        GraphError: there is none.
    """
    if name not in list(Reduce):
        raise GraphError(f"{verb}: no reduction {name!r}{nearest(str(name), list(Reduce))}")
    return Reduce(name)


def reduced(value: Tensor, how: Reduce) -> Tensor:
    """Return a tensor with elements as one value ``()``; sums of half precision are taken in float32."""
    value = value.detach()
    if value.numel() == 1:
        return value.reshape(())
    if how is Reduce.MAX:
        return value.max()
    if how is Reduce.MIN:
        return value.min()
    value = value if value.is_floating_point() else value.float()
    if how is Reduce.NORM:
        return torch.linalg.vector_norm(value, dtype=torch.float32 if value.dtype.itemsize < 4 else None)
    # Half precision would overflow in the sum of a few thousand values.
    return (torch.sum if how is Reduce.SUM else torch.mean)(value, dtype=max(value.dtype, torch.float32, key=_width))


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize
