"""``flodl-hf serve``: models over HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flodl_hf.cli import options as shared
from flodl_hf.cli.options import PRECISIONS, argument, chosen, option, with_parameters
from flodl_hf.cli.shared import reporting, say
from flodl_hf.errors import PredictError
from flodl_hf.serving.settings import Settings, usual_http_processes

_MODELS = "Local folders or Hub names; NAME=MODEL sets the name that clients use."
_WORKERS = "Worker processes per device, each with all models (default: two on a GPU with enough memory)."
_INVARIANT = "Results do not depend on other requests, bit for bit; slower."
_ADAPTERS = "Serve each adapter folder in DIR under its name; NAME=DIR selects the base."
_KEY = "API key; repeat for several, or set FLODL_HF_API_KEYS (comma-separated)."
_OTLP = "Send traces to this OpenTelemetry collector, over HTTP."


def _limit(name: str, text: str, kind: type = int) -> Any:
    least = {"min": 1} if kind is int else {}
    return option(name, kind, text, default=getattr(Settings, name), panel="Limits", **least)


OPTIONS = (
    option("devices", list[str], "Device to serve on; repeat for several (default: best available).", "--device"),
    option("workers", int, _WORKERS, min=1),
    option("http_processes", int, "HTTP processes on one port (default: by the number of cores).", min=1),
    option("served_model_name", str, "Name of the only model; requests may use any name then."),
    option("precision", PRECISIONS, "Default: the type of the weights."),
    option("batch_invariant", bool, _INVARIANT, default=False),
    shared.HEAD,
    option("adapters", list[str], _ADAPTERS, metavar="DIR"),
    option("mix_adapters", bool, "Adapters of one base share batches, without merged weights.", "--mix-adapters",
           default=False),
    option("api_keys", list[str], _KEY, "--api-key"),
    option("api_key_file", Path, "File with one API key per line. Lines that begin with # are comments."),
    _limit("max_batch_tokens", "Maximum tokens of a batch (default: by device)."),
    _limit("max_concurrent", "Maximum concurrent requests; more are refused (429)."),
    _limit("max_key_concurrent", "Maximum concurrent requests per key."),
    _limit("max_key_tokens", "Maximum tokens per key and minute."),
    _limit("max_inputs", "Maximum texts of a request."),
    _limit("max_tokens", "Approximate maximum tokens of a request."),
    _limit("max_body", "Maximum bytes of a request."),
    _limit("max_queue_s", "Reject (429) when the queue exceeds this many seconds of work.", float),
    _limit("max_wait_s", "Reject when the queue stays above this.", float),
    _limit("timeout_s", "Request timeout in seconds.", float),
    _limit("drain_s", "Time for current requests to finish at shutdown, in seconds.", float),
    option("log_texts", bool, "Log the fields of requests (default: no texts).", default=False),
    option("otlp_endpoint", str, _OTLP, metavar="URL"),
    shared.LOCAL,
)  # fmt: skip
"""Keywords of `flodl_hf.serving.serve`."""


@reporting
@with_parameters((
    argument("models", list[str], "MODEL...", _MODELS),
    option("host", str, "Address to listen on; 0.0.0.0 is all interfaces.", default="127.0.0.1"),
    option("port", int, "Port; 0 selects a free one.", "--port", "-p", min=0, max=65535, default=8080),
    *OPTIONS,
))  # fmt: skip
def command(models: list[str], host: str, port: int, **values: Any) -> None:
    """Serve models over HTTP: all heads, APIs compatible with TEI, OpenAI, Cohere, Jina and vLLM, and a test page.

    Requests are answered when all models are warm. SIGTERM finishes requests, SIGHUP reloads all models without losing
    requests. The log on stderr has one JSON line for each request.
    """
    from flodl_hf.serving import serve

    options = chosen(values, OPTIONS)
    options["api_keys"] = _keys(options.get("api_keys", ()), options.pop("api_key_file", None))
    options.setdefault("http_processes", usual_http_processes())
    options |= {name: tuple(options[name]) for name in ("devices", "adapters") if name in options}
    say(f"loading {', '.join(models)}")
    serve(models, host=host, port=port, here=lambda url: say(f"ready: {url}", always=True), **options)


def _keys(values: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the API keys of the command line, the environment and a file."""
    keys = [*values, *os.environ.get("FLODL_HF_API_KEYS", "").split(",")]
    if file is not None:
        try:
            keys += [line for line in file.read_text("utf-8").splitlines() if not line.lstrip().startswith("#")]
        except (OSError, UnicodeDecodeError) as fault:
            raise PredictError(f"serve: {file} cannot be read ({fault}), expected one API key per line") from None
    return tuple(key.strip() for key in keys if key.strip())
