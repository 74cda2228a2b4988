"""Error responses: status and body in the form of each API convention.

text-embeddings-inference uses 413 for exceeded limits and 424 for a model without the required head; OpenAI and Cohere
use 400. An unknown field is 422 everywhere.
"""

from __future__ import annotations

from typing import Any, Literal

from flodl.errors import FlodlError

Style = Literal["tei", "openai", "cohere"]

# kind: status of TEI's and our own routes, status of other routes, TEI's error type, OpenAI's type.
_KINDS: dict[str, tuple[int, int, str, str]] = {
    "body": (400, 400, "Validation", "invalid_request_error"),
    "field": (422, 400, "Validation", "invalid_request_error"),
    "unknown": (422, 422, "Validation", "invalid_request_error"),
    "long": (413, 400, "Validation", "invalid_request_error"),
    "limit": (413, 400, "Validation", "invalid_request_error"),
    "empty": (400, 400, "Empty", "invalid_request_error"),
    "tokenizer": (422, 400, "Tokenizer", "invalid_request_error"),
    "refused": (422, 400, "Validation", "invalid_request_error"),
    "path": (404, 404, "Validation", "invalid_request_error"),
    "model": (404, 404, "Validation", "invalid_request_error"),
    "head": (424, 400, "Backend", "invalid_request_error"),
    "accept": (406, 406, "Validation", "invalid_request_error"),
    "media": (415, 415, "Validation", "invalid_request_error"),
    "size": (413, 413, "Validation", "invalid_request_error"),
    "slow": (408, 408, "Validation", "invalid_request_error"),
    "key": (401, 401, "Validation", "authentication_error"),
    "overloaded": (429, 429, "Overloaded", "rate_limit_error"),
    "deadline": (504, 504, "Overloaded", "timeout_error"),
    "given_up": (499, 499, "Overloaded", "timeout_error"),
    "ended": (503, 503, "Unhealthy", "service_unavailable_error"),
    "internal": (424, 500, "Backend", "server_error"),
}
_CODES = {"model": "model_not_found", "key": "invalid_api_key", "overloaded": "rate_limit_exceeded"}


class RefusedError(FlodlError):
    """A request that is refused.

    Attributes:
        kind: the reason, a key of the table above.
        param: the invalid field, or None.
        after_s: time to retry in seconds, or None.
    """

    kind: str
    param: str | None
    after_s: float | None

    def __init__(self, message: str, kind: str = "refused", **details: Any) -> None:
        super().__init__(message, **{"kind": kind, "param": None, "after_s": None, **details})


def statuses(style: Style) -> list[int]:
    """Return the error statuses of routes of a style, without 499, which only logs contain."""
    return sorted({(row[0] if style == "tei" else row[1]) for row in _KINDS.values()} - {499})


def error_response(fault: RefusedError, style: Style) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers of an error."""
    at_tei, elsewhere, word, kind = _KINDS[fault.kind]
    headers = {"x-flodl-fault": fault.kind}
    if fault.after_s is not None:
        headers["retry-after"] = str(int(fault.after_s))
    if fault.kind == "key":
        headers["www-authenticate"] = "Bearer"
    if style == "tei":
        return at_tei, {"error": fault.message, "error_type": word}, headers
    if style == "cohere":
        return elsewhere, {"message": fault.message}, headers
    code = _CODES.get(fault.kind)
    return elsewhere, {"error": {"message": fault.message, "type": kind, "param": fault.param, "code": code}}, headers
