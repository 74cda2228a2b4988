"""Measurements that colour the picture of a graph, with their units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_TITLES = {"time": "Forward", "memory": "Memory kept until backward", "gradient": "Gradient norm"}


@dataclass(frozen=True)
class Heat:
    """One measurement for each part of a model.

    Attributes:
        kind: ``time`` (seconds), ``memory`` (bytes), ``gradient`` (norms), or any other word.
        values: measurements by dotted path.
        whole: the measurement of the whole model, if it is more than the sum of its parts.
    """

    kind: str
    values: Mapping[str, float] = field(default_factory=dict)
    whole: float | None = None

    @property
    def title(self) -> str:
        """Name of the measurement, with the value of the whole model if known."""
        title = _TITLES.get(self.kind, self.kind)
        return title if self.whole is None else f"{title}: {self.text(self.whole)}"

    def total(self, values: Iterable[float]) -> float:
        """Return the measurement of several parts: the norm of norms, the sum of all else."""
        if self.kind == "gradient":
            return math.hypot(*values)
        return math.fsum(values)

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if self.kind == "time":
            return f"{value * 1e6:.0f} µs" if value < 1e-3 else f"{value * 1e3:.2f} ms"
        if self.kind != "memory":
            return f"{value:.3g}"
        power = min(int(math.log(max(value, 1), 1024)), 3)
        return f"{value / 1024**power:.{min(power, 1)}f} {('B', 'KB', 'MB', 'GB')[power]}"
