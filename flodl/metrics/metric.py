"""What every metric has in common, and how metrics of several ranks become one.

A metric keeps counts or sums, never logits. What it counts is decided in its own file; who calls it, and
how states travel between ranks, is decided by the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Metric", "merged"]


@runtime_checkable
class Metric(Protocol):
    """Something that is fed batch by batch and gives named figures at the end.

    ``update`` takes what the metric needs, so its arguments differ from metric to metric.
    """

    def merge(self, other: Any) -> None:
        """Add what ``other``, a metric of the same kind and settings, has counted."""
        ...

    def compute(self) -> dict[str, float]:
        """Return the figures so far, by name."""
        ...

    def reset(self) -> None:
        """Forget everything counted."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted; JSON-able, small, and enough to go on from."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was counted elsewhere, in place of what was counted here."""
        ...


M = TypeVar("M", bound=Metric)


def merged(metric: M, states: Iterable[Mapping[str, Any]]) -> M:
    """Return ``metric`` holding the sum of ``states``, for example those gathered from all ranks.

    Args:
        metric: any instance with the right settings; what it has counted is replaced.
        states: from :meth:`Metric.state_dict`, in rank order. The order does not matter for counts; sums of
            floating-point numbers may differ in the last bit.
    """
    metric.reset()
    part = deepcopy(metric)
    for state in states:
        part.load_state_dict(state)
        metric.merge(part)
    return metric
