"""One call that predicts: its options, the engines that run it, and the stream of its answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.inference.decode.rows import TokenTable
from flodl_hf.inference.engine import Engine, Pending
from flodl_hf.inference.fleet import Fleet
from flodl_hf.inference.global_settings import plainly, undisturbed
from flodl_hf.inference.graph_model.after_fork import entered
from flodl_hf.inference.inputs import Encoded
from flodl_hf.inference.items import found_by
from flodl_hf.inference.options import RunKeywords, RunOptions, options_of
from flodl_hf.inference.passes import Work
from flodl_hf.inference.pending import COUNTED, TRUNCATED
from flodl_hf.inference.progress import seen
from flodl_hf.inference.results.lists import Found, results_of
from flodl_hf.inference.stream import WINDOW, Job, stream

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model.model import GraphModel
    from flodl_hf.inference.workers import Call

__all__ = ["SENDING", "Session"]

R = TypeVar("R")

SENDING: ContextVar[Callable[[Any, RunOptions, TokenTable, Work, Sequence[Sequence[int]] | None], Pending] | None]
SENDING = ContextVar("SENDING", default=None)
"""Who sends rows on their way in place of a session: a server, which runs the rows of many calls together."""

# An accelerator answers a small window while the next is tokenised, so windows begin small and grow.
FIRST = 512
MOST = 4096


STARTS: ContextVar[Callable[[Encoded, Work], Pending] | None] = ContextVar("STARTS", default=None)
"""Who runs rows in place of the model's own graph."""


def _by(starts: Callable[[Encoded, Work], Pending], work: Work, encoded: Encoded) -> Pending:
    return starts(encoded, work)


def works_by_itself(device: torch.device) -> bool:
    """Return whether a device goes on with what it was sent while the caller does something else."""
    return device.type == "cuda"


class Session:
    """How one call runs on one model.

    Args:
        model: the model.
        given: the call's keywords, which come before the model's own options.
    """

    def __init__(self, model: GraphModel, given: RunKeywords) -> None:
        entered()
        self.model = model
        options = options_of(model)
        self.options = options.changed(dict(given)) if given else options
        if len(self.options.devices or ()) > 1 and model.weights_on_disk is not None:
            raise PredictError(
                f"devices={[str(device) for device in self.options.devices or ()]}: the model's weights are on disk, "
                "which are read for one device. Load it with weights='memory' to share work among several.",
                devices=self.options.devices,
            )

    def runner(self) -> Engine | Fleet:
        """Return what runs rows now; asked for each window, because the model may have changed since the last."""
        devices = self.options.devices
        if devices is None:
            return Engine.of(self.model, self.options)
        engines = [Engine.of(self.model, self.options, device) for device in devices]
        return engines[0] if len(engines) == 1 else Fleet(engines)

    def start(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None = None) -> Pending:
        """Send rows on their way."""
        _count(table)
        if (send := SENDING.get()) is not None:
            return send(self.model, self.options, table, work, places)
        if len(table) == 1 and self.options.devices is None and works_by_itself(self.model.device):
            started = self._while_checked(table, work, places)
            if started is not None:
                return started
        return self.runner().start(table, work, places)

    def _while_checked(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None) -> Pending | None:
        """Start on the graph that was prepared last and look meanwhile whether the model has changed since.

        None if it has; the device's work is then for nothing, and harmless. Somebody waits for this one row, and
        looking takes as long as tokenising it.
        """
        engine = Engine.of(self.model, self.options, unchecked=True)
        try:
            started = engine.start(table, work, places)
        except Exception:
            if engine.prepared.stamp.holds():
                raise
            return None
        return started if engine.prepared.stamp.holds() else None

    def answer(
        self,
        items: Any,
        encode: Callable[[list[Any]], Encoded],
        work: Work,
        finish: Callable[[list[Any], Encoded, Pending], Sequence[R] | Tensor],
        *,
        join: Callable[[list[Any]], Any] | None = None,
        single: bool = False,
        rows: int = 1,
        kind: type[Found[Any]] | None = None,
        what: str = "predict",
        limit: int | None = None,
        **words: Any,
    ) -> Any:
        """Return the answers to some items.

        Args:
            items: items; an iterator gives an iterator.
            encode: their rows of tokens.
            work: what is computed of them.
            finish: answers of scores.
            join: see `Job`.
            single: ``items`` is one item, and its answer is wanted.
            rows: about how many rows an item has.
            kind: what an answer becomes; items with nothing to read then have an empty one. None leaves it as it is,
                and runs them too.
            what: the method, as its progress is headed.
            limit: the tokens that texts are truncated to without a request of the caller, who is warned.
            **words: of `flodl_hf.inference.items.found_by`.
        """
        starts = STARTS.get()
        start = (lambda encoded: self.start(encoded.table, work)) if starts is None else partial(_by, starts, work)
        cut = _Truncated(what, limit)
        job: Job[Any, Any] = Job(encode, start, cut.counting(finish), join)
        call = None
        if not single and self.options.devices is not None and len(self.options.devices) > 1:
            from flodl_hf.inference.workers import call_of

            call = call_of(self.model, self.options, items, encode, work)
            job = job if call is None else _sent(job, call)
        if kind is not None:
            job = found_by(job, kind, **words)
        if single:
            return cut.warned(self.alone(items, job))
        found = cut.warned(self.run(items, job, rows=rows, what=what, call=call))
        return results_of(found) if kind is not None else found

    def alone(self, item: Any, job: Job[Any, R]) -> R:
        """Return the answer that a job gives to one item, which somebody waits for."""
        return undisturbed(job).alone([item])[0]

    def run(
        self, items: Iterable[Any], job: Job[Any, R], *, rows: int = 1, what: str = "predict", call: Call | None = None
    ) -> Any:
        """Return the answers that a job gives; how far it is, is shown of a list that takes longer than a second."""
        on_disk = self.model.weights_on_disk
        devices = list(self.options.devices or [self.model.device if on_disk is None else on_disk.device])
        ahead = len(devices) > 1 or works_by_itself(devices[0])
        most = self.options.window or max(1, (MOST * len(devices) if ahead else WINDOW) // rows)
        first = self.options.window or (max(1, FIRST // rows) if ahead else most)
        deep = 2
        if call is not None and call.ready:
            deep, texts = call.windows
            first = most = self.options.window or max(1, texts // rows)

        # A first call prepares the graph, for which no text has to be there.
        meanwhile = plainly(self.runner) if call is None or not call.ready else None

        def answers(job: Job[Any, R]) -> Any:
            return stream(items, undisturbed(job), first=first, most=most, ahead=ahead, deep=deep, meanwhile=meanwhile)

        return seen(items, job, answers, what=what, show=self.options.progress, by_batch=not ahead)


class _Truncated:
    """Number of truncated texts of one call.

    Args:
        what: the method.
        limit: the tokens that texts are truncated to; None for calls that do not warn.
    """

    def __init__(self, what: str, limit: int | None) -> None:
        self._what, self._limit = what, limit
        self._texts = self._cut = self._pairs = 0

    def counting(self, finish: Callable[[list[Any], Encoded, Any], Any]) -> Callable[[list[Any], Encoded, Any], Any]:
        """Return ``finish`` that also counts."""

        def counted(chunk: list[Any], encoded: Encoded, running: Any) -> Any:
            found = finish(chunk, encoded, running)
            self._texts += len(chunk)
            if encoded.truncated and (heard := TRUNCATED.get()) is not None:
                heard(encoded.truncated, encoded.dropped)
            elif encoded.uncut:
                self._pairs += encoded.truncated
            else:
                self._cut += encoded.truncated
            return found

        return counted

    def warned(self, found: Any) -> Any:
        """Return the answers; warn if texts were truncated, for an iterator at its end."""
        if isinstance(found, Iterator):
            return self._warned_after(found)
        if self._cut and self._limit is not None:
            warnings.warn(
                f"{self._what}: truncated {self._cut:,} of {self._texts:,} texts to {self._limit} tokens, as "
                "sentence-transformers does. windows=True reads all of a text in windows instead.",
                stacklevel=5,
            )
        if self._pairs:
            warnings.warn(
                f"{self._what}: truncated {self._pairs:,} of {self._texts:,} pairs, whose texts are both long: the "
                "longer text first, as transformers does. strict=True refuses such pairs.",
                stacklevel=5,
            )
        return found

    def _warned_after(self, found: Iterator[Any]) -> Iterator[Any]:
        yield from found
        self.warned(None)


def _count(table: TokenTable) -> None:
    if (count := COUNTED.get()) is not None:
        count(int(table.lengths.sum()))


def _sent(job: Job[Any, Any], call: Call) -> Job[Any, Any]:
    """Return the job with its windows sent to workers as soon as there are some."""

    def encode(chunk: list[Any]) -> Any:
        return call.ask(chunk) if call.ready else job.encode(chunk)

    def start(encoded: Any) -> Any:
        return None if isinstance(encoded, Future) else job.start(encoded)

    def finish(chunk: list[Any], encoded: Any, running: Any) -> Any:
        if isinstance(encoded, Future):
            encoded, arrays = encoded.result()
            _count(encoded.table)
            running = Pending.arrived(len(encoded.table), arrays)
        return job.finish(chunk, encoded, running)

    return Job(encode, start, finish, job.join)
