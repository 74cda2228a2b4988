"""Values of metrics: a buffer for the steps of the current epoch, and one value for each earlier epoch.

Scalar tensors stay on their device until they are read, so recording a loss does not wait for the device; reading
copies a whole buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from time import monotonic

import torch
from torch import Tensor

from flodl.monitor.collect import one_value
from flodl.monitor.trend import Trend, mean


class History:
    """Buffers and histories of metrics, in the order of first use.

    Attributes:
        times_s: seconds from the first value to each flush.
    """

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._buffers: dict[str, list[float | Tensor]] = {}
        self._epochs: dict[str, dict[int, float]] = {}
        self._epoch = 0
        self._started = math.nan

    def add(self, name: str, value: float | Tensor) -> None:
        """Append a value to the buffer of ``name``.

        Raises:
            GraphError: a tensor with more or fewer than one element.
        """
        value = one_value(value, f"record {name!r}", name)
        if math.isnan(self._started):
            self._started = monotonic()
        # The caller may overwrite the tensor.
        self._buffers.setdefault(name, []).append(value.clone() if isinstance(value, Tensor) else value)

    def replace(self, name: str, value: float) -> None:
        """Replace the buffer of ``name`` by one value."""
        self._buffers[name] = []
        self.add(name, value)

    def buffer(self, name: str) -> list[float]:
        """Return the values since the last flush."""
        values = self._buffers.get(name, [])
        if len(values) > 1 and all(isinstance(value, Tensor) for value in values):
            device = values[-1].device  # pyright: ignore[reportAttributeAccessIssue]
            return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]).tolist()
        return [float(value) for value in values]

    def names(self) -> list[str]:
        """Return the names that have a history."""
        return [name for name in self._buffers if self._epochs.get(name)]

    def trend(self, name: str) -> Trend:
        """Return the history of ``name``; empty if it has none."""
        epochs = self._epochs.get(name, {})
        return Trend(epochs.values(), name, epochs)

    def flush(self, names: Iterable[str] | None = None) -> None:
        """Move the mean of each buffer to its history.

        A flush of all names ends an epoch, in which a metric without values has a gap. A flush of some names adds an
        epoch to each of these.
        """
        wanted = list(self._buffers) if names is None else names
        means = {name: mean(values) for name in wanted if (values := self.buffer(name))}
        epochs = {name: max(self._epoch, max(self._epochs.get(name, ()), default=-1) + 1) for name in means}
        shared = max(epochs.values(), default=0)
        for name, value in means.items():
            self._epochs.setdefault(name, {})[shared if names is None else epochs[name]] = value
            self._buffers[name] = []
        if means:
            self.times_s.append(monotonic() - self._started)
            self._epoch = shared + 1 if names is None else self._epoch
