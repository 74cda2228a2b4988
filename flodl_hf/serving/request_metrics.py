"""Metrics and log of the requests of one route. Counters are looked up once."""

from __future__ import annotations

import logging
from typing import Any

from flodl_hf.serving.log import log_event
from flodl_hf.serving.metrics import Counter, Histogram
from flodl_hf.serving.routes.route import AppState, Request, Route

__all__ = ["RequestMetrics"]

LOG = logging.getLogger("flodl_hf.serving")
_WORDS = (("embed", "te_embed_count"), ("rerank", "te_rerank_count"), ("predict", "te_predict_count"))


class RequestMetrics:
    """Metrics of the requests of one route.

    Args:
        state: the shared state.
        route: the route.
    """

    def __init__(self, state: AppState, route: Route) -> None:
        self.state, self.route = state, route
        self._arrived: Counter | None = None
        self._succeeded: Counter | None = None
        self._seconds: Histogram | None = None
        self._of_status: dict[tuple[str, int], Counter] = {}
        self._of_model: dict[str, _ModelMetrics] = {}

    def started(self) -> None:
        """Count a received request."""
        if self._arrived is None:
            self._arrived = self.state.metrics.counter("te_request_count", method=self.route.path)
        self._arrived.value += 1

    def finished(self, request: Request | None, status: int, word: str, seconds: float) -> None:
        """Count a finished request.

        Args:
            request: the parsed request, or None if it was invalid.
            status: HTTP status.
            word: kind of the error, or "".
            seconds: total time.
        """
        metrics, path = self.state.metrics, self.route.path
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

    def _log(self, request: Request | None, status: int, word: str, seconds: float) -> None:
        fields: dict[str, Any] = {"door": self.route.path, "status": status, "ms": round(seconds * 1000, 2)}
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

    def __init__(self, state: AppState, path: str, model: str) -> None:
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

    def add(self, request: Request, seconds: float) -> None:
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
