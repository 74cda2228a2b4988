"""When what of a request happened in its worker, for requests that are traced; others have none.

What becomes of it is the doors' (`flodl_hf.serving.traces`).
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Timeline"]

MOST = 32
"""Batches of a request that are told one by one."""

_now = time.perf_counter_ns


class Timeline:
    """Steps of a request: tokenised, waited, ran in batches, decoded. Begins when it is made."""

    def __init__(self) -> None:
        self._at = _now()
        self._sent: int | None = None
        self._steps: list[tuple[str, int, int, dict[str, Any]]] = []
        # Start, when the device had it, end, and size of each batch; written by the threads that run batches.
        self._batches: list[list[Any]] = []

    def sent(self) -> None:
        """Note that rows wait now."""
        if self._sent is None:
            self._sent = self._step("tokenise", self._at, _now())

    def taken(self, started_s: float, rows: int, tokens: int) -> None:
        """Note that rows are in a batch, which the device begins now.

        Args:
            started_s: when the batch was begun, by ``time.perf_counter``.
            rows: of the whole batch.
            tokens: likewise.
        """
        self._batches.append([int(started_s * 1e9), _now(), None, rows, tokens])

    def ran(self) -> None:
        """Note that the first of the batches that run has."""
        ends = next((batch for batch in self._batches if batch[2] is None), None)
        if ends is not None:
            ends[2] = _now()

    def arrived(self) -> None:
        """Note that all results are here."""
        if self._sent is None:
            return
        batches = [batch for batch in self._batches if batch[2] is not None]
        self._step("queue", self._sent, batches[0][0] if batches else _now())
        for start, begun, end, rows, tokens in batches[:MOST]:
            self._step("batch", start, end, rows=rows, tokens=tokens)
            self._step("device", begun, end)
        self._at, self._sent, self._batches = _now(), None, []

    def told(self) -> list[tuple[str, int, int, dict[str, Any]]]:
        """Return the steps: name, start and end in ns of ``time.time_ns``, sizes; "device" comes after "batch"."""
        self._step("decode" if self._steps else "tokenise", self._at, _now())
        shift = time.time_ns() - _now()
        return [(name, start + shift, end + shift, more) for name, start, end, more in self._steps]

    def _step(self, name: str, start: int, end: int, **more: Any) -> int:
        self._steps.append((name, start, end, more))
        return end
