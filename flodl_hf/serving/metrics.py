"""Metrics in Prometheus' format, and metrics and log of requests.

Names are those of text-embeddings-inference (``te_*``) and ``flodl_*``. Own code instead of prometheus_client: see
docs/decisions. All updates happen in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import select
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TextIO

from flodl_hf.workers.messages import as_json

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
    "flodl_device_peak_operations": ("gauge", "measured peak operations per second of the devices", ()),
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

    def add(self, value: float) -> None:
        """Add a value."""
        self.value += value


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
    """Amount per second, with exponentially decreasing weight of older amounts."""

    over_s = 10.0
    """Time constant in seconds."""

    def __init__(self) -> None:
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
        self._metrics: dict[str, dict[Labels, Counter | Histogram]] = {}
        self.operations = Rate()
        """Rate of operations of the encoders' projections."""
        self.last_batch = 0.0
        """Time of the last batch, by ``time.monotonic``."""

    def metric(self, name: str, **labels: str) -> Any:
        """Return a counter, gauge or histogram; callers keep it if they count often."""
        by_labels, key = self._metrics.setdefault(name, {}), tuple(sorted(labels.items()))
        if key not in by_labels:
            by_labels[key] = _made(name)
        return by_labels[key]

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a metric."""
        self.metric(name, **labels).add(value)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._metrics[name] = {(): Counter(value)}

    def dump(self) -> dict[str, Any]:
        """Return all metrics as JSON types, for `merged`."""
        listed = []
        for name, by_labels in self._metrics.items():
            for labels, metric in by_labels.items():
                values = [metric.value] if isinstance(metric, Counter) else [metric.counts, metric.sum]
                listed.append([name, labels, *values])
        return {"last_batch": self.last_batch, "operations": self.operations.now(), "metrics": listed}

    def take(self, dump: Mapping[str, Any]) -> None:
        """Add the metrics of another process; the process with the last batch determines gauges.

        Args:
            dump: the result of `dump`.
        """
        later = dump["last_batch"] >= self.last_batch
        self.last_batch = max(self.last_batch, dump["last_batch"])
        self.operations.add(dump["operations"] * self.operations.over_s)
        for name, labels, *values in dump["metrics"]:
            metric = self.metric(name, **dict(labels))
            if isinstance(metric, Histogram):
                metric.counts = [mine + more for mine, more in zip(metric.counts, values[0], strict=True)]
                metric.sum += values[1]
            elif _KNOWN[name][0] != "gauge":
                metric.value += values[0]
            elif later:
                metric.value = values[0]

    def text(self) -> str:
        """Return all metrics in Prometheus' text format (version 0.0.4)."""
        lines: list[str] = []
        for name, (kind, summary, bounds) in _KNOWN.items():
            lines += [f"# HELP {name} {summary}", f"# TYPE {name} {kind}"]
            unused = {} if kind == "counter" else {(): _made(name)}
            for key, metric in self._metrics.get(name, unused).items():
                labels = dict(key)
                if isinstance(metric, Counter):
                    lines.append(f"{name}{_braced(labels)} {_number(metric.value)}")
                    continue
                totals, end = list(accumulate(metric.counts)), _braced(labels)
                for bound, total in zip((*(f"{bound:g}" for bound in bounds), "+Inf"), totals, strict=True):
                    lines.append(f"{name}_bucket{_braced({**labels, 'le': bound})} {total}")
                lines += [f"{name}_sum{end} {_number(metric.sum)}", f"{name}_count{end} {totals[-1]}"]
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


def _made(name: str) -> Counter | Histogram:
    kind, _, bounds = _KNOWN[name]
    return Histogram(bounds) if kind == "histogram" else Counter()


def _braced(labels: Mapping[str, str]) -> str:
    pairs = []
    for name, value in labels.items():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{name}="{escaped}"')
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


# ---- requests -----------------------------------------------------------------------------------------


class RequestMetrics:
    """Metrics and log of the requests of one route.

    Args:
        state: the shared `flodl_hf.serving.routes.route.AppState`.
        route: the route.
    """

    def __init__(self, state: Any, route: Any) -> None:
        self.state, self.route = state, route
        metric = state.metrics.metric
        self.of_route = cache(lambda name: metric(name, method=route.path))
        self._of_status = cache(lambda model, status: metric("flodl_requests_total", model=model, status=str(status)))
        self._of_model = cache(self._model_metrics)

    def finished(self, request: Any, status: int, word: str, seconds: float) -> None:
        """Count and log a finished request.

        Args:
            request: the parsed `flodl_hf.serving.routes.route.Request`, or None if it was invalid.
            status: HTTP status.
            word: kind of the error, or "".
            seconds: total time.
        """
        metrics = self.state.metrics
        self.of_route("te_request_success").add(status == 200)
        if status != 200:
            metrics.add("te_request_failure", err=word)
        self.of_route("te_request_duration").add(seconds)
        if request is not None and request.model:
            self._of_status(request.model, status).add(1)
            if status == 200:
                info = self.state.workers.models.get(request.model)
                operations = request.tokens * info["operations"] if info is not None else 0
                values = (
                    seconds, request.tokenized_s, request.waited_s, request.inferred_s, request.tokens, request.tokens,
                    request.windows, operations,
                )  # fmt: skip
                of_values, of_texts = self._of_model(request.model)
                for metric, value in zip(of_values, values, strict=True):
                    metric.add(value)
                for metric in of_texts:
                    metric.add(request.texts)
                metrics.operations.add(operations)
                if request.dropped:
                    metrics.add("flodl_dropped_tokens_total", request.dropped, model=request.model)
        if LOG.isEnabledFor(logging.INFO):
            self._log(request, status, word, seconds)

    def _model_metrics(self, model: str) -> tuple[list[Any], list[Any]]:
        """Return the metrics of the values of a successful request, and of its number of texts."""
        metric = self.state.metrics.metric
        steps = [metric(f"te_request_{step}") for step in (
            "tokenization_duration", "queue_duration", "inference_duration", "input_length",
        )]  # fmt: skip
        totals = [metric(f"flodl_{what}_total", model=model) for what in ("tokens", "rows", "operations")]
        words = [word for word in ("embed", "rerank", "predict") if word in self.route.path]
        of_texts = [metric("flodl_texts_total", model=model), *(metric(f"te_{word}_count") for word in words)]
        return [metric("flodl_request_seconds", model=model), *steps, *totals], of_texts

    def _log(self, request: Any, status: int, word: str, seconds: float) -> None:
        fields: dict[str, Any] = {"route": self.route.path, "status": status, "ms": round(seconds * 1000, 2)}
        if word:
            fields["why"] = word
        if request is not None:
            fields |= {name: getattr(request, name) for name in ("model", "texts", "tokens", "dropped")}
            if request.key:
                fields["key"] = request.key
            if request.trace is not None:
                fields["trace"] = request.trace.id
            if self.state.settings.log_texts:
                fields["fields"] = dict(request.fields)
        log_event(LOG, "request", fields)


# ---- log ----------------------------------------------------------------------------------------------

# Delay of request lines, so that several are written together.
FLUSH_DELAY_S = 0.1
# Pipes write this many bytes atomically (at least 512 by POSIX, 4096 on Linux), so that lines of several processes that
# share a pipe stay whole.
ATOMIC_BYTES: int = getattr(select, "PIPE_BUF", 4096)


class Log(logging.Formatter):
    """Formatter with one JSON line for each record: time, level, message and fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields = {"at": round(record.created, 3), "level": record.levelname.lower(), "what": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["fault"] = self.formatException(record.exc_info)
        return _line(fields)


class Lines(logging.StreamHandler[TextIO]):
    """Stream handler that buffers lines of level INFO for a moment and writes them together."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._held: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Write or buffer a record."""
        try:
            self._buffer(self.format(record), record.levelno > logging.INFO)
        except Exception:
            self.handleError(record)

    def add_line(self, what: str, fields: Mapping[str, Any]) -> None:
        """Buffer a line of level INFO without creating a log record, once for each request.

        Args:
            what: the message.
            fields: the fields.
        """
        self.acquire()
        try:
            self._buffer(_line({"at": round(time.time(), 3), "level": "info", "what": what, **fields}), False)
        finally:
            self.release()

    def _buffer(self, line: str, now: bool) -> None:
        self._held.append(line + self.terminator)
        if now:
            self.flush()
        elif len(self._held) == 1:
            try:
                asyncio.get_running_loop().call_later(FLUSH_DELAY_S, self.flush)
            except RuntimeError:  # outside of an event loop
                self.flush()

    def flush(self) -> None:
        """Write the buffered lines."""
        self.acquire()
        try:
            lines, self._held = self._held, []
            for piece in _pieces(lines):
                self.stream.write(piece)
                self.stream.flush()
        finally:
            self.release()


def log_event(logger: logging.Logger, what: str, fields: Mapping[str, Any]) -> None:
    """Log an event of level INFO, without a log record if only this module's handler is installed.

    Args:
        logger: the logger.
        what: the message.
        fields: the fields.
    """
    (handler, *others) = logger.handlers or (None,)
    if isinstance(handler, Lines) and not (others or logger.propagate or logger.filters or handler.filters):
        handler.add_line(what, fields)
    else:
        logger.info(what, extra={"fields": fields})


def _line(fields: Mapping[str, Any]) -> str:
    try:
        return as_json(fields).decode()
    except TypeError:
        return json.dumps(fields, ensure_ascii=False, default=str)


def _pieces(lines: Sequence[str]) -> Iterator[str]:
    """Yield joined lines of at most ATOMIC_BYTES; a longer line separately."""
    held, size = list[str](), 0
    for line in lines:
        more = len(line) if line.isascii() else len(line.encode(errors="replace"))
        if held and size + more > ATOMIC_BYTES:
            yield "".join(held)
            held, size = [], 0
        held.append(line)
        size += more
    if held:
        yield "".join(held)
