"""Worker processes of a program with threads: requests with futures, and the report of a worker's end."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from threading import Lock, Thread, current_thread
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flodl.errors import FlodlError
from flodl_hf.errors import PredictError
from flodl_hf.workers.messages import Stream
from flodl_hf.workers.process import Process


class Worker:
    """A worker process. A thread reads its messages.

    Args:
        process: the process.
        result: function from a message and its arrays to the result of a request; an exception is raised by the future.

    Attributes:
        load: sum of the sizes of its current requests.
        sound: whether it accepts requests.
        end: how it ended; "" while it runs.
    """

    def __init__(
        self, process: Process, result: Callable[[dict[str, Any], list[np.ndarray]], Any] = lambda *_: None
    ) -> None:
        self.process = process
        self.load = 0
        self.sound, self.end = True, ""
        self._result = result
        self._stream = Stream(process.socket)
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = count(1)
        self._lock, self._closing = Lock(), Lock()
        self._listener = Thread(target=self._listen, name=f"flodl-hf-{process.name}", daemon=True)
        self._listener.start()

    def send(self, message: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Send a message without a result; does nothing if the process has ended."""
        with suppress(OSError):
            self._stream.write(message, arrays)

    def ask(self, message: dict[str, Any], arrays: Sequence[np.ndarray] = (), *, size: int = 0) -> Future[Any]:
        """Send a request and return its future.

        Args:
            message: the request.
            arrays: its arrays.
            size: its size, for ``load``.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self.end:
                future.set_exception(self.fault())
                return future
            number = next(self._numbers)
            self._futures[number] = future
            self.load += size

        def done(_: Any) -> None:
            with self._lock:
                self.load -= size

        future.add_done_callback(done)
        # The listener reports a process that has ended.
        self.send({**message, "id": number}, arrays)
        return future

    def _listen(self) -> None:
        end = ""
        try:
            while (message := self._stream.read()) is not None:
                if "end" in message[0]:
                    self.process.reason = message[0]["end"]
                    continue
                result = self._result(*message)
                with self._lock:
                    future = self._futures.pop(message[0]["id"])
                if isinstance(result, BaseException):
                    # Errors that the input did not cause may leave the device unusable.
                    self.sound = self.sound and isinstance(result, FlodlError)
                    future.set_exception(result)
                else:
                    future.set_result(result)
        except BaseException as fault:  # later messages cannot be read either
            end = f"sent an invalid message ({type(fault).__name__}: {fault})"
            self.process.kill()
        end = end or self.process.end()
        with self._lock:
            self.end, self.sound = end, False
            left, self._futures = self._futures, {}
        for future in left.values():
            future.set_exception(self.fault())

    def fault(self) -> PredictError:
        """Return the error that reports the end of the process."""
        name = self.process.name
        return PredictError(f"the worker process of {name} {self.end}; the next call starts a new one", device=name)

    def join(self) -> None:
        """Wait for the end of the process."""
        self._listener.join()

    def close(self) -> None:
        """End the process, once also if garbage collection intervenes."""
        if self._closing.acquire(blocking=False):
            self._stream.shut()
            if self._listener is not current_thread():
                self._listener.join()
                self._stream.close()


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
