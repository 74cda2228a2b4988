"""Every head over HTTP, exact, at the device's rate: ``flodl-hf serve``.

settings   models, devices, limits
app        the ASGI application
running    a server run: its socket, and the processes that answer
http       HTTP with the limits of a server, signals, loop
several/   several processes that answer HTTP, and their parent
log        the log
endpoint   a request from its first byte to its answer
protocol   limits of connections
patience   many timers in one
tally      what is counted and logged of a request
doors/     which paths there are, a file for each convention
faults     what a client is told that cannot be answered
answering  answers as JSON, npy, MessagePack
admission  which requests are let in
ledger     what is inside, in memory that processes share
workers    the processes that hold the models, seen from the doors
processes  those processes started, replaced, let go
child      a process of ours, and its socket
link       messages over that
handing    open sockets from process to process
frames     messages between doors and workers
worker     a process that holds models
adapters   which adapters there are
adapted    adapters as models, on the tensors of their bases
turns      its threads
batching   rows of many requests through one device
ticket     a request in its worker
tasks      what is done for a request
peak       what a device could do, and what is asked of it
metrics    what Prometheus is told
timeline   when what of a request happened in its worker
traces     spans for OpenTelemetry
openapi    the OpenAPI document
page       the page to try each head

Needs the extra ``serve``: ``pip install 'flodl-hf[serve]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flodl.errors import ConfigError
from flodl_hf.checkpoints.hub.download import expect_place
from flodl_hf.checkpoints.hub.folders import expect_tokenizer
from flodl_hf.serving.settings import Served, Settings, served

__all__ = ["Served", "Settings", "serve", "served", "serving"]


def serve(
    models: str | Served | Iterable[str | Served],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    head: str = "auto",
    here: Callable[[str], None] | None = None,
    **settings: Any,
) -> None:
    """Serve models over HTTP until a signal says to stop; ready when all of them are warm.

    Args:
        models: folders or names of the Hub; ``"NAME=FOLDER"`` says what clients call one.
        host: the address to listen at; "0.0.0.0" is every one of this machine.
        port: where; 0 takes a port that is free.
        head: the task that models are loaded for; "auto" is what each folder was written for.
        here: called with the server's address when requests are answered.
        **settings: of `Settings`.

    Raises:
        ConfigError: settings that make no sense, or the extra ``serve`` is not installed.
        WorkersError: a model cannot be served.
        DeviceError: the address cannot be had.
    """
    running = _needed()
    running.run(_settings(models, head, settings), host, port, here or (lambda url: None))


@contextmanager
def serving(
    models: str | Served | Iterable[str | Served], *, host: str = "127.0.0.1", port: int = 0, **settings: Any
) -> Iterator[str]:
    """Serve models in a thread for as long as this holds; gives the server's address.

    Args:
        models: as `serve` takes them.
        host: the address to listen at.
        port: 0 takes a port that is free.
        **settings: of `Settings`.

    Raises:
        ConfigError: settings that make no sense, or the extra ``serve`` is not installed.
        WorkersError: a model cannot be served.
        DeviceError: the address cannot be had.
    """
    running = _needed()
    with running.running(_settings(models, "auto", settings), host, port) as (url, _):
        yield url


def _settings(models: str | Served | Iterable[str | Served], head: str, given: dict[str, Any]) -> Settings:
    listed = [models] if isinstance(models, (str, Served)) else models
    settings = Settings(models=served(listed, head), **given)
    for model in settings.models:
        expect_place(model.source)
        expect_tokenizer(model.source, "serve")
    return settings


def _needed() -> Any:
    try:
        from flodl_hf.serving import running
    except ImportError as fault:
        raise ConfigError(
            f"serve: {fault.name} is not installed; install the extra: pip install 'flodl-hf[serve]'"
        ) from None
    return running
