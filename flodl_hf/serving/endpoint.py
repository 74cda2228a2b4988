"""One HTTP request from its first byte to its response: API key, body limits, errors, headers and log.

`flodl_hf.serving.routes` computes the result. If a client disconnects, its request is cancelled and leaves the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from flodl_hf.serving.admission import key_id
from flodl_hf.serving.http_errors import RefusedError, Style, error_response
from flodl_hf.serving.metrics import RequestMetrics
from flodl_hf.serving.response_encoding import Part, encode_response, response_format
from flodl_hf.serving.routes.fields import read
from flodl_hf.serving.routes.route import AppState, Request, Route
from flodl_hf.workers.messages import as_json, from_json

LOG = logging.getLogger("flodl_hf.serving")
# The rest of a body that is too large is read and discarded for this time, so that the client sees the response instead
# of a closed connection.
DISCARD_S = 2.0
# Only requests that take longer than this get a task that detects a disconnected client.
DISCONNECT_CHECK_S = 0.25
# Brackets are counted in bodies of at least this size.
LARGE_BODY = 1 << 18

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class _GoneError(Exception):
    """The client disconnected."""


class Headers:
    """Request headers by lower-case name; the last of duplicates. Values are decoded when they are read.

    Args:
        scope: ASGI scope.
    """

    __slots__ = ("_values",)

    def __init__(self, scope: Scope) -> None:
        self._values: dict[bytes, bytes] = dict(scope["headers"])

    def __contains__(self, name: bytes) -> bool:
        return name in self._values

    def get(self, name: bytes, default: str = "") -> str:
        """Return the value of a header, or a default."""
        found = self._values.get(name)
        return default if found is None else found.decode("latin-1")


def check_key(state: AppState, headers: Headers) -> str:
    """Return a short identifier of the client's API key.

    Raises:
        RefusedError: an API key is required, and the request has none or a wrong one.
    """
    if not state.settings.api_keys:
        return ""
    kind, _, token = headers.get(b"authorization").partition(" ")
    key = token.strip() if kind.lower() == "bearer" else headers.get(b"x-api-key") or headers.get(b"api-key")
    found = key_id(state.settings.api_keys, key)
    if found is None:
        raise RefusedError("the API key is missing or wrong; expected 'Authorization: Bearer KEY'", "key")
    return found


async def send_response(
    send: Send, status: int, kind: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a response in one piece."""
    await send_parts(send, status, kind, [body], headers)


async def send_parts(
    send: Send, status: int, kind: str, parts: list[Part], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a response in parts, releasing each part after it was sent; ``parts`` is empty afterwards."""
    listed = [
        (b"content-type", kind.encode()),
        (b"content-length", b"%d" % sum(map(len, parts))),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    parts.reverse()
    while parts:
        await send({"type": "http.response.body", "body": bytes(parts.pop()), "more_body": bool(parts)})


async def send_error(send: Send, fault: RefusedError, style: Style, *, close: bool = False) -> int:
    """Send an error response and return its status."""
    status, body, headers = error_response(fault, style)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if close:
        headers["connection"] = "close"
    await send_response(send, status, "application/json", as_json(body), encoded(headers))
    return status


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers in ASGI's form."""
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


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
        state, route = self.state, self.route
        started = time.perf_counter()
        self._metrics.started()
        trace = None if state.traces is None else state.traces.begin(scope, route.path)
        request: Request | None = None
        status, word = 200, ""
        try:
            headers = Headers(scope)
            key = check_key(state, headers)
            form = response_format(headers.get(b"accept"))
            body = await self._body(headers, receive)
            request = Request(
                state,
                route,
                read(
                    route.fields,
                    _parsed(body, state.settings.max_tokens),
                    most=state.settings.max_inputs,
                ),
                key,
                time.monotonic() + _timeout(headers, state.settings.timeout_s),
                scope.get("path_params", {}).get("name"),
                _priority(headers),
                trace,
            )
            del body
            parts = await self._until_disconnect(self._answered(request, form), receive)
            await send_parts(send, 200, form, parts, self._measurement_headers(request, started))
        except RefusedError as fault:
            word = fault.kind
            status = await send_error(send, fault, route.style, close=fault.kind in ("size", "slow", "key"))
        except (_GoneError, asyncio.CancelledError):
            status, word = 499, "gone"
        except Exception:
            LOG.exception("request failed")
            status, word = 500, "internal"
            await send_error(
                send, RefusedError("internal error; the server's log has details", "internal"), route.style
            )
        if trace is not None:
            trace.end(status, word, request)
        # The response is written in the next iteration of the loop; metrics are updated after that.
        took = time.perf_counter() - started
        asyncio.get_running_loop().call_soon(self._metrics.finished, request, status, word, took)

    async def _answered(self, request: Request, form: str) -> list[Part]:
        """Return the encoded response, in parts."""
        reply = await self.route.answer(request)
        if request.trace is not None:
            request.trace.answering()
        return await encode_response(reply, form, request.size)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        most = self.state.settings.max_body
        kind = headers.get(b"content-type", "application/json")
        length = headers.get(b"content-length", "0")
        large = not length.isdecimal() or int(length[:19]) > most or len(length) > 18
        parts: list[bytes] = []
        size, more = 0, not large
        try:
            async with asyncio.timeout(self.state.settings.body_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    large = size > most
                    more = message.get("more_body", False) and not large
        except TimeoutError:
            raise RefusedError(
                f"the body did not arrive within {self.state.settings.body_s:g} s. Send it sooner.", "slow"
            ) from None
        if large:
            parts.clear()
            await self._discarded(receive, 16 * most)
            raise RefusedError(f"the body has more than {most} bytes. Send fewer texts in a request.", "size")
        if "json" not in kind.lower():
            raise RefusedError(f"content-type is {kind[:60]!r}; expected application/json", "media")
        encoding = headers.get(b"content-encoding", "identity")
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

    async def _until_disconnect(self, answering: Awaitable[list[Part]], receive: Receive) -> list[Part]:
        """Return the result of ``answering``; cancel it if the client disconnects."""
        cut = _CancelTask()
        watch: asyncio.Task[None] | None = None

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            cut()

        def look() -> None:
            nonlocal watch
            watch = asyncio.ensure_future(gone())

        timer = asyncio.get_running_loop().call_later(DISCONNECT_CHECK_S, look)
        try:
            return await answering
        except asyncio.CancelledError:
            if not cut.was_called():
                raise
            raise _GoneError from None
        finally:
            timer.cancel()
            if watch is not None:
                watch.cancel()

    def _measurement_headers(self, request: Request, started: float) -> list[tuple[bytes, bytes]]:
        """Return the response headers with times and counts."""
        ms = b"%.1f" % ((time.perf_counter() - started) * 1000)
        found = [
            (b"x-compute-type", self._type),
            (b"x-compute-time", ms),
            (b"x-compute-characters", b"%d" % request.characters),
            (b"x-compute-tokens", b"%d" % request.tokens),
            (b"x-total-time", ms),
            (b"x-tokenization-time", b"%.1f" % (request.tokenized_s * 1000)),
            (b"x-queue-time", b"%.1f" % (request.waited_s * 1000)),
            (b"x-inference-time", b"%.1f" % (request.inferred_s * 1000)),
            (b"x-flodl-windows", b"%d" % request.windows),
        ]
        if request.truncated:
            found.append((b"x-flodl-truncated-texts", b"%d" % request.truncated))
        if request.empty:
            found.append((b"x-flodl-empty-texts", b"%d" % request.empty))
        if request.dropped:
            found.append((b"x-flodl-dropped-tokens", b"%d" % request.dropped))
        return found if request.trace is None else found + encoded(request.trace.headers)


class _CancelTask:
    """Callable that cancels the task in which it was created."""

    __slots__ = ("_called", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._task.cancel()

    def was_called(self) -> bool:
        """Return whether this object cancelled the task; if so, undo the cancellation."""
        if self._called:
            self._task.uncancel()
        return self._called


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
    given = headers.get(b"x-priority").strip().lower()
    if given not in _PRIORITIES:
        raise RefusedError(
            f"x-priority is {given[:40]!r}; expected one of {', '.join(_PRIORITIES)}", "field", param="x-priority"
        )
    return _PRIORITIES[given]


def _timeout(headers: Headers, most: float) -> float:
    if b"x-timeout-s" not in headers:
        return most
    given = headers.get(b"x-timeout-s")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RefusedError(f"x-timeout-s is {given[:40]!r}; expected seconds above 0", "field", param="x-timeout-s")
    return min(seconds, most)
