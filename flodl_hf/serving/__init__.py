"""HTTP server for every head, with exact results: ``flodl-hf serve``.

Start-up: settings (options, folders of adapters), running (sockets, event loops, and the parent of several HTTP
processes), http_process (one of several), app (ASGI application, status pages, OpenAPI), http (uvicorn, signals, limits
of connections).

Requests: endpoint (one HTTP request), routes/ (one file for each API convention), admission (limits, overload, and
current requests of all processes), responses (JSON, npy, Arrow, MessagePack, errors), metrics (Prometheus, and metrics
and log of requests), traces (OpenTelemetry).

Workers: workers (requests to worker processes, their start and replacement), worker (a worker process and its threads),
request (one request in it), batching (its queue, speed of the device), tasks (model calls), adapter_models.
`flodl_hf.workers` has processes, connections and messages.

Other servers: triton_server; `flodl_hf.jobs.ray.deployment`. Client: client.

Needs the extra ``serve``: ``pip install 'flodl-hf[serve]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flodl.errors import ConfigError
from flodl_hf.checkpoints.folders import expect_tokenizer
from flodl_hf.checkpoints.hub.download import expect_place
from flodl_hf.serving.settings import Served, Settings, served

__all__ = ["Served", "Settings", "serve", "serving"]


def serve(
    models: str | Served | Iterable[str | Served],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    head: str = "auto",
    served_model_name: str | None = None,
    here: Callable[[str], None] | None = None,
    **settings: Any,
) -> None:
    """Serve models over HTTP until SIGINT or SIGTERM.

    Args:
        models: folders or Hub names; ``"NAME=FOLDER"`` sets the name that clients use.
        host: address to listen on; "0.0.0.0" is all interfaces.
        port: port to listen on; 0 selects a free one.
        head: task for which models are loaded; "auto" uses the task of each folder.
        served_model_name: the name of the only model, in ``/v1/models`` and in responses; default: the last part of its
            path. Requests may use any name if one model is served.
        here: called with the server's URL as soon as all models are warm and requests are answered.
        **settings: fields of `Settings`.

    Raises:
        ConfigError: settings are invalid, or the extra ``serve`` is not installed.
        WorkersError: a model cannot be served.
        DeviceError: the address cannot be bound.
    """
    running = _needed()
    running.run(_settings(models, head, settings, served_model_name), host, port, here or (lambda url: None))


@contextmanager
def serving(
    models: str | Served | Iterable[str | Served], *, host: str = "127.0.0.1", port: int = 0, **settings: Any
) -> Iterator[str]:
    """Serve models in a background thread; a context manager that returns the server's URL.

    Args:
        models: as for `serve`.
        host: address to listen on.
        port: port to listen on; 0 selects a free one.
        **settings: fields of `Settings`.

    Raises:
        ConfigError: settings are invalid, or the extra ``serve`` is not installed.
        WorkersError: a model cannot be served.
        DeviceError: the address cannot be bound.
    """
    running = _needed()
    with running.running(_settings(models, "auto", settings), host, port) as (url, _):
        yield url


def _settings(
    models: str | Served | Iterable[str | Served], head: str, options: dict[str, Any], name: str | None = None
) -> Settings:
    listed = [models] if isinstance(models, (str, Served)) else models
    settings = Settings(models=served(listed, head, name), **options)
    for model in settings.models:
        expect_place(model.source)
        expect_tokenizer(model.source, "serve")
    return settings


def _needed() -> Any:
    try:
        from flodl_hf.serving import running
    except ImportError as fault:
        raise ConfigError(
            f"serve: {fault.name} is not installed. Install the extra: pip install 'flodl-hf[serve]'"
        ) from None
    return running
