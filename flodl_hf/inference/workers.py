"""A process for each of several devices, for which one interpreter would be too slow.

Processes are started in the background while threads predict (`flodl_hf.inference.engine.Fleet`). They receive the
model once, and end with the program or with the model. `flodl_hf.inference.worker` is the code of a process.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch

from flodl_hf.inference.batch import Work
from flodl_hf.inference.options import RunOptions
from flodl_hf.inference.prepared_graph import Stamp
from flodl_hf.inference.worker import known_of
from flodl_hf.tokenization.backend import cores
from flodl_hf.workers.pool import Worker, pack_object, unpack_object
from flodl_hf.workers.process import Process

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model import GraphModel

# A process needs seconds to import torch and create a context; a device needs longer for this number of texts.
MIN_TEXTS = 50_000
# Windows of a worker at a time: one runs, others are tokenized, wait, or are sent.
WINDOWS_AHEAD = 5
# Maximum number of texts of a window.
WINDOW_TEXTS = 4096

_ALL: WeakSet[Workers] = WeakSet()
_OF: WeakKeyDictionary[GraphModel, Workers] = WeakKeyDictionary()
_TEXTS: WeakKeyDictionary[GraphModel, int] = WeakKeyDictionary()
_LOCK = Lock()


def worth_it(devices: Sequence[torch.device]) -> bool:
    """Return whether several distinct CUDA devices are given."""
    return len(set(devices)) == len(devices) > 1 and all(device.type == "cuda" for device in devices)


def _started(device: torch.device, cores: int) -> Process:
    # Each process tokenizes; with all cores in each they would compete.
    share = {"RAYON_NUM_THREADS": os.environ.get("RAYON_NUM_THREADS", str(cores))}
    cuda = device.index or 0 if device.type == "cuda" else None
    return Process("flodl_hf.inference.worker:serve", str(device), env=share, cuda=cuda)


class Workers:
    """The processes of one model; they are started in a thread.

    Args:
        model: the model.
        devices: device of each process.
        data: the call for which they are started: `pack_object` of (encode, work, options).
        texts: sample of its texts, which is predicted to load kernels and record graphs before results are needed.

    Attributes:
        ready: whether they accept requests.
        failed: whether their start failed.
    """

    def __init__(
        self,
        model: GraphModel,
        devices: Sequence[torch.device],
        data: list[np.ndarray] | None = None,
        texts: Sequence[Any] = (),
    ) -> None:
        self.devices = tuple(devices)
        self.ready = False
        self.closed = False
        self.failed = False
        self._owner = os.getpid()
        self._stamp = Stamp(model.graph)
        self._read = (model.tokenizer, model.sentence_recipe)
        self._workers: list[Worker] = []
        self._calls = count(1)
        self._lock = Lock()
        self._starting = Thread(
            target=self._start, args=(model, data, list(texts)), name="flodl-hf-workers", daemon=True
        )
        _ALL.add(self)
        self._starting.start()

    def _start(self, model: GraphModel, data: list[np.ndarray] | None, texts: list[Any]) -> None:
        share = max(2, cores() // len(self.devices))
        threads = max(1, torch.get_num_threads() // len(self.devices))
        try:
            for device in self.devices:
                self._workers.append(Worker(_started(device, share), lambda message, arrays: unpack_object(arrays)))
            answers = []
            for worker, device in zip(self._workers, self.devices, strict=True):
                answers.append(worker.ask({"kind": "model"}, pack_object((model, device, threads))))
            for future in answers:
                future.result()
            if texts and data is not None:
                self._rehearse(self.call(data), texts)
            self.ready = not self.closed
        except BaseException as fault:
            closed, self.failed = self.closed, not self.closed
            self.close()
            if not closed:
                warnings.warn(
                    f"prediction on {len(self.devices)} devices continues in one process, at a lower speed: "
                    f"{type(fault).__name__}: {fault}",
                    stacklevel=2,
                )

    def _rehearse(self, call: int, texts: list[Any]) -> None:
        # Twice, because shapes are recorded at their second occurrence.
        answers = [self._send(worker, call, texts, 0) for worker in [*self._workers, *self._workers]]
        for future in answers:
            # An error of the texts is reported by their own call.
            if (fault := future.exception()) is not None and not all(worker.sound for worker in self._workers):
                raise fault

    def wait(self) -> None:
        """Return when they were started, or their start failed."""
        self._starting.join()

    def fits(self, model: GraphModel, devices: Sequence[torch.device]) -> bool:
        """Return whether they have this model, unchanged, on these devices."""
        alive = not self.ready or all(worker.sound for worker in self._workers)
        same = all(a is b for a, b in zip(self._read, (model.tokenizer, model.sentence_recipe), strict=True))
        return (
            self._owner == os.getpid()
            and not self.closed
            and alive
            and same
            and self.devices == tuple(devices)
            and self._stamp.holds()
        )

    def close(self) -> None:
        """End all processes."""
        self.closed, self.ready = True, False
        if self._owner != os.getpid():
            return  # a fork shares the connections but does not own the processes
        for worker in self._workers:
            worker.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def call(self, data: list[np.ndarray]) -> int:
        """Announce a call and return its number."""
        number = next(self._calls)
        for worker in self._workers:
            worker.send({"kind": "call", "call": number}, data)
        return number

    def ask(self, call: int, texts: list[Any]) -> Future[Any]:
        """Send texts to the device with the least load."""
        # Load is measured in characters.
        plain = set(map(type, texts)) == {str}
        size = sum(map(len, texts)) if plain else sum(len(t) if isinstance(t, str) else sum(map(len, t)) for t in texts)
        with self._lock:
            return self._send(min(self._workers, key=lambda worker: worker.load), call, texts, size)

    def _send(self, worker: Worker, call: int, texts: list[Any], size: int) -> Future[Any]:
        return worker.ask({"kind": "texts", "call": call}, pack_object(texts, plain=True), size=size)


@dataclass
class Call:
    """Windows of one call: sent to workers as soon as they are ready, run in this process until then.

    Args:
        workers: the processes.
        data: description of the call, see `Workers`.
    """

    workers: Workers
    data: list[np.ndarray]
    number: int | None = None
    lock: Lock = field(default_factory=Lock)

    def ask(self, texts: list[Any]) -> Future[Any]:
        """Send a window."""
        with self.lock:
            if self.number is None:
                self.number = self.workers.call(self.data)
        return self.workers.ask(self.number, texts)


def call_of(
    model: GraphModel, options: RunOptions, items: Any, encode: Callable[[list[Any]], Any], work: Work
) -> Call | None:
    """Return the connection of a call to workers; None if one process serves all devices.

    Args:
        model: the model.
        options: options of the run, with several devices.
        items: the texts; an iterator has an unknown number of them.
        encode: encoding function of the call, also used by workers.
        work: the computation.
    """
    devices = options.devices
    if devices is None or os.name != "posix" or not worth_it(devices):
        return None
    known = isinstance(items, Sequence)
    with _LOCK:
        _TEXTS[model] = _TEXTS.get(model, 0) + (len(items) if known else MIN_TEXTS)
        workers = _OF.get(model)
        if workers is not None and workers.failed:
            return None
        if workers is not None and not workers.fits(model, devices):
            del _OF[model]
            workers.close()
            workers = None
        if workers is None and _TEXTS[model] < MIN_TEXTS:
            return None
        try:
            data = pack_object((encode, work, options), known_of(model))
        except Exception:
            # Contains functions that cannot be pickled.
            return None
        if workers is None:
            sample = list(islice(items, WINDOW_TEXTS)) if known else []
            workers = _OF[model] = Workers(model, devices, data, sample)
    return Call(workers, data)


@atexit.register
def _close_all() -> None:
    for workers in list(_ALL):
        workers.close()
