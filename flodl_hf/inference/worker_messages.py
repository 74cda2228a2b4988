"""Messages between a process and its workers: pickled objects with arrays and weights as separate bytes.

The model is replaced by a name. Only processes of one program exchange these messages; no file is read.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from struct import pack, unpack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["packed", "receive", "send", "unpacked"]


class _Writer(pickle.Pickler):
    """Pickler that writes tensors as separate bytes and objects known to both sides as names."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer] | None, known: dict[str, Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=None if buffers is None else buffers.append)
        self._known = {id(value): name for name, value in known.items() if value is not None}

    def persistent_id(self, obj: Any) -> str | None:
        return self._known.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            # Tensors are copied from their device; the worker has another one.
            held = obj.detach().cpu().contiguous()
            array: Any = held.reshape(-1).view(torch.uint8).numpy() if held.numel() else np.zeros(0, np.uint8)
            return _tensor, (pickle.PickleBuffer(array), held.dtype, tuple(held.shape), isinstance(obj, nn.Parameter))
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, buffers: list[Any], known: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._known = known

    def persistent_load(self, pid: str) -> Any:
        return self._known[pid]


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool) -> Tensor:
    found = torch.frombuffer(data, dtype=dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)
    return nn.Parameter(found, requires_grad=False) if parameter else found


def known_of(model: Any) -> dict[str, Any]:
    """Return the objects known to both sides, by name."""
    return {} if model is None else {"model": model, "tokenizer": model.tokenizer}


def packed(obj: Any, model: Any = None) -> bytes:
    """Return a pickled object; the model and its tokenizer are replaced by names.

    Raises:
        Exception: the object cannot be pickled.
    """
    file = io.BytesIO()
    _Writer(file, None, known_of(model)).dump(obj)
    return file.getvalue()


def unpacked(data: bytes, model: Any = None) -> Any:
    """Return the object of `packed`."""
    return _Reader(data, [], known_of(model)).load()


def send(connection: Connection, obj: Any, *, weights: bool = False) -> None:
    """Send an object without copying its arrays.

    Args:
        connection: the connection.
        obj: the object.
        weights: whether it contains tensors.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    if weights:
        _Writer(file, buffers, {}).dump(obj)
    else:
        pickle.Pickler(file, protocol=5, buffer_callback=buffers.append).dump(obj)
    parts = [part.raw() for part in buffers]
    connection.send_bytes(pack(f"<{len(parts)}Q", *(part.nbytes for part in parts)) or b"-")
    connection.send_bytes(file.getvalue())
    for part in parts:
        if part.nbytes:
            connection.send_bytes(part)


def receive(connection: Connection) -> Any:
    """Return the next object.

    Raises:
        EOFError: the connection is closed.
    """
    head = connection.recv_bytes()
    sizes = unpack(f"<{len(head) // 8}Q", head) if head != b"-" else ()
    data = connection.recv_bytes()
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        if len(buffer):
            connection.recv_bytes_into(buffer)
    return _Reader(data, buffers, {}).load()
