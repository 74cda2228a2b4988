"""ASGI application: routes, status pages, OpenAPI document, and start and stop of the workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route as HttpRoute

from flodl.errors import nearest
from flodl_hf.serving.endpoint import App, Endpoint, Receive, check_key
from flodl_hf.serving.responses import (
    KINDS,
    RefusedError,
    Scope,
    Send,
    encoded,
    error_response,
    send_error,
    send_response,
)
from flodl_hf.serving.routes.route import ROUTES, AppState, Route, model_named, schema_of
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.workers import Processes
from flodl_hf.workers.messages import as_json

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

    ``app.state.server`` is the shared `AppState`, ``app.state.processes`` the worker processes; ``processes.load()``
    reloads all models.

    Args:
        settings: the server's settings.

    Raises:
        ConfigError: traces cannot be sent.
    """
    state = AppState(settings)
    return make_app(state, Processes(settings, state.workers))


def make_app(state: AppState, processes: Processes | None) -> Starlette:
    """Return an application with all routes.

    Args:
        state: the shared state.
        processes: the worker processes; None if another process owns them.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if processes is not None and not state.workers.ready.is_set():
            await processes.load()
        try:
            yield
        finally:
            if processes is not None:
                await processes.close()
            if state.traces is not None:  # the remaining ones are sent
                await asyncio.to_thread(state.traces.close)

    endpoints = {route.path: Endpoint(state, route) for route in ROUTES}
    posts = [HttpRoute(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    below = [
        HttpRoute(_below_model(path).replace("{name}", "{name:path}"), endpoint, methods=["POST"])
        for path, endpoint in endpoints.items()
    ]
    gets = [HttpRoute(one.path.replace("{name}", "{name:path}"), one, methods=["GET"]) for one in _status_pages(state)]
    app = App(routes=[*posts, *gets, *below], lifespan=lifespan)
    app.endpoints = endpoints
    app.router.redirect_slashes = False
    for status in (404, 405):
        app.add_exception_handler(status, _not_found)
    app.state.server, app.state.processes = state, processes
    return app


async def _not_found(request: Any, fault: Any) -> Any:
    from starlette.responses import Response

    path, headers = request.url.path[:200], dict(fault.headers or {})
    if taken := ", ".join(sorted(filter(None, headers.get("Allow", "").split(", ")))):
        message = f"{path}: found method {request.method}, expected {taken}"
    else:
        hint = nearest(path, [route.path for route in ROUTES])
        message = f"{request.method} {path}: no such route{hint}; see /openapi.json"
    style = "openai" if path.startswith("/v1/") else "cohere" if path.startswith("/v2/") else "tei"
    _, body, _ = error_response(RefusedError(message, "path"), style)
    return Response(as_json(body), status_code=fault.status_code, headers=headers, media_type="application/json")


@dataclass(frozen=True, eq=False)
class _StatusPage:
    """A GET route with information about the server; a page with an API key unless it is public."""

    state: AppState
    path: str
    summary: str
    what: Callable[..., Any]
    kind: str = "application/json"
    public: bool = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            if not self.public:
                check_key(self.state, dict(scope["headers"]))
            body = self.what(**scope.get("path_params", {}))
            if asyncio.iscoroutine(body):
                status, body = await body
        except RefusedError as fault:
            await send_error(scope, send, fault, "openai" if scope["path"].startswith("/v1/") else "tei")
            return
        data = body if isinstance(body, bytes) else as_json(body)
        policy = _DOCS_CSP if scope["path"] == "/docs" else _CSP
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"} if "html" in self.kind else {}
        await send_response(scope, send, status, self.kind, [data], encoded(headers))


def _status_pages(state: AppState) -> list[_StatusPage]:
    """Return the GET routes with information about the server."""
    workers = state.workers

    async def ready() -> tuple[int, Any]:
        if workers.ready.is_set():
            return 200, {"ready": True}
        return 503, {"error": "no worker process is running", "error_type": "Unhealthy"}

    async def metrics_text() -> tuple[int, Any]:
        metrics, processes, restarts = state.metrics, 1, 0
        if state.collect_metrics is not None:
            metrics, processes, restarts = await state.collect_metrics()
        peak = workers.peak
        for name, value in {
            "te_queue_size": state.admission.counters.inside,
            "flodl_queue_seconds": state.admission.wait_s,
            "flodl_tokens_per_second": state.admission.rate,
            "flodl_device_peak_operations": peak,
            "flodl_device_share": metrics.operations.now() / peak if peak else 0.0,
            "flodl_worker_restarts_total": workers.restarts,
            "flodl_workers": len(workers.active),
            "flodl_http_processes": processes,
            "flodl_http_process_restarts_total": restarts,
            "flodl_ready": float(workers.ready.is_set()),
        }.items():
            metrics.set(name, value)
        return 200, metrics.text().encode()

    def model(name: str) -> dict[str, Any]:
        name = model_named(workers.models, name)
        info = workers.models[name]
        base = info.get("base")
        return {"id": name, "object": "model", "created": 0, "owned_by": "flodl-hf", "parent": base, **info}

    def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in workers.models]}

    def test_page() -> bytes:
        known = {
            name: {part: info[part] for part in ("head", "tasks", "mask")} for name, info in workers.models.items()
        }
        template = (files("flodl_hf.serving") / "page.html").read_text("utf-8")
        # A model name must not end the script element, so "<" is escaped.
        return template.replace("@MODELS@", json.dumps(known).replace("<", "\\u003c")).encode()

    def document() -> dict[str, Any]:
        listed = [(page.path, page.summary, page.public) for page in pages]
        return openapi(ROUTES, listed, keys=bool(state.settings.api_keys))

    text, html, page = (
        "text/plain; version=0.0.4; charset=utf-8",
        "text/html; charset=utf-8",
        partial(_StatusPage, state),
    )
    pages = [
        *(page(path, "200 if requests are answered", ready) for path in ("/health", "/ready", "/ping")),
        page("/live", "200 while the HTTP process runs", lambda: {"live": True}),
        page("/metrics", "metrics in Prometheus' text format", metrics_text, text),
        page("/info", "models, limits and version", partial(_info, state), public=False),
        page("/v1/models", "served models", models, public=False),
        page("/v1/models/{name}", "one served model", model, public=False),
        page("/openapi.json", "this document", document),
        page("/docs", "Swagger page of this document", lambda: _SWAGGER, html),
        page("/", "HTML page to try each model", test_page, html),
    ]
    return pages


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
        "workers": [worker.info["device"] for worker in state.workers.active],
    }


def openapi(routes: Sequence[Route], pages: Sequence[tuple[str, str, bool]], *, keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        routes: all routes.
        pages: path, summary and whether it is accessible without a key, of each GET route.
        keys: whether requests need an API key.
    """
    from flodl_hf.checkpoints.system import own_version

    paths: dict[str, Any] = {route.path: {"post": _operation(route)} for route in routes}
    name = {
        "name": "name", "in": "path", "required": True, "description": "name of a served model",
        "schema": {"type": "string"},
    }  # fmt: skip
    for path, summary, public in pages:
        described: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": summary}}}
        if "{name}" in path:
            described["parameters"] = [name]
        if keys and public:
            described["security"] = []
        paths.setdefault(path, {})["get"] = described
    for route in routes:
        operation = _operation(route)
        operation |= {"operationId": f"model_{operation['operationId']}", "parameters": [name]}
        paths[_below_model(route.path)] = {"post": operation}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "flodl-hf serve", "version": own_version(), "description": "Encoders with every head."},
        "paths": paths,
    }
    if keys:
        found["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"key": []}]
    return found


def _operation(route: Route) -> dict[str, Any]:
    # Without 499, which only logs contain.
    statuses = {at_tei if route.style == "tei" else elsewhere for at_tei, elsewhere, _ in KINDS.values()} - {499}
    answers = {str(status): HTTPStatus(status).phrase for status in statuses}
    answers |= {
        "200": "the result; also as application/msgpack, and vectors as application/x-npy",
        "429": "too many requests; Retry-After contains the time to retry",
        "503": "no worker process is running, or it ended",
        "504": "timeout",
    }
    return {
        "summary": route.summary,
        "tags": [route.group],
        "operationId": route.path.strip("/").replace("/", "_").replace("-", "_") or "root",
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(route.fields)}}},
        "responses": {status: {"description": text} for status, text in sorted(answers.items())},
    }


def _below_model(path: str) -> str:
    """Return a route's path below the name of a model."""
    return f"/models/{{name}}/-{'' if path == '/' else path}"
