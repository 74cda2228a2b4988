"""A process for each of several devices, where one interpreter could not keep them all busy.

Decides when processes are worth their start, which device a window of texts goes to, and what happens when one ends or
the model changes. They start beside the work, which threads do until then (`flodl_hf.inference.fleet`), are sent the
model once, by its state, and end with the program or with the model. What they do is `flodl_hf.inference.worker`'s.
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

# A process imports torch and makes a context, which takes seconds; so many texts take a device longer than that.
LEAST = 50_000
# Windows that a worker has at a time: one that it tokenises, one that waits, one that runs.
DEEP = 3
# Texts of a window: a batch or two, so that no device has the last one for long by itself.
TEXTS = 2048

# The driver makes the device's context while torch is imported.
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
    """Return whether these devices wait for the interpreter: several that work by themselves, each named once."""
    return len(set(devices)) == len(devices) > 1 and all(device.type == "cuda" for device in devices)


def _started(descriptor: int, cores: int, device: torch.device) -> subprocess.Popen[bytes]:
    # Each tokenises what it answers; all cores for each would have them wait for each other.
    share = {"RAYON_NUM_THREADS": str(cores)} | os.environ
    # Not by multiprocessing, which would run the caller's program again up to where it starts processes.
    place = device.index or 0 if device.type == "cuda" else None
    code = _SERVE.format(path=sys.path, descriptor=descriptor, place=place)
    # In a group of its own, which Ctrl-C does not reach while it still imports.
    return subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[descriptor], stdin=subprocess.DEVNULL, process_group=0, env=share
    )


class _One:
    """The process of one device.

    Args:
        device: the device.
        cores: how many cores are its share.
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

    def tell(self, *message: Any, weights: bool = False) -> None:
        with self._lock:
            send(self.connection, message, weights=weights)

    def ask(self, number: int, size: int, *message: Any, weights: bool = False) -> Future[Any]:
        """Send what has an answer; the future gives it or raises."""
        future: Future[Any] = Future()
        with self._asking:
            self.waiting += size
            # Nobody would hear an answer once the listener has ended.
            if self._ended:
                self.waiting -= size
                future.set_exception(self._fault())
                return future
            self.asked[number] = future
        future.add_done_callback(lambda _: self._less(size))
        try:
            self.tell(*message, weights=weights)
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
            except BaseException as fault:  # what came cannot be read, and what comes behind it may not be either
                self._gone(fault)
                return
            with self._asking:
                future = self.asked.pop(number, None)
            if future is None:
                continue
            if isinstance(found, BaseException):
                # What is not the texts' fault may have left the device in a state that nothing runs in.
                self.sound = self.sound and isinstance(found, FlodlError)
                future.set_exception(found)
            else:
                future.set_result(found)

    def _gone(self, cause: BaseException | None = None) -> None:
        """Give up the process: who waits for an answer, and who asks from now on, is told so."""
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
        how = f"ended (exit code {self.process.returncode}); its messages are above"
        if cause is not None:
            how = f"sent what cannot be read ({type(cause).__name__}: {cause})"
        return PredictError(
            f"the process that answered for {self.device} {how}; the next call starts without it",
            device=str(self.device),
        )

    def close(self) -> None:
        """End the process, whatever it does."""
        # Once, also where garbage collection comes in between; the number of a closed line is soon another's.
        if not self._closing.acquire(blocking=False):
            return
        # Closing alone would leave the thread that reads.
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Its number goes to the next line that is opened, which nobody may read or write by mistake.
        if self._listener is not current_thread():
            self._listener.join(30)
            if self._listener.is_alive():
                return
        with self._lock:
            self.connection.close()


class Workers:
    """The processes of one model; starting them takes place in a thread.

    Args:
        model: what they run.
        devices: one for each.
        data: of the call that they are started for, see `packed`.
        texts: some of its texts, which are answered for nothing, so that kernels are loaded and passes recorded when
            answers are waited for.

    Attributes:
        ready: whether they can be asked.
        failed: whether they could not be started.
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
        self._ones: list[_One] = []
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
                self._ones.append(_One(device, share))
            told = [one.ask(0, 0, "model", model, one.device, threads, weights=True) for one in self._ones]
            for future in told:
                future.result()
            if texts:
                self._rehearse(self.call(data), texts)
            self.ready = not self.closed
        except BaseException as fault:
            closed, self.failed = self.closed, not self.closed
            self.close()
            if not closed:
                warnings.warn(
                    f"prediction on {len(self.devices)} devices continues in one process, which uses them less fully: "
                    f"{type(fault).__name__}: {fault}",
                    stacklevel=2,
                )

    def _rehearse(self, call: int, texts: list[Any]) -> None:
        # Twice: shapes that came once are recorded.
        told = []
        for one in [*self._ones, *self._ones]:
            number = next(self._numbers)
            told.append(one.ask(number, 0, "texts", number, call, texts))
        for future in told:
            # A fault of the texts is told by the call that they are of.
            if (fault := future.exception()) is not None and not all(one.sound for one in self._ones):
                raise fault

    def wait(self) -> None:
        """Return when they have started, or failed to."""
        self._starting.join()

    def fits(self, model: GraphModel, devices: Sequence[torch.device]) -> bool:
        """Return whether they run this model, as it is now, on these devices."""
        alive = not self.ready or all(one.sound and one.process.poll() is None for one in self._ones)
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
        """End all of them."""
        self.closed, self.ready = True, False
        if self._owner != os.getpid():
            return  # a fork has the same lines to them, but they are not its own
        for one in self._ones:
            one.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def call(self, data: bytes) -> int:
        """Announce a call, and return its number."""
        number = next(self._numbers)
        for one in self._ones:
            # One that is gone says so when it is asked.
            with suppress(OSError):
                one.tell("call", number, data)
        return number

    def ask(self, call: int, texts: list[Any]) -> Future[Any]:
        """Have texts answered by the device with the least to do."""
        # Length in characters, which is what a device takes its time by.
        plain = set(map(type, texts)) == {str}
        size = sum(map(len, texts)) if plain else sum(len(t) if isinstance(t, str) else sum(map(len, t)) for t in texts)
        number = next(self._numbers)
        with self._lock:
            one = min(self._ones, key=lambda one: one.waiting)
            return one.ask(number, size, "texts", number, call, texts)


class Call:
    """One call's windows, each sent to a worker once there are some, and run here until then.

    Args:
        workers: the processes.
        data: what a worker has to know of the call, see `packed`.
    """

    def __init__(self, workers: Workers, data: bytes) -> None:
        self._workers = workers
        self._data = data
        self._number: int | None = None
        self._lock = Lock()

    @property
    def ready(self) -> bool:
        """Whether windows are sent."""
        return self._workers.ready

    @property
    def windows(self) -> tuple[int, int]:
        """How many windows are sent before one has to be back, and of how many texts they are."""
        return DEEP * len(self._workers.devices), TEXTS

    def ask(self, texts: list[Any]) -> Future[Any]:
        """Send a window."""
        with self._lock:
            if self._number is None:
                self._number = self._workers.call(self._data)
        return self._workers.ask(self._number, texts)


def call_of(
    model: GraphModel, options: RunOptions, items: Any, encode: Callable[[list[Any]], Any], work: Work
) -> Call | None:
    """Return what sends a call's windows to workers; None where there is one interpreter for all devices.

    Args:
        model: what runs.
        options: how; with several devices.
        items: the texts; of an iterator nobody knows how many there are.
        encode: the call's, which a worker does too.
        work: likewise.
    """
    devices = options.devices
    if devices is None or os.name != "posix" or not worth_it(devices):
        return None
    known = isinstance(items, Sequence)
    with _LOCK:
        _TEXTS[model] = _TEXTS.get(model, 0) + (len(items) if known else LEAST)
        workers = _OF.get(model)
        if workers is not None and workers.failed:
            return None
        if workers is not None and not workers.fits(model, devices):
            del _OF[model]
            workers.close()
            workers = None
        if workers is None and _TEXTS[model] < LEAST:
            return None
        try:
            data = packed((encode, work, options), model)
        except Exception:
            # Made of functions that no other process has.
            return None
        if workers is None:
            sample = list(islice(items, TEXTS)) if known else []
            workers = _OF[model] = Workers(model, devices, data, sample)
    return Call(workers, data)


@atexit.register
def _close_all() -> None:
    for workers in list(_ALL):
        workers.close()
