"""ASGI application: routes, status pages, and start and stop of the workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from flodl.errors import nearest
from flodl_hf.serving.admission import Admission
from flodl_hf.serving.endpoint import (
    Endpoint,
    Receive,
    Scope,
    Send,
    check_key,
    encoded,
    send_error,
    send_response,
)
from flodl_hf.serving.http_errors import RefusedError, Style, error_response
from flodl_hf.serving.metrics import Metrics
from flodl_hf.serving.openapi import below_model, openapi
from flodl_hf.serving.routes import ROUTES
from flodl_hf.serving.routes.route import AppState, CollectMetrics, model_named
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.shared_counters import SharedCounters
from flodl_hf.serving.traces import Traces
from flodl_hf.serving.worker_processes import Processes
from flodl_hf.serving.workers import Workers
from flodl_hf.workers.messages import as_json

LOG = logging.getLogger("flodl_hf.serving")
_CSP = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'"
)

# Browsers load the page's script from this address, as FastAPI's page does.
_SWAGGER_URL = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/"
_DOCS_CSP = (
    f"default-src 'none'; style-src 'unsafe-inline' {_SWAGGER_URL}; script-src 'unsafe-inline' {_SWAGGER_URL}; "
    "img-src data:; connect-src 'self'; frame-ancestors 'none'"
)
_SWAGGER = f"""<!doctype html>
<html><head><meta charset="utf-8"><title>flodl-hf serve</title>
<link rel="stylesheet" href="{_SWAGGER_URL}swagger-ui.css"></head>
<body><div id="page"></div><script src="{_SWAGGER_URL}swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({{url: "openapi.json", dom_id: "#page"}})</script></body></html>
""".encode()


def create_app(settings: Settings) -> Starlette:
    """Return the ASGI application; its workers run from startup to shutdown.

    ``app.state.server`` is the shared `AppState`, ``app.state.processes`` the worker processes; ``processes.reload()``
    reloads all models.

    Args:
        settings: the server's settings.

    Raises:
        ConfigError: traces cannot be sent.
    """
    state = new_state(settings)
    processes = Processes(settings, state.workers)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if not state.workers.ready:
            await processes.start()
        try:
            yield
        finally:
            await processes.close()
            await close_state(state)

    app = make_app(state, lifespan)
    app.state.processes = processes
    return app


def new_state(
    settings: Settings, counters: SharedCounters | None = None, collect_metrics: CollectMetrics | None = None
) -> AppState:
    """Return the state that all routes share.

    Args:
        settings: the server's settings.
        counters: counters of current requests; None creates counters for this process only.
        collect_metrics: function that returns the metrics of all HTTP processes; None if there is one process.

    Raises:
        ConfigError: traces cannot be sent.
    """
    metrics = Metrics()
    admission = Admission(settings, counters)
    queue, fill = metrics.metric("flodl_queue_tokens"), metrics.metric("flodl_batch_fill")
    sizes, lengths = metrics.metric("te_batch_next_size"), metrics.metric("te_batch_next_tokens")
    times = metrics.metric("flodl_batch_seconds")

    def on_batches(ran: list[Any], queued: int) -> None:
        queue.value = queued
        if not ran:
            return
        admission.rate = state.workers.rate
        admission.full = state.workers.max_batch_tokens * len(state.workers.pids)
        metrics.last_batch = time.monotonic()
        for rows, tokens, seconds in ran:
            sizes.add(rows)
            lengths.add(tokens)
            times.add(seconds)
            fill.value = tokens / state.workers.max_batch_tokens

    traces = None if settings.otlp_endpoint is None else Traces(settings.otlp_endpoint)
    state = AppState(settings, Workers(settings, on_batches), admission, metrics, traces, collect_metrics)
    return state


def make_app(state: AppState, lifespan: Any) -> Starlette:
    """Return an application with all routes.

    Args:
        state: the shared state.
        lifespan: Starlette's lifespan.
    """
    endpoints = {route.path: Endpoint(state, route) for route in ROUTES}
    posts = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    below = [
        Route(below_model(path).replace("{name}", "{name:path}"), endpoint, methods=["POST"])
        for path, endpoint in endpoints.items()
    ]
    app = _App(endpoints, routes=[*posts, *_status_routes(state), *below], lifespan=lifespan)
    app.router.redirect_slashes = False
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_found)
    app.state.server = state
    return app


async def close_state(state: AppState) -> None:
    """Send the remaining traces."""
    if state.traces is not None:
        await asyncio.to_thread(state.traces.close)


class _App(Starlette):
    """Application that resolves its POST routes by exact path, before Starlette's routing.

    Args:
        endpoints: endpoint of each path.
        **options: of Starlette.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint], **options: Any) -> None:
        super().__init__(**options)
        self._endpoints = endpoints

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


async def _not_found(request: Any, fault: Any) -> Any:
    from starlette.responses import Response

    path, headers = request.url.path[:200], dict(fault.headers or {})
    style: Style = "openai" if path.startswith("/v1/") else "cohere" if path.startswith("/v2/") else "tei"
    if taken := ", ".join(sorted(filter(None, headers.get("Allow", "").split(", ")))):
        message = f"{path}: found method {request.method}, expected {taken}"
    else:
        hint = nearest(path, [route.path for route in ROUTES])
        message = f"{request.method} {path}: no such route{hint}; see /openapi.json"
    _, body, _ = error_response(RefusedError(message, "path"), style)
    return Response(as_json(body), status_code=fault.status_code, headers=headers, media_type="application/json")


@dataclass(frozen=True, eq=False)
class _StatusPage:
    """A GET route with information about the server."""

    state: AppState
    path: str
    summary: str
    what: Callable[..., Any]
    kind: str = "application/json"
    public: bool = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not self.public:
                check_key(self.state, dict(scope["headers"]))
            found = self.what(**scope.get("path_params", {}))
            status, body = found if isinstance(found, tuple) else await found
        except RefusedError as fault:
            await send_error(scope, send, fault, "openai" if scope["path"].startswith("/v1/") else "tei")
            return
        data = body if isinstance(body, bytes) else as_json(body)
        policy = _DOCS_CSP if scope["path"] == "/docs" else _CSP
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"} if "html" in self.kind else {}
        await send_response(scope, send, status, self.kind, [data], encoded(headers))


def _status_routes(state: AppState) -> list[Route]:
    """Return the GET routes with information about the server."""

    def ready() -> tuple[int, Any]:
        if state.workers.ready:
            return 200, {"ready": True}
        return 503, {"error": "no worker process is running", "error_type": "Unhealthy"}

    async def metrics_text() -> tuple[int, Any]:
        workers = state.workers
        metrics, processes, restarts = (
            (state.metrics, 1, 0) if state.collect_metrics is None else await state.collect_metrics()
        )
        metrics.set("te_queue_size", state.admission.counters.inside)
        metrics.set("flodl_queue_seconds", state.admission.wait_s)
        metrics.set("flodl_tokens_per_second", state.admission.rate)
        metrics.set("flodl_device_peak_operations", workers.peak)
        metrics.set("flodl_device_share", metrics.operations.now() / workers.peak if workers.peak else 0.0)
        metrics.set("flodl_worker_restarts_total", workers.restarts)
        metrics.set("flodl_workers", len(workers.pids))
        metrics.set("flodl_http_processes", processes)
        metrics.set("flodl_http_process_restarts_total", restarts)
        metrics.set("flodl_ready", float(workers.ready))
        return 200, metrics.text().encode()

    text, html = "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"

    def one_model(name: str) -> tuple[int, Any]:
        return 200, _model(model_named(state.workers.models, name), state)

    def described() -> tuple[int, Any]:
        listed = [(page.path, page.summary, page.public) for page in pages]
        return 200, openapi(ROUTES, listed, keys=bool(state.settings.api_keys))

    page = partial(_StatusPage, state)
    pages = [
        *(page(path, "200 if requests are answered", ready) for path in ("/health", "/ready", "/ping")),
        page("/live", "200 while the HTTP process runs", lambda: (200, {"live": True})),
        page("/metrics", "metrics in Prometheus' text format", metrics_text, text),
        page("/info", "models, limits and version", lambda: (200, _info(state)), public=False),
        page("/v1/models", "served models", lambda: (200, _models(state)), public=False),
        page("/v1/models/{name}", "one served model", one_model, public=False),
        page("/openapi.json", "this document", described),
        page("/docs", "Swagger page of this document", lambda: (200, _SWAGGER), html),
        page("/", "HTML page to try each model", lambda: (200, _page(state.workers.models)), html),
    ]
    return [Route(one.path.replace("{name}", "{name:path}"), one, methods=["GET"]) for one in pages]


@cache
def _template() -> str:
    return (files("flodl_hf.serving") / "page.html").read_text("utf-8")


def _page(models: Mapping[str, dict[str, Any]]) -> bytes:
    """Return the HTML page to try each model."""
    known = {name: {part: info[part] for part in ("head", "tasks", "mask")} for name, info in models.items()}
    # A model name must not end the script element, so "<" is escaped.
    return _template().replace("@MODELS@", json.dumps(known).replace("<", "\\u003c")).encode()


def _models(state: AppState) -> dict[str, Any]:
    return {"object": "list", "data": [_model(name, state) for name in state.workers.models]}


def _model(name: str, state: AppState) -> dict[str, Any]:
    info = state.workers.models[name]
    return {"id": name, "object": "model", "created": 0, "owned_by": "flodl-hf", "parent": info.get("base"), **info}


def _info(state: AppState) -> dict[str, Any]:
    """Return the fields of text-embeddings-inference for the first model, and information about all models."""
    from flodl_hf.checkpoints.system import own_version

    settings = state.settings
    (name, info), *_ = state.workers.models.items()
    labels = {"id2label": dict(enumerate(info["labels"])), "label2id": {n: i for i, n in enumerate(info["labels"])}}
    if info["head"] == "base":
        kind: dict[str, Any] = {"embedding": {"pooling": info["pooling"][0]}}
    else:
        kind = {"reranker" if "rerank" in info["tasks"] else "classifier": labels}
    return {
        "model_id": name,
        "served_model_name": name,
        "model_sha": None,
        "model_dtype": settings.precision or info["dtype"],
        "model_type": kind,
        "max_concurrent_requests": settings.max_concurrent,
        "max_input_length": info["max_tokens"],
        "max_batch_tokens": state.workers.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_inputs,
        "auto_truncate": False,
        "tokenization_workers": settings.max_concurrent,
        "version": own_version(),
        "sha": None,
        "docker_label": None,
        "models": state.workers.models,
        "devices": list(settings.devices),
        "workers": state.workers.devices,
    }


async def reload_on(processes: Processes, event: asyncio.Event) -> None:
    """Reload all models whenever an event is set.

    Args:
        processes: the worker processes.
        event: the event.
    """
    while True:
        await event.wait()
        event.clear()
        try:
            await processes.reload()
            LOG.info("reloaded")
        except Exception:
            LOG.exception("reload failed; the previous models remain in use")
