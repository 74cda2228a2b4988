"""The process of one device: it holds the models, takes requests from a socket and writes answers to it.

A thread a request reads, tokenises, waits and decodes (`flodl_hf.serving.turns`); batches of all of them run together
(`flodl_hf.serving.batching`), whoever they come from: several processes of doors have a socket each.
It ends when the first socket does, so it never outlives who started it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Lock, Semaphore, Thread
from typing import Any

import numpy as np

from flodl.errors import FlodlError
from flodl_hf.errors import TextTooLongError, TokenizerError
from flodl_hf.serving.adapted import Together, open_adapters, put_together
from flodl_hf.serving.admission import weigh
from flodl_hf.serving.batching import Batcher
from flodl_hf.serving.frames import HEAD, as_json, packed, unpacked
from flodl_hf.serving.handing import handed
from flodl_hf.serving.packing import as_msgpack
from flodl_hf.serving.peak import Pace, peak_of
from flodl_hf.serving.tasks import TASKS, check_head, describe, warm_items
from flodl_hf.serving.ticket import DeadlineError, GivenUpError, Ticket
from flodl_hf.serving.timeline import Timeline
from flodl_hf.serving.turns import take_turns

__all__ = ["serve"]

# One window for a whole request: it is sorted with others, not by itself.
WINDOW = 1 << 20
CPU_TOKENS = 4096
CUDA_TOKENS = 16_384
# About what a process takes of a GPU before its models.
CONTEXT = 1 << 30
# So many requests compute at a time in this process beside the batches, and as many of those with more characters than
# that. The interpreter runs one thread at a time: with hundreds that want it, those that feed the device would wait
# behind all of them whenever they let go of it.
TURNS = 3
LONG = 65_536
# A request alone with at most so many characters is tokenised and on the device before another thread reads on, in a
# millisecond.
SHORT = 2048
# Of requests that warm the models: long texts are read in windows.
_WHOLE = {"windows": True}
_KINDS = {
    DeadlineError: "deadline",
    GivenUpError: "given_up",
    TextTooLongError: "long",
    TokenizerError: "tokenizer",
    FlodlError: "refused",
}


class _Stream:
    """Both directions of the socket; any thread may write."""

    def __init__(self, held: socket.socket) -> None:
        self._held = held
        self._file = held.makefile("rb")
        self._lock = Lock()

    def write(self, message: dict[str, Any], arrays: list[np.ndarray] | None = None) -> None:
        parts = packed(message, arrays or [])
        with self._lock:
            self._held.sendall(b"".join(parts))

    def read(self) -> dict[str, Any] | None:
        head = self._file.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        size, text = HEAD.unpack(head)
        body = self._file.read(size)
        return unpacked(text, body)[0] if len(body) == size else None

    def close(self) -> None:
        self._file.close()
        self._held.close()


_Request = tuple[_Stream, dict[str, Any], Ticket]


class Worker:
    """The models of one device.

    Args:
        given: what `flodl_hf.serving.settings.Settings.of_worker` says.
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
        self.together: dict[str, tuple[Together, int]] = {}
        if listed := given.get("adapters"):
            adapted = open_adapters(listed, self.models, opened)
            self.bases = {one["name"]: one["base"] for one in listed}
            self.models |= adapted
            if given["mix_adapters"]:
                self.together = put_together(listed, adapted, opened)
        self.batcher = Batcher(self.device, self.max_tokens, links=given["links"])

    def warm(self) -> None:
        """Ask every model something, so that the first client does not wait for what is made once."""
        for name, model in self.models.items():
            check_head(name, model.head)
            if model.tokenizer is None:
                model.ready("serve")
            task, items = warm_items(model)
            for count in (1, 8) if not self.cuda else (1, 1, 1, 8, 64, 64, 64):
                asked = items[:1] if count == 1 else items * count
                self.answer({"model": name, "task": task, "items": asked, "options": _WHOLE}, Ticket())

    def describe(self, name: str) -> dict[str, Any]:
        """Return what is said of a model; of an adapter also its base, and which share its batches."""
        found = describe(self.models[name])
        if name in self.bases:
            found["base"] = self.bases[name]
            found["together"] = list(self.together[name][0].names) if name in self.together else []
        return found

    def peak(self) -> float:
        """Return the operations a second that the device reaches in the dtype that models compute in."""
        from flodl_hf.inference.precision import dtype_of

        precision: Any = self.precision
        return peak_of(self.device, dtype_of(precision) or next(iter(self.models.values())).dtype)

    def pace(self) -> float:
        """Return the tokens a second that the device runs, by a warm model."""
        if self.cuda:
            # What is made once on a GPU takes seconds, which are no batch's.
            self.batcher.pace = Pace()
            name, model = next(iter(self.models.items()))
            task, items = warm_items(model)
            for _ in range(2):
                self.answer({"model": name, "task": task, "items": items * 64, "options": _WHOLE}, Ticket())
        return self.batcher.pace.now

    def has_room(self) -> bool:
        """Return whether the device is a GPU with memory for another process like this one, twice over."""
        import torch

        if not self.cuda:
            return False
        free, whole = torch.cuda.mem_get_info(self.device)
        mine = torch.cuda.memory_reserved(self.device) + CONTEXT
        return free > 2 * mine and 4 * mine < whole

    def answer(self, message: dict[str, Any], ticket: Ticket) -> tuple[Any, list[np.ndarray]]:
        """Return the answer to a request."""
        from flodl_hf.inference.inputs import TRUNCATION, Truncation
        from flodl_hf.inference.pending import TRUNCATED
        from flodl_hf.inference.pipeline import SENDING

        mixed = self.together.get(message["model"])

        def send(model: Any, options: Any, table: Any, work: Any, places: Any) -> Any:
            if mixed is not None:
                model, places = mixed[0], [(mixed[1],)] * len(table)
            return self.batcher.send(ticket, model, options, table, work, places)

        model, options = self.models[message["model"]], message.get("options") or {}

        def run() -> tuple[Any, list[np.ndarray]]:
            SENDING.set(send)
            TRUNCATED.set(ticket.count_truncated)
            TRUNCATION.set(Truncation(options.get("max_tokens"), options.get("side")))
            return TASKS[message["task"]](model, message["items"], options, ticket)

        return copy_context().run(run)


def _fault(fault: BaseException) -> dict[str, str]:
    kind = next((word for known, word in _KINDS.items() if isinstance(fault, known)), "internal")
    return {"kind": kind, "message": str(fault) if kind != "internal" else f"{type(fault).__name__}: {fault}"}


class _Requests:
    """The requests of all who ask, each by a link of their own.

    Args:
        worker: what answers.
        most: requests of a link at a time.
    """

    def __init__(self, worker: Worker, most: int) -> None:
        self._worker, self._most = worker, most
        self._tickets: dict[tuple[_Stream, int], Ticket] = {}
        self._turns, self._long_turns = Semaphore(TURNS), Semaphore(TURNS)

    def answer_all(self, stream: _Stream) -> None:
        """Answer what comes by a link until it ends; who asked by it waits for nothing any more then."""
        # One more than there are requests at a time: somebody always reads what is given up.
        take_turns(partial(self._read, stream), self._work, self._most + 1)
        for (link, _), ticket in list(self._tickets.items()):
            if link is stream:
                ticket.give_up()
        stream.close()

    def links(self, way: socket.socket) -> None:
        """Answer by every link that is handed over, each in threads of its own."""
        with suppress(OSError):
            while (found := handed(way)) is not None:
                if found[1] is not None:
                    link = _Stream(found[1])
                    Thread(target=self.answer_all, args=(link,), name="flodl-hf-link", daemon=True).start()

    def _read(self, stream: _Stream) -> _Request | None:
        while (message := stream.read()) is not None:
            if "cancel" not in message:
                ticket = self._tickets[stream, message["id"]] = Ticket(
                    message["key"], time.monotonic() + message["left_s"], message["priority"]
                )
                # Characters, not tokens: what is tokenised for long holds up only its like.
                ticket.turn = self._turns if weigh(message["items"]) <= LONG else self._long_turns
                if "traced" in message:
                    ticket.timeline = Timeline()
                return stream, message, ticket
            if (gone := self._tickets.get((stream, message["cancel"]))) is not None:
                gone.give_up()
        return None

    def _work(self, request: _Request, read_on: Callable[[], None]) -> None:
        stream, message, ticket = request
        worker = self._worker
        started = time.perf_counter()
        if len(self._tickets) == 1 and weigh(message["items"]) <= SHORT:
            ticket.read_on = read_on
        else:
            read_on()
        number, reply, arrays = message["id"], {}, []
        assert ticket.turn is not None
        with ticket.turn:
            try:
                ticket.check()
                reply["data"], arrays = worker.answer(message, ticket)
                if "as_text" in message:
                    write = as_msgpack if message["as_text"].endswith("msgpack") else as_json
                    arrays, reply["data"] = [np.frombuffer(write(reply["data"]), np.uint8)], None
            except Exception as fault:
                reply["fault"] = _fault(fault)
                if reply["fault"]["kind"] == "internal":
                    traceback.print_exc(file=sys.stderr)
        self._tickets.pop((stream, number), None)
        reply |= {
            "id": number, "tokens": ticket.tokens, "rows": ticket.rows, "dropped": ticket.dropped,
            "truncated": ticket.truncated,
            "waited_s": ticket.waited_s, "took_s": time.perf_counter() - started,
            "queued": worker.batcher.queued_tokens, "ran": worker.batcher.drained(),
            "rate": worker.batcher.pace.now,
        }  # fmt: skip
        if ticket.timeline is not None:
            reply["timeline"] = ticket.timeline.told()
        with suppress(OSError):
            # Without the doors nobody reads it, and reading ends too.
            try:
                stream.write(reply, arrays)
            except (TypeError, ValueError) as fault:  # no JSON type: whoever waits is told so now
                traceback.print_exc(file=sys.stderr)
                stream.write({**reply, "data": None, "fault": _fault(fault)})


def serve(descriptor: int, hands: int | None = None) -> None:
    """Serve one socket until it ends.

    Args:
        descriptor: of the socket that this process inherited.
        hands: of another by which links to others that ask are handed over; they end with the first.
    """
    # A service manager tells every process to end; this one does when those that it answers are done.
    signal.signal(signal.SIGTERM, lambda *_: None)
    stream = _Stream(socket.socket(fileno=descriptor))
    given = stream.read()
    if given is None:
        return
    # The doors have the log; a warning there names no file of ours.
    warnings.showwarning = lambda message, *_, **__: stream.write({"warned": str(message)})
    try:
        started = time.perf_counter()
        worker = Worker(given)
        worker.warm()
        infos = {name: worker.describe(name) for name in worker.models}
        said = {
            "ready": infos, "device": str(worker.device), "warm_s": time.perf_counter() - started,
            "max_batch_tokens": worker.max_tokens, "peak": worker.peak(), "rate": worker.pace(),
            "room": worker.has_room(), "pid": os.getpid(),
        }  # fmt: skip
        worker.batcher.drained()
        requests = _Requests(worker, given["threads"])
        if hands is not None:
            way = socket.socket(fileno=hands)
            Thread(target=requests.links, args=(way,), name="flodl-hf-links", daemon=True).start()
        stream.write(said)
    except Exception as fault:
        stream.write({"broken": f"{type(fault).__name__}: {fault}"})
        return
    requests.answer_all(stream)
