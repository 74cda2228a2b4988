"""Worker process of one device: loads the models, reads requests from sockets and writes results.

One thread for each request reads, tokenizes, waits and decodes (`flodl_hf.serving.thread_pool`). Batches contain rows
of all requests (`flodl_hf.serving.batching`), also if they come from several HTTP processes, each with its own socket.
The process ends when its first socket is closed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import Any

import numpy as np

from flodl.errors import FlodlError
from flodl_hf.errors import TextTooLongError, TokenizerError
from flodl_hf.serving.adapter_models import MixedAdapters, mix_adapters, open_adapters
from flodl_hf.serving.admission import count_characters
from flodl_hf.serving.batching import Batcher
from flodl_hf.serving.request import DeadlineError, GivenUpError, Timeline, Turns, WorkerRequest
from flodl_hf.serving.settings import freeze_gc
from flodl_hf.serving.tasks import TASKS, check_head, describe, warm_items
from flodl_hf.serving.thread_pool import run_threads
from flodl_hf.serving.throughput import TokenRate, measure_peak
from flodl_hf.workers.ipc import receive_socket
from flodl_hf.workers.messages import Stream

# One window for all texts of a request: rows are sorted by the batcher, together with other requests.
WINDOW = 1 << 20
CPU_TOKENS = 4096
CUDA_TOKENS = 16_384
# Approximate GPU memory of a process before its models are loaded.
CONTEXT = 1 << 30
# Maximum number of requests that compute at a time in addition to the batches, and the same number of requests with
# more than LONG_CHARACTERS characters. The interpreter runs one thread at a time; with hundreds of runnable threads,
# those that feed the device would wait behind all others.
MAX_COMPUTING = 3
LONG_CHARACTERS = 65_536
# A single request with at most this many characters is tokenized and started on the device, in about a millisecond,
# before another thread reads the next request.
SHORT_CHARACTERS = 2048
# Options of warm-up requests: long texts are read in windows.
_WHOLE = {"windows": True}
_KINDS = {
    DeadlineError: "deadline",
    GivenUpError: "given_up",
    TextTooLongError: "long",
    TokenizerError: "tokenizer",
    FlodlError: "refused",
}


_Received = tuple[Stream, dict[str, Any], WorkerRequest]


class Worker:
    """The models of one device.

    Args:
        given: the result of `flodl_hf.serving.settings.Settings.for_worker`.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        from flodl.devices import find_device
        from flodl_hf.auto import load

        self.device = find_device(given["device"])
        self.precision: str | None = given["precision"]
        self.cuda = self.device.type == "cuda"
        self.max_tokens = given["max_batch_tokens"] or (CUDA_TOKENS if self.cuda else CPU_TOKENS)
        run: dict[str, Any] = {
            "precision": given["precision"], "batch_invariant": given["batch_invariant"], "progress": False,
            "window": WINDOW,
        }  # fmt: skip
        if self.cuda:
            run["token_budget"] = self.max_tokens
        sources = {model["name"]: model["source"] for model in given["models"]}

        def opened(name: str, head: str, adapter: str | None = None) -> Any:
            options: Any = {"device": str(self.device), "local_files_only": given["local_files_only"]}
            if adapter is not None:
                options["adapter"] = adapter
            return load(sources[name], head=head, **options).eval().runtime(**run)

        self.models: dict[str, Any] = {model["name"]: opened(model["name"], model["head"]) for model in given["models"]}
        self.bases: dict[str, str] = {}
        self.together: dict[str, tuple[MixedAdapters, int]] = {}
        if listed := given.get("adapters"):
            adapted = open_adapters(listed, self.models, opened)
            self.bases = {one["name"]: one["base"] for one in listed}
            self.models |= adapted
            if given["mix_adapters"]:
                self.together = mix_adapters(listed, adapted, opened)
        self.batcher = Batcher(self.device, self.max_tokens, links=given["http_processes"])

    def warm(self) -> None:
        """Run each model, so that the first client does not wait for one-time initialization."""
        for name, model in self.models.items():
            check_head(name, model.head)
            if model.tokenizer is None:
                model._ready("serve")
            task, items = warm_items(model)
            for count in (1, 8) if not self.cuda else (1, 1, 1, 8, 64, 64, 64):
                sample = items[:1] if count == 1 else items * count
                self.answer({"model": name, "task": task, "items": sample, "options": _WHOLE}, WorkerRequest())

    def describe(self, name: str) -> dict[str, Any]:
        """Return information about a model; for an adapter also its base and the adapters that share its batches."""
        found = describe(self.models[name])
        if name in self.bases:
            found["base"] = self.bases[name]
            found["together"] = list(self.together[name][0].names) if name in self.together else []
        return found

    def peak(self) -> float:
        """Return the peak operations per second of the device, in the dtype of the models' computation."""
        from flodl_hf.inference.options import dtype_of

        precision: Any = self.precision
        return measure_peak(self.device, dtype_of(precision) or next(iter(self.models.values())).dtype)

    def pace(self) -> float:
        """Return the tokens per second of the device, measured with a warm model."""
        if self.cuda:
            # One-time initialization on a GPU takes seconds and must not be counted.
            self.batcher.pace = TokenRate()
            name, model = next(iter(self.models.items()))
            task, items = warm_items(model)
            for _ in range(2):
                self.answer({"model": name, "task": task, "items": items * 64, "options": _WHOLE}, WorkerRequest())
        return self.batcher.pace.now

    def has_room(self) -> bool:
        """Return whether the device is a GPU with memory for two more processes like this one."""
        import torch

        if not self.cuda:
            return False
        free, whole = torch.cuda.mem_get_info(self.device)
        mine = torch.cuda.memory_reserved(self.device) + CONTEXT
        return free > 2 * mine and 4 * mine < whole

    def answer(self, message: dict[str, Any], request: WorkerRequest) -> tuple[Any, list[np.ndarray]]:
        """Return the result of a request."""
        from flodl_hf.inference.batch import TRUNCATED
        from flodl_hf.inference.inputs import TRUNCATION, Truncation
        from flodl_hf.inference.pipeline import SENDING

        mixed = self.together.get(message["model"])

        def send(model: Any, options: Any, table: Any, work: Any, places: Any) -> Any:
            if mixed is not None:
                model, places = mixed[0], [(mixed[1],)] * len(table)
            return self.batcher.send(request, model, options, table, work, places)

        model, options = self.models[message["model"]], message.get("options") or {}

        def run() -> tuple[Any, list[np.ndarray]]:
            SENDING.set(send)
            TRUNCATED.set(request.count_truncated)
            TRUNCATION.set(Truncation(options.get("max_tokens"), options.get("side")))
            return TASKS[message["task"]](model, message["items"], options, request)

        return copy_context().run(run)


def _fault(fault: BaseException) -> dict[str, str]:
    kind = next((word for known, word in _KINDS.items() if isinstance(fault, known)), "internal")
    return {"kind": kind, "message": str(fault) if kind != "internal" else f"{type(fault).__name__}: {fault}"}


class _Requests:
    """The requests of all connections.

    Args:
        worker: the models.
        most: maximum number of concurrent requests of a connection.
    """

    def __init__(self, worker: Worker, most: int) -> None:
        self._worker, self._most = worker, most
        self._requests: dict[tuple[Stream, int], WorkerRequest] = {}
        self._turns, self._long_turns = Turns(MAX_COMPUTING), Turns(MAX_COMPUTING)

    def answer_all(self, stream: Stream) -> None:
        """Answer the requests of a connection until it ends, and cancel those that remain."""
        # One thread more than requests, so that cancellations are always read.
        run_threads(partial(self._read, stream), self._work, self._most + 1)
        for (link, _), request in list(self._requests.items()):
            if link is stream:
                request.give_up()
        stream.close()

    def accept_links(self, way: socket.socket) -> None:
        """Answer the requests of each connection that is sent to this process, each with its own threads."""
        with suppress(OSError):
            while (found := receive_socket(way)) is not None:
                if found[1] is not None:
                    link = Stream(found[1])
                    Thread(target=self.answer_all, args=(link,), name="flodl-hf-link", daemon=True).start()

    def _read(self, stream: Stream) -> _Received | None:
        while (read := stream.read()) is not None:
            message = read[0]
            if "cancel" not in message:
                request = self._requests[stream, message["id"]] = WorkerRequest(
                    message["key"], time.monotonic() + message["left_s"], message["priority"]
                )
                # Characters are counted, not tokens, so that requests with slow tokenization delay only each other.
                short = count_characters(message["items"]) <= LONG_CHARACTERS
                request.turns = self._turns if short else self._long_turns
                if "traced" in message:
                    request.timeline = Timeline()
                return stream, message, request
            if (gone := self._requests.get((stream, message["cancel"]))) is not None:
                gone.give_up()
        return None

    def _work(self, received: _Received, read_on: Callable[[], None]) -> None:
        stream, message, request = received
        worker = self._worker
        started = time.perf_counter()
        if len(self._requests) == 1 and count_characters(message["items"]) <= SHORT_CHARACTERS:
            request.read_on = read_on
        else:
            read_on()
        number, reply, arrays = message["id"], {}, []
        with request.turns:
            try:
                request.check()
                request.started = time.perf_counter()
                reply["data"], arrays = worker.answer(message, request)
            except Exception as fault:
                reply["fault"] = _fault(fault)
                if reply["fault"]["kind"] == "internal":
                    traceback.print_exc(file=sys.stderr)
        self._requests.pop((stream, number), None)
        reply |= {
            "id": number, "tokens": request.tokens, "rows": request.rows, "dropped": request.dropped,
            "truncated": request.truncated,
            "waited_s": request.waited_s, "tokenized_s": request.tokenized_s, "took_s": time.perf_counter() - started,
            "queued": worker.batcher.queued_tokens, "ran": worker.batcher.drained(),
            "rate": worker.batcher.pace.now,
        }  # fmt: skip
        if request.timeline is not None:
            reply["timeline"] = request.timeline.to_steps()
        with suppress(OSError):
            # If the HTTP process has ended, there is no reader, and the connection ends soon.
            try:
                stream.write(reply, arrays)
            except (TypeError, ValueError) as fault:  # a result without a JSON form becomes an error
                traceback.print_exc(file=sys.stderr)
                stream.write({**reply, "data": None, "fault": _fault(fault)})


def serve(stream: Stream, fd_channel: int | None = None) -> None:
    """Answer the requests of a connection until it ends.

    Args:
        stream: the connection with the process that started this one, which sends the settings first.
        fd_channel: file descriptor of a socket that receives connections to further HTTP processes; they end with the
            first connection.
    """
    received = stream.read()
    if received is None:
        return
    given = received[0]
    # Warnings go to the log of the HTTP process, without a file name.
    warnings.showwarning = lambda message, *_, **__: stream.write({"warned": str(message)})
    started = time.perf_counter()
    worker = Worker(given)
    worker.warm()
    infos = {name: worker.describe(name) for name in worker.models}
    ready = {
        "ready": infos, "device": str(worker.device), "warm_s": time.perf_counter() - started,
        "max_batch_tokens": worker.max_tokens, "peak": worker.peak(), "rate": worker.pace(),
        "room": worker.has_room(), "pid": os.getpid(),
    }  # fmt: skip
    worker.batcher.drained()
    freeze_gc()
    requests = _Requests(worker, given["max_concurrent"])
    if fd_channel is not None:
        way = socket.socket(fileno=fd_channel)
        Thread(target=requests.accept_links, args=(way,), name="flodl-hf-links", daemon=True).start()
    stream.write(ready)
    requests.answer_all(stream)
