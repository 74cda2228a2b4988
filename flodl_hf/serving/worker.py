"""Worker process of one device: loads the models, reads requests from sockets and writes results.

One thread for each request reads, tokenizes, waits and decodes (`run_threads`). Batches contain rows
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
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from contextvars import copy_context
from functools import partial
from itertools import chain
from threading import Event, Lock, Thread
from typing import Any

import numpy as np

from flodl.errors import FlodlError
from flodl_hf.errors import TextTooLongError, TokenizerError
from flodl_hf.serving.adapter_models import MixedAdapters, mix_adapters, open_adapters
from flodl_hf.serving.batching import Batcher, TokenRate
from flodl_hf.serving.request import DeadlineError, GivenUpError, Timeline, Turns, WorkerRequest
from flodl_hf.serving.settings import freeze_gc
from flodl_hf.serving.tasks import TASKS, check_head, describe, measure_peak, warm_items
from flodl_hf.workers.messages import Stream, pack_message, receive_socket

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
# Requests of these tasks, of which each text has its own result, with at most this many characters are answered
# together, if they wait at the same time and have the same model, task, options, key and priority: the interpreter
# needs over a millisecond for a call, and little for each further text.
JOINED_TASKS = ("embed", "embed_sparse", "classify", "entities", "answer", "fill_mask")
JOINED_CHARACTERS, MAX_JOINED = 1024, 64
# Options come from clients, so they select one of this number of turns of a model, task, key and priority.
VARIANTS = 16
_KINDS = {
    DeadlineError: "deadline", GivenUpError: "given_up", TextTooLongError: "long", TokenizerError: "tokenizer",
    FlodlError: "refused",
}  # fmt: skip

_Received = tuple[Stream, dict[str, Any], WorkerRequest]
_Answer = tuple[dict[str, Any], list[np.ndarray]]


class Worker:
    """The models of one device.

    Args:
        settings: the result of `flodl_hf.serving.settings.Settings.for_worker`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from flodl.devices import find_device
        from flodl_hf.heads.auto import load

        self.device = find_device(settings["device"])
        self.precision: str | None = settings["precision"]
        self.cuda = self.device.type == "cuda"
        self.max_tokens = settings["max_batch_tokens"] or (CUDA_TOKENS if self.cuda else CPU_TOKENS)
        run: dict[str, Any] = {
            "precision": settings["precision"], "batch_invariant": settings["batch_invariant"], "progress": False,
            "window": WINDOW,
        }  # fmt: skip
        if self.cuda:
            run["token_budget"] = self.max_tokens
        sources = {model["name"]: model["source"] for model in settings["models"]}

        def opened(name: str, head: str, adapter: str | None = None) -> Any:
            options: Any = {"device": str(self.device), "local_files_only": settings["local_files_only"]}
            if adapter is not None:
                options["adapter"] = adapter
            return load(sources[name], head=head, **options).eval().runtime(**run)

        self.models = {model["name"]: opened(model["name"], model["head"]) for model in settings["models"]}
        self.bases: dict[str, str] = {}
        self.together: dict[str, tuple[MixedAdapters, int]] = {}
        if listed := settings.get("adapters"):
            adapted = open_adapters(listed, self.models, opened)
            self.bases = {one["name"]: one["base"] for one in listed}
            self.models |= adapted
            if settings["mix_adapters"]:
                self.together = mix_adapters(listed, adapted, opened)
        self.batcher = Batcher(self.device, self.max_tokens, links=settings["http_processes"])

    def warm(self) -> None:
        """Run each model, so that the first client does not wait for one-time initialization."""
        for name, model in self.models.items():
            check_head(name, model.head)
            if model.tokenizer is None:
                model._ready("serve")
            for count in (1, 8) if not self.cuda else (1, 1, 1, 8, 64, 64, 64):
                self._run_sample(name, count)

    def _run_sample(self, name: str, count: int) -> None:
        """Run a request with long and short texts, or with one text."""
        task, items = warm_items(self.models[name])
        sample = items[:1] if count == 1 else items * count
        self.answer({"model": name, "task": task, "items": sample, "options": {"windows": True}}, WorkerRequest())

    def describe(self, name: str) -> dict[str, Any]:
        """Return information about a model; for an adapter also its base and the adapters that share its batches."""
        found = describe(self.models[name])
        if name in self.bases:
            found["base"] = self.bases[name]
            found["together"] = list(self.together[name][0].names) if name in self.together else []
        return found

    def measure(self) -> dict[str, Any]:
        """Return the speed of the device with warm models, and whether it has room for another worker.

        ``peak``: operations per second in the dtype of the models' computation; ``rate``: tokens per second; ``room``:
        whether it is a GPU with memory for two more processes like this one.
        """
        import torch

        from flodl_hf.inference.options import dtype_of

        precision: Any = self.precision
        peak = measure_peak(self.device, dtype_of(precision) or next(iter(self.models.values())).dtype)
        room = False
        if self.cuda:
            # One-time initialization on a GPU takes seconds and must not be counted.
            self.batcher.pace = TokenRate()
            for _ in range(2):
                self._run_sample(next(iter(self.models)), 64)
            free, whole = torch.cuda.mem_get_info(self.device)
            mine = torch.cuda.memory_reserved(self.device) + CONTEXT
            room = free > 2 * mine and 4 * mine < whole
        return {"peak": peak, "rate": self.batcher.pace.now, "room": room}

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
        self._groups: dict[Any, list[_Received]] = {}  # requests that the next turn answers together
        # One group with the same options at a time: with more, each would be smaller.
        self._groups_turns: dict[Any, Turns] = {}
        self._lock = Lock()

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
                # Characters are counted, not tokens, so that requests with slow tokenization delay only each other.
                short = message["characters"] <= LONG_CHARACTERS
                request = self._requests[stream, message["id"]] = WorkerRequest(
                    message["key"], time.monotonic() + message["left_s"], message["priority"],
                    timeline=Timeline() if "traced" in message else None,
                    turns=self._turns if short else self._long_turns,
                )  # fmt: skip
                return stream, message, request
            if (gone := self._requests.get((stream, message["cancel"]))) is not None:
                gone.give_up()
        return None

    def _work(self, received: _Received, read_on: Callable[[], None]) -> None:
        _, message, request = received
        group, key = [received], None
        if len(self._requests) == 1 and message["characters"] <= SHORT_CHARACTERS:
            request.read_on = read_on
        else:
            key = _join_key(message)
            with self._lock:
                waiting = self._groups.get(key) if key is not None else None
                if waiting is not None and len(waiting) < MAX_JOINED:
                    waiting.append(received)
                    return  # the thread of the first request answers it, and this one reads on
                if key is not None:
                    self._groups[key] = group
            read_on()
        with nullcontext() if key is None else self._turns_of(key), request.turns:
            with self._lock:
                if self._groups.get(key) is group:
                    del self._groups[key]
            # Cancelled and late requests would end the others.
            live, late = list[_Received](), list[_Received]()
            for one in group:
                (late if one[2].over else live).append(one)
            group = live + late
            answers = [*self._answers(live), *(self._answer(*one[1:]) for one in late)]
        replies = defaultdict[Stream, list[bytes | memoryview]](list)
        for (stream, message, request), answer in zip(group, answers, strict=True):
            replies[stream] += self._packed_reply(stream, message["id"], request, *answer)
        for stream, parts in replies.items():
            with suppress(OSError):  # if the HTTP process has ended, there is no reader, and the connection ends soon
                stream.send(parts)

    def _turns_of(self, key: Any) -> Turns:
        """Return the turns of the groups of a key of `_join_key`."""
        return self._groups_turns.setdefault((*key[:5], hash(key[5]) % VARIANTS), Turns(1))

    def _answer(self, message: dict[str, Any], request: WorkerRequest) -> _Answer:
        """Return the result or the error of a request, and its arrays."""
        try:
            request.check()
            request.started = time.perf_counter()
            data, arrays = self._worker.answer(message, request)
            return {"data": data}, arrays
        except Exception as fault:
            found = _fault(fault)
            if found["kind"] == "internal":
                traceback.print_exc(file=sys.stderr)
            return {"fault": found}, []

    def _answers(self, group: list[_Received]) -> list[_Answer]:
        """Return the results of requests, which are divided until those of each part can be answered together."""
        if len(group) <= 1:
            return [self._answer(*one[1:]) for one in group]
        found, middle = self._answer_joined(group), len(group) // 2
        return found or [*self._answers(group[:middle]), *self._answers(group[middle:])]

    def _answer_joined(self, group: list[_Received]) -> list[_Answer] | None:
        """Return the results of requests from one call; None if a text is truncated or empty, or an error occurs."""
        requests, counts = [request for *_, request in group], [len(message["items"]) for _, message, _ in group]
        joined = WorkerRequest(requests[0].key, min(request.until for request in requests), requests[0].priority)
        joined.turns, joined.started = requests[0].turns, time.perf_counter()
        items = [item for _, message, _ in group for item in message["items"]]
        try:
            data, arrays = self._worker.answer({**group[0][1], "items": items}, joined)
        except Exception:
            return None
        table = joined.table
        if joined.truncated or table is None or len(table) != joined.rows:
            return None
        rows, tokens = np.bincount(table.owners), np.bincount(table.owners, weights=table.lengths)
        if len(rows) != len(items) or not rows.all():
            return None
        answers: list[_Answer] = []
        starts = np.cumsum([0, *counts[:-1]])
        sums = (np.add.reduceat(values.astype(np.int64), starts).tolist() for values in (tokens, rows))
        for request, start, count, *sizes in zip(requests, starts.tolist(), counts, *sums, strict=True):
            part = slice(start, start + count)
            request.tokens, request.rows = sizes
            request.waited_s, request.tokenized_s = joined.waited_s, joined.tokenized_s
            reply = {"data": data[part] if isinstance(data, list) else data}
            answers.append(self._answer({}, request) if request.gone else (reply, [one[part] for one in arrays]))
        return answers

    def _packed_reply(
        self, stream: Stream, number: int, request: WorkerRequest, reply: dict[str, Any], arrays: list[np.ndarray]
    ) -> list[bytes | memoryview]:
        """Return the parts of the message that ends a request."""
        batcher = self._worker.batcher
        self._requests.pop((stream, number), None)
        reply |= {
            "id": number, "tokens": request.tokens, "rows": request.rows, "dropped": request.dropped,
            "truncated": request.truncated, "waited_s": request.waited_s, "tokenized_s": request.tokenized_s,
            "took_s": time.perf_counter() - request.received, "queued": batcher.queued_tokens,
            "ran": batcher.drained(), "rate": batcher.pace.now,
        }  # fmt: skip
        if request.timeline is not None:
            reply["timeline"] = request.timeline.to_steps()
        try:
            return pack_message(reply, arrays)
        except (TypeError, ValueError) as fault:  # a result without a JSON form becomes an error
            traceback.print_exc(file=sys.stderr)
            return pack_message({**reply, "data": None, "fault": _fault(fault)})


def run_threads(read: Callable[[], Any], answer: Callable[[Any, Callable[[], None]], None], most: int) -> None:
    """Read and answer requests until the source ends; returns even if requests are still processed.

    Requests are not passed between threads before they are processed (leader and followers, Schmidt et al. 2000). An
    idle thread reads next, and a new one starts only if none is idle, so two suffice at low load. The answering thread
    decides when another one reads, because a woken thread competes for the interpreter, which a single request needs
    first.

    Args:
        read: returns the next request, or None at the end; called by one thread at a time.
        answer: called with each request and with a function that lets another thread read, to be called before slow
            work. If it is not called, the same thread reads again after the request.
        most: maximum number of threads.
    """
    turn, end, lock = Lock(), Event(), Lock()
    idle = threads = 0

    def next_reader() -> None:
        """Let an idle thread read, or a new one; at the maximum, the first thread that finishes."""
        nonlocal threads
        with lock:
            if idle or threads >= most:
                turn.release()
                return
            threads += 1
        Thread(target=work, name=f"flodl-hf-request-{threads}", daemon=True).start()

    def work() -> None:
        """Read and answer requests; the thread that reads has the turn."""
        nonlocal idle
        while not end.is_set():
            request, passed_on = None, False
            try:
                with suppress(OSError):
                    request = read()
            finally:
                if request is None:  # other sources have their own threads
                    end.set()
            if request is None:
                break

            def read_on() -> None:
                nonlocal passed_on
                if not passed_on:
                    passed_on = True
                    next_reader()

            try:
                answer(request, read_on)
            except BaseException:
                read_on()
                raise
            if passed_on:
                with lock:
                    idle += 1
                turn.acquire()
                with lock:
                    idle -= 1
        turn.release()  # the idle threads end one after another

    turn.acquire()
    next_reader()
    end.wait()


def _join_key(message: dict[str, Any]) -> Any:
    """Return a value that is equal for requests that may be answered together; None for others."""
    task, items = message["task"], message["items"]
    if task not in JOINED_TASKS or "traced" in message or not 0 < message["characters"] <= JOINED_CHARACTERS:
        return None
    kinds = set(map(type, items))
    if len(kinds) > 1 or (kinds == {list} and task not in ("answer", "classify")):
        return None
    # The group of a blank text, which has no rows, would be divided until the text is alone.
    if not all(text.strip() for text in (chain.from_iterable(items) if kinds == {list} else items)):
        return None
    return kinds.pop(), task, *map(message.get, ("model", "key", "priority")), repr(message.get("options"))


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
    worker = Worker(given)
    worker.warm()
    ready = {
        "ready": {name: worker.describe(name) for name in worker.models}, "device": str(worker.device),
        "max_batch_tokens": worker.max_tokens, "pid": os.getpid(), **worker.measure(),
    }  # fmt: skip
    worker.batcher.drained()
    # The thread that starts batches needs the interpreter often and briefly.
    sys.setswitchinterval(0.0005)
    freeze_gc()
    requests = _Requests(worker, given["max_concurrent"])
    if fd_channel is not None:
        way = socket.socket(fileno=fd_channel)
        Thread(target=requests.accept_links, args=(way,), name="flodl-hf-links", daemon=True).start()
    stream.write(ready)
    requests.answer_all(stream)
