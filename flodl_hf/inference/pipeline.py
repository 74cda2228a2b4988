"""The loop of every prediction: encode a window of texts, start its forward pass, decode its results.

On an accelerator two threads tokenize the next windows while the device computes one and the caller's thread decodes
the last. Items are read in the caller's thread only.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flodl.devices import default_device
from flodl.errors import FlodlError
from flodl.garbage_collection import gc_paused
from flodl.progress import Progress
from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import COUNTED, HEARD, TRUNCATED, Pending
from flodl_hf.inference.decode.rows import TokenTable
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.fleet import Fleet
from flodl_hf.inference.forward import Work
from flodl_hf.inference.graph_model.model import reinit_after_fork
from flodl_hf.inference.inputs import FIRST_PLACE, Encoded
from flodl_hf.inference.options import RunKeywords, RunOptions, options_of
from flodl_hf.inference.results.lists import Found, results_of

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model.model import GraphModel
    from flodl_hf.inference.workers import Call

SENDING: ContextVar[Callable[[Any, RunOptions, TokenTable, Work, Sequence[Sequence[int]] | None], Pending] | None]
SENDING = ContextVar("SENDING", default=None)
"""Runs rows instead of a session: a server combines the rows of several requests."""

STARTS: ContextVar[Callable[[Encoded, Work], Pending] | None] = ContextVar("STARTS", default=None)
"""Runs rows instead of the model's graph."""

# Enough texts to sort by length, few enough that the first results arrive soon.
WINDOW = 1024
# An accelerator computes a small window while the next is tokenized, so windows start small and grow.
FIRST_WINDOW = 512
MAX_WINDOW = 4096
# Long texts fill a window earlier: a window has at most this many characters for each text of its size. A text counts
# with at most MOST_CHARS, since models truncate texts.
MEAN_CHARS, MOST_CHARS = 128, 4096
_AUTOCASTS = ("cpu", "cuda", "mps")


@dataclass(frozen=True)
class Steps:
    """The steps from items to results.

    Args:
        encode: items to token rows; called in other threads, for several windows at a time.
        start: starts the forward pass of encoded rows and returns a pending result.
        decode: items, encoded rows and pending result to one result per item; called in order.
        join: combines the results of all windows of a sequence; None for a list.
        kind: type of the results, which contains the text; None for results without text.
        given: the text that a result contains, for an item.
        blank: whether an item gets an empty result without a forward pass; needs ``kind``.
    """

    encode: Callable[[list[Any]], Any]
    start: Callable[[Any], Any]
    decode: Callable[[list[Any], Any, Any], Any]
    join: Callable[[list[Any]], Any] | None = None
    kind: type[Found[Any]] | None = None
    given: Callable[[Any], Any] | None = None
    blank: Callable[[Any], bool] | None = None


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
        given: the call's run options, which override the model's.
    """

    def __init__(self, model: GraphModel, given: RunKeywords) -> None:
        reinit_after_fork()
        self.model = model
        options = options_of(model)
        self.options = options.changed(dict(given)) if given else options
        if len(self.options.devices or ()) > 1 and model.weights_on_disk is not None:
            raise PredictError(
                f"devices={[str(device) for device in self.options.devices or ()]}: the model's weights are on disk, "
                "expected one device. Load it with weights='memory' to use several.",
                devices=self.options.devices,
            )

    def runner(self) -> Engine | Fleet:
        """Return what runs rows; called for each window, because the model can change between windows."""
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
        if len(table) == 1 and self.options.devices is None and works_by_itself(self.model.device):
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
        return self.runner().start(table, work, places)

    def answer(
        self,
        items: Any,
        encode: Callable[[list[Any]], Encoded],
        work: Work,
        decode: Callable[[list[Any], Encoded, Pending], Any],
        *,
        join: Callable[[list[Any]], Any] | None = None,
        kind: type[Found[Any]] | None = None,
        given: Callable[[Any], Any] | None = None,
        blank: Callable[[Any], bool] | None = None,
        **how: Any,
    ) -> Any:
        """Return the results of items with rows that need one forward pass.

        Args:
            items: the items; an iterator returns an iterator.
            encode: items to rows of tokens.
            work: what to compute.
            decode: scores to one result per item.
            join: see `Steps`.
            kind: see `Steps`.
            given: see `Steps`.
            blank: see `Steps`.
            **how: options of `run`.
        """

        def start(encoded: Encoded) -> Pending:
            instead = STARTS.get()
            return self.start(encoded.table, work) if instead is None else instead(encoded, work)

        call = None
        if not how.get("single") and len(self.options.devices or ()) > 1:
            from flodl_hf.inference.workers import call_of

            call = call_of(self.model, self.options, items, encode, work)
        return self.run(
            items, Steps(encode, start, decode, join, kind, given, None if kind is None else blank), call=call, **how
        )

    def run(
        self,
        items: Any,
        steps: Steps,
        *,
        single: bool = False,
        rows: int = 1,
        what: str = "predict",
        limit: int | None = None,
        call: Call | None = None,
    ) -> Any:
        """Return the results of items.

        Args:
            items: the items, or one item with ``single``; an iterator returns an iterator.
            steps: how to compute results.
            single: whether ``items`` is one item.
            rows: approximate number of rows per item.
            what: name of the method, in the progress bar and warnings.
            limit: default truncation length in tokens, used in a warning.
            call: sends windows to worker processes.
        """
        loop = _Loop(self, steps, what, limit, call)
        if single:
            return loop.one(items)
        found = loop.all(items, rows)
        return found if steps.kind is None else results_of(found)


class _Loop:
    """The windows of one call."""

    def __init__(self, session: Session, steps: Steps, what: str, limit: int | None, call: Call | None) -> None:
        self.session, self.steps, self.what, self.limit, self.call = session, steps, what, limit, call
        self.progress: Progress | None = None
        self.ahead = False
        self.done = self.truncated = self.truncated_pairs = 0

    def one(self, item: Any) -> Any:
        """Return the result of one item."""
        window = self.encode(_Window(0, [item], [item]))
        self.start(window)
        result = self.decode(window)[0]
        self.warn()
        return result

    def all(self, items: Iterable[Any], rows: int) -> Any:
        """Return the results of all items; calls that take longer than a second show their progress."""
        options, on_disk = self.session.options, self.session.model.weights_on_disk
        devices = list(options.devices or [self.session.model.device if on_disk is None else on_disk.device])
        self.ahead = len(devices) > 1 or works_by_itself(devices[0])
        most = max(1, (MAX_WINDOW * len(devices) if self.ahead else WINDOW) // rows)
        first, deep = (max(1, FIRST_WINDOW // rows) if self.ahead else most), 2
        if self.call is not None and self.call.ready:
            deep, texts = self.call.windows
            first = most = max(1, texts // rows)
        if options.window is not None:
            first = most = options.window
        chars = MEAN_CHARS * rows if self.ahead and options.window is None else None
        known = len(items) if isinstance(items, Sequence) else None
        if options.progress is not False and (known is not None or options.progress):
            self.progress = Progress(self.what, known, unit="texts", show=options.progress)
        parts = self.parts(_windows(iter(items), first, most, chars), deep)
        if known is None:
            return chain.from_iterable(parts)
        found = list(parts)
        return list(chain.from_iterable(found)) if self.steps.join is None else self.steps.join(found)

    def parts(self, windows: Iterator[_Window], deep: int) -> Iterator[Any]:
        """Yield the results of each window.

        Garbage collection pauses while results are made: they are many objects that stay alive, and collections would
        take several times as long as the results.
        """
        with self.progress or nullcontext():
            made = self.overlapped(windows, deep) if self.ahead else self.in_turn(windows)
            while True:
                with gc_paused(settled=True):
                    part = next(made, None)
                if part is None:
                    break
                yield part
        self.warn()

    def in_turn(self, windows: Iterator[_Window]) -> Iterator[Any]:
        for window in windows:
            self.start(self.encode(window))
            yield self.decode(window)

    def overlapped(self, windows: Iterator[_Window], deep: int) -> Iterator[Any]:
        first, second = next(windows, None), next(windows, None)
        if first is None or second is None:
            yield from self.in_turn(iter(() if first is None else (first,)))
            return
        # Two threads: the tokenizer has texts while the interpreter makes arrays of other tokens.
        pool = ThreadPoolExecutor(2, thread_name_prefix="flodl-hf-encode")
        encoding: deque[Future[_Window]] = deque(pool.submit(self.encode, window) for window in (first, second))
        running: deque[_Window] = deque()
        try:
            if self.call is None or not self.call.ready:
                with torch_defaults():
                    self.session.runner()  # the first call prepares the graph during the tokenization
            while encoding:
                try:
                    window = encoding.popleft().result()
                    self.start(window)
                    running.append(window)
                    if (following := next(windows, None)) is not None:
                        encoding.append(pool.submit(self.encode, following))
                except Exception:
                    while running:  # results before the error are returned first
                        yield self.decode(running.popleft())
                    raise
                if len(running) >= deep:
                    yield self.decode(running.popleft())
            while running:
                yield self.decode(running.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def encode(self, window: _Window) -> _Window:
        before = FIRST_PLACE.set(window.place)
        try:
            with torch_defaults():
                if self.steps.blank is not None:
                    blank = list(map(self.steps.blank, window.items))
                    if any(blank):
                        window.blank = blank
                        window.read = [item for item, empty in zip(window.items, blank, strict=True) if not empty]
                if window.read:
                    call = self.call if self.call is not None and self.call.ready else None
                    window.encoded = self._encoded(window) if call is None else call.ask(window.read)
        finally:
            FIRST_PLACE.reset(before)
        return window

    def _encoded(self, window: _Window) -> Any:
        try:
            return self.steps.encode(window.read)
        except FlodlError:
            if window.blank is not None:
                self.steps.encode(window.items)  # the error names places among all items
            raise

    def start(self, window: _Window) -> None:
        if not window.read or isinstance(window.encoded, Future):
            return
        with torch_defaults():
            if self.progress is None or self.ahead:
                window.pending = self.steps.start(window.encoded)
                return
            # Without overlap, progress advances with each batch.
            share = 0.0

            def heard(part: float) -> None:
                nonlocal share
                share += part
                assert self.progress is not None
                self.progress.update(self.done + min(len(window.items), int(share * len(window.items))))

            before = HEARD.set(heard)
            try:
                window.pending = self.steps.start(window.encoded)
            finally:
                HEARD.reset(before)

    def decode(self, window: _Window) -> Any:
        if isinstance(window.encoded, Future):
            window.encoded, arrays = window.encoded.result()
            if (count := COUNTED.get()) is not None:
                count(int(window.encoded.table.lengths.sum()))
            window.pending = Pending.arrived(len(window.encoded.table), arrays)
        steps, kind = self.steps, self.steps.kind
        with torch_defaults():
            found = steps.decode(window.read, window.encoded, window.pending) if window.read else ()
        if kind is not None:
            found = list(map(kind, found, self._texts(window.read)))
        if window.blank is not None:
            assert kind is not None
            rest = iter(found)
            texts = self._texts(window.items)
            found = [kind((), text) if empty else next(rest) for text, empty in zip(texts, window.blank, strict=True)]
        self._count(window)
        return found

    def _texts(self, items: list[Any]) -> list[Any]:
        given = self.steps.given
        return items if given is None or set(map(type, items)) == {str} else list(map(given, items))

    def _count(self, window: _Window) -> None:
        self.done += len(window.items)
        if self.progress is not None:
            self.progress.update(self.done)
        encoded = window.encoded
        if not isinstance(encoded, Encoded) or not encoded.truncated:
            return
        if (heard := TRUNCATED.get()) is not None:
            heard(encoded.truncated, encoded.dropped)
        elif encoded.uncut:
            self.truncated_pairs += encoded.truncated
        else:
            self.truncated += encoded.truncated

    def warn(self) -> None:
        """Warn about texts that were truncated without a request."""
        if self.truncated and self.limit is not None:
            warnings.warn(
                f"{self.what}: truncated {self.truncated:,} of {self.done:,} texts to {self.limit} tokens, as "
                "sentence-transformers does. windows=True reads the whole text in windows.",
                stacklevel=_caller_level(),
            )
        if self.truncated_pairs:
            warnings.warn(
                f"{self.what}: truncated {self.truncated_pairs:,} of {self.done:,} pairs of two long texts, the longer "
                "text first, as transformers does. strict=True raises an error instead.",
                stacklevel=_caller_level(),
            )


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
    casts = [kind for kind in _AUTOCASTS if torch.is_autocast_enabled(kind)]
    if not casts and default_device() is None:
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
            count = max(1, int(np.searchsorted(ends, chars * size, "right")))
            chunk, rest = chunk[:count], chunk[count:]
        yield _Window(place, chunk, chunk)
        place, size = place + len(chunk), min(2 * size, most)


def _characters(item: Any) -> int:
    """Return the characters of a text, or of the texts of an item."""
    if isinstance(item, str):
        return len(item)
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
    return sum(len(part) for part in parts if isinstance(part, str))
