"""The little of HTTP that the monitor speaks: strict reading of requests, answers that browsers hold to.

Every answer closes its connection. A request is refused as soon as it is anything but a plain GET or HEAD (or a small
POST, where asked for) with the headers that a browser sends; nothing of it is ever used as a path, and nothing of it
is repeated in an answer.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

__all__ = ["MOST_BODY", "MOST_HEAD", "Refused", "Request", "Rules", "answer", "body_length", "parse_head"]

MOST_HEAD = 8192
MOST_BODY = 1024
MOST_HEADERS = 64

_LINE = re.compile(rb"([A-Z]{1,16}) (\S{1,8000}) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,80}):[ \t]*([\x20-\x7e\t\x80-\xff]*)")
_ONCE = ("host", "origin", "content-length", "cookie", "x-monitor-token", "last-event-id")
_REASONS = {
    200: "OK", 202: "Accepted", 204: "No Content", 303: "See Other", 400: "Bad Request", 403: "Forbidden",
    404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout", 409: "Conflict", 413: "Content Too Large",
    414: "URI Too Long", 415: "Unsupported Media Type", 421: "Misdirected Request", 431: "Header Fields Too Large",
    500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_ALWAYS = (
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", _POLICY),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
)


class Refused(Exception):
    """A request that gets no answer but this status."""

    def __init__(self, status: int, reason: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(status, reason, headers)
        self.status, self.reason, self.headers = status, reason, headers


@dataclass(frozen=True)
class Request:
    """A request as it was understood.

    Attributes:
        method: in capitals.
        path: without its query; used to look up a fixed route and for nothing else.
        query: decoded names and values.
        headers: by lower-case name.
    """

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def parse_head(head: bytes) -> Request:
    """Return the request whose head, up to its empty line, is ``head``.

    Raises:
        Refused: it is not one that a browser sends.
    """
    first, *lines = head.split(b"\r\n")
    if b"\n" in head.replace(b"\r\n", b"") or b"\r" in head.replace(b"\r\n", b"") or b"\0" in head:
        raise Refused(400, "control characters in the head")
    matched = _LINE.fullmatch(first)
    if matched is None:
        raise Refused(400, "no request line")
    method, target = matched[1].decode(), matched[2]
    if len(target) > 2048:
        raise Refused(414, "the target is too long")
    if len(lines) > MOST_HEADERS:
        raise Refused(431, "too many headers")
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise Refused(400, "no header")
        name, value = found[1].decode().lower(), found[2].decode("latin-1").strip(" \t")
        if name in headers and name in _ONCE:
            raise Refused(400, f"{name} twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if "transfer-encoding" in headers:
        raise Refused(400, "a body in pieces")
    path, _, query = target.decode("latin-1").partition("?")
    if not path.startswith("/") or not path.isascii():
        raise Refused(400, "no path")
    try:
        pairs = dict(parse_qsl(query, max_num_fields=8)) if query else {}
    except ValueError:
        raise Refused(400, "no query") from None
    return Request(method, path, pairs, headers)


def body_length(request: Request) -> int:
    """Return how many bytes follow the head.

    Raises:
        Refused: more than are taken, or a body where none belongs.
    """
    text = request.headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise Refused(400, "no length")
    length = int(text)
    if length > MOST_BODY:
        raise Refused(413, "the body is too long")
    if length and request.method != "POST":
        raise Refused(400, "a body where none belongs")
    return length


@dataclass(frozen=True)
class Rules:
    """Who may ask.

    Attributes:
        hosts: values of ``Host`` that are ours, in lower case.
        token: what has to be shown for anything but looking on from this machine.
        control: whether runs may be asked for things.
        read_token: whether looking on needs the token too.
        cookie: name of the cookie that has it.
    """

    hosts: frozenset[str]
    token: str = ""
    control: bool = False
    read_token: bool = False
    cookie: str = "flodl_monitor"

    def check(self, request: Request) -> None:
        """Refuse requests that were sent to another name, or by another site's page.

        Raises:
            Refused: as said.
        """
        headers = request.headers
        host = headers.get("host", "").lower()
        if host not in self.hosts:
            raise Refused(421, "another host")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{name}" for name in self.hosts}:
            raise Refused(403, "another origin")
        if headers.get("sec-fetch-site", "none").lower() not in ("none", "same-origin"):
            raise Refused(403, "another site")
        allowed = ("GET", "HEAD", "POST") if self.control and request.path == "/control" else ("GET", "HEAD")
        if request.method not in allowed:
            raise Refused(405, "no such method", [("Allow", ", ".join(allowed))])

    def may_read(self, request: Request) -> bool:
        """Return whether whoever asks may see anything."""
        return not self.read_token or self.holds(_cookie(request.headers.get("cookie", ""), self.cookie))

    def holds(self, token: str | None) -> bool:
        """Return whether a token is ours; takes as long for any other."""
        mine, given = self.token.encode(), (token or "").encode("utf-8", "surrogatepass")
        return bool(mine) and hmac.compare_digest(mine, given)

    def check_order(self, request: Request) -> None:
        """Refuse orders that do not come from our page with our token.

        Raises:
            Refused: as said.
        """
        if request.headers.get("origin") is None:
            raise Refused(403, "no origin")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "no JSON")
        if not self.holds(request.headers.get("x-monitor-token")):
            raise Refused(403, "no token")


def _cookie(text: str, name: str) -> str | None:
    for part in text.split(";"):
        key, equals, value = part.strip().partition("=")
        if equals and key == name:
            return value
    return None


def answer(
    status: int,
    body: bytes | str | Mapping[str, Any] = b"",
    kind: str = "text/plain; charset=utf-8",
    *,
    headers: Iterable[tuple[str, str]] = (),
    stream: bool = False,
    head_only: bool = False,
) -> bytes:
    """Return an answer as bytes.

    Args:
        body: text, bytes, or what becomes JSON.
        kind: its media type.
        headers: besides those that every answer has.
        stream: more will follow, until the connection ends.
        head_only: leave the body out, as for HEAD.
    """
    if isinstance(body, Mapping):
        body, kind = json.dumps(body), "application/json"
    data = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}", f"Content-Type: {kind}"]
    lines += [] if stream else [f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (*_ALWAYS, *headers)]
    head = "\r\n".join(lines).encode("ascii") + b"\r\n\r\n"
    return head if head_only else head + data
