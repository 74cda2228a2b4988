"""Worker process of one device: texts in, arrays of scores out.

Started by `flodl_hf.inference.workers`; ends when its connection is closed. Tokenization, computation and sending
overlap in three threads.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch

from flodl_hf.inference.decode.rows import TokenTable
from flodl_hf.inference.engine import Engine, current
from flodl_hf.inference.inputs import Encoded
from flodl_hf.inference.worker_messages import packed, receive, send, unpacked

__all__ = ["serve"]

# Windows that wait for the device in addition to the running one.
_AHEAD = 2
# Maximum number of concurrent calls, from several threads of the caller.
_CALLS = 64


def serve(descriptor: int) -> None:
    """Process requests until the connection is closed.

    Args:
        descriptor: file descriptor of the connection.
    """
    # Ctrl-C reaches the whole process group; the caller handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The caller may end while threads compute; their results are not needed.
    connection = Connection(descriptor)
    code = 0
    try:
        Worker(connection).run()
    except (EOFError, OSError):
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Worker:
    """The model of one process.

    Args:
        connection: connection to the caller.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
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
        while True:
            kind, *message = receive(self._connection)
            if kind == "model":
                self._model, self._device, threads = message
                torch.set_num_threads(threads)
                self._running.put((0, None))
            elif kind == "call":
                number, data = message
                while len(self._calls) >= _CALLS:
                    del self._calls[next(iter(self._calls))]
                self._calls[number] = unpacked(data, self._model)
            else:
                number, call, texts = message
                encode, work, options = self._calls[call]
                self._encoding.put((number, pool.submit(encode, texts), work, options))

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
                    found = (slim(encoded) if work.per_text else encoded, pending.arrays())
            except BaseException as fault:
                found = self._picklable(fault)
            try:
                send(self._connection, (number, found))
            except OSError:
                return  # the caller has ended, which the reader detects too
            except Exception as fault:
                # The error occurs before anything is written, so the connection is intact.
                send(self._connection, (number, RuntimeError(f"{type(fault).__name__}: {fault}")))

    def _picklable(self, fault: BaseException) -> BaseException:
        note = f"in the process for {self._device}:\n{''.join(traceback.format_tb(fault.__traceback__))}"
        try:
            # Not every exception can be unpickled.
            unpacked(packed(fault))
        except Exception:
            fault = RuntimeError(f"{type(fault).__name__}: {fault}")
        fault.add_note(note)
        return fault


def slim(encoded: Encoded) -> Encoded:
    """Return rows without tokens, for scores of whole texts."""
    table = encoded.table
    none = np.zeros(0, np.int32)
    bare = TokenTable(
        none, None, table.lengths, table.owners, table.counts, table.first_token, table.window, none, None, None,
        table.nulls,
    )  # fmt: skip
    return replace(encoded, table=bare)
