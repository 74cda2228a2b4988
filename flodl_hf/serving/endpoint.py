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

from starlette.applications import Starlette

from flodl_hf.serving.admission import key_id
from flodl_hf.serving.metrics import RequestMetrics
from flodl_hf.serving.responses import (
    RefusedError,
    Scope,
    Send,
    encode_response,
    encoded,
    response_format,
    send_error,
    send_response,
)
from flodl_hf.serving.routes.route import AppState, Request, Route, read
from flodl_hf.workers.messages import from_json

LOG = logging.getLogger("flodl_hf.serving")
# The rest of a body that is too large is read and discarded for this time, so that the client sees the response instead
# of a closed connection.
DISCARD_S = 2.0
# Interval of checks of a body's time. Only requests that take longer get a task that detects a disconnected client.
CHECK_S = 0.25
# Brackets are counted in bodies of at least this size.
LARGE_BODY = 1 << 18

Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = dict[bytes, bytes]
"""Request headers by lower-case name; the last of duplicates."""


class _GoneError(Exception):
    """The client disconnected."""


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


class App(Starlette):
    """Application that resolves its POST routes by exact path, before Starlette's routing.

    Attributes:
        endpoints: endpoint of each path.
    """

    endpoints: Mapping[str, Endpoint]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            endpoint = self.endpoints.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


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
        self._metrics.of_route("te_request_count").add(1)
        trace = None if state.traces is None else state.traces.begin(scope, route.path)
        request: Request | None = None
        status, word = 200, ""
        watch = _Watch(receive, settings.body_s)
        try:
            headers = dict(scope["headers"])
            key = check_key(state, headers)
            form = response_format(header(headers, b"accept")[:1000])
            body = _parsed(await _body(headers, receive, watch, settings.max_body), settings.max_tokens)
            watch.read = True
            fields = read(route.fields, body, most=settings.max_inputs)
            until, priority = time.monotonic() + _timeout(headers, settings.timeout_s), _priority(headers)
            name = scope.get("path_params", {}).get("name")
            request = Request(state, route, fields, key, until, name, priority, trace)
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


async def _body(headers: Headers, receive: Receive, watch: _Watch, most: int) -> bytes:
    """Return the body of a request.

    Raises:
        RefusedError: it is larger than ``most`` bytes, or not JSON.
    """
    length, parts = header(headers, b"content-length", "0"), list[bytes]()
    large = not length.isdecimal() or int(length[:19]) > most or len(length) > 18
    if large or await _receive(receive, most, parts):
        parts.clear()
        watch.close()  # the answer is known, however late the rest arrives
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                await _receive(receive, 16 * most, None)
        raise RefusedError(f"the body has more than {most} bytes. Send fewer texts in a request.", "size")
    kind, encoding = header(headers, b"content-type", "json"), header(headers, b"content-encoding", "identity")
    if "json" not in kind.lower():
        raise RefusedError(f"content-type is {kind[:60]!r}; expected application/json", "media")
    if encoding.strip().lower() != "identity":
        raise RefusedError(f"content-encoding is {encoding[:60]!r}; expected a body that is not compressed", "media")
    return b"".join(parts)


async def _receive(receive: Receive, most: int, parts: list[bytes] | None) -> bool:
    """Append the parts of a body to a list, or discard them; return True if it has more than ``most`` bytes."""
    size, more = 0, True
    while more and size <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        part = message.get("body", b"")
        size += len(part)
        if parts is not None:
            parts.append(part)
        more = message.get("more_body", False)
    return size > most


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
