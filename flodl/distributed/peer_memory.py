"""Sums over two GPUs of one host that write into each other's memory.

Each GPU has a buffer to which the other writes: the copy engine copies a bucket of gradients there, a signal reports
its arrival, and each GPU adds the received values to its values. The kernels of a collective occupy processors that a
simultaneous backward pass needs; copies occupy none. As ``a + b`` equals ``b + a``, both GPUs have the same bits, equal
to the result of a collective. CUDA graphs can capture copies, signals and sums.

The memory is torch's (`torch.distributed._symmetric_memory`: CUDA's virtual memory, shared between processes). A trial
verifies that two devices reach each other before a run relies on it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flodl.distributed.group import Ranks

SWITCH = "FLODL_PEER_MEMORY"
"""Environment variable; ``0`` disables peer memory, so that NCCL sums."""

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
ALIGNMENT = 256
FREE = 0
"""Signal that a buffer was read and may be overwritten; bucket n has signal n + 1."""
MOST_SIGNALS = 120
"""Fewer signals than torch provides between two ranks."""
TRIAL = 1 << 16


class PeerAccessError(RuntimeError):
    """Two ranks cannot write into each other's memory; the text is the reason and the rank."""


class PeerBuffer:
    """Buffers for the tensors of the other rank; both ranks create it together.

    Args:
        tensors: the tensors to sum, of the same shapes on both ranks, on the ranks' devices.

    Raises:
        PeerAccessError: there is not enough memory, or it cannot be shared; on both ranks.
    """

    def __init__(self, ranks: Ranks, tensors: Sequence[torch.Tensor]) -> None:
        self.ranks, self.other = ranks, 1 - ranks.rank
        # One more for the end of a step: two numbers of 8 bytes.
        like = [*tensors, torch.empty(2, dtype=torch.float64, device="meta")]
        if not tensors or len(like) >= MOST_SIGNALS:
            raise PeerAccessError(f"there are {len(tensors)} buckets, and signals for 1 to {MOST_SIGNALS - 2}")
        begins, size = [], 0
        for tensor in like:
            begins.append(size)
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._memory, self._shared = _shared_memory(ranks, size)
        with _together(ranks):
            theirs = self._shared.get_buffer(self.other, (size,), torch.uint8)
            self._own = [_part(self._memory, begin, tensor) for begin, tensor in zip(begins, like, strict=True)]
            self._theirs = [_part(theirs, begin, tensor) for begin, tensor in zip(begins, like, strict=True)]
            self._adding = torch.cuda.Stream(ranks.device)
            self._shared.put_signal(self.other, FREE)

    def sum_async(self, number: int, tensor: torch.Tensor) -> torch.cuda.Event:
        """Begin to replace tensor ``number`` by its sum over both ranks, and return the event of its end.

        A step calls this in order, from 0.
        """
        current = torch.cuda.current_stream(self.ranks.device)
        if number == 0:
            self._shared.wait_signal(self.other, FREE)
        self._push(number, tensor)
        # Sent tensors are summed while later tensors are sent.
        self._adding.wait_stream(current)
        with torch.cuda.stream(self._adding):
            self._take(number, tensor)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived

    def sum_last(self, pair: torch.Tensor) -> None:
        """Replace two numbers, float64 ``(2,)``, by their sum over both ranks, after all other tensors are sent."""
        number = len(self._own) - 1
        self._push(number, pair)
        self._take(number, pair)

    def finish(self) -> None:
        """Signal that all buffers of a step were read; call it after waiting for all sums."""
        self._shared.put_signal(self.other, FREE)

    def _push(self, number: int, tensor: torch.Tensor) -> None:
        self._theirs[number].copy_(tensor)
        self._shared.put_signal(self.other, number + 1)

    def _take(self, number: int, tensor: torch.Tensor) -> None:
        self._shared.wait_signal(self.other, number + 1)
        tensor.add_(self._own[number])


def _part(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return memory[begin : begin + like.numel() * like.element_size()].view(like.dtype)


def _shared_memory(ranks: Ranks, size: int) -> tuple[torch.Tensor, Any]:
    """Return memory of this rank and the handle of both ranks' memory; both ranks create it together.

    Raises:
        PeerAccessError: it cannot be created on one of them.
    """
    # The module torch.distributed._symmetric_memory would import sympy, which takes seconds.
    from torch._C._distributed_c10d import _SymmetricMemory

    memory, handle = None, None
    with _together(ranks):
        memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, ranks.device)
    assert memory is not None
    assert dist.group.WORLD is not None
    with _together(ranks), _without_multicast():
        handle = _SymmetricMemory.rendezvous(memory, dist.group.WORLD.group_name)
    return memory, handle


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Make torch share memory without multicast, which some hosts lack."""
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before


@contextlib.contextmanager
def _together(ranks: Ranks) -> Iterator[None]:
    """Raise an error of one rank on both ranks, which enter this context together."""
    fault = ""
    try:
        yield
    except Exception as error:  # drivers and versions of torch fail in many ways
        text = str(error).strip()
        said = text.splitlines()[0] if text else ""
        fault = said if isinstance(error, PeerAccessError) else f"{type(error).__name__}: {said}"
    if any(row[0] for row in ranks.table([float(bool(fault))])):
        told = [f"rank {rank}: {text}" for rank, text in enumerate(ranks.gather(fault)) if text]
        raise PeerAccessError("; ".join(told))


def unfit(ranks: Ranks) -> str | None:
    """Return why these ranks cannot use peer memory; None if a trial is possible."""
    if ranks.device.type != "cuda":
        return f"peer memory joins CUDA devices, and this is a {ranks.device.type}"
    return None if ranks.world == 2 else f"peer memory joins two ranks, and there are {ranks.world}"


def peer_access_error(ranks: Ranks) -> str | None:
    """Return why the ranks' devices cannot write into each other's memory; None if a trial succeeded.

    All ranks call it together, and it returns None on all or on none.
    """
    reason = unfit(ranks)
    if reason is not None:
        return reason
    place: list[Any] = [socket.gethostname(), _boot(), str(torch.cuda.get_device_properties(ranks.device).uuid)]
    first, second = ranks.gather([*place, os.environ.get(SWITCH, "1")])
    if "0" in (first[-1], second[-1]):
        return f"{SWITCH} is 0"
    if first[:2] != second[:2]:
        return "the ranks are on different hosts"
    if first[2] == second[2]:
        return "both ranks have the same device"
    try:
        _try(ranks)
    except PeerAccessError as fault:
        return str(fault)
    return None


def _boot() -> str:
    """Return an identifier of the running system, which distinguishes hosts of one name; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _try(ranks: Ranks) -> None:
    """Write to the other rank, and check the values that it wrote, without waiting for missing signals."""
    numbers = torch.arange(TRIAL, dtype=torch.float32, device=ranks.device)
    room = PeerBuffer(ranks, [numbers])
    wanted = numbers * (1 + room.other)
    with _together(ranks):
        room._push(0, numbers * (1 + ranks.rank))
        torch.cuda.synchronize(ranks.device)
    with _together(ranks):
        pad = room._shared.get_signal_pad(ranks.rank, (4 * ranks.world,), torch.uint32).tolist()
        # One signal for the free buffer, one for the tensor.
        if not torch.equal(room._own[0], wanted) or sum(pad) != 2:
            raise PeerAccessError(f"values of the other rank did not arrive, its signals are {pad}")
    with _together(ranks):
        room._shared.wait_signal(room.other, FREE)
        room._shared.wait_signal(room.other, 1)
        total = numbers.clone()
        for _ in range(3):
            room.finish()
            handle = room.sum_async(0, total)
            handle.wait()
        torch.cuda.synchronize(ranks.device)
        if not torch.equal(total, numbers * 8):
            raise PeerAccessError("sums over both ranks are wrong")
