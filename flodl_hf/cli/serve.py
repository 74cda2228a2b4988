"""``flodl-hf serve``: models over HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flodl_hf.cli.choices import Head, PrecisionWord
from flodl_hf.cli.shared import Local, reporting, say
from flodl_hf.errors import PredictError


def _limit(*names: str, says: str, **more: Any) -> Any:
    return typer.Option(*names, help=says, rich_help_panel="Limits", **more)


@reporting
def command(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Local folders or Hub names; NAME=MODEL says what clients call one."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port; 0 takes one that is free.", min=0, max=65535)] = 8080,
    device: Annotated[
        list[str] | None, typer.Option("--device", help="Device; again for more. By default the best.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            help="Worker processes for each device, each with the models; by default two on a GPU with memory.",
            min=1,
        ),
    ] = None,
    http_processes: Annotated[
        int,
        typer.Option(
            "--http-processes", help="Processes that answer HTTP, at one port; more for many small requests.", min=1
        ),
    ] = 1,
    precision: Annotated[PrecisionWord | None, typer.Option(help="By default that of the weights.")] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Let an answer depend on its text alone, bit for bit; slower.")
    ] = False,
    head: Head = "auto",
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapters",
            metavar="DIR",
            help="Serve every adapter in DIR by its folder's name; NAME=DIR: of that model.",
        ),
    ] = None,
    mix_adapters: Annotated[
        bool, typer.Option("--mix-adapters", help="Let adapters of a base share batches, without merged weights.")
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="A key that clients need; again for more. Or FLODL_HF_API_KEYS, with commas."),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="A file with a key a line.")] = None,
    max_batch_tokens: Annotated[
        int | None, _limit("--max-batch-tokens", says="Most tokens that run together; by default by the device.", min=1)
    ] = None,
    max_concurrent: Annotated[
        int, _limit("--max-concurrent", says="Most requests at a time; more are refused (429).", min=1)
    ] = 512,
    max_key_concurrent: Annotated[
        int | None, _limit("--max-key-concurrent", says="Most requests of one key at a time.", min=1)
    ] = None,
    max_key_tokens: Annotated[
        int | None, _limit("--max-key-tokens", says="Most tokens of one key in a minute.", min=1)
    ] = None,
    max_inputs: Annotated[int, _limit("--max-inputs", says="Most texts of a request.", min=1)] = 2048,
    max_tokens: Annotated[int, _limit("--max-tokens", says="Most tokens of a request, about.", min=1)] = 300_000,
    max_body: Annotated[int, _limit("--max-body", says="Most bytes of a request.", min=1)] = 16 << 20,
    max_queue: Annotated[float, _limit("--max-queue-s", says="Refuse requests when more than this waits.")] = 10.0,
    max_wait: Annotated[
        float, _limit("--max-wait-s", says="Refuse requests when more than this waits all the time.")
    ] = 0.5,
    timeout: Annotated[float, _limit("--timeout-s", says="Give a request up after so long.")] = 60.0,
    drain: Annotated[float, _limit("--drain-s", says="How long requests may go on when told to stop.")] = 30.0,
    log_texts: Annotated[
        bool, typer.Option("--log-texts", help="Let the log say what was asked; by default it holds no texts.")
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option("--otlp-endpoint", metavar="URL", help="Send traces to this OpenTelemetry collector, over HTTP."),
    ] = None,
    local: Local = False,
) -> None:
    """Serve models over HTTP: every head, the doors of TEI, OpenAI, Cohere, Jina and vLLM, and a page to try them.

    Requests are answered when all models are warm. SIGTERM lets requests finish, SIGHUP loads all models anew without
    losing one. The log is a line of JSON for each request, on stderr.
    """
    from flodl_hf.serving import serve

    keys = _keys(api_key or [], api_key_file)
    say(f"loading {', '.join(models)}")
    serve(
        models,
        host=host,
        port=port,
        head=head,
        here=lambda url: say(f"ready: {url}", always=True),
        devices=tuple(device or ["auto"]),
        workers=workers,
        http_processes=http_processes,
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
    """Return the keys of the command line, of the environment and of a file."""
    keys = [*given, *os.environ.get("FLODL_HF_API_KEYS", "").split(",")]
    if file is not None:
        try:
            keys += file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise PredictError(f"serve: {file} cannot be read ({fault}); expected a key a line") from None
    return tuple(key.strip() for key in keys if key.strip())
