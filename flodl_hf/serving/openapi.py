"""The OpenAPI document, derived from the routes."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from flodl_hf.serving.http_errors import statuses
from flodl_hf.serving.routes.fields import schema_of
from flodl_hf.serving.routes.route import Route


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
        "name": "name",
        "in": "path",
        "required": True,
        "description": "name of a served model",
        "schema": {"type": "string"},
    }
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
        paths[below_model(route.path)] = {"post": operation}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "flodl-hf serve", "version": own_version(), "description": "Encoders with every head."},
        "paths": paths,
    }
    if keys:
        found["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"key": []}]
    return found


def below_model(path: str) -> str:
    """Return a route's path below the name of a model."""
    return f"/models/{{name}}/-{'' if path == '/' else path}"


def _operation(route: Route) -> dict[str, Any]:
    schema = schema_of(route.fields)
    answers = {str(status): HTTPStatus(status).phrase for status in statuses(route.style)}
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
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {status: {"description": text} for status, text in sorted(answers.items())},
    }
