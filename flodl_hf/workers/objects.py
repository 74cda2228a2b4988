"""Python objects in messages: a pickle, with arrays and tensors as separate bytes.

Only processes of one program exchange such objects; no file is read. Objects that both sides have, such as the model,
are replaced by names.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], known: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
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
    def __init__(self, data: np.ndarray, buffers: Sequence[np.ndarray], known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data.data), buffers=buffers)
        self._known = known

    def persistent_load(self, pid: str) -> Any:
        return self._known[pid]


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool) -> Tensor:
    found = torch.frombuffer(data, dtype=dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)
    return nn.Parameter(found, requires_grad=False) if parameter else found


def _bytes(data: Any) -> np.ndarray:
    return np.frombuffer(data, np.uint8) if len(data) else np.zeros(0, np.uint8)


def pack_object(obj: Any, known: Mapping[str, Any] | None = None, *, plain: bool = False) -> list[np.ndarray]:
    """Return an object as the arrays of a message.

    Args:
        obj: the object.
        known: name and object of what both sides have.
        plain: whether the object contains neither tensors nor known objects, which is faster.

    Raises:
        Exception: the object cannot be pickled.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    if plain:
        pickle.Pickler(file, protocol=5, buffer_callback=buffers.append).dump(obj)
    else:
        _Writer(file, buffers, known or {}).dump(obj)
    return [_bytes(file.getbuffer()), *(_bytes(part.raw()) for part in buffers)]


def unpack_object(arrays: Sequence[np.ndarray], known: Mapping[str, Any] | None = None) -> Any:
    """Return the object of `pack_object`."""
    return _Reader(arrays[0], arrays[1:], known or {}).load()
