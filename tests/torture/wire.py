"""One connection to a server, as bytes: what is sent is sent as it is, and answers are read by the few lines below.

A client that knows what it may send would mend what it is given; this one does not.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any, NamedTuple

__all__ = ["Answer", "Wire", "head", "post"]


class Answer(NamedTuple):
    """An answer: its status, its headers by lower-case name, its body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body's value.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.body)


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    """Return a request's line and headers, with the empty line."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: here", *headers, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a request with a body of JSON, its length stated."""
    return head(path, "content-type: application/json", f"content-length: {len(body)}", *headers) + body


class Wire:
    """A connection.

    Args:
        address: host and port.
        patience: seconds after which a read is given up.
    """

    def __init__(self, address: tuple[str, int], patience: float) -> None:
        self.patience = patience
        self.socket = socket.create_connection(address, timeout=patience)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send; return whether the server took all of it."""
        try:
            self.socket.sendall(data)
        except (OSError, TimeoutError):
            return False
        return True

    def answer(self) -> Answer | None:
        """Return the next answer, or None where the server closed without a whole one.

        Raises:
            TimeoutError: neither came.
        """
        until = time.monotonic() + self.patience
        while b"\r\n\r\n" not in self._rest:
            if not self._more(until):
                return None
        top, _, self._rest = self._rest.partition(b"\r\n\r\n")
        line, *lines = top.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (item.partition(":") for item in lines)}
        status = int(line.split(" ")[1])
        if status == 100:
            return self.answer()
        if headers.get("transfer-encoding") == "chunked":
            body = self._chunked(until)
        else:
            body = (
                self._taken(int(headers["content-length"]), until) if "content-length" in headers else self._all(until)
            )
        return None if body is None else Answer(status, headers, body)

    def _more(self, until: float) -> bool:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)
        try:
            part = self.socket.recv(1 << 16)
        except TimeoutError:
            raise
        except OSError:
            part = b""
        self._rest += part
        return bool(part)

    def _taken(self, size: int, until: float) -> bytes | None:
        while len(self._rest) < size:
            if not self._more(until):
                return None
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def _all(self, until: float) -> bytes:
        while self._more(until):
            pass
        found, self._rest = self._rest, b""
        return found

    def _chunked(self, until: float) -> bytes | None:
        found = b""
        while True:
            while b"\r\n" not in self._rest:
                if not self._more(until):
                    return None
            size, _, self._rest = self._rest.partition(b"\r\n")
            part = self._taken(int(size, 16) + 2, until)
            if part is None or size == b"0":
                return None if part is None else found
            found += part[:-2]
