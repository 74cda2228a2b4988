"""The OpenAPI document, computed from the doors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flodl_hf.serving.doors.door import Door
from flodl_hf.serving.doors.fields import KINDS

__all__ = ["openapi"]


def openapi(doors: Sequence[Door], *, keys: bool) -> dict[str, Any]:
    """Return the document.

    Args:
        doors: all doors.
        keys: whether requests need an API key.
    """
    from flodl_hf.version import own_version

    paths: dict[str, Any] = {door.path: {"post": _operation(door)} for door in doors}
    for path, says in (
        ("/health", "200 where requests are answered"),
        ("/metrics", "for Prometheus"),
        ("/info", "models, limits and version"),
        ("/v1/models", "the models that are served"),
    ):
        paths[path] = {"get": {"summary": says, "responses": {"200": {"description": says}}}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "flodl-hf serve", "version": own_version(), "description": "Encoders with every head."},
        "paths": paths,
    }
    if keys:
        found["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"key": []}]
    return found


def _operation(door: Door) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {field.name: {**KINDS[field.kind][0], "description": field.says} for field in door.fields},
        "required": [field.name for field in door.fields if field.needed],
        "additionalProperties": not door.strict,
    }
    told = {
        "200": "the answer; also as application/msgpack, and vectors as application/x-npy",
        "429": "too many requests; Retry-After says when to come again",
        "503": "no worker is there, or it ended",
        "504": "too late",
    }
    return {
        "summary": door.says,
        "tags": [door.group],
        "operationId": door.path.strip("/").replace("/", "_").replace("-", "_") or "root",
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {status: {"description": says} for status, says in told.items()},
    }
