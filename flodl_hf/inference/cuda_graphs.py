"""Record passes as CUDA graphs: one launch instead of a hundred, for batches with recurring shapes.

Decides when a shape is recorded (behind an ordinary pass of it, while the device computes that one; ever later after
each time a recording had to go), how many recordings are kept (the least recently used go first), that captures
are serialised, and that a pass that cannot be recorded runs normally. Shapes recur because
`flodl_hf.nn.buckets` and the engine pad batches to few of them.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from flodl.garbage_collection import gc_paused

T = TypeVar("T")

# Tokens up to which a batch computes faster than it is launched, op by op.
SMALL = 4096
# All recordings share one pool of memory for the activations of the largest; each recording additionally uses
# its input and its result, and the driver's memory for a graph, about 100 kB.
KEPT = 64
# Results of all recordings together, and of one, in bytes: results for each token may be large.
KEPT_BYTES = 256 << 20
MOST_BYTES = 64 << 20
# Recording costs the host as much as some passes of a small shape, so such a one has to come twice. A large one
# computes for longer than its recording takes, and recurs because large shapes are few.
WAIT = 2

# torch's random number generators and memory pools do not support two captures at the same time.
_CAPTURING = threading.Lock()


class _Captured:
    """A pass as a CUDA graph.

    Args:
        step: the pass.
        input: its input, on the device.
        pool: the memory that recordings share.
        stream: where captures of this pool are made; replays run on the caller's stream.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], input: Tensor, pool: Any, stream: torch.cuda.Stream) -> None:
        self.input = input
        self._graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would also wait for the device, which has work, and hand all cached memory back, pinned
        # memory too, which the next batches want.
        # Garbage with another recording must not be collected meanwhile: freeing it would break this one.
        with _CAPTURING, gc_paused(), torch.cuda.stream(stream):
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.output = step(self.input)
                self._graph.capture_end()
            except BaseException:
                with suppress(Exception):
                    self._graph.capture_end()
                with suppress(Exception):
                    # A recording that broke may leave its allocations open, and memory would never be freed.
                    torch._C._cuda_endAllocateToPool(input.device.index or 0, pool)  # pyright: ignore
                raise

    def replay(self) -> None:
        self._graph.replay()


class Recorder:
    """The recordings of one prepared graph; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: dict[Hashable, int] = {}
        self._wanted: dict[Hashable, int] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._side: Any = None
        self.refused: str | None = None
        """Why passes of this graph cannot be recorded, once that was found out."""

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop every recording and its memory."""
        with self._lock:
            self._kept.clear()
            self._seen.clear()
            self._pool = None

    def replayed(self, key: Hashable, packed: Tensor, device: torch.device, take: Callable[[Tensor], T]) -> T | None:
        """Return ``take`` applied to a recorded pass's result; None if the pass is not recorded.

        Args:
            key: identifies the pass and its shapes.
            packed: the input, on the host.
            device: where it runs.
            take: sends the result on its way; it is overwritten by the next call.
        """
        if key not in self._kept:
            return None
        stream = self.stream_of(device)
        with self._lock:
            recording = self._kept.get(key)
            # All recordings share memory, so all must run on one stream; callers on another do without.
            if recording is None or self._stream != stream:
                return None
            self._kept.move_to_end(key)
            recording.input.copy_(packed, non_blocking=True)
            recording.replay()
            return take(recording.output)

    def saw(
        self, key: Hashable, input: Tensor, output: Tensor, step: Callable[[Tensor], Tensor], *, wait: int = WAIT
    ) -> None:
        """Note an ordinary pass that was just sent to the device; record it if worthwhile.

        Args:
            key: as of `replayed`.
            input: its input on the device, which becomes the recording's own.
            output: its result, for its size.
            step: the pass.
            wait: at which coming of the shape it is recorded.
        """
        device = input.device
        if self.refused is not None or not self.records_on(device):
            return
        stream = self.stream_of(device)
        with self._lock:
            if self._stream is None:
                self._stream = stream
            if self._stream != stream or key in self._kept:
                return
            self._seen[key] = self._seen.get(key, 0) + 1
            wait = self._wanted.get(key, wait)
            if self._seen[key] < wait:
                return
            # One that is dropped and wanted again shall not be recorded time and again.
            self._seen[key], self._wanted[key] = 0, 2 * max(wait, WAIT)
            size = output.nbytes
            if size > MOST_BYTES:
                self._wanted[key] = 1 << 62
                return
            self._make_room(size)
            try:
                self._kept[key] = self.capture(step, input)
            except torch.OutOfMemoryError:
                # The pool needs memory in addition to the memory of ordinary passes, which they do not use.
                self._kept.clear()
                self._pool = None
            except RuntimeError as fault:
                self.refused = f"{type(fault).__name__}: {fault}".splitlines()[0]
                warnings.warn(
                    f"prediction on {device}: passes are not recorded, but launched operation by operation, which is "
                    f"slower: {self.refused}",
                    stacklevel=2,
                )

    def records_on(self, device: torch.device) -> bool:
        """Return whether passes can be recorded on a device."""
        return device.type == "cuda"

    def stream_of(self, device: torch.device) -> Any:
        """Return the stream that the caller's work goes to."""
        return torch.cuda.current_stream(device)

    def capture(self, step: Callable[[Tensor], Tensor], input: Tensor) -> Any:
        """Return a pass recorded on its input, in the memory that all recordings share."""
        with torch.cuda.device(input.device):
            if self._side is None:
                self._side = torch.cuda.Stream(input.device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            return _Captured(step, input, self._pool, self._side)

    def _make_room(self, size: int) -> None:
        kept = sum(recording.output.nbytes for recording in self._kept.values())
        while self._kept and (len(self._kept) >= KEPT or kept + size > KEPT_BYTES):
            _, gone = self._kept.popitem(last=False)
            kept -= gone.output.nbytes
