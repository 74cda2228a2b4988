"""Traces of requests, sent to a collector by OpenTelemetry's protocol (OTLP over HTTP).

A span for each request, below it what became of it: tokenise, queue, batch, device, decode, answer. Spans hold sizes
and times, never texts. A ``traceparent`` of the client is taken as what the request belongs to (W3C Trace Context), and
its sampling is followed.

Needs the extra ``telemetry``: ``pip install 'flodl-hf[telemetry]'``; its own variables (``OTEL_SERVICE_NAME``,
``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``) are read as everywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from flodl.errors import ConfigError

__all__ = ["Trace", "Traces"]

EXPORT_S = 5.0
"""How long a collector may take for one delivery, and for all that is left at the end."""
_SPECIAL = {"rows": "flodl.batch.rows", "tokens": "flodl.batch.tokens"}


class Traces:
    """Where traces go.

    Args:
        endpoint: the collector's address; without a path it is ``/v1/traces``.

    Raises:
        ConfigError: no such address, or the extra ``telemetry`` is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"serve: otlp_endpoint is {endpoint!r}; expected the address of a collector, such as "
                "http://localhost:4318"
            )
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as fault:
            raise ConfigError(
                f"serve: {fault.name} is not installed, and otlp_endpoint needs it; install the extra: "
                "pip install 'flodl-hf[telemetry]'"
            ) from None
        from flodl_hf.checkpoints.version import own_version

        found = Resource.create({"service.version": own_version()})
        if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            found = found.merge(Resource({SERVICE_NAME: "flodl-hf"}))
        self._provider = TracerProvider(resource=found, shutdown_on_exit=False)
        address = endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"
        self._exporter = OTLPSpanExporter(address, timeout=EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("flodl_hf.serving", own_version())
        self.api = trace
        self._contexts = TraceContextTextMapPropagator()

    def begin(self, scope: dict[str, Any], route: str) -> Trace:
        """Return the trace of a request that has come.

        Args:
            scope: of ASGI.
            route: the path of its door.
        """
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate", b"user-agent")
        }
        host, port = scope.get("server") or ("", None)
        said = {
            "http.request.method": scope["method"],
            "http.route": route,
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
            "network.protocol.version": scope.get("http_version", "1.1"),
            "server.address": host,
        }
        if port is not None:
            said["server.port"] = port
        if "user-agent" in headers:
            said["user_agent.original"] = headers["user-agent"][:200]
        span = self.tracer.start_span(
            f"{scope['method']} {route}", self._contexts.extract(headers), self.api.SpanKind.SERVER, said
        )
        return Trace(self, span)

    def close(self) -> None:
        """Send what is left, and end; a collector that does not answer is not waited for any longer than `EXPORT_S`."""
        given_up = threading.Timer(EXPORT_S, self._exporter.shutdown)
        given_up.daemon = True
        given_up.start()
        self._provider.shutdown()
        given_up.cancel()


class Trace:
    """One request.

    Args:
        traces: where it goes.
        span: of the request.
    """

    def __init__(self, traces: Traces, span: Any) -> None:
        self._traces, self._span = traces, span
        self._inside = traces.api.set_span_in_context(span)
        self._answering: int | None = None
        self.recording: bool = span.is_recording()
        """Whether anybody will see it; a client's ``traceparent`` may say no."""

    @property
    def id(self) -> str:
        """Its trace, as logs name it."""
        return format(self._span.get_span_context().trace_id, "032x")

    @property
    def headers(self) -> dict[str, str]:
        """What the client is told, for it to find the trace."""
        context = self._span.get_span_context()
        return {"traceresponse": f"00-{self.id}-{context.span_id:016x}-{context.trace_flags:02x}"}

    def worked(self, steps: Sequence[Any]) -> None:
        """Add what a worker did, as `flodl_hf.serving.timeline.Timeline.told` says."""
        batch: Any = None
        for name, start, end, more in steps:
            below = batch if name == "device" else self._inside
            span = self._traces.tracer.start_span(
                name, below, attributes={_SPECIAL[key]: value for key, value in more.items()}, start_time=start
            )
            if name == "batch":
                batch = self._traces.api.set_span_in_context(span)
            span.end(end)

    def answering(self) -> None:
        """Note that the answer is known, and is written and sent from now on."""
        self._answering = time.time_ns()

    def end(self, status: int, word: str, call: Any) -> None:
        """End it.

        Args:
            status: of HTTP.
            word: why it was not answered, or nothing.
            call: the `flodl_hf.serving.doors.door.Call`; None where it was not understood.
        """
        span = self._span
        if self._answering is not None and self.recording:
            self._traces.tracer.start_span("answer", self._inside, start_time=self._answering).end()
        span.set_attribute("http.response.status_code", status)
        if word:
            span.set_attribute("error.type", word)
        if status >= 500:
            span.set_status(self._traces.api.StatusCode.ERROR)
        if call is not None and self.recording:
            said: dict[str, Any] = {
                "flodl.texts": call.texts,
                "flodl.windows": call.windows,
                "flodl.dropped_tokens": call.dropped,
            }
            said["gen_ai.usage.input_tokens"] = call.tokens
            if call.model:
                said["gen_ai.request.model"] = call.model
            if "embed" in call.door.path:
                said["gen_ai.operation.name"] = "embeddings"
            span.set_attributes(said)
        span.end()
