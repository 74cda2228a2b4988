"""Capture of steps as CUDA graphs, and replay: one launch instead of thousands.

A captured graph contains everything a step does on the device; what Python does in it (prints, counters, choices)
happens at the capture and never again. So a step is captured only after an ordinary run of the same batch shape that
never synchronised with the device, and is refused if it draws random numbers on the host. Capturing trains nothing: the
runs before it are ordinary steps, and the capture itself computes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from flodl.data.batch import Batch
from flodl.errors import TrainError
from flodl.nested import map_leaves
from flodl.train.events import Recorded
from flodl.train.saving.state import load_random, random_state
from flodl.train.step.cuda_graphs import CudaCapturer, Overlap, Run
from flodl.train.step.host import HostStep
from flodl.train.step.outcome import OBSERVED, Outcome

MOST_GRAPHS = 64
MOST_ENDS = 8
SMALL = 1 << 15  # numbers; the common kernel gives 65,536 of them to one block
MAX_GAP_STEPS = 16  # a shape that comes again within so many steps of its first run is captured at once;
MIN_OCCURRENCES = 5  # others at their fifth run: a capture takes as long as some ordinary steps
MAX_SYNCING_RUNS = 2  # a first run may wait while kernels are chosen; a second one that waits shows a step that waits

HOST = torch.device("cpu")
_TRAINING = itemgetter("training")


class Refused(Exception):
    """A step cannot be captured; the text is the reason."""


@dataclass
class _Graph:
    replay: Run
    inputs: Sequence[torch.Tensor] = ()
    held: object = None  # memory that the captured graph reads
    put_tags: Callable[[], object] | None = None  # restores the values of tags that the captured graph writes

    def __post_init__(self) -> None:
        # Small tensors of one dtype are copied by one launch, each large tensor by its own.
        groups: dict[Any, list[int]] = {}
        for place, tensor in enumerate(self.inputs):
            groups.setdefault(tensor.dtype if tensor.numel() <= SMALL else place, []).append(place)
        self.groups = list(groups.values())

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a batch to the memory that the captured graph reads."""
        for places in self.groups:
            into, parts = [self.inputs[i] for i in places], [tensors[i] for i in places]
            torch._foreach_copy_(into, parts)  # pyright: ignore[reportPrivateImportUsage]


class _Captures:
    """Captured graphs by key, and the decision to capture a key.

    Args:
        device: the step on its device, a `flodl.train.step.device.DeviceStep`.
        compute: the function that is captured.
        capturer: None runs everything one operation at a time.

    Attributes:
        given_up: why nothing is captured any more; None if captures are possible.
        num_captured: number of captures so far.
    """

    most, what = MOST_GRAPHS, "steps"

    def __init__(self, device: Any, compute: Callable[..., Outcome], capturer: CudaCapturer | None) -> None:
        self.device, self.compute = device, compute
        self.capturer: Any = capturer
        self.step: HostStep = device.step
        self.given_up: str | None = None
        self.num_captured = 0
        self.forget()

    def forget(self) -> None:
        """Drop all captured graphs: tensors that they use were replaced, or modules changed."""
        self._graphs: dict[Any, _Graph] = {}
        self._runs: dict[Any, tuple[int, int]] = {}
        self._syncing_runs = 0
        self._modules, self._parameters = list(self.step.model.modules()), list(self.step.model.parameters())
        self._own = [vars(module) for module in self._modules]
        self._seen = self._signature()

    def _signature(self) -> object:
        """Return a value that differs if memory that graphs use was replaced; it changes on all ranks together."""
        tensors = list(self.step.model.parameters())
        if self._graphs:  # only graphs refer to the state of the optimiser
            state = (value for values in self.step.optimizer.state.values() for value in values.values())
            tensors += [value for value in state if isinstance(value, torch.Tensor)]
        return [tensor.data_ptr() for tensor in tensors]

    def invalidate_if_changed(self) -> None:
        """Drop all captured graphs if the model or the memory of the optimiser changed."""
        if self._signature() != self._seen:
            self.forget()

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def _options(self) -> tuple[Any, ...]:
        """Return the options on which a captured update depends, hashable."""
        groups = self.step.optimizer.param_groups
        return tuple([(_plain(group), id(group["lr"]), len(group["params"])) for group in groups])

    def _observe(self, run: Run) -> tuple[Outcome, str | None]:
        """Return the outcome of an ordinary step, and the operation that a graph cannot contain, or None."""
        outcome, fault = self.capturer.watch(run)
        names = [name[1:] for name, total, _ in outcome.metrics if name[:1] == OBSERVED and total is not None]
        if names and fault is None:
            fault = f"{', '.join(names)} is a Python number, which a replay would repeat; expected a tensor"
        return outcome, fault

    def _note_run(self, key: Any, fault: str | None, number: int = 0) -> None:
        """Allow the capture of a key after its first run, or count a fault."""
        if fault is None:
            self._runs[key] = 1, number
            return
        self._syncing_runs += 1
        if self._syncing_runs >= MAX_SYNCING_RUNS:
            self._give_up(fault)

    def _capture(self, key: Any, run: Run, inputs: Sequence[torch.Tensor] = ()) -> _Graph | None:
        """Return the new captured graph of a key; None, with random states as before, if it cannot be captured."""
        before = random_state(HOST)
        fault, replay = None, None
        try:
            replay = self.capturer.capture(run)
            now = random_state(HOST)
            if now[1] != before[1] or any(not torch.equal(now[0][name], state) for name, state in before[0].items()):
                raise Refused("the step draws random numbers on the host, which a captured graph would repeat")
        except Exception as error:
            fault = f"{error}".strip().splitlines()[0] if str(error).strip() else type(error).__name__
        held = self.device.finish_capture()
        fault = self._of_all_ranks(fault)
        if fault is not None or replay is None:
            # Outside of the handler, since the error's frames refer to the incomplete capture.
            load_random(HOST, *before)
            self._give_up(fault or "nothing was captured")
            return None
        self.num_captured += 1
        watching = self.step.watching
        put_tags = watching.holding() if inputs and watching is not None else None
        graph = self._graphs[key] = _Graph(replay, inputs, held, put_tags)
        self._seen = self._signature()
        return graph

    def _of_all_ranks(self, fault: str | None) -> str | None:
        """Return the fault that decides."""
        return fault

    def _give_up(self, reason: str) -> None:
        self.forget()
        self.given_up = reason
        if self.device.strict:
            raise TrainError(f"capture: steps cannot be captured, because {reason}. Use capture='auto'.", reason=reason)
        self.device.warn(
            f"capture: {self.what} run one operation at a time, with the same numbers, because {reason}. Use "
            "capture=False to suppress this warning."
        )


class StepCaptures(_Captures):
    """Captured graphs of this rank's part of a step, by the structure of its batches."""

    def __init__(self, *args: Any) -> None:
        self._full = False
        self._steps = self._replayed = 0
        super().__init__(*args)

    @property
    def recorded(self) -> Recorded:
        """Summary of the steps so far."""
        reason = self.given_up or (f"there are more shapes than {self.most}" if self._full else None)
        return Recorded(self._steps, self._replayed, self.num_captured, reason)

    def _signature(self) -> object:
        """Return a value that differs if also modules or watched values were replaced."""
        watching = self.step.watching
        watched = watching.signature() if watching is not None else None
        return super()._signature(), [*map(id, self.step.model.modules())], watched

    def run(self, batches: Sequence[Any]) -> Outcome:
        """Return the outcome of one step, replayed if its shape is captured."""
        self._steps += 1
        ordinary = partial(self.compute, batches)
        if self.given_up is not None:
            return ordinary()
        try:
            tensors: list[torch.Tensor] = []
            spec = tuple(flatten(batch, tensors, self.device.num_rows) for batch in batches)
            if tensors and tensors[0].device != self.step.ranks.device:
                raise Refused(f"batches are on {tensors[0].device} and the model is on {self.step.ranks.device}")
            learns = bytes([p.requires_grad for p in self._parameters])
            key = spec, self._options(), learns, bytes(map(_TRAINING, self._own))
            graph = self._graphs.get(key)
        except (Refused, TypeError) as error:
            self._give_up(str(error))
            return ordinary()
        if graph is None:
            if len(self._graphs) >= self.most:
                if not self._full:
                    self.device.warn(
                        f"capture: {self.most} shapes of batches are captured, steps of others run one operation at a "
                        "time. Expected few shapes; use buckets, or batches of one size."
                    )
                self._full = True
                return ordinary()
            if key not in self._runs:
                translated = _translations()
                outcome, fault = self._observe(ordinary)
                if translated == _translations():  # torch.compile waits for the device while it translates
                    self._note_run(key, fault, self._steps)
                return outcome
            came, first = self._runs[key]
            self._runs[key] = came + 1, first
            if came + 1 < MIN_OCCURRENCES and self._steps - first > MAX_GAP_STEPS * came:
                return ordinary()  # too rare for a capture to pay yet
            inputs = [tensor.clone() for tensor in tensors]
            rest = iter(inputs)
            own = [_with(batch, rest) for batch in batches]
            graph = self._capture(key, partial(self.compute, own), inputs)
            if graph is None:
                return ordinary()
        graph.take(tensors)
        if graph.put_tags is not None:
            graph.put_tags()
        self._replayed += 1
        return _copied(graph.replay())


class EndCaptures(_Captures):
    """Captured graphs of the end of a step that all ranks share.

    Sums over ranks may be captured only if all ranks capture them, together. So every decision here follows from what
    all ranks know: options of the optimiser, missing gradients, and whether the capture succeeded on each rank.

    Attributes:
        pair: sum and count of this rank's losses, float64 ``(2,)``; replays read it, so its memory stays.
        weight: this rank's samples, float64 ``()``; its memory stays too.
    """

    most, what = MOST_ENDS, "sums over ranks and updates"

    def __init__(self, device: Any, *args: Any) -> None:
        self.overlap: Overlap | None = None
        self.pair = torch.zeros(2, dtype=torch.float64, device=device.place)
        self.weight = torch.zeros((), dtype=torch.float64, device=device.place)
        self._samples: int | None = None
        super().__init__(device, *args)

    def run(self, pair: torch.Tensor, samples: int, missing: tuple[int, ...]) -> Outcome:
        """Return the outcome of the step of all ranks.

        Args:
            pair: sum and count of this rank's losses, float64 ``(2,)``.
            samples: this rank's samples, the weight of its buffers.
            missing: positions of parameters without a gradient on any rank.
        """
        self.pair.copy_(pair)
        if samples != self._samples:  # they seldom change
            self.weight.fill_(float(samples))
            self._samples = samples
        if self.overlap is not None:
            self.overlap.end.record()
        ordinary = partial(self.compute, self.pair, self.weight, missing, self.overlap)
        if self.capturer is None or self.given_up is not None:
            return ordinary()
        key = self._options(), missing
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= self.most:
                return ordinary()
            if key not in self._runs:
                outcome, fault = self._observe(ordinary)
                self._note_run(key, self._of_all_ranks(fault))
                return outcome
            graph = self._capture(key, ordinary)
            if graph is None:
                self.step.sums.abandon()
                return ordinary()
        return _copied(graph.replay() if self.overlap is None else self.overlap.beside(graph.replay))

    def _of_all_ranks(self, fault: str | None) -> str | None:
        """Return the fault of this rank or of another one."""
        if any(row[0] for row in self.step.ranks.table([float(fault is not None)])):
            return fault or "another rank cannot capture the end of a step"
        return None


def _copied(outcome: Outcome) -> Outcome:
    """Return the outcome of a replay with a row that later replays do not overwrite."""
    return replace(outcome, row=outcome.row.clone())


def _plain(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([v for name, v in group.items() if name != "params" and not isinstance(v, torch.Tensor)])


# ---- batches as flat lists of tensors ------------------------------------------------------------------


def flatten(value: Any, tensors: list[torch.Tensor], rows: bool = True) -> Any:
    """Append the tensors of a batch to ``tensors`` and return everything else about it, hashable.

    Args:
        rows: True if ``num_rows`` of a `flodl.data.Batch` is part of its structure.

    Raises:
        Refused: it contains an object that cannot be compared or copied.
    """
    if isinstance(value, torch.Tensor):
        if tensors and value.device != tensors[0].device:
            raise Refused(f"a batch contains tensors on {value.device} and on {tensors[0].device}")
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
    raise Refused(f"a batch contains a {type(value).__name__}, which cannot be compared")


def _with(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return ``value`` with its tensors replaced."""

    def put(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(tensors)
        if not isinstance(part, Batch):
            return part
        if part.piece is not None:
            return part.over(part.piece.at(next(tensors)))
        return Batch({name: _with(inner, tensors) for name, inner in part.items()}, part.num_rows)

    return map_leaves(value, put)


def _translations() -> tuple[int, int]:
    """Return the numbers of functions and graphs that ``torch.compile`` has translated."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0
    return dynamo.counters["frames"]["total"], dynamo.counters["stats"]["unique_graphs"]
