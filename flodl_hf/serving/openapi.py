"""The OpenAPI document, computed from the doors."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from flodl_hf.serving.doors.door import Door
from flodl_hf.serving.doors.fields import schema_of
from flodl_hf.serving.faults import statuses

__all__ = ["Told", "below_model", "openapi"]

Told = tuple[str, str, bool]


def openapi(doors: Sequence[Door], told: Sequence[Told], *, keys: bool) -> dict[str, Any]:
    """Return the document.

    Args:
        doors: all doors.
        told: paths that say something of the server: what, and whether without a key.
        keys: whether requests need an API key.
    """
    from flodl_hf.checkpoints.version import own_version

    paths: dict[str, Any] = {door.path: {"post": _operation(door)} for door in doors}
    for path, says, open_to_all in told:
        described: dict[str, Any] = {"summary": says, "responses": {"200": {"description": says}}}
        if keys and open_to_all:
            described["security"] = []
        paths.setdefault(path, {})["get"] = described
    name = {"name": "name", "in": "path", "required": True, "description": "a model", "schema": {"type": "string"}}
    for door in doors:
        operation = _operation(door)
        operation |= {"operationId": f"model_{operation['operationId']}", "parameters": [name]}
        paths[below_model(door.path)] = {"post": operation}
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
    """Return a door's path below the name of a model."""
    return f"/models/{{name}}/-{'' if path == '/' else path}"


def _operation(door: Door) -> dict[str, Any]:
    schema = schema_of(door.fields)
    answers = {str(status): HTTPStatus(status).phrase for status in statuses(door.style)}
    answers |= {
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
        "responses": {status: {"description": says} for status, says in sorted(answers.items())},
    }
