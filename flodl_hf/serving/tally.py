"""What is counted and logged of the requests of a door.

Counters are looked up once and kept.
"""

from __future__ import annotations

import logging
from typing import Any

from flodl_hf.serving.doors.door import Call, Door, House
from flodl_hf.serving.log import told
from flodl_hf.serving.metrics import Counter, Histogram

__all__ = ["Tally"]

LOG = logging.getLogger("flodl_hf.serving")
_WORDS = (("embed", "te_embed_count"), ("rerank", "te_rerank_count"), ("predict", "te_predict_count"))


class Tally:
    """The requests of one door.

    Args:
        house: whose metrics and settings.
        door: the door.
    """

    def __init__(self, house: House, door: Door) -> None:
        self.house, self.door = house, door
        self._arrived: Counter | None = None
        self._succeeded: Counter | None = None
        self._seconds: Histogram | None = None
        self._of_status: dict[tuple[str, int], Counter] = {}
        self._of_model: dict[str, _Answered] = {}

    def come(self) -> None:
        """Count a request that has come."""
        if self._arrived is None:
            self._arrived = self.house.metrics.counter("te_request_count", method=self.door.path)
        self._arrived.value += 1

    def gone(self, call: Call | None, status: int, word: str, seconds: float) -> None:
        """Count a request that was answered, or was not.

        Args:
            call: what was understood of it, or None.
            status: of HTTP.
            word: why it was not answered, or nothing.
            seconds: all of it.
        """
        metrics, path = self.house.metrics, self.door.path
        if self._succeeded is None or self._seconds is None:
            self._succeeded = metrics.counter("te_request_success", method=path)
            self._seconds = metrics.histogram("te_request_duration", method=path)
        if status == 200:
            self._succeeded.value += 1
        else:
            metrics.add("te_request_failure", err=word)
        self._seconds.add(seconds)
        if call is not None and call.model:
            counter = self._of_status.get((call.model, status))
            if counter is None:
                counter = metrics.counter("flodl_requests_total", model=call.model, status=str(status))
                self._of_status[call.model, status] = counter
            counter.value += 1
            if status == 200:
                answered = self._of_model.get(call.model)
                if answered is None:
                    answered = self._of_model[call.model] = _Answered(self.house, path, call.model)
                answered.add(call, seconds)
        if LOG.isEnabledFor(logging.INFO):
            self._log(call, status, word, seconds)

    def _log(self, call: Call | None, status: int, word: str, seconds: float) -> None:
        said: dict[str, Any] = {"door": self.door.path, "status": status, "ms": round(seconds * 1000, 2)}
        if word:
            said["why"] = word
        if call is not None:
            said |= {"model": call.model, "texts": call.texts, "tokens": call.tokens, "dropped": call.dropped}
            if call.key:
                said["key"] = call.key
            if call.trace is not None:
                said["trace"] = call.trace.id
            if self.house.settings.log_texts:
                said["fields"] = dict(call.fields)
        told(LOG, "request", said)


class _Answered:
    """What is counted of the answers of one model at one door."""

    def __init__(self, house: House, path: str, model: str) -> None:
        metrics = house.metrics
        self._house, self._model = house, model
        self._seconds = metrics.histogram("flodl_request_seconds", model=model)
        self._texts = metrics.counter("flodl_texts_total", model=model)
        self._queue = metrics.histogram("te_request_queue_duration")
        self._inference = metrics.histogram("te_request_inference_duration")
        self._length = metrics.histogram("te_request_input_length")
        self._tokens = metrics.counter("flodl_tokens_total", model=model)
        self._rows = metrics.counter("flodl_rows_total", model=model)
        self._operations = metrics.counter("flodl_operations_total", model=model)
        self._texts_of_kind = [metrics.counter(name) for word, name in _WORDS if word in path]

    def add(self, call: Call, seconds: float) -> None:
        self._seconds.add(seconds)
        self._texts.value += call.texts
        self._queue.add(call.waited_s)
        self._inference.add(call.inferred_s)
        self._length.add(call.tokens)
        self._tokens.value += call.tokens
        self._rows.value += call.windows
        for counter in self._texts_of_kind:
            counter.value += call.texts
        if (info := self._house.workers.models.get(self._model)) is not None:
            operations = call.tokens * info["operations"]
            self._operations.value += operations
            self._house.metrics.operations.add(operations)
        if call.dropped:
            self._house.metrics.add("flodl_dropped_tokens_total", call.dropped, model=self._model)
