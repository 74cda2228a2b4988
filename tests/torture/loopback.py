"""A Hub on the loopback interface that lies, drips, falls silent and sends elsewhere, as one case asks for.

It has one repository in one commit. A fault holds for the listing, or for one file; everything else is answered as the
Hub does. A second server of other files stands for another host: what a redirect leads to, and who must see no token.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote

from tests.torture.damage import damaged_bytes

__all__ = ["COMMIT", "REPOSITORY", "Hub", "listing_of"]

REPOSITORY = "ada/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SLOW_S = 0.2
"""Seconds between the bytes of an answer that drips."""


def listing_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return what the Hub says of a repository: weights by SHA-256, other files by git's digest."""
    siblings = []
    for name, data in files.items():
        entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        else:
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        siblings.append(entry)
    return {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no news."""


class Hub:
    """The server, and the one beside it.

    Args:
        files: of the repository.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.requests: list[str] = []
        self.strangers: list[str] = []
        """Authorisations that the other host was shown."""
        self.fault: Mapping[str, Any] = {}
        self.times = 0
        self.victim = 0
        self.server, self.other = (
            _Server(("127.0.0.1", 0), type("Repository", (_Repository,), {"hub": self})),
            _Server(("127.0.0.1", 0), type("Stranger", (_Stranger,), {"hub": self})),
        )
        for server in (self.server, self.other):
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def elsewhere(self) -> str:
        """The other host: under another name, because a port alone is none for some versions of huggingface_hub."""
        return f"http://localhost:{self.other.server_address[1]}"

    def take(self, fault: Mapping[str, Any]) -> None:
        """Answer with a fault from now on; answers that still drip end."""
        self.fault, self.times = dict(fault), 0
        self.requests.clear()
        self.strangers.clear()


class _Repository(BaseHTTPRequestHandler):
    """Answers for a repository, with the fault that its hub holds."""

    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"
    timeout = 30

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer."""
        path = unquote(self.path.split("?")[0])
        self.hub.requests.append(f"{self.command} {path}")
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
        listing = path.startswith(f"/api/models/{REPOSITORY}")
        fault = self.hub.fault
        mine = fault.get("at") == ("listing" if listing else name)
        with suppress(OSError):
            if listing:
                body = json.dumps({**listing_of(self.hub.files), **(fault.get("listing", {}) if mine else {})}).encode()
                self._send(body, {"Content-Type": "application/json"}, fault if mine else {})
            elif name in self.hub.files:
                data = self.hub.files[name]
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                self._send(data, headers, fault if mine else {})
            else:
                said = {"X-Error-Code": "EntryNotFound" if path.startswith(f"/{REPOSITORY}/") else "RepoNotFound"}
                self._send(b"{}", said, {"status": 404})

    do_HEAD = do_GET

    def _send(self, body: bytes, headers: dict[str, str], fault: Mapping[str, Any]) -> None:
        head = self.command == "HEAD"
        if fault.get("only") not in (None, self.command):
            fault = {}
        if fault.get("once") and self.hub.times:
            fault = {}
        self.hub.times += bool(fault)
        status, way = fault.get("status", 200), fault.get("way", "")
        if way == "silent":
            self._wait(fault)
            return
        if way == "closed":
            self.connection.close()
            return
        if "how" in fault and not head:
            body = damaged_bytes(body, fault)
        elif "body" in fault and not head:
            body = fault["body"].encode()
        stated = {"Content-Length": str(len(body)), **headers, **fault.get("headers", {})}
        if "to" in fault:
            status = 302
            stated |= {"Location": fault["to"].format(url=self.hub.url, elsewhere=self.hub.elsewhere, path=self.path)}
        start = f"HTTP/1.1 {status} Said\r\n" + "".join(f"{k}: {v}\r\n" for k, v in stated.items() if v is not None)
        raw = (start + "\r\n").encode("latin-1", "replace")
        if way == "slow-head":
            self._drip(raw, fault)
        else:
            self.connection.sendall(raw)
        if head:
            return
        if way == "kill":
            self.connection.sendall(body[: fault["after"] % (len(body) + 1)])
            if self.hub.victim:
                os.kill(self.hub.victim, signal.SIGKILL)
        elif way in ("stop", "drop", "drip"):
            at = len(body) * fault.get("part", 1) // 4
            self.connection.sendall(body[:at])
            if way == "stop":
                self._wait(fault)
            elif way == "drip":
                self._drip(body[at:], fault)
            self.close_connection = True
        else:
            self.connection.sendall(body)

    def _wait(self, fault: Mapping[str, Any]) -> None:
        while self.hub.fault is fault:
            time.sleep(0.05)
        self.close_connection = True

    def _drip(self, data: bytes, fault: Mapping[str, Any]) -> None:
        for place in range(len(data)):
            if self.hub.fault is not fault:
                break
            self.connection.sendall(data[place : place + 1])
            time.sleep(SLOW_S)


class _Stranger(BaseHTTPRequestHandler):
    """Answers for another host, which no request with a token should reach."""

    hub: ClassVar[Hub]

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Give the repository's files by their names, and other bytes under ``evil/``."""
        if self.headers.get("Authorization"):
            self.hub.strangers.append(self.headers["Authorization"])
        name = unquote(self.path).lstrip("/").removeprefix("evil/")
        data = self.hub.files.get(name, b"{}")
        if self.path.startswith("/evil/"):
            data = data[:-1] + bytes([data[-1] ^ 1])
        with suppress(OSError):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    do_HEAD = do_GET
