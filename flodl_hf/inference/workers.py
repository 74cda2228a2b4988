"""A process for each of several devices, for which one interpreter would be too slow.

Processes are started in the background while threads predict (`flodl_hf.inference.fleet`). They receive the model once,
and end with the program or with the model. `flodl_hf.inference.worker` is the code of a process.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count, islice
from multiprocessing.connection import Connection
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from flodl.errors import FlodlError
from flodl_hf.errors import PredictError
from flodl_hf.inference.options import RunOptions
from flodl_hf.inference.passes import Work
from flodl_hf.inference.prepared_graph import Stamp
from flodl_hf.inference.worker_messages import packed, receive, send
from flodl_hf.tokenization.threads import cores

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model.model import GraphModel

__all__ = ["Call", "Workers", "call_of"]

# A process needs seconds to import torch and create a context; a device needs longer for this number of texts.
MIN_TEXTS = 50_000
# Windows of a worker at a time: one is tokenized, one waits, one runs.
WINDOWS_AHEAD = 3
# Texts of a window: one or two batches, so that all devices finish at about the same time.
WINDOW_TEXTS = 2048

# The device's context is created while torch is imported.
_SERVE = """
import sys
sys.path[:] = {path!r}
from threading import Thread
from flodl_hf.checkpoints.system import make_cuda_context
if {place!r} is not None:
    Thread(target=make_cuda_context, args=({place!r},), daemon=True).start()
from flodl_hf.inference.worker import serve
serve({descriptor})
"""
_ALL: WeakSet[Workers] = WeakSet()
_OF: WeakKeyDictionary[GraphModel, Workers] = WeakKeyDictionary()
_TEXTS: WeakKeyDictionary[GraphModel, int] = WeakKeyDictionary()
_LOCK = Lock()


def worth_it(devices: Sequence[torch.device]) -> bool:
    """Return whether several distinct CUDA devices are given."""
    return len(set(devices)) == len(devices) > 1 and all(device.type == "cuda" for device in devices)


def _started(descriptor: int, cores: int, device: torch.device) -> subprocess.Popen[bytes]:
    # Each process tokenizes; with all cores in each they would compete.
    share = {"RAYON_NUM_THREADS": str(cores)} | os.environ
    # Not multiprocessing, which would run the caller's program again up to the start of processes.
    place = device.index or 0 if device.type == "cuda" else None
    code = _SERVE.format(path=sys.path, descriptor=descriptor, place=place)
    # A separate process group, which Ctrl-C does not reach during the imports.
    return subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[descriptor], stdin=subprocess.DEVNULL, process_group=0, env=share
    )


class _Process:
    """The process of one device.

    Args:
        device: the device.
        cores: number of cores for it.
    """

    def __init__(self, device: torch.device, cores: int) -> None:
        self.device = device
        self.asked: dict[int, Future[Any]] = {}
        self.waiting = 0
        self.sound = True
        self._lock = Lock()
        self._ended = False
        self._asking = Lock()
        self._closing = Lock()
        mine, its = socket.socketpair()
        with its:
            self.process = _started(its.fileno(), cores, device)
        self.connection = Connection(mine.detach())
        self._listener = Thread(target=self._listen, name=f"flodl-hf-{device}", daemon=True)
        self._listener.start()

    def send(self, *message: Any, weights: bool = False) -> None:
        with self._lock:
            send(self.connection, message, weights=weights)

    def ask(self, number: int, size: int, *message: Any, weights: bool = False) -> Future[Any]:
        """Send a message that has a result; return its future."""
        future: Future[Any] = Future()
        with self._asking:
            self.waiting += size
            # No result is received after the listener has ended.
            if self._ended:
                self.waiting -= size
                future.set_exception(self._fault())
                return future
            self.asked[number] = future
        future.add_done_callback(lambda _: self._less(size))
        try:
            self.send(*message, weights=weights)
        except OSError:
            self._gone()
        return future

    def _less(self, size: int) -> None:
        with self._asking:
            self.waiting -= size

    def _listen(self) -> None:
        while True:
            try:
                number, found = receive(self.connection)
            except (EOFError, OSError):
                self._gone()
                return
            except BaseException as fault:  # neither this message nor later ones can be read
                self._gone(fault)
                return
            with self._asking:
                future = self.asked.pop(number, None)
            if future is None:
                continue
            if isinstance(found, BaseException):
                # Other errors than those of texts may leave the device unusable.
                self.sound = self.sound and isinstance(found, FlodlError)
                future.set_exception(found)
            else:
                future.set_result(found)

    def _gone(self, cause: BaseException | None = None) -> None:
        """Fail all current and later requests of the process."""
        if cause is None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        with self._asking:
            self._ended, self.sound = True, False
            left, self.asked = self.asked, {}
        for future in left.values():
            if not future.done():
                future.set_exception(self._fault(cause))

    def _fault(self, cause: BaseException | None = None) -> PredictError:
        how = f"ended (exit code {self.process.returncode}); its stderr is above"
        if cause is not None:
            how = f"sent an invalid message ({type(cause).__name__}: {cause})"
        return PredictError(
            f"the worker process of {self.device} {how}; the next call starts a new one",
            device=str(self.device),
        )

    def close(self) -> None:
        """End the process."""
        # Once, also if garbage collection intervenes: the file descriptor of a closed connection is soon reused.
        if not self._closing.acquire(blocking=False):
            return
        # Closing does not wake the reading thread.
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # The file descriptor is reused by the next connection, which no thread may use by mistake.
        if self._listener is not current_thread():
            self._listener.join(30)
            if self._listener.is_alive():
                return
        with self._lock:
            self.connection.close()


class Workers:
    """The processes of one model; they are started in a thread.

    Args:
        model: the model.
        devices: device of each process.
        data: the call for which they are started, see `packed`.
        texts: sample of its texts, which is predicted to load kernels and record graphs before results are needed.

    Attributes:
        ready: whether they accept requests.
        failed: whether their start failed.
    """

    def __init__(
        self, model: GraphModel, devices: Sequence[torch.device], data: bytes = b"", texts: Sequence[Any] = ()
    ) -> None:
        self.devices = tuple(devices)
        self.ready = False
        self.closed = False
        self.failed = False
        self._owner = os.getpid()
        self._stamp = Stamp(model.graph)
        self._read = (model.tokenizer, model.sentence_recipe)
        self._processes: list[_Process] = []
        self._numbers = count(1)
        self._lock = Lock()
        self._starting = Thread(
            target=self._start, args=(model, data, list(texts)), name="flodl-hf-workers", daemon=True
        )
        _ALL.add(self)
        self._starting.start()

    def _start(self, model: GraphModel, data: bytes, texts: list[Any]) -> None:
        share = max(2, cores() // len(self.devices))
        threads = max(1, torch.get_num_threads() // len(self.devices))
        try:
            for device in self.devices:
                self._processes.append(_Process(device, share))
            answers = [one.ask(0, 0, "model", model, one.device, threads, weights=True) for one in self._processes]
            for future in answers:
                future.result()
            if texts:
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
        answers = []
        for one in [*self._processes, *self._processes]:
            number = next(self._numbers)
            answers.append(one.ask(number, 0, "texts", number, call, texts))
        for future in answers:
            # An error of the texts is reported by their own call.
            if (fault := future.exception()) is not None and not all(one.sound for one in self._processes):
                raise fault

    def wait(self) -> None:
        """Return when they were started, or their start failed."""
        self._starting.join()

    def fits(self, model: GraphModel, devices: Sequence[torch.device]) -> bool:
        """Return whether they have this model, unchanged, on these devices."""
        alive = not self.ready or all(one.sound and one.process.poll() is None for one in self._processes)
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
        for one in self._processes:
            one.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def call(self, data: bytes) -> int:
        """Announce a call and return its number."""
        number = next(self._numbers)
        for one in self._processes:
            # An ended process is reported by its next request.
            with suppress(OSError):
                one.send("call", number, data)
        return number

    def ask(self, call: int, texts: list[Any]) -> Future[Any]:
        """Send texts to the device with the least load."""
        # Load is measured in characters.
        plain = set(map(type, texts)) == {str}
        size = sum(map(len, texts)) if plain else sum(len(t) if isinstance(t, str) else sum(map(len, t)) for t in texts)
        number = next(self._numbers)
        with self._lock:
            one = min(self._processes, key=lambda one: one.waiting)
            return one.ask(number, size, "texts", number, call, texts)


class Call:
    """Windows of one call: sent to workers as soon as they are ready, run in this process until then.

    Args:
        workers: the processes.
        data: description of the call, see `packed`.
    """

    def __init__(self, workers: Workers, data: bytes) -> None:
        self._workers = workers
        self._data = data
        self._number: int | None = None
        self._lock = Lock()

    @property
    def ready(self) -> bool:
        """Whether windows are sent to workers."""
        return self._workers.ready

    @property
    def windows(self) -> tuple[int, int]:
        """Number of windows that are sent ahead, and their number of texts."""
        return WINDOWS_AHEAD * len(self._workers.devices), WINDOW_TEXTS

    def ask(self, texts: list[Any]) -> Future[Any]:
        """Send a window."""
        with self._lock:
            if self._number is None:
                self._number = self._workers.call(self._data)
        return self._workers.ask(self._number, texts)


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
            data = packed((encode, work, options), model)
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
