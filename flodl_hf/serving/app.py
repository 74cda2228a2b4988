"""The ASGI application: doors, what is said of the server, and the workers' life around it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from flodl.errors import nearest
from flodl_hf.serving.admission import Admission
from flodl_hf.serving.doors import DOORS
from flodl_hf.serving.doors.door import Gathered, House
from flodl_hf.serving.endpoint import (
    Endpoint,
    Headers,
    Receive,
    Scope,
    Send,
    checked_key,
    encoded,
    fault_answer,
    send_whole,
)
from flodl_hf.serving.faults import RefusedError
from flodl_hf.serving.frames import as_json
from flodl_hf.serving.ledger import Ledger
from flodl_hf.serving.metrics import Metrics
from flodl_hf.serving.openapi import below_model, openapi
from flodl_hf.serving.page import page
from flodl_hf.serving.processes import Processes
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.traces import Traces
from flodl_hf.serving.workers import Workers

__all__ = ["app_of", "closed", "create_app", "new_house", "reload_on"]

LOG = logging.getLogger("flodl_hf.serving")
_CSP = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'"
)


def create_app(settings: Settings) -> Starlette:
    """Return the application; its workers live from its startup to its shutdown.

    ``app.state.house`` is what its doors share, ``app.state.processes`` the processes of the workers;
    ``processes.reload()`` loads all models anew.

    Args:
        settings: what is served, and how.

    Raises:
        ConfigError: traces cannot be sent.
    """
    house = new_house(settings)
    processes = Processes(settings, house.workers)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if not house.workers.ready:
            await processes.start()
        try:
            yield
        finally:
            await processes.close()
            await closed(house)

    app = app_of(house, lifespan)
    app.state.processes = processes
    return app


def new_house(settings: Settings, ledger: Ledger | None = None, gathered: Gathered | None = None) -> House:
    """Return what doors share.

    Args:
        settings: what is served, and how.
        ledger: what is inside, shared with other processes; None is nothing, shared with nobody.
        gathered: gives what all processes counted; None where there is this one.

    Raises:
        ConfigError: traces cannot be sent.
    """
    metrics = Metrics()
    admission = Admission(settings, ledger)
    queue, fill = metrics.counter("flodl_queue_tokens"), metrics.counter("flodl_batch_fill")
    sizes, lengths = metrics.histogram("te_batch_next_size"), metrics.histogram("te_batch_next_tokens")
    times = metrics.histogram("flodl_batch_seconds")

    def heard(ran: list[Any], queued: int) -> None:
        queue.value = queued
        admission.rate = house.workers.rate
        admission.full = house.workers.max_batch_tokens * len(house.workers.pids)
        if ran:
            metrics.heard = time.monotonic()
        for rows, tokens, seconds in ran:
            sizes.add(rows)
            lengths.add(tokens)
            times.add(seconds)
            fill.value = tokens / house.workers.max_batch_tokens

    traces = None if settings.otlp_endpoint is None else Traces(settings.otlp_endpoint)
    house = House(settings, Workers(settings, heard), admission, metrics, traces, gathered)
    return house


def app_of(house: House, lifespan: Any) -> Starlette:
    """Return an application of doors.

    Args:
        house: what they share.
        lifespan: of Starlette.
    """
    doors = {door.path: Endpoint(house, door) for door in DOORS}
    app = _App(doors, routes=[*_answered(doors), *_told(house), *_answered_below(house)], lifespan=lifespan)
    app.router.redirect_slashes = False
    app.add_exception_handler(404, _nowhere)
    app.add_exception_handler(405, _nowhere)
    app.state.house = house
    return app


async def closed(house: House) -> None:
    """Send what is left of traces."""
    if house.traces is not None:
        await asyncio.to_thread(house.traces.close)


class _App(Starlette):
    """An application whose doors are found by their path alone, before all that Starlette does for a request.

    Args:
        doors: by path.
        **words: of Starlette.
    """

    def __init__(self, doors: Mapping[str, Endpoint], **words: Any) -> None:
        super().__init__(**words)
        self._doors = doors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            endpoint = self._doors.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def _answered(doors: Mapping[str, Endpoint]) -> list[Route]:
    """Return the doors."""
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in doors.items()]


def _answered_below(house: House) -> list[Route]:
    """Return the doors once more, below a model's name."""
    return [
        Route(below_model(door.path).replace("{name}", "{name:path}"), Endpoint(house, door), methods=["POST"])
        for door in DOORS
    ]


async def _nowhere(request: Any, fault: Any) -> Any:
    from starlette.responses import Response

    path, headers = request.url.path[:200], dict(fault.headers or {})
    if taken := ", ".join(sorted(filter(None, headers.get("Allow", "").split(", ")))):
        said = f"{request.method} is not what {path} takes; expected {taken}"
    else:
        said = f"{request.method} {path} leads nowhere{nearest(path, [door.path for door in DOORS])}; see /openapi.json"
    body = {"error": said, "error_type": "Validation"}
    return Response(as_json(body), status_code=fault.status_code, headers=headers, media_type="application/json")


class _Told:
    """A path that says something of the server."""

    def __init__(self, house: House, what: Any, kind: str = "application/json", *, open_to_all: bool = True) -> None:
        self.house = house
        self.what = what
        self.kind = kind
        self.open_to_all = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not self.open_to_all:
                checked_key(self.house, Headers(scope))
            found = self.what()
            status, body = found if isinstance(found, tuple) else await found
        except RefusedError as fault:
            await fault_answer(send, fault, "tei")
            return
        data = body if isinstance(body, bytes) else as_json(body)
        headers = {"content-security-policy": _CSP, "referrer-policy": "no-referrer"} if "html" in self.kind else {}
        await send_whole(send, status, self.kind, data, encoded(headers))


def _told(house: House) -> list[Route]:
    """Return the paths that say something of the server."""

    def ready() -> tuple[int, Any]:
        there = house.workers.ready
        return (200, {"ready": True}) if there else (503, {"error": "no worker is there", "error_type": "Unhealthy"})

    async def counted() -> tuple[int, Any]:
        workers = house.workers
        metrics, processes, restarts = (house.metrics, 1, 0) if house.gathered is None else await house.gathered()
        metrics.set("te_queue_size", house.admission.inside)
        metrics.set("flodl_queue_seconds", house.admission.wait_s)
        metrics.set("flodl_tokens_per_second", house.admission.rate)
        metrics.set("flodl_device_peak_operations", workers.peak)
        metrics.set("flodl_device_share", metrics.operations.now() / workers.peak if workers.peak else 0.0)
        metrics.set("flodl_worker_restarts_total", workers.restarts)
        metrics.set("flodl_workers", len(workers.pids))
        metrics.set("flodl_http_processes", processes)
        metrics.set("flodl_http_process_restarts_total", restarts)
        metrics.set("flodl_ready", float(workers.ready))
        return 200, metrics.text().encode()

    text = "text/plain; version=0.0.4; charset=utf-8"

    def described() -> tuple[int, Any]:
        said = [(path, says, told.open_to_all) for path, says, told in listed]
        return 200, openapi(DOORS, said, keys=bool(house.settings.api_keys))

    listed = [
        ("/health", "200 where requests are answered", _Told(house, ready)),
        ("/ready", "200 where requests are answered", _Told(house, ready)),
        ("/ping", "200 where requests are answered", _Told(house, ready)),
        ("/live", "200 while this process runs", _Told(house, lambda: (200, {"live": True}))),
        ("/metrics", "for Prometheus", _Told(house, counted, text)),
        ("/info", "models, limits and version", _Told(house, lambda: (200, _info(house)), open_to_all=False)),
        ("/v1/models", "the models that are served", _Told(house, lambda: (200, _models(house)), open_to_all=False)),
        ("/openapi.json", "this document", _Told(house, described)),
        (
            "/",
            "a page to try each model",
            _Told(house, lambda: (200, page(house.workers.models).encode()), "text/html; charset=utf-8"),
        ),
    ]
    return [Route(path, told, methods=["GET"]) for path, _, told in listed]


def _models(house: House) -> dict[str, Any]:
    data = [
        {"id": name, "object": "model", "created": 0, "owned_by": "flodl-hf", "parent": info.get("base"), **info}
        for name, info in house.workers.models.items()
    ]
    return {"object": "list", "data": data}


def _info(house: House) -> dict[str, Any]:
    """Return text-embeddings-inference's fields for the first model, and what is known of all."""
    from flodl_hf.checkpoints.version import own_version

    settings = house.settings
    (name, info), *_ = house.workers.models.items()
    labels = {"id2label": dict(enumerate(info["labels"])), "label2id": {n: i for i, n in enumerate(info["labels"])}}
    if info["head"] == "base":
        kind: dict[str, Any] = {"embedding": {"pooling": info["pooling"][0]}}
    else:
        kind = {"reranker" if "rerank" in info["tasks"] else "classifier": labels}
    return {
        "model_id": name,
        "model_sha": None,
        "model_dtype": settings.precision or info["dtype"],
        "model_type": kind,
        "max_concurrent_requests": settings.max_concurrent,
        "max_input_length": info["max_tokens"],
        "max_batch_tokens": house.workers.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_inputs,
        "auto_truncate": False,
        "tokenization_workers": settings.max_concurrent,
        "version": own_version(),
        "sha": None,
        "docker_label": None,
        "models": house.workers.models,
        "devices": list(settings.devices),
        "workers": house.workers.devices,
    }


async def reload_on(processes: Processes, asked: asyncio.Event) -> None:
    """Load all models anew whenever it is asked for.

    Args:
        processes: of the workers.
        asked: set to ask.
    """
    while True:
        await asked.wait()
        asked.clear()
        try:
            await processes.reload()
            LOG.info("reloaded")
        except Exception:
            LOG.exception("not reloaded; the models that were loaded before go on")
