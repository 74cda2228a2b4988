"""Traces: the real SDK sends them over HTTP to a collector of ours, which reads its protocol."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serving_models import TEXTS

from flodl.errors import ConfigError
from flodl_hf.serving.client import Client
from flodl_hf.serving.request import MAX_BATCHES, Timeline
from flodl_hf.serving.running import running
from flodl_hf.serving.settings import Served, Settings
from flodl_hf.serving.traces import Traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
OWN = f"{77:032x}"
SECRET = "the secret cat"


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it is sent, and all bytes of them."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.bytes = b""
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Collector  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # pyright: ignore[reportMissingImports]
            ExportTraceServiceRequest,
        )

        data = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                self.server.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
                for scope in resource.scope_spans:
                    self.server.spans += scope.spans
            self.server.bytes += data
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def told(folders: dict[str, Path]) -> Iterator[tuple[Collector, dict[str, Any]]]:
    """A collector after a server has closed, and the answers that the server gave, by what was asked."""
    import httpx

    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace  # pyright: ignore[reportMissingImports]
    from opentelemetry.context import attach, detach  # pyright: ignore[reportMissingImports]

    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        names = ("embed", "ranker")
        settings = Settings(
            models=tuple(Served(name, str(folders[name])) for name in names), devices=("cpu",),
            otlp_endpoint=f"http://127.0.0.1:{collector.server_port}",
        )  # fmt: skip
        with running(settings) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
            given = {"input": [SECRET, *TEXTS], "windows": True}
            rank = {"query": SECRET, "documents": TEXTS}
            answers = {
                "embed": client.post("/v1/embeddings", json=given, headers={"traceparent": PARENT}),
                "unsampled": client.post("/v1/embeddings", json=given, headers={"traceparent": UNSAMPLED}),
                "own": client.post("/v2/rerank", json=rank),
                "refused": client.post("/embed", json={"inputs": SECRET, "model": "none"}),
            }
            # Our client says which trace its program is in.
            context = trace.SpanContext(int(OWN, 16), 5, is_remote=False, trace_flags=trace.TraceFlags(1))
            token = attach(trace.set_span_in_context(trace.NonRecordingSpan(context)))
            with Client(url) as ours:
                ours.embed(TEXTS[0])
            detach(token)
        yield collector, answers
        collector.shutdown()
        thread.join()


def values(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def of_trace(collector: Collector, trace: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for span in collector.spans:
        if span.trace_id.hex() == trace:
            found.setdefault(span.name, []).append(span)
    return found


def test_a_request_and_what_became_of_it(told: tuple[Collector, dict[str, Any]]) -> None:
    collector, answers = told
    spans = of_trace(collector, PARENT.split("-")[1])
    assert set(spans) == {"POST /v1/embeddings", "tokenise", "queue", "batch", "device", "decode", "answer"}
    (request,) = spans["POST /v1/embeddings"]
    assert request.parent_span_id.hex() == PARENT.split("-")[2]
    assert request.kind == request.SPAN_KIND_SERVER
    said = values(request)
    usage = answers["embed"].json()["usage"]
    assert said | {
        "http.request.method": "POST", "http.route": "/v1/embeddings", "url.path": "/v1/embeddings",
        "url.scheme": "http", "http.response.status_code": 200, "gen_ai.operation.name": "embeddings",
        "gen_ai.request.model": "embed", "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "flodl.texts": 1 + len(TEXTS), "flodl.dropped_tokens": 0, "server.address": "127.0.0.1",
    } == said  # fmt: skip
    below = [span for name, listed in spans.items() if name != request.name for span in listed]
    batches = {span.span_id for span in spans["batch"]}
    for span in below:
        assert span.parent_span_id == request.span_id or span.parent_span_id in batches
        assert (span.name == "device") == (span.parent_span_id in batches)
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano
    order = [
        min(span.start_time_unix_nano for span in spans[name]) for name in ("tokenise", "queue", "batch", "device")
    ]
    assert order == sorted(order)
    rows = sum(values(span)["flodl.batch.rows"] for span in spans["batch"])
    assert rows >= said["flodl.windows"]
    assert sum(values(span)["flodl.batch.tokens"] for span in spans["batch"]) >= usage["prompt_tokens"]
    parts = answers["embed"].headers["traceresponse"].split("-")
    assert parts == ["00", request.trace_id.hex(), request.span_id.hex(), "01"]


def test_who_sends_no_trace_gets_one(told: tuple[Collector, dict[str, Any]]) -> None:
    collector, answers = told
    spans = of_trace(collector, answers["own"].headers["traceresponse"].split("-")[1])
    (request,) = spans["POST /v2/rerank"]
    assert not request.parent_span_id
    assert {"tokenise", "queue", "batch", "device", "decode", "answer"} < set(spans)
    assert "gen_ai.operation.name" not in values(request)


def test_what_is_not_sampled_is_not_sent_and_what_is_refused_says_why(told: tuple[Collector, dict[str, Any]]) -> None:
    collector, answers = told
    routes = [span.name for span in collector.spans if span.kind == span.SPAN_KIND_SERVER]
    assert sorted(routes) == ["POST /embed", "POST /embed", "POST /v1/embeddings", "POST /v2/rerank"]
    assert answers["unsampled"].headers["traceresponse"].endswith("-00")
    (refused,) = [span for span in collector.spans if span.name == "POST /embed" and span.trace_id.hex() != OWN]
    assert values(refused)["http.response.status_code"] == 404
    assert values(refused)["error.type"] == "model"


def test_our_client_passes_its_trace_on(told: tuple[Collector, dict[str, Any]]) -> None:
    (request,) = of_trace(told[0], OWN)["POST /embed"]
    assert int(request.parent_span_id.hex(), 16) == 5


def test_no_text_is_in_a_trace_and_the_service_has_a_name(told: tuple[Collector, dict[str, Any]]) -> None:
    collector, _ = told
    assert collector.bytes
    for word in ("secret", "Paris", "Acme"):
        assert word.encode() not in collector.bytes
    assert {resource["service.name"] for resource in collector.resources} == {"flodl-hf"}


def test_addresses_of_collectors() -> None:
    for wrong in ("localhost:4318", "ftp://a", "http://"):
        with pytest.raises(ConfigError, match="otlp_endpoint"):
            Traces(wrong)


def test_nothing_of_it_is_imported_when_it_is_off_and_its_absence_is_said(folders: dict[str, Path]) -> None:
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}", name=name.partition(".")[0])
sys.meta_path.insert(0, Absent())
from flodl.errors import ConfigError
from flodl_hf.serving.app import create_app
from flodl_hf.serving.settings import Settings, served
assert create_app(Settings(models=served(["m"]))).state.server.traces is None
try:
    create_app(Settings(models=served(["m"]), otlp_endpoint="http://127.0.0.1:4318"))
except ConfigError as fault:
    assert "flodl-hf[telemetry]" in str(fault), fault
else:
    raise SystemExit("no fault")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


def test_a_timeline() -> None:
    line = Timeline()
    line.sent()
    for place in range(MAX_BATCHES + 3):
        line.taken(time.perf_counter(), 2, 10 + place)
        line.ran()
    line.ran()  # nobody else runs
    line.arrived()
    line.arrived()
    names = [name for name, *_ in line.to_steps()]
    assert names == ["tokenise", "queue", *["batch", "device"] * MAX_BATCHES, "decode"]
    assert [more for name, _, _, more in line.to_steps() if name == "batch"][:2] == [
        {"rows": 2, "tokens": 10}, {"rows": 2, "tokens": 11},
    ]  # fmt: skip
    assert [name for name, *_ in Timeline().to_steps()] == ["tokenise"]
    for _, start, end, _ in line.to_steps():
        assert 0 < start <= end
