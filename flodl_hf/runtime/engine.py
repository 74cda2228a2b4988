"""Rows of tokens through a prepared graph, without filling or with it in buckets, and the results back.

Decides how a batch is laid out, which of an accelerator's passes are recorded and replayed, what happens when
memory runs out, and that nothing waits for a device before results are asked for. Knows no text, and no task
beyond "one result a row" and "one result a token".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flodl.errors import PredictError
from flodl_hf.buckets import Bucket, Buffer, bucket_of
from flodl_hf.decode.rows import Placed, TokenTable
from flodl_hf.layout import Layout, Packed, Padded
from flodl_hf.runtime.options import RunOptions
from flodl_hf.runtime.passes import At, Work
from flodl_hf.runtime.plan import plan_batches
from flodl_hf.runtime.precision import multiplying
from flodl_hf.runtime.prepared import Prepared, holder
from flodl_hf.runtime.record import Recorder

if TYPE_CHECKING:
    from flodl_hf.model import EncoderModel

__all__ = ["Engine", "Pending"]

# Small chunks keep activations in a processor's cache; an accelerator wants large products.
CPU_BUDGET = 1024
CUDA_BUDGET = 16_384


_FIRST = np.zeros(1, np.int64)


# Share of the largest number by which results in buckets may differ: other kernels, other order of sums.
BUCKETS_APART = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 5e-3, torch.float64: 1e-9}


class Pending:
    """Results on their way; ask for them when they are needed.

    Args:
        rows: how many rows there are.
        per_text: whether there is one result a row.
    """

    def __init__(self, rows: int, per_text: bool) -> None:
        self._per_text = per_text
        self._rows = rows
        self._parts: list[tuple[np.ndarray, np.ndarray, Tensor, Any]] = []
        self.threads: list[Thread] = []
        self.faults: list[BaseException] = []

    def add(self, batch: np.ndarray, sizes: np.ndarray, values: Tensor, event: Any) -> None:
        """Note a batch: its rows, how many results each has, where they will be, and the event that says so."""
        self._parts.append((batch, sizes, values, event))

    def placed(self) -> Placed:
        """Return the results of all tokens, in float32 on the CPU, and where each row's begin."""
        self.wait()
        starts = np.zeros(self._rows, np.int64)
        at = 0
        for batch, sizes, values, _ in self._parts:
            starts[batch] = at + np.cumsum(sizes) - sizes
            at += len(values)
        return Placed(self._joined(), starts)

    def stacked(self) -> Tensor:
        """Return the result of each row in the order of the rows, ``(rows, ...)``, in float32 on the CPU."""
        self.wait()
        if len(self._parts) == 1 and self._rows == 1:
            return self._parts[0][2].float()
        order = np.empty(self._rows, np.int64)
        order[np.concatenate([part[0] for part in self._parts])] = np.arange(self._rows)
        return self._joined()[torch.from_numpy(order)]

    def wait(self) -> None:
        """Return when all results are here; raise what another thread met on the way."""
        for thread in self.threads:
            thread.join()
        if self.faults:
            raise self.faults[0]
        for *_, event in self._parts:
            if event is not None:
                event.synchronize()

    def _joined(self) -> Tensor:
        values = [part[2] for part in self._parts]
        return (torch.cat(values) if len(values) > 1 else values[0]).float()


class Engine:
    """Runs rows through one prepared graph on one device.

    Args:
        prepared: the graph, and what is kept with it.
        options: how to run.
        types: whether the graph reads token types.
        longest: most tokens that the model takes in a row, or None.
        bucketed: whether batches are filled up to buckets; None does so on a CUDA device.
    """

    def __init__(
        self, prepared: Prepared, options: RunOptions, *, types: bool, longest: int | None, bucketed: bool | None = None
    ) -> None:
        self.prepared = prepared
        self.graph = prepared.graph
        self.options = options
        self.types = types
        self.longest = longest
        self.device = prepared.device
        self.cuda = self.device.type == "cuda"
        self.bucketed = self.cuda if bucketed is None else bucketed
        self.exact = options.precision == "exact"
        kept = prepared.recorded
        if "recorder" not in kept:
            kept["recorder"] = Recorder()
        self.recorder: Recorder = kept["recorder"]
        usual = CUDA_BUDGET if self.cuda else CPU_BUDGET
        # What once ran out of memory is not tried again on this graph.
        self.budget = min(options.token_budget or usual, kept.get("most_tokens", 1 << 60))

    @classmethod
    def of(cls, model: EncoderModel, options: RunOptions | None = None, device: torch.device | None = None) -> Engine:
        """Return the engine of a model on a device, or on the model's own."""
        options = options or RunOptions()
        return cls(holder(model).get(model.graph, options.precision, device), options, **facts(model))

    def batches(self, table: TokenTable) -> list[np.ndarray]:
        """Return which rows run together."""
        return plan_batches(
            table.lengths, self.budget, equal=self.exact, alone=self.options.batch_invariant
        )  # fmt: skip

    def start(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None = None) -> Pending:
        """Send all rows on their way and return at once where the device works by itself.

        Args:
            table: the rows.
            work: what to compute.
            places: for `At`: which tokens of each row.
        """
        if len(table) and not int(table.lengths.min()):
            at = int(np.argmin(table.lengths))
            raise PredictError(f"row {at} has no tokens; expected at least one, such as a special token", row=at)
        pending = Pending(len(table), work.per_text)
        batches = self.batches(table)
        with torch.inference_mode(), multiplying(self.options.precision, self.device), current(self.device):
            for batch in batches:
                # A lone batch is somebody waiting for one answer; many are bound by the device, not by launches.
                self.send(pending, table, batch, work, places, record=len(batches) == 1)
        return pending

    def send(
        self,
        pending: Pending,
        table: TokenTable,
        batch: np.ndarray,
        work: Work,
        places: Sequence[Sequence[int]] | None = None,
        *,
        record: bool = False,
    ) -> None:
        """Run one batch; if memory runs out, its halves. With ``record`` the pass may be recorded for the next."""
        try:
            sizes, values, event = self._one(table, batch, work, places, record or self.options.batch_invariant)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        else:
            pending.add(batch, sizes, values, event)
            return
        # Outside of the handler, whose traceback would keep the failed batch's memory.
        self._shrink(int(table.lengths[batch].sum()))
        for half in np.array_split(batch, 2):
            self.send(pending, table, half, work, places)

    def _shrink(self, tokens: int) -> None:
        self.budget = max(1, min(self.budget, tokens) // 2)
        self.prepared.recorded["most_tokens"] = self.budget
        self.recorder.clear()
        if self.cuda:
            torch.cuda.empty_cache()

    def _one(
        self,
        table: TokenTable,
        batch: np.ndarray,
        work: Work,
        places: Sequence[Sequence[int]] | None,
        record: bool,
    ) -> tuple[np.ndarray, Tensor, Any]:
        if len(table) == 1:
            # Somebody waits for this one text: what sorting and gathering would do to it is nothing.
            lengths, starts, ids = table.lengths, _FIRST, table.ids
            types = table.types if self.types else None
        else:
            lengths = table.lengths[batch]
            starts = np.cumsum(lengths) - lengths
            tokens = np.arange(int(lengths.sum())) + np.repeat(table.starts[batch] - starts, lengths)
            ids = table.ids[tokens]
            types = table.types[tokens] if self.types and table.types is not None else None
        if work.per_text:
            sizes = np.ones(len(batch), np.int64)
        elif places is not None:
            sizes = np.fromiter((len(places[i]) for i in batch), np.int64, len(batch))
        else:
            sizes = lengths
        at = None
        if isinstance(work, At):
            assert places is not None
            at = np.concatenate(
                [start + np.asarray(places[i], np.int64) for start, i in zip(starts, batch, strict=True)]
            )
        count = int(sizes.sum())
        if self.bucketed and not self.exact and self._buckets_hold(work, ids, types, lengths, at, count):
            return sizes, *self._bucketed(work, ids, types, lengths, at, count, record)
        return sizes, *self._plain(work, ids, types, lengths, at, count)

    def _buckets_hold(
        self,
        work: Work,
        ids: np.ndarray,
        types: np.ndarray | None,
        lengths: np.ndarray,
        at: np.ndarray | None,
        count: int,
    ) -> bool:
        """Return whether a device gives in buckets what it gives without; asked with a graph's first batch.

        Buckets use kernels that no other way of running needs, on devices that we have never seen.
        """
        known = self.prepared.recorded.get("buckets_hold")
        if known is not None or not self.cuda:
            return known is not False
        given = (work, ids, types, lengths, at, count)
        right, there = self._plain(*given)
        try:
            found, event = self._bucketed(*given, record=False)
            for mark in (there, event):
                mark.synchronize()
            apart = float((found.float() - right.float()).abs().max() / right.float().abs().max().clamp(min=1e-6))
            fault = "" if apart <= BUCKETS_APART[found.dtype] else f"results part by {apart:.1e}"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            fault = str(error).splitlines()[0]
        if fault:
            warnings.warn(f"prediction on {self.device} goes on without buckets, more slowly: {fault}", stacklevel=2)
        self.prepared.recorded["buckets_hold"] = not fault
        return not fault

    def _plain(
        self,
        work: Work,
        ids: np.ndarray,
        types: np.ndarray | None,
        lengths: np.ndarray,
        at: np.ndarray | None,
        count: int,
    ) -> tuple[Tensor, Any]:
        layout: Layout
        shape: tuple[int, ...] = (-1,)
        if self.exact:
            layout, shape = Padded(None), (len(lengths), -1)
        else:
            layout = Packed.of(lengths.tolist(), self.device)
        there = torch.from_numpy(ids.astype(np.int64)).to(self.device).view(shape)
        kinds = None
        if self.types:
            kinds = torch.zeros_like(there) if types is None else torch.from_numpy(types).to(there).view(shape)
        chosen = None if at is None else torch.from_numpy(at).to(self.device)
        return self._back(work(self.graph, there, kinds, layout, chosen), count)

    def _bucketed(
        self,
        work: Work,
        ids: np.ndarray,
        types: np.ndarray | None,
        lengths: np.ndarray,
        at: np.ndarray | None,
        count: int,
        record: bool,
    ) -> tuple[Tensor, Any]:
        bucket = bucket_of(lengths, most=self.longest)
        buffer = Buffer(bucket, types=self.types, pinned=self.cuda)
        all_lengths = buffer.write(ids, types, lengths)
        if at is None and record:
            step = self._step(work, bucket, buffer)
            found = self.recorder.run(
                (work, bucket), buffer.packed, step, self.device, lambda out: self._back(out[:count], count)
            )
            if found is not None:
                return found
        packed = buffer.packed.to(self.device, non_blocking=True)
        there, kinds, layout = buffer.on(packed, all_lengths, len(lengths))
        chosen = None
        if at is not None:
            pinned = torch.from_numpy(at)
            chosen = (pinned.pin_memory() if self.cuda else pinned).to(self.device, non_blocking=True)
        return self._back(work(self.graph, there, kinds, layout, chosen)[:count], count)

    def _step(self, work: Work, bucket: Bucket, buffer: Buffer) -> Callable[[Tensor], Tensor]:
        def step(packed: Tensor) -> Tensor:
            there, kinds, layout = buffer.on(packed)
            return work(self.graph, there, kinds, layout, None)

        return step

    def _back(self, found: Tensor, count: int) -> tuple[Tensor, Any]:
        if not self.cuda:
            return found[:count], None
        # Copied while the next batch runs; the event says when it is here.
        home = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        home.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return home, event


def current(device: torch.device) -> torch.cuda.device:
    """Return a context in which a CUDA device is the current one; of another device it changes nothing."""
    # An index below zero leaves the current device as it is.
    return torch.cuda.device(device if device.type == "cuda" else -1)


def facts(model: EncoderModel) -> dict[str, Any]:
    """Return what an engine has to know of a model."""
    config = model.config
    uses = config.family.uses_token_types and getattr(config.encoder, "type_vocab_size", 0) > 1
    return {"types": uses, "longest": config.max_tokens}
