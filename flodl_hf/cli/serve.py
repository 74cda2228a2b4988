"""``flodl-hf serve``: models over HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flodl_hf.cli.choices import Head, PrecisionChoice
from flodl_hf.cli.shared import Local, reporting, say
from flodl_hf.errors import PredictError


def _limit(*names: str, summary: str, **options: Any) -> Any:
    return typer.Option(*names, help=summary, rich_help_panel="Limits", **options)


@reporting
def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Local folders or Hub names; NAME=MODEL sets the name that clients use."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port; 0 selects a free one.", min=0, max=65535)] = 8080,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Device to serve on; repeat for several (default: best available)."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            help="Worker processes per device, each with all models (default: two on a GPU with enough memory).",
            min=1,
        ),
    ] = None,
    http_processes: Annotated[
        int | None,
        typer.Option("--http-processes", help="HTTP processes on one port (default: by the number of cores).", min=1),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="Name of the only model; requests may use any name then."),
    ] = None,
    precision: Annotated[PrecisionChoice | None, typer.Option(help="Default: the type of the weights.")] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Results do not depend on other requests, bit for bit; slower.")
    ] = False,
    head: Head = "auto",
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapters",
            metavar="DIR",
            help="Serve each adapter folder in DIR under its name; NAME=DIR selects the base.",
        ),
    ] = None,
    mix_adapters: Annotated[
        bool, typer.Option("--mix-adapters", help="Adapters of one base share batches, without merged weights.")
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="API key; repeat for several, or set FLODL_HF_API_KEYS (comma-separated)."),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="File with one API key per line.")] = None,
    max_batch_tokens: Annotated[
        int | None, _limit("--max-batch-tokens", summary="Maximum tokens of a batch (default: by device).", min=1)
    ] = None,
    max_concurrent: Annotated[
        int, _limit("--max-concurrent", summary="Maximum concurrent requests; more are refused (429).", min=1)
    ] = 512,
    max_key_concurrent: Annotated[
        int | None, _limit("--max-key-concurrent", summary="Maximum concurrent requests per key.", min=1)
    ] = None,
    max_key_tokens: Annotated[
        int | None, _limit("--max-key-tokens", summary="Maximum tokens per key and minute.", min=1)
    ] = None,
    max_inputs: Annotated[int, _limit("--max-inputs", summary="Maximum texts of a request.", min=1)] = 2048,
    max_tokens: Annotated[
        int, _limit("--max-tokens", summary="Approximate maximum tokens of a request.", min=1)
    ] = 300_000,
    max_body: Annotated[int, _limit("--max-body", summary="Maximum bytes of a request.", min=1)] = 16 << 20,
    max_queue: Annotated[
        float, _limit("--max-queue-s", summary="Reject (429) when the queue exceeds this many seconds of work.")
    ] = 10.0,
    max_wait: Annotated[float, _limit("--max-wait-s", summary="Reject when the queue stays above this.")] = 0.5,
    timeout: Annotated[float, _limit("--timeout-s", summary="Request timeout in seconds.")] = 60.0,
    drain: Annotated[
        float, _limit("--drain-s", summary="Time for current requests to finish at shutdown, in seconds.")
    ] = 30.0,
    log_texts: Annotated[
        bool, typer.Option("--log-texts", help="Log the fields of requests (default: no texts).")
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option("--otlp-endpoint", metavar="URL", help="Send traces to this OpenTelemetry collector, over HTTP."),
    ] = None,
    local: Local = False,
) -> None:
    """Serve models over HTTP: all heads, APIs compatible with TEI, OpenAI, Cohere, Jina and vLLM, and a test page.

    Requests are answered when all models are warm. SIGTERM finishes requests, SIGHUP reloads all models without losing
    requests. The log on stderr has one JSON line for each request.
    """
    from flodl_hf.serving import serve
    from flodl_hf.serving.settings import usual_http_processes

    keys = _keys(api_key or [], api_key_file)
    say(f"loading {', '.join(models)}")
    serve(
        models,
        host=host,
        port=port,
        head=head,
        served_model_name=served_model_name,
        here=lambda url: say(f"ready: {url}", always=True),
        devices=tuple(device or ["auto"]),
        workers=workers,
        http_processes=http_processes or usual_http_processes(),
        precision=precision,
        adapters=tuple(adapters or ()),
        mix_adapters=mix_adapters,
        batch_invariant=batch_invariant,
        local_files_only=local,
        api_keys=keys,
        max_batch_tokens=max_batch_tokens,
        max_concurrent=max_concurrent,
        max_key_concurrent=max_key_concurrent,
        max_key_tokens=max_key_tokens,
        max_inputs=max_inputs,
        max_tokens=max_tokens,
        max_body=max_body,
        max_queue_s=max_queue,
        max_wait_s=max_wait,
        timeout_s=timeout,
        drain_s=drain,
        log_texts=log_texts,
        otlp_endpoint=otlp_endpoint,
    )


def _keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the API keys of the command line, the environment and a file."""
    keys = [*given, *os.environ.get("FLODL_HF_API_KEYS", "").split(",")]
    if file is not None:
        try:
            keys += file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise PredictError(f"serve: {file} cannot be read ({fault}), expected one API key per line") from None
    return tuple(key.strip() for key in keys if key.strip())
