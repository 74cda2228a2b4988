"""Worker process of one device: texts in, arrays of scores out.

Started by `flodl_hf.inference.workers`. Tokenization, computation and sending
overlap in three threads.
"""

from __future__ import annotations

import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch

from flodl_hf.inference.engine import Engine, current
from flodl_hf.inference.inputs import Encoded
from flodl_hf.workers.messages import Stream
from flodl_hf.workers.pool import pack_object, unpack_object

# Windows that wait for the device in addition to the running one.
_AHEAD = 2
# Maximum number of concurrent calls, from several threads of the caller.
_CALLS = 64


def known_of(model: Any) -> dict[str, Any]:
    """Return name and object of everything that the caller and its workers have."""
    return {"model": model, "tokenizer": model.tokenizer}


def serve(stream: Stream) -> None:
    """Process requests until the connection is closed.

    Args:
        stream: the connection with the caller.
    """
    Worker(stream).run()


class Worker:
    """The model of one process.

    Args:
        stream: connection to the caller.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._model: Any = None
        self._device = torch.device("cpu")
        self._calls: dict[int, tuple[Any, Any, Any]] = {}
        self._encoding: Queue[tuple[int, Future[Encoded], Any, Any]] = Queue()
        self._running: Queue[tuple[int, Any]] = Queue(_AHEAD)

    def run(self) -> None:
        """Read messages until the connection is closed."""
        for work in (self._start_all, self._send_all):
            Thread(target=work, daemon=True).start()
        # Two threads, so that one window is tokenized while another is decoded.
        pool = ThreadPoolExecutor(2)
        while (received := self._stream.read()) is not None:
            message, arrays = received
            if message["kind"] == "model":
                self._model, self._device, threads = unpack_object(arrays)
                torch.set_num_threads(threads)
                self._running.put((message["id"], None))
            elif message["kind"] == "call":
                while len(self._calls) >= _CALLS:
                    del self._calls[next(iter(self._calls))]
                self._calls[message["call"]] = unpack_object(arrays, known_of(self._model))
            else:
                encode, work, options = self._calls[message["call"]]
                self._encoding.put((message["id"], pool.submit(encode, unpack_object(arrays)), work, options))

    def _start_all(self) -> None:
        while True:
            number, future, work, options = self._encoding.get()
            try:
                encoded = future.result()
                # The current device is a property of each thread; device 0 would get an additional context.
                with current(self._device):
                    pending = Engine.of(self._model, options, self._device).start(encoded.table, work)
                self._running.put((number, (encoded, work, pending)))
            except BaseException as fault:
                self._running.put((number, self._picklable(fault)))

    def _send_all(self) -> None:
        while True:
            number, found = self._running.get()
            try:
                if isinstance(found, tuple):
                    encoded, work, pending = found
                    found = (slim(encoded) if work.per_text else encoded, list(pending.parts()))
                arrays = pack_object(found, plain=True)
            except BaseException as fault:
                arrays = pack_object(self._picklable(fault), plain=True)
            with suppress(OSError):  # the caller has ended, which the reader detects too
                self._stream.write({"id": number}, arrays)

    def _picklable(self, fault: BaseException) -> BaseException:
        note = f"in the process for {self._device}:\n{''.join(traceback.format_tb(fault.__traceback__))}"
        try:
            # Not every exception can be unpickled.
            unpack_object(pack_object(fault))
        except Exception:
            fault = RuntimeError(f"{type(fault).__name__}: {fault}")
        fault.add_note(note)
        return fault


def slim(encoded: Encoded) -> Encoded:
    """Return rows without tokens, for scores of whole texts."""
    none = np.zeros(0, np.int32)
    table = replace(encoded.table, ids=none, types=None, sequence=none, offsets=None, word_ids=None)
    return replace(encoded, table=table)
