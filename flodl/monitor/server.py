"""The web server of the page, on `http.server`: one thread for each connection, none of which delays a run.

Requests are accepted only under the server's own host names and not from pages of other sites. A path is compared with
a fixed table and never opens a file. Every response closes its connection.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import socket
import socketserver
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from flodl.errors import TrainError
from flodl.monitor.archive import archive_page, asset, served_page
from flodl.monitor.store import RunStore

__all__ = ["PageServer"]

FIRST_PORT, NUM_PORTS = 6060, 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_CONNECTIONS, MAX_STREAMS = 64, 24
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
Response = tuple[int, str]
Route = tuple[str, Callable[[], str]]


@dataclass(frozen=True)
class _Access:
    """Which requests are accepted.

    Attributes:
        hosts: accepted values of ``Host`` in lower case.
        token: secret for commands, and for reading if ``reading_needs_token``.
        control: whether commands are accepted.
    """

    hosts: frozenset[str]
    token: str
    control: bool
    reading_needs_token: bool
    cookie: str

    def refuse(self, handler: BaseHTTPRequestHandler, path: str) -> Response | None:
        """Return the status and reason of a refused request; None for an accepted one."""
        headers = handler.headers
        hosts = headers.get_all("host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return 421, "unknown host"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{name}" for name in self.hosts}:
            return 403, "other origin"
        if headers.get("sec-fetch-site", "none").lower() not in ("none", "same-origin"):
            return 403, "other site"
        if handler.command == "POST" and self.control and path == "/control":
            return self._refuse_command(handler)
        if handler.command not in ("GET", "HEAD"):
            return 405, "method not allowed"
        if "content-length" in headers or "transfer-encoding" in headers:
            return 400, "unexpected body"
        return None

    def _refuse_command(self, handler: BaseHTTPRequestHandler) -> Response | None:
        headers = handler.headers
        if headers.get("origin") is None or not self.is_token(headers.get("x-monitor-token")):
            return 403, "origin and token needed"
        if headers.get_content_type() != "application/json":
            return 415, "JSON needed"
        length = headers.get("content-length", "")
        if not length.isdecimal() or "transfer-encoding" in headers:
            return 400, "length needed"
        return (413, "body too long") if int(length) > MAX_BODY else None

    def may_read(self, handler: BaseHTTPRequestHandler) -> bool:
        """Return whether the request may read runs."""
        try:
            cookie = SimpleCookie(handler.headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            cookie = None
        return not self.reading_needs_token or self.is_token(cookie.value if cookie else None)

    def is_token(self, given: str | None) -> bool:
        """Compare a token in constant time."""
        return bool(self.token) and hmac.compare_digest(self.token.encode(), (given or "").encode("utf-8", "replace"))


class _Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    protocol_version, default_request_version, timeout = "HTTP/1.1", "HTTP/1.0", REQUEST_TIMEOUT_S

    @property
    def page(self) -> PageServer:
        """The server with its routes and rules."""
        return cast("PageServer", self.server)

    def setup(self) -> None:
        """Name the thread."""
        threading.current_thread().name = "flodl-monitor-request"
        super().setup()

    def parse_request(self) -> bool:
        """Parse the head of a request; send an error for one that is not accepted."""
        if not super().parse_request():
            return False
        self.close_connection = True
        self.url = urlsplit(self.path)
        refused = self.page.access.refuse(self, self.url.path)
        if refused is not None:
            self.send_error(*refused)
        return refused is None

    def do_GET(self) -> None:
        """Answer with a page, a stream or a redirect."""
        page, path = self.page, self.url.path
        token = parse_qs(self.url.query).get("token", [""])[0] if path == "/" else ""
        if page.access.reading_needs_token and page.access.is_token(token):
            cookie = f"{page.access.cookie}={page.access.token}; HttpOnly; SameSite=Strict; Path=/"
            self.respond(303, extra={"Location": "/", "Set-Cookie": cookie})
        elif not page.access.may_read(self):
            self.send_error(403, "open the printed address, which contains the token")
        elif path == "/events":
            self._stream()
        elif path in page.routes:
            kind, make = page.routes[path]
            self.respond(200, make(), kind)
        else:
            self.send_error(404, "not found")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Run a command."""
        body = self.rfile.read(int(self.headers["content-length"]))
        status, text = self.page.command(body)
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
            with store.reader() as messages:
                self.wfile.write(b"retry: 2000\n\n")
                while store.is_reading(messages):
                    try:
                        message = messages.get(timeout=HEARTBEAT_S)
                    except queue.Empty:
                        message = b": no change\n\n"
                    if message is None:
                        break
                    self.wfile.write(message)

    def respond(
        self, status: int, body: str = "", kind: str = "text/plain; charset=utf-8", extra: dict[str, str] | None = None
    ) -> None:
        """Send a response."""
        data = body.encode()
        self._head(status, {"Content-Type": kind, "Content-Length": str(len(data)), **(extra or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error as plain text that repeats nothing of the request."""
        self.close_connection = True
        code = 405 if code == 501 else code
        reason = message if self.command is not None and hasattr(self, "headers") else "invalid request"
        extra = {"Allow": "GET, HEAD"} if code == 405 else {}
        self.respond(code, f"{reason}\n", extra=extra)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class PageServer(socketserver.ThreadingTCPServer):
    """Serves the page of a store until `close`.

    Args:
        store: the runs.
        host: address to listen on; other addresses than this machine's own need ``token``.
        port: None for the first free port from 6060, 0 for any free port.
        control: whether the page may send commands.
        token: secret; created if ``control`` needs one.
        names: further accepted values of ``Host``.
        on_command: receives a command, returns an HTTP status and a sentence.
        routes: further paths, each with its media type and a function that returns the text.

    Attributes:
        url: address for a browser, including the token.

    Raises:
        TrainError: the port is taken, or a token is missing.
    """

    daemon_threads, request_queue_size = True, 64

    def __init__(
        self,
        store: RunStore,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        control: bool = False,
        token: str | None = None,
        names: Iterable[str] = (),
        on_command: Callable[[str], Response] | None = None,
        routes: Mapping[str, Route] | None = None,
    ) -> None:
        outside = host not in LOOPBACK
        token = _checked_token(token, host, outside) or (secrets.token_hex(16) if control else "")
        self.store, self.on_command = store, on_command
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        ports = list(range(FIRST_PORT, FIRST_PORT + NUM_PORTS)) if port is None else [port]
        while ports:
            try:
                super().__init__((host, ports.pop(0)), _Handler)
                break
            except (OSError, OverflowError) as fault:
                if not ports:
                    raise TrainError(
                        f"monitor: cannot listen on {host}, port {port} ({fault}). Pass a free port, or 0 for any.",
                        host=host,
                        port=port,
                    ) from None
        port = self.server_address[1]  # pyright: ignore[reportGeneralTypeIssues]
        hosts = _host_names(host, port) | {name.lower() for name in names}
        self.access = _Access(frozenset(hosts), token, control, outside, f"flodl_monitor_{port}")
        store.control = control
        self.routes: dict[str, Route] = {
            "/": ("text/html; charset=utf-8", served_page),
            "/monitor.css": ("text/css; charset=utf-8", lambda: asset("monitor.css")),
            "/monitor.js": ("text/javascript; charset=utf-8", lambda: asset("monitor.js")),
            "/icon.svg": ("image/svg+xml", lambda: asset("icon.svg")),
            "/archive.html": ("text/html; charset=utf-8", lambda: archive_page(store.to_json(), "flodl")),
            "/api/runs": ("application/json", store.to_json),
            **(routes or {}),
        }
        shown = "127.0.0.1" if host in ("0.0.0.0", "localhost", "") else f"[{host}]" if ":" in host else host
        # A browser does not send what follows "#", so no log contains the token of commands.
        self.url = f"http://{shown}:{port}/" + f"?token={token}" * outside + f"#token={token}" * control
        threading.Thread(target=self.serve_forever, args=(0.1,), name="flodl-monitor-server", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: the page reconnects by itself."""

    def command(self, body: bytes) -> Response:
        """Return the response to a command such as ``{"do": "save"}``."""
        try:
            wanted = json.loads(body)["do"]
        except (ValueError, TypeError, KeyError, RecursionError):
            wanted = None
        if self.on_command is None or not isinstance(wanted, str):
            return 400, 'expected {"do": "save"}'
        return self.on_command(wanted)

    def close(self) -> None:
        """Send the last messages, disconnect pages, and free the address."""
        self.store.close()
        self.shutdown()
        self.server_close()
        end = time.monotonic() + CLOSE_TIMEOUT_S
        while self.store.num_readers and time.monotonic() < end:
            time.sleep(0.01)


def _checked_token(token: str | None, host: str, outside: bool) -> str | None:
    if outside and not token:
        raise TrainError(
            f"monitor: {host} is reachable from other machines, expected token=. Or omit host and forward the port: "
            "ssh -L 6060:127.0.0.1:6060",
            host=host,
        )
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isalnum()):
        raise TrainError("monitor: token= needs at least 16 ASCII letters and digits, such as secrets.token_hex(16)")
    if outside:
        warnings.warn(
            f"monitor: listening on {host}; anyone with the token can read the run, and traffic is not encrypted",
            RuntimeWarning,
        )
    return token


def _host_names(host: str, port: int) -> set[str]:
    """Return the values of ``Host`` that a browser sends to this address."""
    names = {host.lower()}
    if host in LOOPBACK:
        names = {"127.0.0.1", "localhost", "::1"} if host == "::1" else {"127.0.0.1", "localhost"}
    elif host in ("", "0.0.0.0", "::"):
        own = socket.gethostname().lower()
        names = {"127.0.0.1", "localhost", own}
        with contextlib.suppress(OSError):
            names |= set(socket.gethostbyname_ex(own)[2])
    return {f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names}
