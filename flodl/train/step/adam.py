"""Adam and AdamW on CUDA by kernels of our own, where these give torch's bits.

`torch.optim` stays what holds options and state, is saved and resumed; only what moves the parameters is launched here.
What is not plain (another class, hooks, options without a kernel, a first step, which makes the state) torch does. So
it does tensors whose bits ours do not meet: torch's kernels round in other places for tensors that begin at sixteen
bytes than for others, so each kind is tried by itself, once a process.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from flodl.train.step.blocks import BlockLayout, capturing, is_dense, sent

__all__ = ["AdamUpdate", "Agreement", "agreement"]

MOST_PROGRAMS = 1 << 15
BLOCK = 1024
STEPS = 256  # counts that a program counts up
AVERAGES = ("exp_avg", "exp_avg_sq")
Tensors = list[list[torch.Tensor]]
"""Parameters, gradients, averages, averages of squares, and counts of steps, each in the same order."""


class Agreement(NamedTuple):
    """Where our kernels have the bits of torch's.

    Attributes:
        even: for tensors that all begin at sixteen bytes and have a whole number of these.
        others: for the rest.
        apart: some products of decay are rounded before they are added, see `flodl.train.step.adam_kernels`.
    """

    even: bool
    others: bool
    apart: bool = False


class _Part(NamedTuple):
    """Tensors of one group that are moved by one launch, and how; without an agreement by torch."""

    group: dict[str, Any]
    tensors: Tensors
    agreed: Agreement | None


class _Settings(NamedTuple):
    """Numbers of a group on the device: betas, epsilon and decay, float64; the betas in float32, ``(2, 1)``."""

    numbers: torch.Tensor
    betas: torch.Tensor


class AdamUpdate:
    """Moves the parameters of optimisers, one group after the other.

    Args:
        device: of all parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._layouts: dict[Any, BlockLayout] = {}
        self._settings: dict[tuple[float, ...], _Settings] = {}
        self._unknown: list[tuple[BlockLayout, torch.Tensor, np.ndarray]] = []

    def __call__(self, optimizer: torch.optim.Optimizer, found: torch.Tensor, by: torch.Tensor | None) -> bool:
        """Do what ``optimizer.step()`` does, and return True; or nothing, where it has to be asked itself.

        Args:
            found: float32, 1 where the step is left out.
            by: float32, what gradients are divided by; None for nothing. They are not written back.
        """
        planned = self._plan(optimizer, by is not None)
        if planned is None:
            return False
        for part, made in planned:
            if made is None:
                move_by_torch(part.group, part.tensors, found, by)
            else:
                self._launch(part, made, found, by)
        return True

    def prepare(self, optimizer: torch.optim.Optimizer, divided: bool) -> None:
        """Make what a capture of the next step will need and cannot make, after torch moved the parameters.

        Args:
            divided: whether gradients are divided on the way.
        """
        if not capturing(self.device):
            self._plan(optimizer, divided)

    def _plan(self, optimizer: torch.optim.Optimizer, divided: bool) -> list[tuple[_Part, Any]] | None:
        """Return what is moved, and what each launch of ours needs; None where torch moves everything."""
        if self.device.type != "cuda" or not _is_plain(optimizer):
            return None
        parts: list[_Part] = []
        for group in optimizer.param_groups:
            tensors = _tensors_of(optimizer, group)
            if tensors is None:
                return None
            if tensors[0]:
                parts += _divided(self.device, group, tensors, divided)
        planned = [(part, self._ready(part, n) if part.agreed is not None else None) for n, part in enumerate(parts)]
        late = any(part.agreed is not None and made is None for part, made in planned)
        return None if late or all(part.agreed is None for part in parts) else planned

    def finish_capture(self) -> object:
        """Complete what was captured since the last call; the answer must be held as long as that is replayed."""
        done, self._unknown = self._unknown, []
        for layout, table, rows in done:
            table.copy_(torch.from_numpy(rows))
            layout.spare.append(torch.empty_like(table))
        return done

    def _ready(self, part: _Part, number: int = 0) -> tuple[BlockLayout, _Settings] | None:
        """Return where programs read, and the group's settings; None where it is too late to make them.

        Args:
            number: of the part in a step: each has room of its own, though it be as large as another.
        """
        group = part.group
        sizes = number, *(p.numel() for p in part.tensors[0])
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        layout, settings = self._layouts.get(sizes), self._settings.get(numbers)
        if capturing(self.device):
            return None if layout is None or settings is None or not layout.spare else (layout, settings)
        if layout is None:
            layout = self._layouts[sizes] = BlockLayout.of(sizes[1:], self.device, MOST_PROGRAMS)
        if not layout.spare:
            # What is allocated during capture shares its memory with other tensors of the graph.
            layout.spare.append(torch.empty(6, len(sizes) - 1, dtype=torch.int64, device=self.device))
        if settings is None:
            betas = np.asarray(group["betas"], np.float32)[:, None]
            settings = _Settings(sent(np.asarray(numbers, np.float64), self.device), sent(betas, self.device))
            self._settings[numbers] = settings
        return layout, settings

    def _launch(self, part: _Part, made: Any, found: torch.Tensor, by: torch.Tensor | None) -> None:
        from flodl.train.step import adam_kernels

        kernels: Any = adam_kernels
        group, tensors, agreed = part
        layout, settings = made
        rows = _places(tensors)
        if capturing(self.device):
            table = layout.spare.pop()
            self._unknown.append((layout, table, rows))
        else:
            table = sent(rows, self.device)
        assert agreed is not None
        number = len(tensors[0])
        counted = torch.empty(number, dtype=torch.float32, device=self.device)
        decays = group["weight_decay"] != 0
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernels.count_steps[(-(-number // STEPS),)](table[5], number, found, counted, STEPS, num_warps=4)
            powers = torch.pow(settings.betas, counted)
            kernels.move[(layout.which.numel(),)](
                tensors[0][_base(rows[4])], table, number, layout.sizes, layout.which, layout.starts, powers,
                settings.numbers, group["lr"], found, found if by is None else by, layout.span, by is not None, decays,
                group["decoupled_weight_decay"], agreed.apart, BLOCK, num_warps=4,
            )  # fmt: skip
        if not capturing(self.device):
            # As torch's operations do, for whoever keeps what was computed of weights; of replays nobody is told here.
            torch.autograd.graph.increment_version(tensors[0])


def move_by_torch(group: dict[str, Any], tensors: Tensors, found: torch.Tensor, by: torch.Tensor | None) -> None:
    """Move some of a group's parameters as its optimiser does; arguments as of `AdamUpdate`."""
    params, grads, first, second, steps = tensors
    operations: Any = torch
    operations._foreach_add_(steps, 1)
    move = operations._fused_adamw_ if group["decoupled_weight_decay"] else operations._fused_adam_
    move(
        params, grads, first, second, [], steps, amsgrad=False, lr=group["lr"], beta1=group["betas"][0],
        beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        grad_scale=by, found_inf=found,
    )  # fmt: skip
    operations._foreach_sub_(steps, [found] * len(steps))


def _divided(device: torch.device, group: dict[str, Any], tensors: Tensors, divided: bool) -> Iterator[_Part]:
    """Yield the part of a group that our kernels move, and that which torch moves."""
    agreed = agreement(device, group["decoupled_weight_decay"], group["weight_decay"] != 0, divided)
    ours: list[int] = []
    if agreed is not None:
        even = _places(tensors)[4]
        ours = [place for place, whole in enumerate(even) if (agreed.even if whole else agreed.others)]
    rest = sorted({*range(len(tensors[0]))}.difference(ours))
    for places, by_whom in ((ours, agreed), (rest, None)):
        if places:
            yield _Part(group, [[part[place] for place in places] for part in tensors], by_whom)


def _places(tensors: Sequence[Sequence[torch.Tensor]]) -> np.ndarray:
    """Return the rows that the kernels go by, int64 ``(6, parameters)``; the last are addresses of counts.

    Places are told from the first parameter that is even, else from the first (`_base`).
    """
    *four, steps = [np.asarray([t.data_ptr() for t in part], np.int64) for part in tensors]
    sizes = np.asarray([p.numel() for p in tensors[0]], np.int64)
    even = np.logical_and.reduce([sizes % 4 == 0, *(part % 16 == 0 for part in four)])
    return np.stack([*((part - four[0][_base(even)]) // 4 for part in four), even.astype(np.int64), steps])


def _base(even: np.ndarray) -> int:
    """Return which parameter others' places are told from: an even one, if any; even ones are fours apart."""
    return int(even.argmax())


def _is_plain(optimizer: Any) -> bool:
    """Return whether nothing stands between the optimiser's options and its fused kernel."""
    kind = type(optimizer)
    return (
        kind in (torch.optim.Adam, torch.optim.AdamW)
        and "step" not in vars(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
    )


def _tensors_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Tensors | None:
    """Return parameters with a gradient, their gradients, averages and counts; None where a kernel lacks for one."""
    if group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]:
        return None
    if not isinstance(group["lr"], torch.Tensor) or any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return None
    found: Tensors = [[], [], [], [], []]
    for p in group["params"]:
        if p.grad is None:
            continue
        state = optimizer.state.get(p)
        if not state or not all(name in state for name in (*AVERAGES, "step")):
            return None
        four = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
        step = state["step"]
        same = all(t.dtype == torch.float32 and t.stride() == p.stride() and t.device == p.device for t in four)
        if not same or not p.numel() or not is_dense(p) or step.device != p.device or step.dtype != torch.float32:
            return None
        for part, tensor in zip(found, (*four, step), strict=True):
            part.append(tensor)
    return found


# ---- whose bits are met -----------------------------------------------------------------------------------

_KNOWN: dict[tuple[Any, ...], Agreement | None] = {}


def agreement(device: torch.device, decoupled: bool, decays: bool, divided: bool) -> Agreement | None:
    """Return where our kernels have the bits of torch's on a device; None where nowhere, or nobody knows yet.

    Args:
        decoupled: weights decay beside the gradient (AdamW), not through it.
        decays: whether they do at all.
        divided: gradients are divided on the way.
    """
    key = (device, decoupled, decays, divided)
    if key not in _KNOWN:
        if capturing(device):
            return None  # what is tried now would be captured
        _KNOWN[key] = _found(*key)
    return _KNOWN[key]


def _found(device: torch.device, decoupled: bool, decays: bool, divided: bool) -> Agreement | None:
    faults, best = [], None
    with contextlib.suppress(ImportError):
        from flodl.train.step import adam_kernels  # noqa: F401

        with _waiting_allowed():
            for apart in (False, True) if decays and not decoupled else (False,):
                try:
                    even, others = _equal(device, apart, decoupled, decays, divided)
                except Exception as error:  # compilers and drivers fail in many ways
                    faults.append(f"{type(error).__name__}: {error}".splitlines()[0])
                    continue
                if (even or others) and (best is None or (even, others) > (best.even, best.others)):
                    best = Agreement(even, others, apart)
                if even and others:
                    break
        if faults and best is None:
            warnings.warn(
                f"train: torch's own kernel moves the parameters on {device}, which is slower: {faults[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
    return best


@contextmanager
def _waiting_allowed() -> Iterator[None]:
    """Have nobody take the trial's waiting for the device for the step's."""
    mode = torch.cuda.get_sync_debug_mode()
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:  # torch warns of its prototype at every call
            torch.cuda.set_sync_debug_mode(mode)


COUNTS = tuple(range(1, 640, 20))
"""Steps that were counted when a trial begins: ways to take powers that differ may round alike at the first ones."""
SHAPES = tuple((large, *[small] * (len(COUNTS) - 1)) for large, small in (((512, 96), (64,)), ((257, 129), (3,))))
"""Of tensors that are even, and of others."""


def _equal(device: torch.device, apart: bool, decoupled: bool, decays: bool, divided: bool) -> tuple[bool, bool]:
    """Return whether even tensors, and others, are torch's after some steps of which one is left out."""
    ours = Agreement(True, True, apart)
    return tuple(  # type: ignore[return-value]
        all(map(torch.equal, *(_moved(device, shapes, who, decoupled, decays, divided) for who in (None, ours))))
        for shapes in SHAPES
    )


def _moved(
    device: torch.device, shapes: Any, ours: Agreement | None, decoupled: bool, decays: bool, divided: bool
) -> list[torch.Tensor]:
    """Return parameters and state after four steps: by torch, or from the second on by us."""
    # A run's own random numbers must not depend on whether its process has asked before.
    drawn = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    params = [torch.nn.Parameter(drawn(shape)) for shape in shapes]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    rate = torch.tensor(3e-4, device=device)
    decay = 0.01 if decays else 0.0
    optimizer = kind(params, lr=rate, weight_decay=decay, fused=True, capturable=device.type == "cuda")
    group, update = optimizer.param_groups[0], AdamUpdate(device)
    by = torch.tensor(7.3, device=device) if divided else None
    for turn in range(4):
        for p in params:
            p.grad = drawn(p.shape) * 10.0 ** (turn - 2)
        found = torch.tensor(float(turn == 2), device=device)
        tensors = _tensors_of(optimizer, group)
        if ours is None or tensors is None:
            with _told(optimizer, found, by):
                optimizer.step()
            for p, count in zip(params, COUNTS, strict=False) if turn == 0 else ():
                optimizer.state[p]["step"].fill_(count)
        else:
            part = _Part(group, tensors, ours)
            update._launch(part, update._ready(part), found, by)
    return [*params, *(optimizer.state[p][name] for p in params for name in (*AVERAGES, "step"))]


@contextmanager
def _told(optimizer: Any, found: torch.Tensor, by: torch.Tensor | None) -> Iterator[None]:
    optimizer.found_inf, optimizer.grad_scale = found, by
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale
