"""A token goes to the endpoint and to no other host or port, whatever address an answer names.

huggingface_hub keeps it for every server that it takes for the Hub's, which a mirror is not: a redirect from one of
them to another carried it along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

__all__ = ["at_home", "same_origin"]

_PORTS = {"http": 80, "https": 443}
_home: ContextVar[str | None] = ContextVar("flodl_hf_token_home", default=None)
_bound: Counter[tuple[str, str]] = Counter()
_lock = Lock()


def same_origin(url: str, other: str) -> bool:
    """Return whether two addresses are of one host, port and scheme."""
    return _origin(url) == _origin(other)


def _origin(url: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme.lower(), (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme.lower())
    except ValueError:  # no port that there could be: of no server
        return "", url, None


@contextmanager
def at_home(endpoint: str, authorization: str | None = None) -> Iterator[None]:
    """Restrict the Hub client's tokens to one server, within this context and its copies.

    Args:
        endpoint: its address.
        authorization: a header sent only to that server meanwhile, also in threads started by the client.
    """
    from huggingface_hub import utils

    # Where a connection fails, huggingface_hub closes its client and has its factory make another for the next try.
    http: Any = getattr(utils, "_http", None)
    factory = getattr(http, "_GLOBAL_CLIENT_FACTORY", None)
    if factory is not None and not isinstance(factory, _Guarding):
        http._GLOBAL_CLIENT_FACTORY = _Guarding(factory)
    _guarded(utils.get_session())
    before = _home.set(endpoint)
    key = (authorization or "", endpoint)
    with _lock:
        _bound[key] += 1
    try:
        yield
    finally:
        _home.reset(before)
        with _lock:
            _bound[key] -= 1
            if not _bound[key]:
                del _bound[key]


@dataclass(frozen=True, slots=True)
class _Guarding:
    """Makes clients as another factory does, which take tokens to one server alone."""

    factory: Callable[[], Any]

    def __call__(self) -> Any:
        return _guarded(self.factory())


def _guarded(client: Any) -> Any:
    # The client of older releases has no such hooks, and drops tokens by itself where host or port change.
    hooks = getattr(client, "event_hooks", None)
    if hooks is not None and _without_token not in hooks["request"]:
        client.event_hooks = {**hooks, "request": [*hooks["request"], _without_token]}
    return client


def _without_token(request: Any) -> None:
    """Take the token from a request that goes elsewhere."""
    found = request.headers.get("authorization")
    if not found:
        return
    home = _home.get()
    with _lock:
        homes = [home] if home is not None else [place for header, place in _bound if header == found]
    if homes and not any(same_origin(str(request.url), place) for place in homes):
        del request.headers["authorization"]
