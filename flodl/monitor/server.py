"""The web server of the page, on `http.server`: one thread for each connection, none of which delays a run.

It listens on this machine only. Requests are accepted under the server's own host names and not from pages of other
sites. A path is compared with a fixed table and never opens a file. Every response closes its connection.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from typing import Any, cast
from urllib.parse import urlsplit

from flodl.errors import TrainError
from flodl.monitor.store import RunStore, asset, served_page

FIRST_PORT, NUM_PORTS = 6060, 20
HOST = "127.0.0.1"
MAX_STREAMS = 24
MAX_BODY = 1024
REQUEST_TIMEOUT_S = 5.0
STREAM_TIMEOUT_S = 15.0
"""Seconds after which a page that reads nothing is disconnected."""
HEARTBEAT_S = 10.0
CLOSE_TIMEOUT_S = 1.0

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": _POLICY,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
Answer = tuple[int, str]
Route = tuple[str, Callable[[], str]]


class _Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    protocol_version, default_request_version, timeout = "HTTP/1.1", "HTTP/1.0", REQUEST_TIMEOUT_S

    def parse_request(self) -> bool:
        """Parse the head of a request; send an error for one that is not accepted."""
        threading.current_thread().name = "flodl-monitor-request"
        if not super().parse_request():
            return False
        self.close_connection = True
        self.page, self.url = cast("PageServer", self.server), urlsplit(self.path)
        refused = self._refused()
        if refused is not None:
            self.send_error(*refused)
        return refused is None

    def _refused(self) -> Answer | None:
        """Return the status and reason of a request that is not accepted."""
        headers, page = self.headers, self.page
        hosts, origin = headers.get_all("host", []), headers.get("origin")
        is_command = self.command == "POST" and page.store.control and self.url.path == "/control"
        length = headers.get("content-length", "")
        has_length = length.isdecimal() and "transfer-encoding" not in headers
        has_token = origin is not None and hmac.compare_digest(
            page.token.encode(), headers.get("x-monitor-token", "").encode("utf-8", "replace")
        )
        of_commands = [
            (403, "origin and token needed", not has_token),
            (415, "JSON needed", headers.get_content_type() != "application/json"),
            (400, "length needed", not has_length),
            (413, "body too long", has_length and int(length) > MAX_BODY),
        ]
        of_pages = [
            (405, "method not allowed", self.command not in ("GET", "HEAD")),
            (400, "unexpected body", bool(length) or "transfer-encoding" in headers),
        ]
        refusals = [
            (421, "unknown host", len(hosts) != 1 or hosts[0].lower() not in page.hosts),
            (403, "other origin", origin is not None and origin.lower() not in page.origins),
            (403, "other site", headers.get("sec-fetch-site", "none").lower() not in ("none", "same-origin")),
            *(of_commands if is_command else of_pages),
        ]
        return next(((status, reason) for status, reason, applies in refusals if applies), None)

    def do_GET(self) -> None:
        """Answer with a page or a stream."""
        if self.url.path == "/events":
            self._stream()
        elif self.url.path in self.page.routes:
            kind, make = self.page.routes[self.url.path]
            self.respond(200, make(), kind)
        else:
            self.send_error(404, "not found")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Run a command such as ``{"do": "save"}``."""
        try:
            wanted = json.loads(self.rfile.read(int(self.headers["content-length"])))["do"]
        except (ValueError, TypeError, KeyError, RecursionError):
            wanted = None
        status, text = self.page.on_command(str(wanted))
        self.respond(status, json.dumps({"said": text}), "application/json")

    def _stream(self) -> None:
        store = self.page.store
        if self.command == "HEAD":
            self.respond(200, kind="text/event-stream")
        elif store.num_readers >= MAX_STREAMS:
            self.send_error(503, "too many readers")
        else:
            self.connection.settimeout(STREAM_TIMEOUT_S)
            self._head(200, {"Content-Type": "text/event-stream"})
            self.wfile.write(b"retry: 2000\n\n")
            with closing(store.stream(HEARTBEAT_S)) as messages:
                for message in messages:
                    self.wfile.write(message or b": no change\n\n")

    def respond(self, status: int, body: str = "", kind: str = "text/plain; charset=utf-8", **extra: str) -> None:
        """Send a response."""
        data = body.encode()
        self._head(status, {"Content-Type": kind, "Content-Length": str(len(data)), **extra})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error as plain text that repeats nothing of the request."""
        self.close_connection = True
        code = 405 if code == 501 else code
        reason = message if hasattr(self, "page") else "invalid request"
        self.respond(code, f"{reason}\n", **({"Allow": "GET, HEAD"} if code == 405 else {}))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class PageServer(socketserver.ThreadingTCPServer):
    """Serves the page of a store until `close`.

    Args:
        store: the runs.
        port: None for the first free port from 6060, 0 for any free port.
        control: whether the page may send commands, with a token that is part of `url`.
        names: further accepted values of ``Host``.
        on_command: receives a command, returns an HTTP status and a sentence.
        routes: further paths, each with its media type and a function that returns the text.

    Attributes:
        url: address for a browser.

    Raises:
        TrainError: the port is taken.
    """

    daemon_threads, request_queue_size = True, 64

    def __init__(
        self,
        store: RunStore,
        *,
        port: int | None = None,
        control: bool = False,
        names: Iterable[str] = (),
        on_command: Callable[[str], Answer] = lambda word: (400, "no command is accepted"),
        routes: Mapping[str, Route] | None = None,
    ) -> None:
        last = FIRST_PORT + NUM_PORTS if port is None else port
        for number in range(FIRST_PORT, last + 1) if port is None else (port,):
            try:
                super().__init__((HOST, number), _Handler)
                break
            except (OSError, OverflowError) as fault:
                if number == last:
                    text = f"cannot listen on port {number} ({fault}). Pass a free port, or 0 for any."
                    raise TrainError(f"monitor: {text}", port=number) from None
        port = int(self.server_address[1])
        self.store, self.on_command, self.token = store, on_command, secrets.token_hex(16)
        self.hosts = {f"{HOST}:{port}", f"localhost:{port}", *(name.lower() for name in names)}
        self.origins = {f"http://{name}" for name in self.hosts}
        store.control = control
        self.routes: dict[str, Route] = {
            "/": ("text/html; charset=utf-8", served_page),
            "/monitor.css": ("text/css; charset=utf-8", lambda: asset("monitor.css")),
            "/monitor.js": ("text/javascript; charset=utf-8", lambda: asset("monitor.js")),
            "/icon.svg": ("image/svg+xml", lambda: asset("icon.svg")),
            "/archive.html": ("text/html; charset=utf-8", lambda: store.page("flodl")),
            "/api/runs": ("application/json", store.to_json),
            **(routes or {}),
        }
        # A browser does not send what follows "#", so no log contains the token of commands.
        self.url = f"http://{HOST}:{port}/" + f"#token={self.token}" * control
        threading.Thread(target=self.serve_forever, args=(0.1,), name="flodl-monitor-server", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: the page reconnects by itself."""

    def close(self) -> None:
        """Send the last messages, disconnect pages, and free the address."""
        self.store.close()
        self.shutdown()
        self.server_close()
        end = time.monotonic() + CLOSE_TIMEOUT_S
        while self.store.num_readers and time.monotonic() < end:
            time.sleep(0.01)
