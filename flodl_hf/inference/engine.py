"""Rows of tokens through a prepared graph, without padding or with it in buckets, and the results back.

Decides the layout of a batch, which of an accelerator's passes are recorded and replayed, the reaction to
running out of memory, and that a device is not synchronised before results are needed. Uses no text, and no task
beyond "one result a row" and "one result a token".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import (
    BUDGETS,
    Batch,
    Pending,
    Scores,
    States,
    Work,
    batch_of,
    plan_batches,
    without_tokens,
)
from flodl_hf.inference.cuda_graphs import SMALL, WAIT, Recorder
from flodl_hf.inference.inputs import encode, split_pairs
from flodl_hf.inference.layers_from_disk import Given
from flodl_hf.inference.options import Precision, RunKeywords, RunOptions
from flodl_hf.inference.prepared_graph import Prepared, prepared_for
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.nn.buckets import Buffer, bucket_of, laid_out, rounded
from flodl_hf.nn.layout import Layout, Packed, Padded
from flodl_hf.nn.prompts import prefix_of

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model import GraphModel


class Engine:
    """Runs rows through one prepared graph on one device.

    Args:
        prepared: the graph, and its prepared state.
        options: how to run.
        types: whether the graph reads token types.
        longest: maximum number of tokens of a row, or None.
        bucketed: whether batches are padded to buckets; None does so on a CUDA device that is trusted with them.
        coarse: whether small batches are padded to powers of two and four, so that few shapes recur in many of them.
    """

    def __init__(
        self,
        prepared: Prepared,
        options: RunOptions,
        *,
        types: bool,
        longest: int | None,
        bucketed: bool | None = None,
        coarse: bool = False,
    ) -> None:
        self.prepared = prepared
        self.graph = prepared.graph
        self.options = options
        self.types = types
        self.longest = longest
        self.device = prepared.device
        self.cuda = self.device.type == "cuda"
        self.bucketed = prepared.bucketed if bucketed is None else bucketed
        self.coarse = coarse
        self.exact = options.precision == "exact"
        kept = prepared.recorded
        if "recorder" not in kept:
            kept["recorder"] = Recorder()
        self.recorder: Recorder = kept["recorder"]
        # What once ran out of memory is not tried again on this graph.
        self.budget = min(options.token_budget or BUDGETS[self.device.type], kept.get("most_tokens", 1 << 60))

    @classmethod
    def of(
        cls,
        model: GraphModel,
        options: RunOptions | None = None,
        device: torch.device | None = None,
        *,
        unchecked: bool = False,
        coarse: bool = False,
    ) -> Engine:
        """Return the engine of a model on a device, or on the model's own; ``unchecked`` as of `prepared_for`."""
        options = options or RunOptions()
        on_disk = model.weights_on_disk
        if on_disk is not None and (device not in (None, on_disk.device) or len(options.devices or ()) > 1):
            raise PredictError(
                f"devices: the model's weights are on disk, read for {on_disk.device}; expected no other device. Load "
                "it with device= for another, or with weights='memory' to share work among several.",
                device=str(device),
            )
        place = device if on_disk is None else on_disk.device
        found = prepared_for(model, options.precision, place, unchecked=unchecked, on_disk=on_disk)
        places = model.config.max_tokens
        longest = places and places - model.virtual_tokens
        return cls(found, options, types=model._reads_types, longest=longest, coarse=coarse)

    def start(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None = None) -> Pending:
        """Start all rows; return immediately if the device works asynchronously.

        Args:
            table: the rows.
            work: what to compute.
            places: for `ScoresAt`: which tokens of each row.
        """
        if not table.lengths.all():
            raise without_tokens(table)
        pending = Pending(len(table))
        alone = self.options.batch_invariant
        batches = plan_batches(table.lengths, self.budget, equal=self.exact, alone=alone)
        with torch.inference_mode(), current(self.device, self.options.precision):
            if self.prepared.layered is not None:
                self._by_layers(pending, table, batches, work, places)
                return pending
            for batch in batches:
                # A single batch has a waiting caller, so even a small one may be recorded.
                self.send(pending, table, batch, work, places, alone=len(batches) == 1)
        return pending

    def _by_layers(
        self,
        pending: Pending,
        table: TokenTable,
        batches: list[np.ndarray],
        work: Work,
        places: Sequence[Sequence[int]] | None,
    ) -> None:
        """Run all batches side by side, each layer being read once for all of them."""
        layered, rest = self.prepared.layered, deque(batches)
        assert layered is not None
        while rest:
            made = [batch_of(table, rows, work, places, types=self.types) for rows in rest]
            try:
                answers = layered.results((batch.work, self._given(batch)) for batch in made)
                for batch, found in zip(made, answers, strict=True):
                    pending.add(rest[0], batch.sizes, *self._back(found.float(), batch.count))
                    rest.popleft()
            except torch.OutOfMemoryError:
                if all(len(rows) == 1 for rows in rest):
                    raise
            else:
                return
            self._shrink(max(len(batch.ids) for batch in made))
            rows = np.concatenate(rest)
            alone = self.options.batch_invariant
            rest = deque(rows[b] for b in plan_batches(table.lengths[rows], self.budget, equal=self.exact, alone=alone))

    def send(
        self,
        pending: Pending,
        table: TokenTable,
        rows: np.ndarray,
        work: Work,
        places: Sequence[Sequence[int]] | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Run some rows; if memory runs out, their halves. ``alone``: small shapes like this one will recur."""
        batch = batch_of(table, rows, work, places, types=self.types)
        try:
            values, event = self._run(batch, alone or self.options.batch_invariant)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        else:
            pending.add(rows, batch.sizes, values, event)
            return
        # Outside of the handler: its traceback would keep the failed batch's memory.
        self._shrink(len(batch.ids))
        for half in np.array_split(rows, 2):
            self.send(pending, table, half, work, places)

    def _shrink(self, tokens: int) -> None:
        self.budget = max(1, min(self.budget, tokens) // 2)
        self.prepared.recorded["most_tokens"] = self.budget
        self.recorder.clear()
        if self.cuda:
            torch.cuda.empty_cache()

    def _run(self, batch: Batch, alone: bool) -> tuple[Tensor, Any]:
        # Large batches come in few shapes, all of them recorded: launching them op by op would keep the
        # interpreter from tokenising and decoding meanwhile.
        large = len(batch.ids) > SMALL
        wanted = self.bucketed and not self.exact and batch.at is None and (large or alone)
        if wanted and self.recorder.records_on(self.device) and not self.recorder.refused:
            return self._recorded(batch, large)
        return self._back(batch.work(self.graph, *self._given(batch)).float(), batch.count)

    def _given(self, batch: Batch) -> Given:
        """Return the arguments of a batch's pass, on the device."""
        at = None if batch.at is None else self._chosen(batch.at)
        if self.bucketed and not self.exact:
            buffer = Buffer(self._bucket(batch), types=self.types, pinned=self.cuda)
            lengths = buffer.write(batch.ids, batch.types, batch.lengths)
            packed = buffer.packed.to(self.device, non_blocking=True)
            return Given(*buffer.on(packed, lengths, len(batch.lengths)), at)
        if self.prepared.rounded:
            lead = prefix_of(self.graph)
            types = batch.types if self.types else None
            if self.types and types is None:
                types = np.zeros_like(batch.ids)
            ids, kinds, laid = laid_out(batch.ids, types, batch.lengths, lead=0 if lead is None else lead.count)
            return Given(ids, kinds, laid, at)
        layout: Layout
        shape: tuple[int, ...] = (-1,)
        if self.exact:
            layout, shape = Padded(None), (len(batch.lengths), -1)
        else:
            layout = Packed.of(batch.lengths.tolist(), self.device)
        there = torch.from_numpy(batch.ids.astype(np.int64)).to(self.device).view(shape)
        kinds = None
        if self.types:
            kinds = torch.zeros_like(there)
            if batch.types is not None:
                kinds = torch.from_numpy(batch.types).to(there).view(shape)
        return Given(there, kinds, layout, at)

    def _chosen(self, chosen: np.ndarray) -> Tensor:
        if self.prepared.rounded:
            chosen = np.pad(chosen, (0, rounded(len(chosen)) - len(chosen)))
        found = torch.from_numpy(chosen)
        return (found.pin_memory() if self.cuda else found).to(self.device, non_blocking=True)

    def _bucket(self, batch: Batch) -> Any:
        large = len(batch.ids) > SMALL
        steps, full = 1 if self.coarse and not large else 4, self.budget if large else None
        return bucket_of(batch.lengths, steps=steps, most=self.longest, full=full)

    def _recorded(self, batch: Batch, large: bool) -> tuple[Tensor, Any]:
        """Return the result of a batch whose shape is recorded, now or later."""
        bucket = self._bucket(batch)
        buffer = Buffer(bucket, types=self.types, pinned=self.cuda)
        buffer.write(batch.ids, batch.types, batch.lengths)
        key = (batch.work, bucket)
        found = self.recorder.replayed(key, buffer.packed, self.device, lambda out: self._back(out, batch.count))
        if found is not None:
            return found
        packed = buffer.packed.to(self.device, non_blocking=True)
        # As the recording will compute it, to the bit: it knows no lengths.
        step = self._step(batch.work, buffer)
        output = step(packed)
        result = self._back(output, batch.count)
        self.recorder.saw(key, packed, output, step, wait=1 if large else WAIT)
        return result

    def _step(self, work: Work, buffer: Buffer) -> Callable[[Tensor], Tensor]:
        def step(packed: Tensor) -> Tensor:
            there, kinds, layout = buffer.on(packed)
            return work(self.graph, there, kinds, layout, None).float()

        return step

    def _back(self, output: Tensor, count: int) -> tuple[Tensor, Any]:
        output = output[:count]
        if not self.cuda:
            return output.cpu(), None
        # Copied while the next batch runs; the event is set when the copy is complete.
        home = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        home.copy_(output, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return home, event


@contextmanager
def current(device: torch.device, precision: Precision | None = None) -> Iterator[None]:
    """Make a CUDA device the current one, and allow or forbid TF32 for its float32 products; nothing for others.

    The switch is the whole process's: calls of different precision on several threads take turns.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        if precision not in ("tf32", "fp32", "exact"):
            # torch refuses to read the switch if the program has set ``fp32_precision``.
            yield
            return
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


# ---- several devices ----------------------------------------------------------------------------------

# Batches that are started ahead on a device, so that it never waits for its thread.
_AHEAD = 2


class Fleet:
    """Runs rows on several engines with a common queue of batches.

    Each device has a thread that takes the next batch when it has finished one, so devices of different speed are all
    used.

    Args:
        engines: an engine for each device; devices may be repeated.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)

    def start(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None = None) -> Pending:
        """Start the prediction of all rows and return immediately; see `Engine.start`."""
        pending = Pending(len(table))
        budget = min(engine.budget for engine in self.engines)
        smallest = min(self.engines, key=lambda engine: engine.budget)
        alone = smallest.options.batch_invariant
        queue = deque(plan_batches(table.lengths, budget, equal=smallest.exact, alone=alone))
        for engine in self.engines:
            args = (engine, pending, queue, table, work, places)
            thread = Thread(target=_serve, args=args, name=f"flodl-hf-{engine.device}", daemon=True)
            pending.threads.append(thread)
            thread.start()
        return pending


def _serve(
    engine: Engine,
    pending: Pending,
    queue: deque[np.ndarray],
    table: TokenTable,
    work: Work,
    places: Sequence[Sequence[int]] | None,
) -> None:
    sent: deque[torch.cuda.Event] = deque()
    try:
        with torch.inference_mode(), current(engine.device, engine.options.precision):
            while queue and not pending.faults:
                try:
                    batch = queue.popleft()
                except IndexError:
                    return
                engine.send(pending, table, batch, work, places)
                if engine.cuda:
                    event = torch.cuda.Event()
                    event.record()
                    sent.append(event)
                    if len(sent) > _AHEAD:
                        sent.popleft().synchronize()
    except BaseException as fault:  # raised again when results are requested
        pending.faults.append(fault)


@dataclass(frozen=True, slots=True)
class Spread:
    """How far scores moved.

    Attributes:
        largest: largest difference of a score.
        mean: mean difference.
        texts: how many texts were compared.
        worst: the text with the largest difference, by its place; -1 without texts.
    """

    largest: float
    mean: float
    texts: int
    worst: int


def spread(model: GraphModel, texts: Sequence[Any], **run: Any) -> Spread:
    """Return the difference between the scores of texts in one batch and of each text alone.

    With ``batch_invariant=True`` among the keywords the answer is 0, on any device.

    Args:
        model: the model; of an encoder without a head the token states are compared.
        texts: texts or pairs.
        **run: how to run, see `RunKeywords`.

    Raises:
        PredictError: the model has no tokenizer.
    """
    given: RunKeywords = run  # type: ignore[assignment]
    options = (model._run_options or RunOptions()).changed(dict(given))
    tokenizer = model._ready("spread", untrained=True)
    firsts, seconds = split_pairs(list(texts), "spread")
    table = encode(tokenizer, firsts, seconds, max_tokens=model.max_tokens).table
    work = States() if model.head == "base" else Scores(model._per_text)

    sizes = np.ones(len(table), np.int64) if work.per_text else table.lengths
    together, alone = (
        Engine.of(model, options.changed({"batch_invariant": invariant})).start(table, work).placed()
        for invariant in (options.batch_invariant, True)
    )
    largest, total, count, worst = 0.0, 0.0, 0, -1
    for row, size in enumerate(sizes.tolist()):
        a, b = (placed.values[placed.starts[row] : placed.starts[row] + size] for placed in (together, alone))
        gap = (a - b).abs()
        if worst < 0 or float(gap.max()) > largest:
            largest, worst = float(gap.max()), int(table.owners[row])
        total += float(gap.sum())
        count += gap.numel()
    return Spread(largest, total / max(1, count), len(texts), worst)
