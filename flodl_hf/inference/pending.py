"""Results that are on their way home, and in which order they are wanted.

Arrays, not tensors, put them in order: torch would wake a thread for every core, which then waits busily and slows
the threads that tokenise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.inference.decode.rows import Placed

__all__ = ["COUNTED", "HEARD", "TRUNCATED", "Pending"]

HEARD: ContextVar[Callable[[float], None] | None] = ContextVar("HEARD", default=None)
"""Who hears of each batch that is noted, as a share of all rows."""

COUNTED: ContextVar[Callable[[int], None] | None] = ContextVar("COUNTED", default=None)
"""Called with the number of tokens of each window that is sent, and with 0 after each batch."""

TRUNCATED: ContextVar[Callable[[int, int], None] | None] = ContextVar("TRUNCATED", default=None)
"""Called with the numbers of truncated texts and of their dropped tokens, instead of a warning."""


class Pending:
    """Results of a pass that may still be running; wait for them when needed.

    Args:
        rows: how many rows there are.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._parts: list[tuple[np.ndarray, np.ndarray, Tensor, Any]] = []
        self.threads: list[Thread] = []
        self.faults: list[BaseException] = []
        self._heard, self._counted = HEARD.get(), COUNTED.get()

    def add(self, rows: np.ndarray, sizes: np.ndarray, values: Tensor, event: Any) -> None:
        """Note a batch.

        Args:
            rows: its rows.
            sizes: how many results each has.
            values: where they will be, float32 on the CPU.
            event: signals that they are complete; None if they are.
        """
        self._parts.append((rows, sizes, values, event))
        if self._heard is not None:
            self._heard(len(rows) / self._rows)
        if self._counted is not None:
            self._counted(0)

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows of each batch and their results, ``(results, ...)``, batch after batch as they arrive."""
        # Other threads may still be adding batches.
        for thread in self.threads:
            thread.join()
        if self.faults:
            raise self.faults[0]
        for rows, _, values, event in self._parts:
            if event is not None:
                event.synchronize()
            yield rows, values.numpy()

    def arrays(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return rows, sizes and results of all batches, to be sent elsewhere."""
        self.wait()
        return [(rows, sizes, values.numpy()) for rows, sizes, values, _ in self._parts]

    @classmethod
    def arrived(cls, rows: int, arrays: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Pending:
        """Return the values of `arrays` as completed results."""
        found = cls(rows)
        for chosen, sizes, values in arrays:
            found.add(chosen, sizes, torch.from_numpy(values), None)
        return found

    def placed(self) -> Placed:
        """Return the results of all tokens, in float32 on the CPU, and where each row's begin."""
        self.wait()
        starts = np.zeros(self._rows, np.int64)
        at = 0
        for rows, sizes, values, _ in self._parts:
            starts[rows] = at + np.cumsum(sizes) - sizes
            at += len(values)
        parts = [part[2] for part in self._parts]
        if len(parts) == 1:
            return Placed(parts[0], starts)
        return Placed(torch.from_numpy(np.concatenate([part.numpy() for part in parts])), starts)

    def stacked(self) -> Tensor:
        """Return the result of each row in the order of the rows, ``(rows, ...)``, in float32 on the CPU."""
        if len(self._parts) == 1 and self._rows == 1:
            self.wait()
            return self._parts[0][2]
        found: np.ndarray | None = None
        for rows, values in self.parts():
            if found is None:
                found = np.empty((self._rows, *values.shape[1:]), np.float32)
            found[rows] = values
        assert found is not None
        return torch.from_numpy(found)

    def wait(self) -> None:
        """Wait for all results; raise the exception of another thread, if any."""
        for _ in self.parts():
            pass
