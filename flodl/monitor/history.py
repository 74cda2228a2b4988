"""Two-stage storage of numbers: what this epoch brought so far, and one value for each epoch before.

Scalars that live on a device stay there until somebody looks, so recording a loss does not stop the
device at every step; looking moves a whole buffer at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

import torch
from torch import Tensor

from flodl.monitor.collect import one_value
from flodl.monitor.sums import mean

__all__ = ["Series"]


class Series:
    """Named buffers and their histories, in the order in which the names first came."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[float | Tensor]] = {}
        self._history: dict[str, dict[int, float]] = {}
        self._epoch = 0
        self._flush_times: list[float] = []
        self._started: float | None = None

    def add(self, name: str, value: float | Tensor) -> None:
        """Append one value to the buffer of ``name``.

        Raises:
            GraphError: a tensor with more or fewer than one element.
        """
        value = one_value(value, f"record {name!r}", name)
        if isinstance(value, Tensor):
            value = value.clone()  # the caller may go on writing into it
        if self._started is None:
            self._started = monotonic()
        self._buffers.setdefault(name, []).append(value)

    def put(self, name: str, value: float) -> None:
        """Have ``value`` be all that was recorded of ``name`` since the last flush."""
        self._buffers[name] = []
        self.add(name, value)

    def buffer(self, name: str) -> list[float]:
        """Return the values recorded since the last flush."""
        return _numbers(self._buffers.get(name, []))

    def history(self, name: str) -> dict[int, float]:
        """Return one value, by epoch from 0, for each flush that had something for ``name``."""
        return dict(self._history.get(name, {}))

    def names(self) -> list[str]:
        """Return every name that has a history, in the order of first recording."""
        return [name for name in self._buffers if self._history.get(name)]

    def flush(self, names: Iterable[str] | None = None) -> bool:
        """Move the mean of each buffer to its history; return whether anything moved.

        A flush of everything closes an epoch, so a metric that is absent in one has a gap there. Names
        flushed one by one count each for itself.
        """
        means = {
            name: mean(values)
            for name in (list(self._buffers) if names is None else names)
            if (values := self.buffer(name))
        }
        nexts = {name: max(self._epoch, max(self._history.get(name, ()), default=-1) + 1) for name in means}
        shared = max(nexts.values(), default=0)
        for name, value in means.items():
            self._history.setdefault(name, {})[shared if names is None else nexts[name]] = value
            self._buffers[name] = []
        if means:
            self._flush_times.append(self.elapsed_s())
            self._epoch = shared + 1 if names is None else self._epoch
        return bool(means)

    def reset(self, names: Iterable[str] | None = None) -> None:
        """Forget histories; forgetting all begins again at the first epoch."""
        if names is None:
            self._epoch, self._flush_times = 0, []
        for name in list(self._history) if names is None else names:
            self._history.pop(name, None)

    def elapsed_s(self) -> float:
        """Return the seconds since the first value was recorded."""
        return 0.0 if self._started is None else monotonic() - self._started

    def flush_times_s(self) -> list[float]:
        """Return when each flush that moved something happened, in seconds since the first value."""
        return list(self._flush_times)


def _numbers(values: list[float | Tensor]) -> list[float]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    moved: dict[int, float] = {}
    for kind in {(tensor.device, tensor.dtype) for tensor in tensors}:
        same = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind]
        moved.update(zip(map(id, same), torch.stack(same).tolist(), strict=True))
    return [float(moved[id(value)]) if isinstance(value, Tensor) else float(value) for value in values]
