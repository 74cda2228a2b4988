"""The loop of every prediction: encode a window of texts, start its forward pass, decode its results.

On an accelerator two threads tokenize the next windows while the device computes one and the caller's thread decodes
the last. Items are read in the caller's thread only.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flodl.errors import FlodlError
from flodl.garbage_collection import gc_paused
from flodl.progress import Progress
from flodl_hf.inference.batch import COUNTED, HEARD, TRUNCATED, Pending, Work
from flodl_hf.inference.graph_model import warn_after_fork
from flodl_hf.inference.inputs import FIRST_PLACE, Encoded
from flodl_hf.inference.options import RunKeywords, RunOptions
from flodl_hf.inference.results import Found, Results
from flodl_hf.inference.token_table import TokenTable

if TYPE_CHECKING:
    from flodl_hf.inference.engine import Engine, Fleet
    from flodl_hf.inference.graph_model import GraphModel
    from flodl_hf.inference.workers import Call

SENDING: ContextVar[Callable[[Any, RunOptions, TokenTable, Work, Sequence[Sequence[int]] | None], Pending] | None]
SENDING = ContextVar("SENDING", default=None)
"""Runs rows instead of a session: a server combines the rows of several requests, a model mixes adapters."""

# Enough texts to sort by length, few enough that the first results arrive soon.
WINDOW = 1024
# An accelerator computes a small window while the next is tokenized, so windows start small and grow.
FIRST_WINDOW = 128
MAX_WINDOW = 4096
# Long texts fill a window earlier: a window has at most this many characters for each text of its size. A text counts
# with at most MOST_CHARS, since models truncate texts.
MEAN_CHARS, MOST_CHARS = 128, 4096
# Tokens whose pass is started before it is known whether the model has changed since the last call.
MAX_UNCHECKED_TOKENS = 8192
# Results of which so few are made that garbage collection need not pause.
FEW_RESULTS = 32
_AUTOCASTS = ("cpu", "cuda", "mps")


@dataclass
class _Window:
    """Consecutive items and their state: ``read`` are the items that need a forward pass."""

    place: int
    items: list[Any]
    read: list[Any]
    blank: list[bool] | None = None
    encoded: Any = None
    pending: Any = None


def works_by_itself(device: torch.device) -> bool:
    """Return whether a device computes asynchronously."""
    return device.type == "cuda"


class Session:
    """One call that predicts with a model.

    Args:
        model: the model.
        keywords: the call's run options, which override the model's.
    """

    def __init__(self, model: GraphModel, keywords: RunKeywords) -> None:
        warn_after_fork()
        self.model = model
        options = model._run_options or RunOptions()
        self.options = options.changed(dict(keywords)) if keywords else options
        self._ahead = False
        self._call: Call | None = None
        self._progress: Progress | None = None
        self._known: int | None = None
        self._began: float | None = None
        self._done = self._size = self._truncated = self._truncated_pairs = 0

    def runner(self) -> Engine | Fleet:
        """Return what runs rows; called for each window, because the model can change between windows."""
        from flodl_hf.inference.engine import Engine, Fleet

        devices = self.options.devices
        if devices is None:
            return Engine.of(self.model, self.options)
        engines = [Engine.of(self.model, self.options, device) for device in devices]
        return engines[0] if len(engines) == 1 else Fleet(engines)

    def start(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None = None) -> Pending:
        """Start the forward pass of rows.

        Args:
            table: the rows.
            work: what to compute.
            places: the tokens of each row with needed scores; None for all.
        """
        if (count := COUNTED.get()) is not None:
            count(int(table.lengths.sum()))
        if (send := SENDING.get()) is not None:
            return send(self.model, self.options, table, work, places)
        if self.options.devices is not None:
            return self.runner().start(table, work, places)
        from flodl_hf.inference.engine import Engine

        if works_by_itself(self.model.device) and int(table.lengths.sum()) <= MAX_UNCHECKED_TOKENS:
            # Start on the graph of the last call, and check during its pass whether the model has changed.
            engine = Engine.of(self.model, self.options, unchecked=True)
            stamp = engine.prepared.stamp
            try:
                started = engine.start(table, work, places)
            except Exception:
                if stamp.holds():
                    raise
            else:
                if stamp.holds():
                    return started
        return Engine.of(self.model, self.options).start(table, work, places)

    def answer(
        self,
        items: Any,
        encode: Callable[[list[Any]], Any],
        work: Work | None,
        decode: Callable[[list[Any], Any, Any], Any],
        *,
        single: bool = False,
        rows: int = 1,
        start_rows: Callable[[Any], Any] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
        kind: type[Found[Any]] | None = None,
        given: Callable[[Any], Any] | None = None,
        blank: Callable[[Any], bool] | None = None,
        what: str = "predict",
        limit: int | None = None,
    ) -> Any:
        """Return the results of items; calls that take longer than a second show their progress.

        Args:
            items: the items, or one item with ``single``; an iterator returns an iterator.
            encode: items to token rows; called in other threads, for several windows at a time.
            work: what to compute of rows that need one forward pass; None with ``start_rows``.
            decode: items, encoded rows and pending scores to one result per item; called in order.
            single: whether ``items`` is one item.
            rows: approximate number of rows per item.
            start_rows: starts the forward pass of encoded rows and returns a pending result.
            join: combines the results of all windows of a sequence; None for a list.
            kind: type of the results, which contains the text; None for results without text.
            given: the text that a result contains, for an item.
            blank: whether an item gets an empty result without a forward pass; needs ``kind``.
            what: name of the method, in the progress bar and warnings.
            limit: default truncation length in tokens, used in a warning.
        """
        self._encode_items, self._work, self._decode_scores, self._start_rows = encode, work, decode, start_rows
        self._kind, self._given, self._blank, self._what, self._limit = kind, given, blank, what, limit
        if single:
            result = self._result(_Window(0, [items], [items]))[0]
            self._warn()
            return result
        options, on_disk = self.options, self.model.weights_on_disk
        devices = list(options.devices or [self.model.device if on_disk is None else on_disk.device])
        self._ahead = len(devices) > 1 or works_by_itself(devices[0])
        most = max(1, (MAX_WINDOW * len(devices) if self._ahead else WINDOW) // rows)
        first, deep = (max(1, FIRST_WINDOW // rows) if self._ahead else most), 2
        if work is not None and len(devices) > 1 and on_disk is None:
            from flodl_hf.inference import workers

            self._call = workers.call_of(self.model, options, items, encode, work)
            if self._call is not None and self._call.workers.ready:
                deep, most = workers.WINDOWS_AHEAD * len(devices), max(1, workers.WINDOW_TEXTS // rows)
        if options.window is not None:
            first = most = options.window
        chars = MEAN_CHARS * rows if self._ahead and options.window is None else None
        self._known, self._began = len(items) if isinstance(items, Sequence) else None, time.monotonic()
        parts = self._parts(_windows(iter(items), first, most, chars), deep)
        if self._known is None:
            return chain.from_iterable(parts)
        if join is not None:
            return join(list(parts))
        found = chain.from_iterable(parts)
        return list(found) if kind is None else Results(found)

    def _parts(self, windows: Iterator[_Window], deep: int) -> Iterator[Any]:
        """Yield the results of each window.

        Garbage collection pauses while results are made: they are many objects that stay alive, and collections would
        take several times as long as the results.
        """
        few = self._known is not None and self._known <= FEW_RESULTS
        try:
            made = self._overlapped(windows, deep) if self._ahead else map(self._result, windows)
            while True:
                with nullcontext() if few else gc_paused(settled=True):
                    part = next(made, None)
                if part is None:
                    break
                yield part
        finally:
            if self._progress is not None:
                self._progress.close()
        if self._truncated or self._truncated_pairs:
            self._warn()

    def _result(self, window: _Window) -> Any:
        """Return the results of a window, without overlap."""
        self._start(self._encode(window))
        return self._decode(window)

    def _overlapped(self, windows: Iterator[_Window], deep: int) -> Iterator[Any]:
        first, second = next(windows, None), next(windows, None)
        if first is None or second is None:
            if first is not None:
                yield self._result(first)
            return
        # Two threads: the tokenizer has texts while the interpreter makes arrays of other tokens.
        pool = ThreadPoolExecutor(2, thread_name_prefix="flodl-hf-encode")
        encoding: deque[Future[_Window]] = deque(pool.submit(self._encode, window) for window in (first, second))
        running: deque[_Window] = deque()
        try:
            if self._call is None or not self._call.workers.ready:
                with torch_defaults():
                    self.runner()  # the first call prepares the graph during the tokenization
            while encoding:
                try:
                    window = encoding.popleft().result()
                    self._start(window)
                    running.append(window)
                    if (following := next(windows, None)) is not None:
                        encoding.append(pool.submit(self._encode, following))
                except Exception:
                    while running:  # results before the error are returned first
                        yield self._decode(running.popleft())
                    raise
                if len(running) >= deep:
                    yield self._decode(running.popleft())
            while running:
                yield self._decode(running.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, window: _Window) -> _Window:
        before = FIRST_PLACE.set(window.place)
        try:
            with torch_defaults():
                if self._blank is not None and self._kind is not None:
                    blank = list(map(self._blank, window.items))
                    if any(blank):
                        window.blank = blank
                        window.read = [item for item, empty in zip(window.items, blank, strict=True) if not empty]
                if window.read and self._call is not None and self._call.workers.ready:
                    window.encoded = self._call.ask(window.read)
                elif window.read:
                    window.encoded = self._encode_items(window.read)
        except FlodlError:
            if window.blank is not None:
                self._encode_items(window.items)  # the error names places among all items
            raise
        finally:
            FIRST_PLACE.reset(before)
        return window

    def _start(self, window: _Window) -> None:
        if not window.read or isinstance(window.encoded, Future):
            return
        # Without overlap, progress advances with each batch.
        self._size = len(window.items)
        before = HEARD.set(None if self._ahead or self._began is None else self._report)
        try:
            with torch_defaults():
                if self._start_rows is not None:
                    window.pending = self._start_rows(window.encoded)
                elif self._work is not None:
                    window.pending = self.start(window.encoded.table, self._work)
        finally:
            HEARD.reset(before)

    def _report(self, share: float) -> None:
        """Report the items with results: those of earlier windows and a share of one; a single batch shows nothing."""
        done, wanted = self._done + int(share * self._size), self.options.progress
        if self._progress is None and (wanted or (wanted is None and self._known is not None and done < self._known)):
            self._progress = Progress(self._what, self._known, unit="texts", show=wanted, started=self._began)
        if self._progress is not None:
            self._progress.update(done)

    def _decode(self, window: _Window) -> Any:
        if isinstance(window.encoded, Future):
            window.encoded, arrays = window.encoded.result()
            if (count := COUNTED.get()) is not None:
                count(int(window.encoded.table.lengths.sum()))
            window.pending = Pending(len(window.encoded.table))
            for rows, sizes, values in arrays:
                window.pending.add(rows, sizes, torch.from_numpy(values), None)
        found: Any = ()
        if window.read:
            with torch_defaults():
                found = self._decode_scores(window.read, window.encoded, window.pending)
        if self._kind is not None:
            plain = self._given is None or set(map(type, window.items)) == {str}
            texts: Any = window.items if plain or self._given is None else map(self._given, window.items)
            if window.blank is not None:
                rest = iter(found)
                found = [() if empty else next(rest) for empty in window.blank]
            found = list(map(self._kind, found, texts))
        self._done += len(window.items)
        if self._began is not None:
            self._report(0.0)
        encoded = window.encoded
        if isinstance(encoded, Encoded) and encoded.truncated:
            if (truncated := TRUNCATED.get()) is not None:
                truncated(encoded.truncated, encoded.dropped)
            elif encoded.uncut:
                self._truncated_pairs += encoded.truncated
            else:
                self._truncated += encoded.truncated
        return found

    def _warn(self) -> None:
        """Warn about texts that were truncated without a request."""
        truncated = []
        if self._truncated and self._limit is not None:
            truncated.append(
                f"{self._truncated:,} of {self._done:,} texts to {self._limit} tokens, as sentence-transformers does. "
                "long_texts='windows' reads the whole text."
            )
        if self._truncated_pairs:
            truncated.append(
                f"{self._truncated_pairs:,} of {self._done:,} pairs of two long texts, the longer text first, as "
                "transformers does. long_texts='error' raises an error instead."
            )
        for message in truncated:
            warnings.warn(f"{self._what}: truncated {message}", stacklevel=_caller_level())


def _caller_level() -> int:
    """Return the stack level of the first frame outside of this library, for a warning of the calling function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("flodl_hf."):
        frame, level = frame.f_back, level + 1
    return level


def torch_defaults() -> AbstractContextManager[Any]:
    """Return a context without autocast and default device, which the caller's program may have set.

    ``precision`` and ``device`` of a call specify how it runs. Both settings belong to a thread, so each step checks.
    """
    casts = list(filter(torch.is_autocast_enabled, _AUTOCASTS))
    if not casts and torch.get_default_device().type == "cpu":
        return nullcontext()
    stack = ExitStack()
    for kind in casts:
        stack.enter_context(torch.autocast(kind, enabled=False))
    stack.enter_context(torch.device("cpu"))
    return stack


def _windows(items: Iterator[Any], first: int, most: int, chars: int | None) -> Iterator[_Window]:
    """Yield windows of items; each is twice as large as the one before, up to a maximum.

    Args:
        items: the items.
        first: number of items of the first window.
        most: highest number of items.
        chars: mean number of characters of the items of a window; None for no limit.
    """
    place, size, rest = 0, min(first, most), []
    while chunk := rest + list(islice(items, size - len(rest))):
        rest = []
        if chars is not None and len(chunk) > 1:
            ends = np.cumsum(np.minimum(np.fromiter(map(_characters, chunk), np.int64, len(chunk)), MOST_CHARS))
            # The last window may be half as long again, because a short one uses a device badly.
            last = len(chunk) < size and ends[-1] <= 1.5 * chars * size
            count = len(chunk) if last else max(1, int(np.searchsorted(ends, chars * size, "right")))
            chunk, rest = chunk[:count], chunk[count:]
        yield _Window(place, chunk, chunk)
        place, size = place + len(chunk), min(2 * size, most)


def _characters(item: Any) -> int:
    """Return the characters of a text, or of the texts of an item."""
    if isinstance(item, str):
        return len(item)
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
    return sum(len(part) for part in parts if isinstance(part, str))
