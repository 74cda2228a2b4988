"""Passes recorded as CUDA graphs: one launch instead of hundreds, for batches whose shapes come again.

Decides what is worth recording (small batches, at their third coming), how many recordings are kept (the
least recently used go first), and that a pass which cannot be recorded runs as it always did.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Recorder"]

T = TypeVar("T")

# Above this many numbers in the input a batch takes longer to compute than to launch.
MOST_NUMBERS = 4 * 4096
# Each recording keeps its activations' memory, a few megabytes at these sizes; all share one pool.
KEPT = 48
# Recording costs as much as some hundred passes, so a shape has to come again first.
WAIT = 2


class _Recording:
    def __init__(self, packed: Tensor, step: Callable[[Tensor], Tensor], device: torch.device, pool: Any) -> None:
        self.input = packed.to(device)
        # Once outside of the recording: libraries set themselves up, kernels are compiled.
        step(self.input)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.output = step(self.input)


class Recorder:
    """The recordings of one prepared graph; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._seen: dict[Hashable, int] = {}
        self._pool: Any = None
        self._stream: Any = None
        self.refused: str | None = None
        """Why passes of this graph cannot be recorded, once that was found out."""

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop every recording and its memory."""
        with self._lock:
            self._kept.clear()
            self._pool = None

    def run(
        self,
        key: Hashable,
        packed: Tensor,
        step: Callable[[Tensor], Tensor],
        device: torch.device,
        take: Callable[[Tensor], T],
    ) -> T | None:
        """Return what ``take`` makes of a recorded pass's result; None where the pass is not recorded.

        Args:
            key: what the pass is and which shapes it has.
            packed: the input, on the host.
            step: the pass.
            device: where it runs.
            take: sends the result on its way; it is overwritten by the next call.
        """
        if device.type != "cuda" or self.refused is not None or packed.numel() > MOST_NUMBERS:
            return None
        stream = torch.cuda.current_stream(device)
        with self._lock:
            # All recordings share memory, so all must run on one stream; callers on another do without.
            if self._stream is None:
                self._stream = stream
            if self._stream != stream:
                return None
            recording = self._kept.get(key) or self._record(key, packed, step, device)
            if recording is None:
                return None
            self._kept.move_to_end(key)
            recording.input.copy_(packed, non_blocking=True)
            recording.graph.replay()
            return take(recording.output)

    def _record(
        self, key: Hashable, packed: Tensor, step: Callable[[Tensor], Tensor], device: torch.device
    ) -> _Recording | None:
        seen = self._seen.get(key, 0)
        self._seen[key] = seen + 1
        if seen < WAIT:
            return None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        while len(self._kept) >= KEPT:
            self._kept.popitem(last=False)
        try:
            with torch.cuda.device(device):
                recording = _Recording(packed, step, device, self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as fault:
            self.refused = str(fault).splitlines()[0]
            return None
        self._kept[key] = recording
        return recording
