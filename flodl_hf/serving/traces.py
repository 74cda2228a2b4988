"""OpenTelemetry traces of requests, sent by OTLP over HTTP.

Each request has a span with child spans: tokenise, queue, batch, device, decode, answer. Spans contain sizes and times,
never texts. A client's ``traceparent`` is the parent span, and its sampling decision applies (W3C Trace Context).

Needs the extra ``telemetry``: ``pip install 'flodl-hf[telemetry]'``. The environment variables of OpenTelemetry apply
(``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from flodl.errors import ConfigError

EXPORT_S = 5.0
"""Timeout of one delivery to the collector, and of the last one at shutdown."""
_SPECIAL = {"rows": "flodl.batch.rows", "tokens": "flodl.batch.tokens"}


class Traces:
    """Exporter of traces.

    Args:
        endpoint: the collector's address; without a path, ``/v1/traces`` is added.

    Raises:
        ConfigError: the address is invalid, or the extra ``telemetry`` is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"serve: otlp_endpoint is {endpoint!r}, expected the address of a collector such as "
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
                f"serve: {fault.name} is not installed, and otlp_endpoint needs it. Install the extra: "
                "pip install 'flodl-hf[telemetry]'"
            ) from None
        from flodl_hf.checkpoints.system import own_version

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
        """Start the trace of a request.

        Args:
            scope: ASGI scope.
            route: path of the route.
        """
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate", b"user-agent")
        }
        host, port = scope.get("server") or ("", None)
        attributes = {
            "http.request.method": scope["method"], "http.route": route, "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"), "server.address": host, "server.port": port,
            "network.protocol.version": scope.get("http_version", "1.1"),
            "user_agent.original": headers.get("user-agent", "")[:200] or None,
        }  # fmt: skip
        attributes = {name: value for name, value in attributes.items() if value is not None}
        span = self.tracer.start_span(
            f"{scope['method']} {route}", self._contexts.extract(headers), self.api.SpanKind.SERVER, attributes
        )
        return Trace(self, span)

    def close(self) -> None:
        """Send the remaining spans, waiting at most ``EXPORT_S``."""
        given_up = threading.Timer(EXPORT_S, self._exporter.shutdown)
        given_up.daemon = True
        given_up.start()
        self._provider.shutdown()
        given_up.cancel()


class Trace:
    """Trace of one request.

    Args:
        traces: the exporter.
        span: the request's span.
    """

    def __init__(self, traces: Traces, span: Any) -> None:
        self._traces, self._span = traces, span
        self._inside = traces.api.set_span_in_context(span)
        self._answering: int | None = None
        self.recording: bool = span.is_recording()
        """Whether the span is recorded; a client's ``traceparent`` may disable it."""

    @property
    def id(self) -> str:
        """The trace id, as logs contain it."""
        return format(self._span.get_span_context().trace_id, "032x")

    @property
    def headers(self) -> dict[str, str]:
        """Response headers with the trace id."""
        context = self._span.get_span_context()
        return {"traceresponse": f"00-{self.id}-{context.span_id:016x}-{context.trace_flags:02x}"}

    def add_steps(self, steps: Sequence[Any]) -> None:
        """Add the steps of a worker, see `flodl_hf.serving.request.Timeline.to_steps`."""
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
        """Record that the result is available, and is encoded and sent from now on."""
        self._answering = time.time_ns()

    def end(self, status: int, word: str, request: Any) -> None:
        """End the span.

        Args:
            status: HTTP status.
            word: kind of the error, or "".
            request: the parsed request, or None if it was invalid.
        """
        span = self._span
        if self._answering is not None and self.recording:
            self._traces.tracer.start_span("answer", self._inside, start_time=self._answering).end()
        span.set_attribute("http.response.status_code", status)
        if word:
            span.set_attribute("error.type", word)
        if status >= 500:
            span.set_status(self._traces.api.StatusCode.ERROR)
        if request is not None and self.recording:
            span.set_attributes({
                "flodl.texts": request.texts, "flodl.windows": request.windows, "flodl.dropped_tokens": request.dropped,
                "gen_ai.usage.input_tokens": request.tokens,
            })  # fmt: skip
            if request.model:
                span.set_attribute("gen_ai.request.model", request.model)
            if "embed" in request.route.path:
                span.set_attribute("gen_ai.operation.name", "embeddings")
        span.end()
