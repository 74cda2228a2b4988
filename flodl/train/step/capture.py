"""Steps captured once for each shape of batch and replayed: one launch instead of thousands.

Decides which steps may be captured, when, and what a captured graph is valid for. It holds everything a step does on
the device; what Python does in it (prints, counters, choices) happens when it is captured and never again. So a step
is captured only after an ordinary run of the same shape that never synchronised with the device, and is refused when
it draws random numbers on the host. Nothing is trained by capturing: the runs before it are ordinary steps, and
capturing itself computes nothing. What a step computes is in `flodl.train.step.on_device`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import is_, itemgetter
from typing import Any, Protocol

import numpy as np
import torch

from flodl.data.batch import Batch
from flodl.distributed.group import Ranks
from flodl.errors import TrainError
from flodl.garbage_collection import gc_paused
from flodl.nested import map_leaves
from flodl.train.recorded import Recorded
from flodl.train.step.on_device import DeviceStep
from flodl.train.step.outcome import OBSERVED, Outcome
from flodl.train.step.overlap import Overlap, choose_overlap, fault_of

__all__ = ["Capturer", "Captures", "CudaCapturer", "Refused", "flatten", "options_of", "state_places"]

MOST_GRAPHS = 64
SMALL = 1 << 15  # numbers; the common kernel gives 65,536 of them to one block
OFTEN = 16  # steps from one coming of a shape to the next within which it is captured when it comes again;
SELDOM = 5  # others when they come for the fifth time: a capture takes as long as some ordinary steps
DIRTY_RUNS = 2  # a first run may wait while kernels are chosen; a second one that waits is how the step is


_TRAINING = itemgetter("training")


class Refused(Exception):
    """A step cannot be captured; the text says why."""


class Capturer(Protocol):
    """How ordinary runs are watched and steps captured."""

    def watch(self, run: Callable[[], Outcome]) -> tuple[Outcome, str | None]:
        """Run an ordinary step; return its outcome, and what it did that a captured graph cannot."""
        ...

    def capture(self, run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        """Return a function that does on the device what ``run`` does.

        Raises:
            Exception: it cannot be captured; nothing has changed.
        """
        ...

    def beside(self, ranks: Ranks) -> tuple[Capturer, Overlap | str]:
        """Return what captures the end of a step of several ranks, and what launches it beside the rest, or why not."""
        ...


@dataclass
class _Graph:
    inputs: list[torch.Tensor]
    replay: Callable[[], Outcome]
    held: object = None  # memory that the captured graph reads
    put_tags: Callable[[], object] | None = None  # has graphs show the values of tags that the captured graph writes

    def __post_init__(self) -> None:
        self.groups = _together(self.inputs)

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Copy a batch to where the captured graph reads it."""
        for places in self.groups:
            if len(places) == 1:
                self.inputs[places[0]].copy_(tensors[places[0]])
                continue
            into, parts = [self.inputs[i] for i in places], [tensors[i] for i in places]
            torch._foreach_copy_(into, parts)  # pyright: ignore[reportPrivateImportUsage]


class Captures:
    """The captured graphs of one step function, by the structure of its batches.

    Args:
        step: what is captured.
        capturer: how.
        warn: told once why steps are not captured.
        most: captured graphs at most; further shapes run as ordinary steps.
        strict: raise where steps cannot be captured.
        num_rows: whether `flodl.data.Batch.num_rows` is part of a batch's shape.
    """

    def __init__(
        self,
        step: DeviceStep,
        capturer: Capturer,
        warn: Callable[[str], Any],
        *,
        most: int = MOST_GRAPHS,
        strict: bool = False,
        num_rows: bool = True,
    ) -> None:
        self.step, self.capturer, self.warn, self.most, self.strict = step, capturer, warn, most, strict
        self.num_rows = num_rows
        self.given_up: str | None = None
        self._told_full = False
        self._steps = self._replayed = self._captured = 0
        self._first_s = self._capture_s = 0.0
        self.forget()

    @property
    def recorded(self) -> Recorded:
        """What became of the steps so far."""
        reason = self.given_up or (f"there are more shapes than {self.most}" if self._told_full else None)
        return Recorded(self._steps, self._replayed, self._captured, self._first_s, self._capture_s, reason)

    def forget(self) -> None:
        """Drop all captured graphs: tensors that they use were replaced, or modules changed."""
        self._graphs: dict[Any, _Graph] = {}
        self._runs: dict[Any, tuple[int, int]] = {}
        self._dirty = 0
        self._state_places: list[int] = []
        modules = list(self.step.model.modules())
        self._own = [vars(m) for m in modules]
        tables = [table for m in modules for table in (m._modules, m._parameters) if table]
        self._tables = [(table, tuple(table.values())) for table in tables]
        self._parameters = list(self.step.model.parameters())
        self._places = [p.data_ptr() for p in self._parameters]
        self._watched = self._signature()

    def _signature(self) -> object:
        watching = self.step.accumulator.watching
        return watching.signature() if watching is not None else None

    def invalidate_if_changed(self) -> None:
        """Drop all captured graphs if modules, or the memory of parameters or of the optimiser, were exchanged."""
        for table, seen in self._tables:
            if len(table) != len(seen) or not all(map(is_, table.values(), seen)):
                self.forget()
                return
        moved = self._graphs and state_places(self.step.optimizer) != self._state_places
        if moved or [p.data_ptr() for p in self._parameters] != self._places or self._signature() != self._watched:
            self.forget()

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs)

    def run(self, train_step: Callable[..., Any], batches: Sequence[Any]) -> Outcome:
        """Return the outcome of one step, replayed where its shape has been captured."""
        self._steps += 1
        if self.given_up is not None:
            return self._launched(train_step, batches)
        try:
            tensors: list[torch.Tensor] = []
            spec = tuple(flatten(batch, tensors, self.num_rows) for batch in batches)
            if tensors and tensors[0].device != self.step.device:
                raise Refused(f"batches are on {tensors[0].device} and the model is on {self.step.device}")
            key = (spec, self._state())
            graph = self._graphs.get(key)
        except (Refused, TypeError) as error:
            self._give_up(str(error))
            return self._launched(train_step, batches)
        if graph is None:
            graph = self._prepare(key, train_step, batches, tensors)
            if isinstance(graph, Outcome):
                return graph
        graph.take(tensors)
        if graph.put_tags is not None:
            graph.put_tags()
        self._replayed += 1
        return graph.replay().replayed()

    def _launched(self, train_step: Callable[..., Any], batches: Sequence[Any]) -> Outcome:
        """Return the outcome of an ordinary step."""
        began = time.perf_counter()
        try:
            return self.step(train_step, batches)
        finally:
            self._first_s += time.perf_counter() - began

    def _is_rare(self, key: Any) -> bool:
        """Count that a shape came again, and return whether it comes too seldom for a capture to pay yet."""
        came, first = self._runs[key]
        self._runs[key] = came + 1, first
        return came + 1 < SELDOM and self._steps - first > OFTEN * came

    def _prepare(
        self, key: Any, train_step: Callable[..., Any], batches: Sequence[Any], tensors: list[torch.Tensor]
    ) -> _Graph | Outcome:
        """Return a new captured graph, or the outcome of an ordinary step where it is too early for one."""
        if len(self._graphs) >= self.most:
            if not self._told_full:
                self._told_full = True
                self.warn(
                    f"capture: {self.most} shapes of batches are captured, steps of others run one operation at a "
                    "time. Expected few shapes; use buckets, or batches of one size."
                )
            return self._launched(train_step, batches)
        if key in self._runs:
            if self._is_rare(key):
                return self._launched(train_step, batches)
        else:
            translated, began = _translated(), time.perf_counter()
            outcome, fault = self.capturer.watch(lambda: self.step(train_step, batches))
            self._first_s += time.perf_counter() - began
            if translated != _translated():
                return outcome  # torch.compile waits for the device while it translates; another run will tell
            fault = fault or _fixed_numbers(outcome)
            if fault is None:
                self._runs[key] = 1, self._steps
            else:
                self._dirty += 1
                if self._dirty >= DIRTY_RUNS:
                    self._give_up(fault)
            return outcome
        inputs = [tensor.clone() for tensor in tensors]
        rest = iter(inputs)
        own = [_with(batch, rest) for batch in batches]
        before, began = _host_random(), time.perf_counter()
        fault, replay = None, None
        try:
            replay = self.capturer.capture(lambda: self.step(train_step, own))
            if not _same_random(before, _host_random()):
                raise Refused("the step draws random numbers on the host, which a captured graph would repeat")
        except Exception as error:
            fault = f"{error}".strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if fault is not None or replay is None:
            # Outside of the handler, since the error's frames hold on to what was half captured.
            _set_host_random(before)
            self._give_up(fault or "nothing was captured")
            return self._launched(train_step, batches)
        watching = self.step.accumulator.watching
        put_tags = watching.holding() if watching is not None else None
        self._captured += 1
        self._capture_s += time.perf_counter() - began
        graph = self._graphs[key] = _Graph(inputs, replay, self.step.finish_capture(), put_tags)
        self._state_places = state_places(self.step.optimizer)
        return graph

    def _give_up(self, reason: str) -> None:
        self.forget()
        self.given_up = reason
        if self.strict:
            raise TrainError(f"capture: steps cannot be captured, because {reason}. Leave it at 'auto'.", reason=reason)
        self.warn(
            f"capture: steps run one operation at a time, with the same numbers, because {reason}. "
            "capture=False says that this is expected."
        )

    def _state(self) -> tuple[Any, ...]:
        """Return what a captured graph depends on besides the batch."""
        options = options_of(self.step.optimizer)
        learns = bytes([p.requires_grad for p in self._parameters])
        modes = bytes(map(_TRAINING, self._own))
        return options, learns, modes


def _fixed_numbers(outcome: Outcome) -> str | None:
    """Return what a step tells as numbers of Python, which a captured graph would tell again and again."""
    told = [
        name[len(OBSERVED) :] for name, total, _ in outcome.metrics if name.startswith(OBSERVED) and total is not None
    ]
    return f"{', '.join(told)} is told as a number of Python, which would stay; expected a tensor" if told else None


def _together(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return which tensors are copied by one launch: small ones of one dtype, and each large one by itself."""
    groups: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype if tensor.numel() <= SMALL else place, []).append(place)
    return list(groups.values())


def options_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return what a captured update depends on besides tensors, hashable."""
    return tuple([(_plain(group), id(group["lr"]), len(group["params"])) for group in optimizer.param_groups])


def state_places(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the addresses of what the optimiser keeps of each parameter, which captured updates write to."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return [value.data_ptr() for value in kept if isinstance(value, torch.Tensor)]


def _plain(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([v for name, v in group.items() if name != "params" and not isinstance(v, torch.Tensor)])


# ---- batches as flat lists of tensors ------------------------------------------------------------------


def flatten(value: Any, tensors: list[torch.Tensor], rows: bool = True) -> Any:
    """Append the tensors of a batch to ``tensors`` and return everything else about it, hashable.

    Args:
        rows: whether ``num_rows`` of a `flodl.data.Batch` counts as part of it.

    Raises:
        Refused: it holds something that cannot be told apart or copied.
    """
    if isinstance(value, torch.Tensor):
        if tensors and value.device != tensors[0].device:
            raise Refused(f"a batch holds tensors on {value.device} and on {tensors[0].device}")
        tensors.append(value)
        return value.shape, value.dtype, value.stride()
    if isinstance(value, Batch):
        parts, layout = value.items(), None
        if value.piece is not None:
            layout = value.piece.layout
            flatten(value.piece.memory, tensors)
            parts = [(name, part) for name, part in parts if not isinstance(part, torch.Tensor)]
        inner = tuple([(name, flatten(part, tensors)) for name, part in parts])
        return "batch", layout, inner, value.num_rows if rows else None
    if isinstance(value, Mapping):
        return type(value).__name__, tuple((name, flatten(part, tensors)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple([flatten(part, tensors) for part in value])
    if is_dataclass(value) and not isinstance(value, type):
        inner = tuple((f.name, flatten(getattr(value, f.name), tensors)) for f in fields(value))
        return type(value).__name__, inner
    if isinstance(value, (int, float, str, bool, bytes, type(None))):
        return type(value).__name__, value
    raise Refused(f"a batch holds a {type(value).__name__}, whose contents are not known")


def _with(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return ``value`` with the given tensors in place of its own."""

    def put(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(tensors)
        if not isinstance(part, Batch):
            return part
        if part.piece is not None:
            return part.over(part.piece.at(next(tensors)))
        return Batch({name: _with(inner, tensors) for name, inner in part.items()}, part.num_rows)

    return map_leaves(value, put)


def _translated() -> tuple[int, int]:
    """Return how many functions ``torch.compile`` has looked at, and how many graphs it made of them."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0
    return dynamo.counters["frames"]["total"], dynamo.counters["stats"]["unique_graphs"]


# ---- random numbers of the host ------------------------------------------------------------------------


def _host_random() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _same_random(a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> bool:
    numpy = all(np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))
    return bool(torch.equal(a[0], b[0])) and numpy and a[2] == b[2]


def _set_host_random(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


# ---- CUDA ----------------------------------------------------------------------------------------------


class CudaCapturer:
    """Captures CUDA graphs that share one pool of memory; they are replayed one after another.

    Args:
        device: a CUDA device.
        tune: let cuDNN time its algorithms for each shape, which is worth it where shapes come again.
    """

    def __init__(self, device: torch.device, *, tune: bool = True) -> None:
        self.device, self.tune = device, tune
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def watch(self, run: Callable[[], Outcome]) -> tuple[Outcome, str | None]:
        """Run a step on the stream that captures, and say where it waited for the device."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen, self._tuned(), torch.cuda.stream(self._stream):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outcome = run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self._stream)
        outcome.row.record_stream(current)
        waits = [w for w in seen if "synchronizing CUDA operation" in str(w.message)]
        for other in seen:
            if other not in waits and "debug mode is a prototype" not in str(other.message):
                warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        if not waits:
            return outcome, None
        return outcome, f"it synchronises with the device at {waits[0].filename}:{waits[0].lineno}"

    def capture(self, run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        """Return the replay of a new CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        generator = torch.cuda.default_generators[self.device.index or 0]
        kept = generator.clone_state()
        try:
            # Other threads copy batches and allocate meanwhile; only this one is held to the rules of capture.
            with (
                self._tuned(),
                gc_paused(),  # freeing an older captured graph would break this one
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                outcome = run()
        except BaseException:
            torch.cuda.set_stream(current)
            with contextlib.suppress(Exception):
                # A failed capture may leave its allocations open, and memory would never be freed.
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)  # pyright: ignore
            generator.graphsafe_set_state(kept)
            raise

        def replay() -> Outcome:
            graph.replay()
            return outcome

        return replay

    def beside(self, ranks: Ranks) -> tuple[CudaCapturer, Overlap | str]:
        """Return a capturer whose graphs share no memory with those of this one, so that both may run at once."""
        overlap = choose_overlap(ranks, fault_of(self.device))
        return (self if isinstance(overlap, str) else CudaCapturer(self.device, tune=self.tune)), overlap

    @contextlib.contextmanager
    def _tuned(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self.tune
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before
