"""Metrics in Prometheus' format, and metrics and log of requests.

Names are those of text-embeddings-inference (``te_*``) and ``flodl_*``. Own code instead of prometheus_client: see
docs/decisions. All updates happen in the event loop's thread.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from flodl_hf.serving.log import log_event

LOG = logging.getLogger("flodl_hf.serving")

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = tuple(float(1 << power) for power in range(18))

Labels = tuple[tuple[str, str], ...]

_KNOWN: dict[str, tuple[str, str, Sequence[float]]] = {
    "te_request_count": ("counter", "received requests", ()),
    "te_request_success": ("counter", "successful requests", ()),
    "te_request_failure": ("counter", "failed requests, by error", ()),
    "te_request_duration": ("histogram", "seconds from a request's headers to its response", SECONDS),
    "te_request_tokenization_duration": ("histogram", "seconds of a request's tokenization", SECONDS),
    "te_request_queue_duration": ("histogram", "seconds in which a request waited for its batch", SECONDS),
    "te_request_inference_duration": ("histogram", "seconds of a request in the worker after the queue", SECONDS),
    "te_request_input_length": ("histogram", "tokens of a request", SIZES),
    "te_batch_next_size": ("histogram", "rows of a batch", SIZES),
    "te_batch_next_tokens": ("histogram", "tokens of a batch", SIZES),
    "te_queue_size": ("gauge", "current requests", ()),
    "te_embed_count": ("counter", "embedded texts", ()),
    "te_predict_count": ("counter", "classified texts", ()),
    "te_rerank_count": ("counter", "ranked texts", ()),
    "flodl_requests_total": ("counter", "requests to each model or adapter, by status", ()),
    "flodl_request_seconds": ("histogram", "seconds of successful requests, by model", SECONDS),
    "flodl_texts_total": ("counter", "texts of successful requests, by model", ()),
    "flodl_tokens_total": ("counter", "processed tokens, by model", ()),
    "flodl_rows_total": ("counter", "processed windows, by model", ()),
    "flodl_dropped_tokens_total": ("counter", "truncated tokens, by model", ()),
    "flodl_batch_seconds": ("histogram", "seconds of a batch", SECONDS),
    "flodl_batch_fill": ("gauge", "tokens of the last batch as a share of the maximum", ()),
    "flodl_queue_tokens": ("gauge", "queued tokens of the worker that reported last", ()),
    "flodl_queue_seconds": ("gauge", "estimated seconds to process the current requests", ()),
    "flodl_tokens_per_second": ("gauge", "tokens per second of the workers at full load", ()),
    "flodl_operations_total": ("counter", "operations of the encoders' projections, by model", ()),
    "flodl_device_peak_operations": (
        "gauge",
        "measured peak operations per second of the devices",
        (),
    ),
    "flodl_device_share": ("gauge", "operations of about the last ten seconds as a share of the measured peak", ()),
    "flodl_worker_restarts_total": ("counter", "replaced workers", ()),
    "flodl_workers": ("gauge", "active workers", ()),
    "flodl_http_processes": ("gauge", "HTTP processes", ()),
    "flodl_http_process_restarts_total": ("counter", "replaced HTTP processes", ()),
    "flodl_ready": ("gauge", "1 if requests are answered", ()),
}


class Counter:
    """A counter or gauge."""

    __slots__ = ("value",)

    def __init__(self, value: float = 0.0) -> None:
        self.value = value


class Histogram:
    """Counts of values up to each of some bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Rate:
    """Amount per second, with exponentially decreasing weight of older amounts.

    Args:
        over_s: time constant in seconds.
    """

    def __init__(self, over_s: float = 10.0) -> None:
        self.over_s = over_s
        self._rate = 0.0
        self._at = time.monotonic()

    def add(self, amount: float) -> None:
        """Add an amount."""
        self._rate = self.now() + amount / self.over_s

    def now(self) -> float:
        """Return the amount per second."""
        at = time.monotonic()
        self._rate *= math.exp((self._at - at) / self.over_s)
        self._at = at
        return self._rate


class Metrics:
    """All metrics of a process."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Labels, Counter]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self.operations = Rate()
        """Rate of operations of the encoders' projections."""
        self.last_batch = 0.0
        """Time of the last batch, by ``time.monotonic``."""

    def counter(self, name: str, **labels: str) -> Counter:
        """Return a counter; callers keep it if they count often."""
        counters = self._numbers.setdefault(name, {})
        return counters.setdefault(_key(labels), Counter())

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return a histogram; callers keep it if they count often."""
        histograms = self._histograms.setdefault(name, {})
        key = _key(labels)
        if key not in histograms:
            histograms[key] = Histogram(_KNOWN[name][2])
        return histograms[key]

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        self.counter(name, **labels).value += value

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._numbers[name] = {(): Counter(value)}

    def dump(self) -> dict[str, Any]:
        """Return all metrics as JSON types, for `merged`."""
        return {
            "last_batch": self.last_batch,
            "operations": self.operations.now(),
            "numbers": [
                [name, labels, held.value] for name, by in self._numbers.items() for labels, held in by.items()
            ],
            "histograms": [
                [name, labels, held.counts, held.sum]
                for name, by in self._histograms.items()
                for labels, held in by.items()
            ],
        }

    def take(self, dump: Mapping[str, Any]) -> None:
        """Add the metrics of another process; the process with the last batch determines gauges.

        Args:
            dump: the result of `dump`.
        """
        later = dump["last_batch"] >= self.last_batch
        self.last_batch = max(self.last_batch, dump["last_batch"])
        self.operations.add(dump["operations"] * self.operations.over_s)
        for name, labels, value in dump["numbers"]:
            held = self.counter(name, **dict(labels))
            if _KNOWN[name][0] == "counter":
                held.value += value
            elif later:
                held.value = value
        for name, labels, counts, total in dump["histograms"]:
            found = self.histogram(name, **dict(labels))
            found.counts = [mine + more for mine, more in zip(found.counts, counts, strict=True)]
            found.sum += total

    def text(self) -> str:
        """Return all metrics in Prometheus' text format (version 0.0.4)."""
        lines: list[str] = []
        for name, (kind, summary, bounds) in _KNOWN.items():
            lines += [f"# HELP {name} {summary}", f"# TYPE {name} {kind}"]
            if kind != "histogram":
                for labels, held in self._numbers.get(name, {} if kind == "counter" else {(): Counter()}).items():
                    lines.append(f"{name}{_braced(dict(labels))} {_number(held.value)}")
                continue
            for labels, found in self._histograms.get(name, {(): Histogram(bounds)}).items():
                total = 0
                for bound, count in zip([*(f"{b:g}" for b in bounds), "+Inf"], found.counts, strict=True):
                    total += count
                    lines.append(f"{name}_bucket{_braced({**dict(labels), 'le': bound})} {total}")
                lines.append(f"{name}_sum{_braced(dict(labels))} {_number(found.sum)}")
                lines.append(f"{name}_count{_braced(dict(labels))} {total}")
        return "\n".join(lines) + "\n"


def merged(dumps: Iterable[Mapping[str, Any]]) -> Metrics:
    """Return the sum of the metrics of several processes.

    Args:
        dumps: results of `Metrics.dump`.
    """
    whole = Metrics()
    for dump in dumps:
        whole.take(dump)
    return whole


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


def _braced(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ---- requests -----------------------------------------------------------------------------------------


class Counted(Protocol):
    """Counts of a request; implemented by `flodl_hf.serving.routes.route.Request`."""

    model: str
    texts: int
    tokens: int
    windows: int
    dropped: int
    waited_s: float
    tokenized_s: float
    inferred_s: float
    key: str
    fields: Mapping[str, Any]
    trace: Any


_WORDS = (("embed", "te_embed_count"), ("rerank", "te_rerank_count"), ("predict", "te_predict_count"))


class RequestMetrics:
    """Metrics of the requests of one route.

    Args:
        state: the shared state.
        route: the route.
    """

    def __init__(self, state: Any, route: Any) -> None:
        self.state, self.route = state, route
        self._metrics: Metrics = state.metrics
        self._arrived: Counter | None = None
        self._succeeded: Counter | None = None
        self._seconds: Histogram | None = None
        self._of_status: dict[tuple[str, int], Counter] = {}
        self._of_model: dict[str, _ModelMetrics] = {}

    def started(self) -> None:
        """Count a received request."""
        if self._arrived is None:
            self._arrived = self._metrics.counter("te_request_count", method=self.route.path)
        self._arrived.value += 1

    def finished(self, request: Counted | None, status: int, word: str, seconds: float) -> None:
        """Count a finished request.

        Args:
            request: the parsed request, or None if it was invalid.
            status: HTTP status.
            word: kind of the error, or "".
            seconds: total time.
        """
        metrics, path = self._metrics, self.route.path
        if self._succeeded is None or self._seconds is None:
            self._succeeded = metrics.counter("te_request_success", method=path)
            self._seconds = metrics.histogram("te_request_duration", method=path)
        if status == 200:
            self._succeeded.value += 1
        else:
            metrics.add("te_request_failure", err=word)
        self._seconds.add(seconds)
        if request is not None and request.model:
            counter = self._of_status.get((request.model, status))
            if counter is None:
                counter = metrics.counter("flodl_requests_total", model=request.model, status=str(status))
                self._of_status[request.model, status] = counter
            counter.value += 1
            if status == 200:
                answered = self._of_model.get(request.model)
                if answered is None:
                    answered = self._of_model[request.model] = _ModelMetrics(self.state, path, request.model)
                answered.add(request, seconds)
        if LOG.isEnabledFor(logging.INFO):
            self._log(request, status, word, seconds)

    def _log(self, request: Counted | None, status: int, word: str, seconds: float) -> None:
        fields: dict[str, Any] = {"route": self.route.path, "status": status, "ms": round(seconds * 1000, 2)}
        if word:
            fields["why"] = word
        if request is not None:
            fields |= {
                "model": request.model,
                "texts": request.texts,
                "tokens": request.tokens,
                "dropped": request.dropped,
            }
            if request.key:
                fields["key"] = request.key
            if request.trace is not None:
                fields["trace"] = request.trace.id
            if self.state.settings.log_texts:
                fields["fields"] = dict(request.fields)
        log_event(LOG, "request", fields)


class _ModelMetrics:
    """Metrics of successful requests of one model and route."""

    def __init__(self, state: Any, path: str, model: str) -> None:
        metrics = state.metrics
        self._state, self._model = state, model
        self._seconds = metrics.histogram("flodl_request_seconds", model=model)
        self._texts = metrics.counter("flodl_texts_total", model=model)
        self._tokenization = metrics.histogram("te_request_tokenization_duration")
        self._queue = metrics.histogram("te_request_queue_duration")
        self._inference = metrics.histogram("te_request_inference_duration")
        self._length = metrics.histogram("te_request_input_length")
        self._tokens = metrics.counter("flodl_tokens_total", model=model)
        self._rows = metrics.counter("flodl_rows_total", model=model)
        self._operations = metrics.counter("flodl_operations_total", model=model)
        self._texts_of_kind = [metrics.counter(name) for word, name in _WORDS if word in path]

    def add(self, request: Counted, seconds: float) -> None:
        self._seconds.add(seconds)
        self._texts.value += request.texts
        self._tokenization.add(request.tokenized_s)
        self._queue.add(request.waited_s)
        self._inference.add(request.inferred_s)
        self._length.add(request.tokens)
        self._tokens.value += request.tokens
        self._rows.value += request.windows
        for counter in self._texts_of_kind:
            counter.value += request.texts
        if (info := self._state.workers.models.get(self._model)) is not None:
            operations = request.tokens * info["operations"]
            self._operations.value += operations
            self._state.metrics.operations.add(operations)
        if request.dropped:
            self._state.metrics.add("flodl_dropped_tokens_total", request.dropped, model=self._model)
