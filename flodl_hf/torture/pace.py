"""Clients that are slow, silent, greedy or gone, many at once, and a worker that ends or stands still meanwhile.

Decides how long each may take: the server's own limits, and some seconds for a busy machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

from flodl_hf.torture.case import Grade, Verdict, refusal, right, silent
from flodl_hf.torture.replies import graded, refused
from flodl_hf.torture.served import BODIES, LIMITS, Server, spoken
from flodl_hf.torture.wire import Answer, Wire, head, post

__all__ = ["DOES"]

LARGE = 100 << 20
BLOCK = 1 << 20
PEAK_MB = 120
"""What the doors may take while a body of `LARGE` bytes is sent: far less than it."""
CALM_S = 20.0
START_S = 150.0
"""What a worker may take to load all models on a busy machine."""
JSON = "content-type: application/json"


def _data(path: str) -> bytes:
    return json.dumps(BODIES[path]).encode()


def _dribbled(wire: Wire, data: bytes, pause: float, *, until: float = float("inf")) -> bool:
    """Send byte by byte; return whether the server took all of it."""
    for place in range(len(data)):
        if time.monotonic() > until or not wire.send(data[place : place + 1]):
            return False
        time.sleep(pause)
    return True


# --- slow -------------------------------------------------------------------------------------------------------------


def _slow_head(server: Server, path: str, _draw: int) -> Verdict:
    request = post(path, _data(path))
    top = request.index(b"\r\n\r\n")
    with server.wire() as wire:
        _dribbled(wire, request[:top], 0.0005)
        wire.send(request[top:])
        return graded(server, path, wire.answer())


def _endless_head(server: Server, path: str, _draw: int) -> Verdict:
    until = time.monotonic() + LIMITS["header_s"] + CALM_S
    with server.wire(LIMITS["header_s"] + CALM_S) as wire:
        wire.send(head(path, JSON)[:-2])
        if _dribbled(wire, b"x-a: b\r\n" * 5_000, 0.05, until=until):
            return Verdict(Grade.HANG, "a head without end is read for ever")
        return refusal("closed") if time.monotonic() < until else Verdict(Grade.HANG, "a head without end is read")


def _half_open(server: Server, path: str, draw: int) -> Verdict:
    request = post(path, _data(path))
    top = request.index(b"\r\n\r\n") + 3
    with server.wire(LIMITS["header_s"] + CALM_S) as wire:
        wire.send(request[: draw % top])
        return refusal("closed") if wire.closed() else Verdict(Grade.HANG, "a connection that says nothing stays open")


def _slow_body(server: Server, path: str, _draw: int) -> Verdict:
    data = _data(path)
    with server.wire() as wire:
        wire.send(head(path, JSON, f"content-length: {len(data)}"))
        _dribbled(wire, data, 0.0005)
        return graded(server, path, wire.answer())


def _endless_body(server: Server, path: str, _draw: int) -> Verdict:
    until = time.monotonic() + LIMITS["body_s"] + CALM_S
    with server.wire(LIMITS["body_s"] + CALM_S) as wire:
        wire.send(head(path, JSON, "content-length: 100000"))
        if _dribbled(wire, b" " * 100_000, 0.05, until=until):
            return Verdict(Grade.HANG, "a body without end is read for ever")
        return refused(wire.answer(), closing=True)


def _reads_nothing(server: Server, _path: str, _draw: int) -> Verdict:
    """Ask for far more than sockets hold, and read none of it."""
    request = head("/openapi.json", method="GET")
    until = time.monotonic() + LIMITS["write_s"] + 2 * CALM_S
    with server.wire(LIMITS["write_s"] + 2 * CALM_S) as wire:
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.send(request * 120)
        while time.monotonic() < until:
            if not wire.send(b"\r\n"):
                return refusal("closed")
            time.sleep(0.1)
    return Verdict(Grade.HANG, "a client that reads nothing keeps its connection")


def _reads_slowly(server: Server, path: str, _draw: int) -> Verdict:
    with server.wire() as wire:
        wire.send(post(path, _data(path)))
        time.sleep(0.3)
        return graded(server, path, wire.answer())


def _idle(server: Server, path: str, _draw: int) -> Verdict:
    with server.wire(LIMITS["idle_s"] + CALM_S) as wire:
        wire.send(post(path, _data(path)))
        verdict = graded(server, path, wire.answer())
        return verdict if wire.closed() else Verdict(Grade.HANG, "a connection without a request stays for ever")


# --- large ------------------------------------------------------------------------------------------------------------


def _peak(process: int, *, reset: bool = False) -> float:
    with suppress(OSError, IndexError, ValueError):
        if reset:
            Path(f"/proc/{process}/clear_refs").write_text("5")
        status = Path(f"/proc/{process}/status").read_text("ascii")
        return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) / 1024
    return 0.0


def _large(start: Callable[[str], bytes], part: bytes) -> Callable[[Server, str, int], Verdict]:
    def act(server: Server, path: str, _draw: int) -> Verdict:
        before = _peak(server.process.pid, reset=True)
        with server.wire(60.0) as wire:
            sent = wire.send(start(path))
            for _ in range(LARGE // BLOCK):
                if not sent:
                    break
                sent = wire.send(part)
            verdict = refused(wire.answer(), closing=not sent)
        taken = _peak(server.process.pid) - before
        return Verdict(Grade.MEMORY, f"the doors took {taken:.0f} MB") if taken > PEAK_MB else verdict

    return act


# --- gone -------------------------------------------------------------------------------------------------------------


def _calm(server: Server) -> Verdict:
    """Wait until nothing is being answered any more."""
    until, inside = time.monotonic() + CALM_S, -1.0
    while time.monotonic() < until:
        with server.wire() as wire:
            wire.send(head("/metrics", method="GET"))
            answer = wire.answer()
        lines = answer.body.decode().splitlines() if answer is not None else []
        inside = next((float(line.split()[1]) for line in lines if line.startswith("te_queue_size")), -1.0)
        if inside == 0:
            return refusal("away")
        time.sleep(0.05)
    return Verdict(Grade.PARTIAL, f"{inside:.0f} requests of clients that are gone are still there")


def _much(count: int = 400) -> bytes:
    return post("/embed", json.dumps({"model": "embed", "inputs": ["a very good film! " * 9] * count}).encode())


def _gone(
    part: Callable[[bytes, int], bytes], clients: int = 1, wait: float = 0.0
) -> Callable[[Server, str, int], Verdict]:
    def act(server: Server, _path: str, draw: int) -> Verdict:
        request = _much()
        with ExitStack() as stack:
            wires = [stack.enter_context(server.wire()) for _ in range(clients)]
            for wire in wires:
                wire.send(part(request, draw))
            time.sleep(wait)
            for wire in wires:
                wire.reset()
        return _calm(server)

    return act


# --- many -------------------------------------------------------------------------------------------------------------


def _asks(server: Server, path: str) -> Answer | None:
    with server.wire(90.0) as wire:
        wire.send(post(path, _data(path)))
        return wire.answer()


def _all_right(server: Server, paths: list[str], answers: list[Answer | None], *also: int) -> Verdict:
    for path, answer in zip(paths, answers, strict=True):
        if answer is not None and answer.status in also:
            verdict = refused(answer, also=also)
            if not verdict.good or (answer.status == 429 and "retry-after" not in answer.headers):
                return verdict if not verdict.good else Verdict(Grade.UNNAMED, "429 without Retry-After")
        elif answer is None or answer.status != 200:
            return Verdict(Grade.UNNAMED, f"{path} gets {answer} beside others")
        elif spoken(answer) != server.right[path]:
            return silent(f"{path} has another answer beside others")
    return right()


def _beside_half_open(server: Server, _path: str, draw: int) -> Verdict:
    random = Random(draw)
    paths = [random.choice(tuple(BODIES)) for _ in range(24)]
    with ExitStack() as stack, ThreadPoolExecutor(12) as pool:
        for _ in range(200):
            stack.enter_context(server.wire()).send(b"POST /embed HTTP/1.1\r\nhost:")
        return _all_right(server, paths, list(pool.map(lambda path: _asks(server, path), paths)))


def _more_than_allowed(server: Server, _path: str, draw: int) -> Verdict:
    random = Random(draw)
    paths = [random.choice(tuple(BODIES)) for _ in range(160)]
    before = threading.stack_size(1 << 19)  # a case may have so much memory, stacks of threads included
    try:
        with ThreadPoolExecutor(160) as pool:
            return _all_right(server, paths, list(pool.map(lambda path: _asks(server, path), paths)), 429)
    finally:
        threading.stack_size(before)


# --- ended ------------------------------------------------------------------------------------------------------------


def _struck(number: int, wait: float) -> Callable[[Server, str, int], Verdict]:
    """Strike the worker while it answers; who asked is told, and the next is answered."""

    def act(server: Server, path: str, draw: int) -> Verdict:
        before = server.worker
        with ThreadPoolExecutor(4) as pool, server.wire(90.0) as wire:
            wire.send(_much(500))
            time.sleep(wait * (draw % 100) / 100)
            os.kill(before, number)
            others = [pool.submit(_asks, server, path) for _ in range(4)]
            answer = wire.answer()
            beside = [one.result() for one in others]
        until = time.monotonic() + START_S
        while server.worker == before and time.monotonic() < until:
            time.sleep(0.05)
        if server.worker == before:
            return Verdict(Grade.HANG, "no worker takes the place of one that ended")
        server.taken = server.memory()  # another process, which begins anew
        told = refused(answer, also=(503,)) if answer is None or answer.status != 200 else right()
        after = _all_right(server, [path] * 4, beside, 429, 503)
        return after if told.good and not after.good else told

    return act


def _frozen(server: Server, path: str, _draw: int) -> Verdict:
    """Freeze the worker: a request with a deadline is told so in time, and answered again when it goes on."""
    worker, data = server.worker, _data(path)
    os.kill(worker, signal.SIGSTOP)
    try:
        with server.wire(CALM_S) as wire:
            wire.send(head(path, JSON, f"content-length: {len(data)}", "x-timeout-s: 0.5") + data)
            verdict = refused(wire.answer(), also=(504,))
    finally:
        os.kill(worker, signal.SIGCONT)
    return verdict


def _reloaded(server: Server, _path: str, draw: int) -> Verdict:
    """Have all models loaded anew while clients ask: none of them notices."""
    random, before = Random(draw), server.worker
    server.process.send_signal(signal.SIGHUP)
    until, verdict = time.monotonic() + START_S, right()
    while server.worker == before and time.monotonic() < until and verdict.good:
        paths = [random.choice(tuple(BODIES)) for _ in range(4)]
        verdict = _all_right(server, paths, [_asks(server, path) for path in paths])
    server.taken = server.memory()
    return verdict if server.worker != before else Verdict(Grade.HANG, "models are not loaded anew")


_WAYS: Mapping[str, Mapping[str, Callable[[Server, str, int], Verdict]]] = {
    "slow": {
        "a head, byte by byte": _slow_head, "a head without end": _endless_head, "half open": _half_open,
        "a body, byte by byte": _slow_body, "a body without end": _endless_body, "reads nothing": _reads_nothing,
        "reads slowly": _reads_slowly, "idle": _idle,
    },
    "large": {
        "stated": _large(lambda path: head(path, JSON, f"content-length: {LARGE}"), b" " * BLOCK),
        "in chunks": _large(
            lambda path: head(path, JSON, "transfer-encoding: chunked"),
            f"{BLOCK:x}\r\n".encode() + b"[" * BLOCK + b"\r\n",
        ),
        "in one text": _large(
            lambda path: head(path, JSON, f"content-length: {LARGE + 12}") + b'{"inputs": "', b"a" * BLOCK
        ),
    },
    "gone": {
        "at once": _gone(lambda data, draw: data), "behind the head": _gone(lambda data, draw: data[:data.index(b"{")]),
        "within the body": _gone(lambda data, draw: data[: data.index(b"{") + 1 + draw % 2_000]),
        "while it is answered": _gone(lambda data, draw: data, wait=0.2),
        "twenty of them": _gone(lambda data, draw: data, 20, 0.1),
    },
    "many": {"beside half open ones": _beside_half_open, "more than allowed": _more_than_allowed},
    "ended": {
        "killed": _struck(signal.SIGKILL, 1.0), "killed before it begins": _struck(signal.SIGKILL, 0.0),
        "crashed": _struck(signal.SIGSEGV, 1.0), "frozen": _frozen, "loaded anew": _reloaded,
    },
}  # fmt: skip


def _of(kind: str) -> Callable[[Server, Mapping[str, Any]], Verdict]:
    return lambda server, what: _WAYS[kind][what["way"]](server, what["path"], what["draw"])


DOES: Mapping[str, tuple[tuple[str, ...], Callable[[Server, Mapping[str, Any]], Verdict]]] = {
    kind: (tuple(ways), _of(kind)) for kind, ways in _WAYS.items()
}
"""By the kind of a case: its ways, and what does one."""
