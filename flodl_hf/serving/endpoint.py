"""One HTTP request from its first byte to its response: API key, body limits, errors, headers and log.

`flodl_hf.serving.routes` computes the result. If a client disconnects, its request is cancelled and leaves the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flodl_hf.serving.admission import key_id
from flodl_hf.serving.http_errors import RefusedError, Style, error_response
from flodl_hf.serving.metrics import RequestMetrics
from flodl_hf.serving.protocol import CYCLE, write_response
from flodl_hf.serving.response_encoding import Part, encode_response, response_format
from flodl_hf.serving.routes.fields import read
from flodl_hf.serving.routes.route import AppState, Request, Route
from flodl_hf.workers.messages import as_json, from_json

LOG = logging.getLogger("flodl_hf.serving")
# The rest of a body that is too large is read and discarded for this time, so that the client sees the response instead
# of a closed connection.
DISCARD_S = 2.0
# Interval of checks of a body's time. Only requests that take longer get a task that detects a disconnected client.
CHECK_S = 0.25
# Brackets are counted in bodies of at least this size.
LARGE_BODY = 1 << 18

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class _GoneError(Exception):
    """The client disconnected."""


Headers = dict[bytes, bytes]
"""Request headers by lower-case name; the last of duplicates."""


def header(headers: Headers, name: bytes, default: str = "") -> str:
    """Return the value of a header, or a default."""
    value = headers.get(name)
    return default if value is None else value.decode("latin-1")


def check_key(state: AppState, headers: Headers) -> str:
    """Return a short identifier of the client's API key.

    Raises:
        RefusedError: an API key is required, and the request has none or a wrong one.
    """
    if not state.settings.api_keys:
        return ""
    kind, _, token = header(headers, b"authorization").partition(" ")
    key = token.strip() if kind.lower() == "bearer" else header(headers, b"x-api-key") or header(headers, b"api-key")
    found = key_id(state.settings.api_keys, key)
    if found is None:
        raise RefusedError("the API key is missing or wrong; expected 'Authorization: Bearer KEY'", "key")
    return found


async def send_response(
    scope: Scope, send: Send, status: int, kind: str, parts: list[Part], headers: bytes = b""
) -> None:
    """Send a response, releasing each part after it was sent; ``parts`` is empty afterwards.

    Args:
        scope: ASGI scope.
        send: ASGI function.
        status: HTTP status.
        kind: media type.
        parts: parts of the body.
        headers: further headers; each ends with a line break.
    """
    size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
    head = _HEAD % (kind.encode(), size, headers)
    if len(parts) == 1 and scope["method"] != "HEAD" and write_response(scope, status, head, parts[0]):
        return
    listed = [tuple(line.split(b": ", 1)) for line in head.splitlines()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    parts.reverse()
    while parts:
        await send({"type": "http.response.body", "body": bytes(parts.pop()), "more_body": bool(parts)})


_HEAD = b"content-type: %b\r\ncontent-length: %d\r\nx-content-type-options: nosniff\r\ncache-control: no-store\r\n%b"


async def send_error(scope: Scope, send: Send, fault: RefusedError, style: Style, *, close: bool = False) -> int:
    """Send an error response and return its status."""
    status, body, headers = error_response(fault, style)
    if close:
        scope.pop(CYCLE, None)  # uvicorn closes the connection
        headers["connection"] = "close"
    await send_response(scope, send, status, "application/json", [as_json(body)], encoded(headers))
    return status


def encoded(headers: Mapping[str, str]) -> bytes:
    """Return headers as they are sent; characters outside Latin-1 are replaced.

    Raises:
        ValueError: a header contains a line break, which would end it.
    """
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if wrong := [line for line in lines if "\r" in line or "\n" in line]:
        raise ValueError(f"response headers: found a line break in {wrong[0][:80]!r}, expected one line")
    return "".join([f"{line}\r\n" for line in lines]).encode("latin-1", "replace")


class Endpoint:
    """ASGI application of one route.

    Args:
        state: the shared state.
        route: the route.
    """

    def __init__(self, state: AppState, route: Route) -> None:
        self.state = state
        self.route = route
        self._metrics = RequestMetrics(state, route)
        self._type = b"cpu" if state.settings.devices[0].startswith("cpu") else b"device"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state, route, settings = self.state, self.route, self.state.settings
        started = time.perf_counter()
        self._metrics.started()
        trace = None if state.traces is None else state.traces.begin(scope, route.path)
        request: Request | None = None
        status, word = 200, ""
        watch = _Watch(receive, settings.body_s)
        try:
            headers = dict(scope["headers"])
            key = check_key(state, headers)
            form = response_format(header(headers, b"accept"))
            body = _parsed(await self._body(headers, receive, watch), settings.max_tokens)
            watch.read = True
            request = Request(
                state,
                route,
                read(route.fields, body, most=settings.max_inputs),
                key,
                time.monotonic() + _timeout(headers, settings.timeout_s),
                scope.get("path_params", {}).get("name"),
                _priority(headers),
                trace,
            )
            del body
            reply = await route.answer(request)
            if trace is not None:
                trace.answering()
            parts = await encode_response(reply, form, request.size)
            watch.close()
            await send_response(scope, send, 200, form, parts, self._measurements(request, started))
        except RefusedError as fault:
            word = fault.kind
            status = await send_error(scope, send, fault, route.style, close=word in ("size", "slow", "key"))
        except _GoneError:
            status, word = 499, "gone"
        except asyncio.CancelledError:
            status, word = 499, "gone"
            if watch.is_late():
                word = "slow"
                late = f"the body did not arrive within {settings.body_s:g} s. Send it sooner."
                status = await send_error(scope, send, RefusedError(late, word), route.style, close=True)
        except Exception:
            LOG.exception("request failed")
            status, word = 500, "internal"
            fault = RefusedError("internal error; the server's log has details", "internal")
            await send_error(scope, send, fault, route.style)
        finally:
            watch.close()
        if trace is not None:
            trace.end(status, word, request)
        # The response is written in the next iteration of the loop; metrics are updated after that.
        watch.loop.call_soon(self._metrics.finished, request, status, word, time.perf_counter() - started)

    async def _body(self, headers: Headers, receive: Receive, watch: _Watch) -> bytes:
        most = self.state.settings.max_body
        kind = header(headers, b"content-type", "application/json")
        length = header(headers, b"content-length", "0")
        large = not length.isdecimal() or int(length[:19]) > most or len(length) > 18
        parts: list[bytes] = []
        size, more = 0, not large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            large = size > most
            more = message.get("more_body", False) and not large
        if large:
            parts.clear()
            watch.close()  # the answer is known, however late the rest arrives
            await self._discarded(receive, 16 * most)
            raise RefusedError(f"the body has more than {most} bytes. Send fewer texts in a request.", "size")
        if "json" not in kind.lower():
            raise RefusedError(f"content-type is {kind[:60]!r}; expected application/json", "media")
        encoding = header(headers, b"content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise RefusedError(
                f"content-encoding is {encoding[:60]!r}; expected a body that is not compressed", "media"
            )
        return b"".join(parts)

    async def _discarded(self, receive: Receive, most: int) -> None:
        """Read and discard the rest of a body for a limited time."""
        size, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while more and size <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)

    def _measurements(self, request: Request, started: float) -> bytes:
        """Return the response headers with times and counts."""
        ms = (time.perf_counter() - started) * 1000
        found = _MEASUREMENTS % (
            self._type, ms, request.characters, request.tokens, ms, request.tokenized_s * 1000,
            request.waited_s * 1000, request.inferred_s * 1000, request.windows,
        )  # fmt: skip
        if request.truncated:
            found += b"x-flodl-truncated-texts: %d\r\n" % request.truncated
        if request.empty:
            found += b"x-flodl-empty-texts: %d\r\n" % request.empty
        if request.dropped:
            found += b"x-flodl-dropped-tokens: %d\r\n" % request.dropped
        return found if request.trace is None else found + encoded(request.trace.headers)


_MEASUREMENTS = (
    b"x-compute-type: %b\r\nx-compute-time: %.1f\r\nx-compute-characters: %d\r\nx-compute-tokens: %d\r\n"
    b"x-total-time: %.1f\r\nx-tokenization-time: %.1f\r\nx-queue-time: %.1f\r\nx-inference-time: %.1f\r\n"
    b"x-flodl-windows: %d\r\n"
)


class _Watch:
    """Cancels the current task if the body of its request is late or its client disconnects, with one timer.

    Args:
        receive: ASGI function.
        body_s: time in which the body has to arrive.
    """

    __slots__ = ("_body_s", "_cancelled", "_late", "_receive", "_task", "_timer", "_watcher", "loop", "read")

    def __init__(self, receive: Receive, body_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.read = False
        """Whether the body has arrived."""
        self._task = asyncio.current_task(self.loop)
        self._receive, self._body_s = receive, body_s
        self._late = self._cancelled = False
        self._watcher: asyncio.Task[None] | None = None
        self._timer = self.loop.call_later(min(CHECK_S, body_s), self._check)

    def _check(self) -> None:
        self._body_s -= CHECK_S
        if self.read:
            self._watcher = asyncio.ensure_future(self._disconnected())
        elif self._body_s > 0:
            self._timer = self.loop.call_later(min(CHECK_S, self._body_s), self._check)
        else:
            self._late = True
            self._cancel()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        assert self._task is not None
        self._cancelled = True
        self._task.cancel()

    def is_late(self) -> bool:
        """Return whether the task was cancelled because of the body; undo a cancellation by this object."""
        if self._cancelled and self._task is not None:
            self._task.uncancel()
        return self._late

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()


def _parsed(body: bytes, most: int) -> Any:
    """Return the JSON value of a body.

    Args:
        body: the bytes.
        most: maximum number of tokens of a request. Each list, object and key has at least one token; a body with more
            of them is refused before parsing, because millions of them would block the event loop for seconds.

    Raises:
        RefusedError: the body is not JSON, or has too many parts.
    """
    if len(body) > LARGE_BODY and (marks := sum(map(body.count, (b"[", b"{", b":")))) > most:
        raise RefusedError(
            f"the body has {marks} brackets and colons; expected at most {most}, as many as tokens, in a request",
            "limit",
        )
    try:
        return from_json(body)
    except (ValueError, RecursionError) as fault:
        raise RefusedError(f"the body is invalid: found {str(fault)[:200]}, expected JSON", "body") from None


_PRIORITIES = {"high": 1, "normal": 0, "low": -1}


def _priority(headers: Headers) -> int:
    if b"x-priority" not in headers:
        return 0
    given = header(headers, b"x-priority").strip().lower()
    if given not in _PRIORITIES:
        raise RefusedError(
            f"x-priority is {given[:40]!r}; expected one of {', '.join(_PRIORITIES)}", "field", param="x-priority"
        )
    return _PRIORITIES[given]


def _timeout(headers: Headers, most: float) -> float:
    if b"x-timeout-s" not in headers:
        return most
    given = header(headers, b"x-timeout-s")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RefusedError(f"x-timeout-s is {given[:40]!r}; expected seconds above 0", "field", param="x-timeout-s")
    return min(seconds, most)
