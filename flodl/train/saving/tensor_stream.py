"""Tensors of any device as the bytes of a safetensors file, in pieces.

A checkpoint is written while training continues, by a thread of the training process. Pieces are copied on a separate
stream into two pinned buffers, and copying, hashing and writing release the interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from flodl.checkpoint.safetensors_file import compose_head
from flodl.checkpoint.tensor_bytes import bytes_of

PIECE = 1 << 24
"""Bytes of a piece: large enough for the transfer rate, small enough to be hashed while in a cache."""


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors, on their device if they fit there, else in host memory.

    On CUDA a copy on the device takes about a thousandth of the time of a copy to the host.
    """
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    on_cuda = [tensor for tensor in found.values() if tensor.is_cuda]
    if on_cuda and not _fits(on_cuda):
        return {name: to_cpu(tensor) for name, tensor in found.items()}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def event_after(values: Iterable[object]) -> torch.cuda.Event | None:
    """Return an event after which the tensors among ``values`` are complete; None if none is on CUDA."""
    device = next((value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda), None)
    if device is None:
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event


def copies_on_host(tensors: Mapping[str, torch.Tensor], ready: torch.cuda.Event | None) -> dict[str, torch.Tensor]:
    """Return the tensors in host memory, copied on a separate stream once ``ready`` has passed."""
    if ready is None:
        return dict(tensors)
    with torch.cuda.device(next(tensor.device for tensor in tensors.values() if tensor.is_cuda)):
        stream = torch.cuda.Stream()
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            found = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        stream.synchronize()
    return found


def _fits(tensors: list[torch.Tensor]) -> bool:
    """Return whether copies leave the device at least as much free memory as they take."""
    device = tensors[0].device
    free, _ = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * sum(tensor.nbytes for tensor in tensors) <= free + spare


def safetensors_chunks(
    tensors: Mapping[str, torch.Tensor], ready: torch.cuda.Event | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of ``tensors``; each piece is valid until the next one.

    Args:
        tensors: tensors by name.
        ready: event after which the tensors are complete; None without CUDA tensors.
    """
    head, order = compose_head(tensors, {"format": "pt"})
    yield head
    with contextlib.ExitStack() as stack:
        pieces: _Pieces | None = None
        for name in order:
            tensor = tensors[name]
            if not tensor.is_cuda:
                yield bytes_of(tensor)
                continue
            if pieces is None or pieces.device != tensor.device:
                pieces = _Pieces(tensor.device, ready)
                stack.callback(pieces.stream.synchronize)
            yield from pieces.of(tensor)


class _Pieces:
    """Copies tensors of one CUDA device to the host; the next piece is copied while the caller uses this one."""

    def __init__(self, device: torch.device, ready: torch.cuda.Event | None) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)
            if ready is not None:
                self.stream.wait_event(ready)
            self._rooms = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def of(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        sent = [self._send(data, start, turn) for turn, start in enumerate(range(0, min(data.numel(), PIECE), PIECE))]
        for turn, start in enumerate(range(0, data.numel(), PIECE)):
            room, event = sent[turn]
            event.synchronize()
            if start + PIECE < data.numel():
                sent.append(self._send(data, start + PIECE, turn + 1))
            yield room.numpy().data

    def _send(self, data: torch.Tensor, start: int, turn: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        part = data[start : start + PIECE]
        room = self._rooms[turn % 2][: part.numel()]
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            room.copy_(part, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return room, event
