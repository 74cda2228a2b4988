"""The server of the page: one thread, a few connections, and nothing that waits for a reader.

What is sent to readers lies in one ring of messages that all of them share; each reader has a place in it. A reader
that falls behind the ring is sent everything anew, one that takes nothing for a while is let go. So readers cost the
run nothing but the making of each message, once.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from flodl.errors import TrainError
from flodl.monitor.http import MOST_BODY, MOST_HEAD, Refused, Request, Rules, answer, body_length, parse_head

__all__ = ["MOST_CONNECTIONS", "MOST_STREAMS", "Ring", "Server"]

MOST_CONNECTIONS = 32
MOST_STREAMS = 24
HEAD_S = 5.0
"""Seconds that a request may take to come."""
STUCK_S = 15.0
"""Seconds after which a reader that took nothing is let go."""
BEAT_S = 10.0
LINGER_S = 1.0
SEND_BUFFER = 1 << 18


class Ring:
    """The newest messages to readers, with their numbers.

    Args:
        everything: gives, in pieces, the message that a reader begins with; called with the lock held.
        most_bytes: bytes kept; older messages are forgotten.
    """

    def __init__(self, everything: Callable[[], Iterable[str]], most_bytes: int = 4 << 20) -> None:
        self.everything, self.most_bytes = everything, most_bytes
        self.lock = threading.RLock()
        self.mark = f"{time.time_ns():x}"
        self.number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._whole: tuple[int, bytes] | None = None

    def add(self, text: str) -> None:
        """Add a message."""
        with self.lock:
            self.number += 1
            data = f"id: {self.mark}-{self.number}\nevent: delta\ndata: {text}\n\n".encode()
            self._kept.append((self.number, data))
            self._bytes += len(data)
            while self._bytes > self.most_bytes and len(self._kept) > 1:
                self._bytes -= len(self._kept.popleft()[1])

    def place(self, last_seen: str) -> int | None:
        """Return the place of a reader that says what it has seen; None where it has to begin anew."""
        mark, _, number = last_seen.partition("-")
        if mark != self.mark or not number.isdecimal() or len(number) > 15:
            return None
        return int(number) if int(number) <= self.number else None

    def after(self, place: int | None) -> tuple[int, bytes]:
        """Return what comes after ``place`` and the place after that; everything where that is forgotten."""
        with self.lock:
            if place == self.number:
                return self.number, b""
            first = self._kept[0][0] if self._kept else self.number + 1
            if place is None or place + 1 < first:
                return self.number, self._all()
            return self.number, b"".join(data for number, data in self._kept if number > place)

    def _all(self) -> bytes:
        if self._whole is None or self._whole[0] != self.number:
            text = "".join(self.everything())
            data = f"id: {self.mark}-{self.number}\nevent: all\ndata: {text}\n\n".encode()
            self._whole = (self.number, data)
        return self._whole[1]


class _Connection:
    """One connection: first a request comes in, then an answer goes out, or a stream until somebody leaves."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock, self.since, self.moved = sock, now, now
        self.read = b""
        self.request: Request | None = None
        self.needed = 0
        self.out = memoryview(b"")
        self.streams = False
        self.place: int | None = None
        self.closing = False  # all is sent; the other side may still be sending


class Server:
    """Answers on one address until `close`.

    Args:
        ring: what streams are fed from.
        files: path to ``(media type, body)``, all that can be had besides the stream.
        rules: who may ask; made with the address, since it is part of them.
        host: address to listen on.
        port: 0 for any that is free.
        on_order: called with the JSON text of an order; gives ``(status, answer)``.

    Attributes:
        address: where it listens.

    Raises:
        TrainError: the port is taken, or the address is not this machine's.
    """

    def __init__(
        self,
        ring: Ring,
        files: dict[str, tuple[str, Callable[[], bytes]]],
        rules: Callable[[str, int], Rules],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        on_order: Callable[[str], tuple[int, dict[str, Any]]] | None = None,
    ) -> None:
        self.ring, self.files, self.on_order = ring, files, on_order
        try:
            self._listener = socket.create_server((host, port), backlog=64, reuse_port=False)
        except (OSError, OverflowError) as fault:
            raise TrainError(
                f"monitor: cannot listen on {host}:{port} ({fault}); expected a free port of this machine. Give "
                "another, or 0 for any that is free.",
                host=host,
                port=port,
            ) from None
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.rules = rules(host, self.address[1])
        self._wake_here, self._wake_there = socket.socketpair()
        for end in (self._wake_here, self._wake_there):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_here, selectors.EVENT_READ, self._woken)
        self._connections: dict[socket.socket, _Connection] = {}
        self._pause_until = 0.0
        self._beat = time.monotonic()
        self._ending: float | None = None
        self._thread = threading.Thread(target=self._run, name="flodl-monitor-server", daemon=True)
        self._thread.start()

    @property
    def readers(self) -> int:
        """How many pages are looking on."""
        return sum(connection.streams for connection in list(self._connections.values()))

    def wake(self) -> None:
        """Have new messages sent."""
        with contextlib.suppress(OSError):
            self._wake_there.send(b"x")

    def close(self, patience_s: float = 1.0) -> None:
        """Send what is left to those who take it, and end."""
        if self._ending is None:
            self._ending = time.monotonic() + patience_s
            self.wake()
            self._thread.join(timeout=patience_s + 2)

    # ---- the loop ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over():
                for key, mask in self._selector.select(timeout=0.05 if self._ending else 0.5):
                    if key.data in (self._accept, self._woken):
                        key.data()
                    else:
                        self._guarded(key.data, mask)
                self._sweep(time.monotonic())
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            for sock in (self._listener, self._wake_here, self._wake_there):
                sock.close()

    def _is_over(self) -> bool:
        if self._ending is None:
            return False
        return time.monotonic() >= self._ending or not any(
            len(c.out) or (c.streams and c.place != self.ring.number) for c in self._connections.values()
        )

    def _woken(self) -> None:
        with contextlib.suppress(OSError):
            while self._wake_here.recv(4096):
                pass
        for connection in list(self._connections.values()):
            if connection.streams and not len(connection.out):
                self._guarded(connection, selectors.EVENT_WRITE)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # no descriptors left, or the caller is gone: look again in a while
            self._selector.unregister(self._listener)
            self._pause_until = time.monotonic() + 0.5
            return
        sock.setblocking(False)
        now = time.monotonic()
        if len(self._connections) >= MOST_CONNECTIONS:
            waiting = [c for c in self._connections.values() if not c.streams]
            if not waiting:
                sock.close()
                return
            self._drop(min(waiting, key=lambda c: c.since))  # whoever is slowest to ask makes room
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._connections[sock] = _Connection(sock, now)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _guarded(self, connection: _Connection, mask: int) -> None:
        """Serve a connection; whatever goes wrong there ends it and nothing else."""
        if connection.sock not in self._connections:
            return
        try:
            if mask & selectors.EVENT_READ:
                self._take(connection)
            if connection.sock in self._connections:
                self._give(connection)
        except OSError:
            self._drop(connection)
        except Exception:
            connection.streams = False
            with contextlib.suppress(Exception):
                connection.sock.send(answer(500, "the monitor could not answer this\n"))
            self._drop(connection)

    def _sweep(self, now: float) -> None:
        if self._pause_until and now >= self._pause_until:
            self._pause_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        beat = now - self._beat >= BEAT_S
        if beat:
            self._beat = now
        for connection in list(self._connections.values()):
            if connection.closing:
                late = now - connection.moved > LINGER_S
            elif not connection.streams and not len(connection.out):
                late = now - connection.since > HEAD_S
            else:
                late = len(connection.out) > 0 and now - connection.moved > STUCK_S
            if late:
                self._drop(connection)
            elif beat and connection.streams and not len(connection.out):
                connection.out = memoryview(b": still here\n\n")
                connection.moved = now
                self._guarded(connection, selectors.EVENT_WRITE)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.sock, None) is not None:
            with contextlib.suppress(Exception):
                self._selector.unregister(connection.sock)
            connection.sock.close()

    # ---- what comes in -------------------------------------------------------------------------------

    def _take(self, connection: _Connection) -> None:
        data = connection.sock.recv(65536)
        if not data:
            self._drop(connection)
            return
        if connection.streams or connection.closing or len(connection.out):
            return  # nothing more is expected, and nothing is done with it
        connection.read += data
        try:
            self._read_on(connection)
        except Refused as refused:
            self._say(connection, answer(refused.status, refused.reason + "\n", headers=refused.headers))

    def _read_on(self, connection: _Connection) -> None:
        if connection.request is None:
            head, end, rest = connection.read.partition(b"\r\n\r\n")
            if len(head) > MOST_HEAD:
                raise Refused(431, "the head is too long")
            if not end:
                return
            request = parse_head(head)
            self.rules.check(request)
            connection.request, connection.read = request, rest
            connection.needed = body_length(request)
        if len(connection.read) >= connection.needed:
            body = connection.read[: min(connection.needed, MOST_BODY)]
            self._answer(connection, connection.request, body)

    def _answer(self, connection: _Connection, request: Request, body: bytes) -> None:
        head_only = request.method == "HEAD"
        if request.path == "/control" and request.method == "POST":
            self.rules.check_order(request)
            assert self.on_order is not None
            status, said = self.on_order(body.decode("utf-8", "replace"))
            self._say(connection, answer(status, said))
            return
        if request.path == "/" and self.rules.read_token and self.rules.holds(request.query.get("token")):
            cookie = f"{self.rules.cookie}={self.rules.token}; HttpOnly; SameSite=Strict; Path=/"
            self._say(connection, answer(303, headers=[("Location", "/"), ("Set-Cookie", cookie)]))
            return
        if not self.rules.may_read(request):
            raise Refused(403, "open the address with its token, as it was printed")
        if request.path == "/events":
            self._stream(connection, request, head_only)
            return
        found = self.files.get(request.path)
        if found is None:
            raise Refused(404, "nothing is here")
        self._say(connection, answer(200, found[1](), found[0], head_only=head_only))

    def _stream(self, connection: _Connection, request: Request, head_only: bool) -> None:
        if not head_only and self.readers >= MOST_STREAMS:
            raise Refused(503, "too many readers", [("Retry-After", "10")])
        head = answer(200, kind="text/event-stream", stream=True)
        if head_only:
            self._say(connection, head)
            return
        connection.place = self.ring.place(request.headers.get("last-event-id", ""))
        connection.out = memoryview(head + b"retry: 2000\n\n")
        connection.streams = True
        connection.moved = time.monotonic()

    def _say(self, connection: _Connection, data: bytes) -> None:
        connection.out = memoryview(data)
        connection.moved = time.monotonic()
        if connection.request is None:
            connection.request = Request("GET", "/")  # refused before it was one

    # ---- what goes out -------------------------------------------------------------------------------

    def _give(self, connection: _Connection) -> None:
        if connection.streams and not len(connection.out):
            connection.place, data = self.ring.after(connection.place)
            connection.out = memoryview(data)
            connection.moved = time.monotonic()
        if len(connection.out):
            try:
                sent = connection.sock.send(connection.out[: SEND_BUFFER // 2])
            except BlockingIOError:
                sent = 0
            if sent:
                connection.out = connection.out[sent:]
                connection.moved = time.monotonic()
        answered = connection.request is not None and not connection.streams
        if answered and not len(connection.out) and not connection.closing:
            connection.closing = True
            connection.sock.shutdown(socket.SHUT_WR)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._has_more(connection) else 0)
        self._selector.modify(connection.sock, wanted, connection)

    def _has_more(self, connection: _Connection) -> bool:
        return len(connection.out) > 0 or (connection.streams and connection.place != self.ring.number)
