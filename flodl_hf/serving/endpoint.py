"""A request from its first byte to its answer: the key, the body within its limits, the call, faults, headers, the log.

What is asked is looked at by a door. A client that goes away takes its request out of the batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flodl_hf.serving.admission import known_key
from flodl_hf.serving.answering import accepted, written
from flodl_hf.serving.doors.door import Call, Door, House, Reply
from flodl_hf.serving.doors.fields import read
from flodl_hf.serving.faults import RefusedError, Style, told
from flodl_hf.serving.frames import as_json, from_json

__all__ = ["Endpoint", "checked_key", "fault_answer", "headers_of", "send_whole"]

LOG = logging.getLogger("flodl_hf.serving")
# A body that is too large is read so long and thrown away, for the client to see the answer rather than a closed
# connection.
DISCARD_S = 2.0
# Whether a client is still there is looked at after so long: most have their answer by then.
PATIENCE_S = 0.05

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class _GoneError(Exception):
    """The client is gone."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a request's headers by their names in lower case; of several the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def checked_key(house: House, headers: Mapping[str, str]) -> str:
    """Return a word for whose request it is.

    Raises:
        RefusedError: keys are needed, and this is none.
    """
    given = headers.get("authorization", "")
    kind, _, token = given.partition(" ")
    key = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key") or headers.get("api-key")
    found = known_key(house.settings.api_keys, key)
    if found is None:
        raise RefusedError("the API key is missing or wrong; expected 'Authorization: Bearer KEY'", "key")
    return found


async def send_whole(send: Send, status: int, kind: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Send an answer in one piece."""
    listed = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
        *((name.encode(), value.encode("latin-1", "replace")) for name, value in (headers or {}).items()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


async def fault_answer(send: Send, fault: RefusedError, style: Style, *, close: bool = False) -> int:
    """Send what a client is told that is not answered; return the status."""
    status, body, headers = told(fault, style)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if close:
        headers["connection"] = "close"
    await send_whole(send, status, "application/json", as_json(body), headers)
    return status


class Endpoint:
    """One door as an ASGI application.

    Args:
        house: what all doors share.
        door: the door.
    """

    def __init__(self, house: House, door: Door) -> None:
        self.house = house
        self.door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        house, door = self.house, self.door
        started = time.perf_counter()
        house.metrics.add("te_request_count", method=door.path)
        trace = None if house.traces is None else house.traces.begin(scope, door.path)
        call: Call | None = None
        status, word = 200, ""
        try:
            headers = headers_of(scope)
            key = checked_key(house, headers)
            form = accepted(headers.get("accept", ""))
            body = await self._body(headers, receive)
            call = Call(
                house,
                door,
                read(door.fields, _parsed(body), strict=door.strict),
                key,
                time.monotonic() + _timeout(headers, house.settings.timeout_s),
                scope.get("path_params", {}).get("name"),
                _priority(headers),
                trace,
            )
            del body
            reply = await self._unless_gone(door.answer(call), receive)
            if trace is not None:
                trace.answering()
            data = written(reply, form)
            await send_whole(send, 200, form, data, self._figures(call, started))
        except RefusedError as fault:
            word = fault.kind
            status = await fault_answer(send, fault, door.style, close=fault.kind in ("size", "slow", "key"))
        except (_GoneError, asyncio.CancelledError):
            status, word = 499, "gone"
        except Exception:
            LOG.exception("a request failed")
            status, word = 500, "internal"
            await fault_answer(send, RefusedError("the server failed; see its log", "internal"), door.style)
        if trace is not None:
            trace.end(status, word, call)
        # The answer leaves when the loop turns, and is counted behind that.
        took = time.perf_counter() - started
        asyncio.get_running_loop().call_soon(self._count, call, status, word, took)

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        most = self.house.settings.max_body
        kind = headers.get("content-type", "application/json")
        length = headers.get("content-length", "0")
        large = not length.isdecimal() or int(length[:19]) > most or len(length) > 18
        parts, size = [], 0
        try:
            async with asyncio.timeout(DISCARD_S if large else self.house.settings.body_s) as limit:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    size += len(message.get("body", b""))
                    if size > most and not large:
                        large = True
                        parts.clear()
                        limit.reschedule(asyncio.get_running_loop().time() + DISCARD_S)
                    if not large:
                        parts.append(message.get("body", b""))
                    elif size > 16 * most:
                        break
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if not large:
                raise RefusedError(
                    f"the body was not there after {self.house.settings.body_s:g} s; send it sooner", "slow"
                ) from None
        if large:
            raise RefusedError(f"the body has more than {most} bytes; send fewer texts in a request", "size")
        if "json" not in kind.lower():
            raise RefusedError(f"content-type is {kind[:60]!r}; expected application/json", "media")
        return b"".join(parts)

    async def _unless_gone(self, answering: Awaitable[Reply], receive: Receive) -> Reply:
        """Return the answer; a client that goes away takes it back."""

        asking = asyncio.current_task()
        assert asking is not None
        away = False

        async def gone() -> None:
            nonlocal away
            while (await receive())["type"] != "http.disconnect":
                pass
            away = True
            asking.cancel()

        watch: asyncio.Task[None] | None = None

        def look() -> None:
            nonlocal watch
            watch = asyncio.ensure_future(gone())

        timer = asyncio.get_running_loop().call_later(PATIENCE_S, look)
        try:
            return await answering
        except asyncio.CancelledError:
            if not away:
                raise
            asking.uncancel()
            raise _GoneError from None
        finally:
            timer.cancel()
            if watch is not None:
                watch.cancel()

    def _figures(self, call: Call, started: float) -> dict[str, str]:
        """Return headers that say what an answer came to."""
        ms = (time.perf_counter() - started) * 1000
        found = {
            "x-compute-type": "cpu" if self.house.settings.devices[0].startswith("cpu") else "device",
            "x-compute-time": f"{ms:.1f}",
            "x-compute-characters": str(call.characters),
            "x-compute-tokens": str(call.tokens),
            "x-total-time": f"{ms:.1f}",
            "x-queue-time": f"{call.waited_s * 1000:.1f}",
            "x-inference-time": f"{call.inferred_s * 1000:.1f}",
            "x-flodl-windows": str(call.windows),
        }
        if call.dropped:
            found["x-flodl-dropped-tokens"] = str(call.dropped)
        return found if call.trace is None else found | call.trace.headers

    def _count(self, call: Call | None, status: int, word: str, seconds: float) -> None:
        metrics, path = self.house.metrics, self.door.path
        if status == 200:
            metrics.add("te_request_success", method=path)
        else:
            metrics.add("te_request_failure", err=word)
        metrics.observe("te_request_duration", seconds, method=path)
        if call is not None and call.model:
            metrics.add("flodl_requests_total", model=call.model, status=str(status))
        if call is not None and status == 200:
            self._count_answered(call, seconds)
        if not LOG.isEnabledFor(logging.INFO):
            return
        said: dict[str, Any] = {"door": path, "status": status, "ms": round(seconds * 1000, 2)}
        if word:
            said["why"] = word
        if call is not None:
            said |= {"model": call.model, "texts": call.texts, "tokens": call.tokens, "dropped": call.dropped}
            if call.key:
                said["key"] = call.key
            if call.trace is not None:
                said["trace"] = call.trace.id
            if self.house.settings.log_texts:
                said["fields"] = dict(call.fields)
        # Made here: to look for its caller would take longer than all else that is said of a request.
        record = logging.LogRecord(LOG.name, logging.INFO, __file__, 0, "request", None, None, "_count")
        record.__dict__["said"] = said
        LOG.handle(record)

    def _count_answered(self, call: Call, seconds: float) -> None:
        metrics = self.house.metrics
        metrics.observe("flodl_request_seconds", seconds, model=call.model)
        metrics.add("flodl_texts_total", call.texts, model=call.model)
        metrics.observe("te_request_queue_duration", call.waited_s)
        metrics.observe("te_request_inference_duration", call.inferred_s)
        metrics.observe("te_request_input_length", call.tokens)
        metrics.add("flodl_tokens_total", call.tokens, model=call.model)
        metrics.add("flodl_rows_total", call.windows, model=call.model)
        if (info := self.house.workers.models.get(call.model)) is not None:
            operations = call.tokens * info["operations"]
            metrics.add("flodl_operations_total", operations, model=call.model)
            metrics.operations.add(operations)
        if call.dropped:
            metrics.add("flodl_dropped_tokens_total", call.dropped, model=call.model)
        for word, name in (("embed", "te_embed_count"), ("rerank", "te_rerank_count"), ("predict", "te_predict_count")):
            if word in self.door.path:
                metrics.add(name, call.texts)


def _parsed(body: bytes) -> Any:
    try:
        return from_json(body)
    except (ValueError, RecursionError) as fault:
        raise RefusedError(f"the body is no JSON: {str(fault)[:200]}", "body") from None


_PRIORITIES = {"high": 1, "normal": 0, "low": -1}


def _priority(headers: Mapping[str, str]) -> int:
    given = headers.get("x-priority", "normal").strip().lower()
    if given not in _PRIORITIES:
        raise RefusedError(
            f"x-priority is {given[:40]!r}; expected one of {', '.join(_PRIORITIES)}", "field", param="x-priority"
        )
    return _PRIORITIES[given]


def _timeout(headers: Mapping[str, str], most: float) -> float:
    given = headers.get("x-timeout-s")
    if given is None:
        return most
    try:
        asked = float(given)
    except ValueError:
        asked = 0.0
    if not 0 < asked < float("inf"):
        raise RefusedError(f"x-timeout-s is {given[:40]!r}; expected seconds above 0", "field", param="x-timeout-s")
    return min(asked, most)
