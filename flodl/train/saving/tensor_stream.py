"""Tensors of any device as the bytes of a safetensors file.

A checkpoint is written while training continues, by a thread of the training process. Tensors are copied to the host
one after the other on a separate stream, and copying, hashing and writing release the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from flodl.checkpoint.safetensors_file import compose_head
from flodl.checkpoint.tensor_bytes import bytes_of


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


def on_host(tensors: Mapping[str, torch.Tensor], ready: torch.cuda.Event | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in host memory; those of a device are copied on a separate stream once ``ready`` has passed."""
    stream = None
    for name, tensor in tensors.items():
        if not tensor.is_cuda:
            yield name, tensor
            continue
        if stream is None:
            stream = torch.cuda.Stream(tensor.device)
            if ready is not None:
                stream.wait_event(ready)
        with torch.cuda.stream(stream):
            found = tensor.to("cpu")  # waits for this stream only
        yield name, found


def _fits(tensors: list[torch.Tensor]) -> bool:
    """Return whether copies leave the device at least as much free memory as they take."""
    device = tensors[0].device
    free, _ = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * sum(tensor.nbytes for tensor in tensors) <= free + spare


def safetensors_chunks(
    tensors: Mapping[str, torch.Tensor], ready: torch.cuda.Event | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of ``tensors``, one tensor after the other.

    Args:
        tensors: contiguous tensors by name.
        ready: event after which the tensors are complete; None without CUDA tensors.
    """
    head, order = compose_head(tensors, {"format": "pt"})
    yield head
    for _, tensor in on_host({name: tensors[name] for name in order}, ready):
        yield bytes_of(tensor)
