"""A request from its first byte to its answer: the key, the body within its limits, the call, faults, headers, the log.

What is asked is looked at by a door. A client that goes away takes its request out of the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from flodl_hf.serving.admission import known_key
from flodl_hf.serving.answering import Part, accepted, written_in_pieces
from flodl_hf.serving.doors.door import Call, Door, House
from flodl_hf.serving.doors.fields import read
from flodl_hf.serving.faults import RefusedError, Style, told
from flodl_hf.serving.frames import as_json, from_json
from flodl_hf.serving.patience import Patience
from flodl_hf.serving.tally import Tally

__all__ = ["Endpoint", "Headers", "checked_key", "encoded", "fault_answer", "send_whole"]

LOG = logging.getLogger("flodl_hf.serving")
# A body that is too large is read so long and thrown away, for the client to see the answer rather than a closed
# connection.
DISCARD_S = 2.0
# Whether a client is still there is looked at after so long, by a task of its own: most have their answer by then.
PATIENCE_S = 0.25
# Of bodies with fewer bytes the parts are not counted.
LARGE_BODY = 1 << 18

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class _GoneError(Exception):
    """The client is gone."""


class Headers:
    """A request's headers by their names in lower case; of several the last. Few are read, so few become text.

    Args:
        scope: of ASGI.
    """

    __slots__ = ("_held",)

    def __init__(self, scope: Scope) -> None:
        self._held: dict[bytes, bytes] = dict(scope["headers"])

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def get(self, name: bytes, usual: str = "") -> str:
        """Return one, or what stands for it where it is not there."""
        found = self._held.get(name)
        return usual if found is None else found.decode("latin-1")


def checked_key(house: House, headers: Headers) -> str:
    """Return a word for whose request it is.

    Raises:
        RefusedError: keys are needed, and this is none.
    """
    if not house.settings.api_keys:
        return ""
    kind, _, token = headers.get(b"authorization").partition(" ")
    key = token.strip() if kind.lower() == "bearer" else headers.get(b"x-api-key") or headers.get(b"api-key")
    found = known_key(house.settings.api_keys, key)
    if found is None:
        raise RefusedError("the API key is missing or wrong; expected 'Authorization: Bearer KEY'", "key")
    return found


async def send_whole(
    send: Send, status: int, kind: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send an answer in one piece."""
    await send_parts(send, status, kind, [body], headers)


async def send_parts(
    send: Send, status: int, kind: str, parts: list[Part], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send an answer in parts, of which each is let go when it is on its way; ``parts`` is empty afterwards."""
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


async def fault_answer(send: Send, fault: RefusedError, style: Style, *, close: bool = False) -> int:
    """Send what a client is told that is not answered; return the status."""
    status, body, headers = told(fault, style)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if close:
        headers["connection"] = "close"
    await send_whole(send, status, "application/json", as_json(body), encoded(headers))
    return status


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them."""
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


class Endpoint:
    """One door as an ASGI application.

    Args:
        house: what all doors share.
        door: the door.
    """

    def __init__(self, house: House, door: Door) -> None:
        self.house = house
        self.door = door
        self._tally = Tally(house, door)
        self._slow, self._away = Patience(house.settings.body_s), Patience(PATIENCE_S)
        self._type = b"cpu" if house.settings.devices[0].startswith("cpu") else b"device"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        house, door = self.house, self.door
        started = time.perf_counter()
        self._tally.come()
        trace = None if house.traces is None else house.traces.begin(scope, door.path)
        call: Call | None = None
        status, word = 200, ""
        try:
            headers = Headers(scope)
            key = checked_key(house, headers)
            form = accepted(headers.get(b"accept"))
            body = await self._body(headers, receive)
            call = Call(
                house,
                door,
                read(
                    door.fields,
                    _parsed(body, house.settings.max_tokens),
                    most=house.settings.max_inputs,
                ),
                key,
                time.monotonic() + _timeout(headers, house.settings.timeout_s),
                scope.get("path_params", {}).get("name"),
                _priority(headers),
                trace,
                form,
            )
            del body
            parts = await self._unless_gone(self._answered(call, form), receive)
            await send_parts(send, 200, form, parts, self._figures(call, started))
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
        asyncio.get_running_loop().call_soon(self._tally.gone, call, status, word, took)

    async def _answered(self, call: Call, form: str) -> list[Part]:
        """Return the answer to a call, in parts."""
        reply = await self.door.answer(call)
        if call.trace is not None:
            call.trace.answering()
        return await written_in_pieces(reply, form, call.size)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        most = self.house.settings.max_body
        kind = headers.get(b"content-type", "application/json")
        length = headers.get(b"content-length", "0")
        large = not length.isdecimal() or int(length[:19]) > most or len(length) > 18
        parts: list[bytes] = []
        cut, size = _Cut(), 0
        self._slow.begin(cut, cut)
        try:
            more = not large
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _GoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                large = size > most
                more = message.get("more_body", False) and not large
        except asyncio.CancelledError:
            if not cut.taken_back():
                raise
            raise RefusedError(
                f"the body was not there after {self.house.settings.body_s:g} s; send it sooner", "slow"
            ) from None
        finally:
            self._slow.end(cut)
        if large:
            parts.clear()
            await self._discarded(receive, 16 * most)
            raise RefusedError(f"the body has more than {most} bytes; send fewer texts in a request", "size")
        if "json" not in kind.lower():
            raise RefusedError(f"content-type is {kind[:60]!r}; expected application/json", "media")
        packed = headers.get(b"content-encoding", "identity")
        if packed.strip().lower() != "identity":
            raise RefusedError(f"content-encoding is {packed[:60]!r}; expected a body that is not compressed", "media")
        return b"".join(parts)

    async def _discarded(self, receive: Receive, most: int) -> None:
        """Read on for a while, and keep nothing."""
        size, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while more and size <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)

    async def _unless_gone(self, answering: Awaitable[list[Part]], receive: Receive) -> list[Part]:
        """Return the answer; a client that goes away takes it back."""
        cut = _Cut()
        watch: asyncio.Task[None] | None = None

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            cut()

        def look() -> None:
            nonlocal watch
            watch = asyncio.ensure_future(gone())

        self._away.begin(cut, look)
        try:
            return await answering
        except asyncio.CancelledError:
            if not cut.taken_back():
                raise
            raise _GoneError from None
        finally:
            self._away.end(cut)
            if watch is not None:
                watch.cancel()

    def _figures(self, call: Call, started: float) -> list[tuple[bytes, bytes]]:
        """Return headers that say what an answer came to."""
        ms = b"%.1f" % ((time.perf_counter() - started) * 1000)
        found = [
            (b"x-compute-type", self._type),
            (b"x-compute-time", ms),
            (b"x-compute-characters", b"%d" % call.characters),
            (b"x-compute-tokens", b"%d" % call.tokens),
            (b"x-total-time", ms),
            (b"x-queue-time", b"%.1f" % (call.waited_s * 1000)),
            (b"x-inference-time", b"%.1f" % (call.inferred_s * 1000)),
            (b"x-flodl-windows", b"%d" % call.windows),
        ]
        if call.truncated:
            found.append((b"x-flodl-truncated-texts", b"%d" % call.truncated))
        if call.empty:
            found.append((b"x-flodl-empty-texts", b"%d" % call.empty))
        if call.dropped:
            found.append((b"x-flodl-dropped-tokens", b"%d" % call.dropped))
        return found if call.trace is None else found + encoded(call.trace.headers)


class _Cut:
    """Called, it cancels the task that it was made in."""

    __slots__ = ("_called", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._task.cancel()

    def taken_back(self) -> bool:
        """Return whether it was this that cancelled the task, which then goes on."""
        if self._called:
            self._task.uncancel()
        return self._called


def _parsed(body: bytes, most: int) -> Any:
    """Return the JSON of a body.

    Args:
        body: as it came.
        most: tokens of a request. Lists, objects and names are a token each at least, also in a text: what has more of
            them is refused unread, as millions of them keep all others waiting for seconds.

    Raises:
        RefusedError: it is none, or has too many parts.
    """
    if len(body) > LARGE_BODY and (marks := sum(map(body.count, (b"[", b"{", b":")))) > most:
        raise RefusedError(
            f"the body has {marks} brackets and colons; expected at most {most}, as many as tokens, in a request",
            "limit",
        )
    try:
        return from_json(body)
    except (ValueError, RecursionError) as fault:
        raise RefusedError(f"the body is no JSON: {str(fault)[:200]}", "body") from None


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
        asked = float(given)
    except ValueError:
        asked = 0.0
    if not 0 < asked < float("inf"):
        raise RefusedError(f"x-timeout-s is {given[:40]!r}; expected seconds above 0", "field", param="x-timeout-s")
    return min(asked, most)
