"""What a client is told that cannot be answered: a status and a body, in the words of the door that it came to.

Statuses are those of each convention: text-embeddings-inference has 413 for what breaks a limit and 424 for a model
that cannot, OpenAI's and Cohere's interfaces have 400. A field that a route does not have is 422 everywhere.
"""

from __future__ import annotations

from typing import Any, Literal

from flodl.errors import FlodlError

__all__ = ["RefusedError", "Style", "statuses", "told"]

Style = Literal["tei", "openai", "cohere"]

# kind: statuses at TEI's doors and ours, and at the others; TEI's word; OpenAI's type.
_KINDS: dict[str, tuple[int, int, str, str]] = {
    "body": (400, 400, "Validation", "invalid_request_error"),
    "field": (422, 400, "Validation", "invalid_request_error"),
    "unknown": (422, 422, "Validation", "invalid_request_error"),
    "long": (413, 400, "Validation", "invalid_request_error"),
    "limit": (413, 400, "Validation", "invalid_request_error"),
    "empty": (400, 400, "Empty", "invalid_request_error"),
    "tokenizer": (422, 400, "Tokenizer", "invalid_request_error"),
    "refused": (422, 400, "Validation", "invalid_request_error"),
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
    """A request that is not answered.

    Attributes:
        kind: why, in a word.
        param: the field that is wrong, or None.
        after_s: when to come again, or None.
    """

    kind: str
    param: str | None
    after_s: float | None

    def __init__(self, message: str, kind: str = "refused", **details: Any) -> None:
        super().__init__(message, **{"kind": kind, "param": None, "after_s": None, **details})


def statuses(style: Style) -> list[int]:
    """Return the statuses of faults at doors of a style; that of a client that has gone is seen in logs alone."""
    return sorted({(row[0] if style == "tei" else row[1]) for row in _KINDS.values()} - {499})


def told(fault: RefusedError, style: Style) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers of a fault."""
    at_tei, elsewhere, word, kind = _KINDS[fault.kind]
    headers = {"x-flodl-fault": fault.kind}
    if fault.after_s is not None:
        headers["retry-after"] = str(int(fault.after_s))
    if style == "tei":
        return at_tei, {"error": fault.message, "error_type": word}, headers
    if style == "cohere":
        return elsewhere, {"message": fault.message}, headers
    code = _CODES.get(fault.kind)
    return elsewhere, {"error": {"message": fault.message, "type": kind, "param": fault.param, "code": code}}, headers
