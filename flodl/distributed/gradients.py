"""Sums of gradients over ranks, in buckets at fixed addresses.

Gradients are copied to flat buckets, the last layers first, because a backward pass computes them first. The buckets
are summed over ranks and then are the gradients; their addresses stay, so CUDA graphs can capture the backward pass and
the rest. A sum is `fill_buckets`, `launch` and `wait`. Without capture, buckets can be sent during the backward pass,
so that communication overlaps with it; with capture, events mark full buckets, and sums wait for these events only
(`during_backward`). Every rank sends the same buckets in the same order, even if gradients are missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from flodl.distributed.average import buckets_of
from flodl.distributed.group import Ranks, Summed
from flodl.distributed.peer_memory import SWITCH, PeerAccessError, PeerBuffer, unfit
from flodl.errors import TrainError

GRADIENT_BUCKET = 1 << 22
"""Elements of a bucket: few enough that the first is sent early, enough to fill a link."""

EVEN = 16
"""Each gradient in a bucket begins at a multiple of this many elements, because kernels read aligned data faster."""

CAPTURED_BUCKET = 1 << 24
"""The same for captured sums: they need no call of the host, and a link of 450 GB/s needs more elements."""


class GradientSum:
    """Sum gradients over ranks; a parameter that no rank used has no gradient afterwards.

    Args:
        model: its trainable parameters are read at every step, so unfreezing takes effect.
        on_cpu: send gradients through host memory (gloo) on every device.

    Attributes:
        early: False sends everything after the backward pass.
        room: peer memory of two ranks that sum through it; None if a collective sums.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, *, on_cpu: bool = False) -> None:
        self.ranks, self.model = ranks, model
        self.on_cpu = on_cpu and ranks.device.type != "cpu"
        self.early = not self.on_cpu
        self.parameters: list[nn.Parameter] = []
        self._views: list[torch.Tensor] = []
        self._flats: list[torch.Tensor] = []
        self._buckets: list[list[int]] = []
        self._hooks: list[Any] = []
        self._sent: list[tuple[torch.Tensor, Any]] = []
        self._made: list[bool] = []
        self._left: list[int] = []
        self._full: list[bool] = []
        self._late: list[int] = []
        self._watching = self._begun = False
        self._captured = False
        self._event: Callable[[], Any] | None = None
        self._marks: list[Any] = []
        self._fault = unfit(ranks) or "steps are not recorded"
        self._tell: Callable[[str], Any] | None = None
        self.room: PeerBuffer | None = None

    @property
    def summed(self) -> Summed | None:
        """Transport of the sums, and why not a faster one; None with one rank."""
        if self.ranks.solo:
            return None
        if self.room is not None:
            return Summed("peer memory")
        if self.on_cpu:
            return Summed("gloo", "they travel through host memory (backend='cpu')")
        return Summed("NCCL", self._fault or None) if self.ranks.device.type == "cuda" else Summed("gloo")

    def prepare_capture(
        self,
        event: Callable[[], Any] | None = None,
        *,
        fault: str | None = "it was not tried",
        tell: Callable[[str], Any] | None = None,
    ) -> None:
        """Use fewer and larger buckets from now on.

        Args:
            event: creates an event with ``record()`` and ``wait()``, which marks a full bucket and for which its sum
                waits. None: sums wait for all earlier launches.
            fault: why two ranks cannot use peer memory; None: both use it.
            tell: receives one message if peer memory turns out to be too small.
        """
        self._captured, self._event, self.parameters = True, event, []
        self._fault, self._tell = fault or "", tell
        if fault is None:
            self.refresh_buckets()

    def refresh_buckets(self) -> bool:
        """Read which parameters are trained; return True if they changed, which creates new buckets."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if len(parameters) == len(self.parameters) and all(
            a is b for a, b in zip(parameters, self.parameters, strict=True)
        ):
            return False
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.parameters = [], parameters
        backwards = list(reversed(range(len(parameters))))
        members = [parameters[place] for place in backwards]
        buckets = _early_and_late(members) if self._captured else buckets_of(members, GRADIENT_BUCKET)
        self._buckets = [[backwards[i] for i in places] for places in buckets]
        self._views, self._flats = list(parameters), []
        for places in self._buckets:
            like = [parameters[place] for place in places]
            sizes = [-(-p.numel() // EVEN) * EVEN for p in like]
            flat = torch.zeros(sum(sizes), dtype=like[0].dtype, device=like[0].device)
            for place, piece in zip(places, flat.split(sizes), strict=True):
                p = parameters[place]
                # In the order of the parameter in memory, which fused optimisers need; without its gaps.
                strides = torch.empty_like(p, device="meta").stride()
                self._views[place] = piece[: p.numel()].as_strided(p.shape, strides, piece.storage_offset())
            self._flats.append(flat)
        self._marks = [self._event() for _ in self._buckets] if self._event is not None else []
        self._make_room()
        return True

    def _make_room(self) -> None:
        """Create peer memory for the other rank's gradients if possible."""
        self.room = None
        if self._fault or not self._flats:
            return
        try:
            self.room = PeerBuffer(self.ranks, self._flats)
        except PeerAccessError as fault:
            self._fault = f"gradients do not fit into peer memory ({fault})"
            if self._tell is not None:
                self._tell(
                    f"gradients are summed by NCCL from here on, with the same numbers, because {self._fault}. "
                    f"Smaller batches leave more memory; {SWITCH}=0 disables peer memory."
                )

    # ---- during the backward pass --------------------------------------------------------------------

    @contextlib.contextmanager
    def during_backward(self, *, send: bool) -> Iterator[None]:
        """Fill buckets during the backward pass inside, which must be this rank's last before the sum.

        Args:
            send: also send full buckets, unless sums wait until the end. False marks them by events, if there are any.
        """
        if self.ranks.solo or (not self.early or self._event is not None if send else self._event is None):
            yield
            return
        self._begin()
        if not self._hooks:
            for bucket, places in enumerate(self._buckets):
                for place in places:
                    hook = partial(self._note, place, bucket)
                    self._hooks.append(self.parameters[place].register_post_accumulate_grad_hook(hook))
        self._watching = True
        try:
            yield
            self._begun = True
        finally:
            self._watching = False

    def _begin(self) -> None:
        """Prepare to fill and send the first bucket."""
        self.refresh_buckets()
        self._made = [False] * len(self.parameters)
        self._left = [len(places) for places in self._buckets]
        self._full = [False] * len(self._buckets)
        self._sent, self._late = [], []

    def _note(self, index: int, bucket: int, _parameter: torch.Tensor) -> None:
        """Record that the gradient of a parameter is complete."""
        if not self._watching:
            return
        if self._full[bucket]:
            self._late.append(index)
        elif not self._made[index]:
            self._made[index] = True
            self._left[bucket] -= 1
            if self._marks and self._left[bucket] == 0:
                self._fill([bucket])
            while not self._marks and len(self._sent) < len(self._buckets) and self._left[len(self._sent)] == 0:
                self._fill([len(self._sent)])
                self._send()

    # ---- one sum -------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill_buckets(self) -> tuple[int, ...]:
        """Copy gradients that were not sent to the buckets; return the positions of parameters without one.

        Raises:
            TrainError: a gradient changed after it had been sent.
        """
        if not self._begun:
            self._begin()
        self._begun = False
        self._refuse_late()
        self._fill([bucket for bucket, full in enumerate(self._full) if not full])
        return tuple(i for i, p in enumerate(self.parameters) if p.grad is None)

    @torch.no_grad()
    def _fill(self, buckets: Sequence[int]) -> None:
        places = [place for bucket in buckets for place in self._buckets[bucket]]
        pairs = [(self._views[i], grad) for i in places if (grad := self.parameters[i].grad) is not None]
        lacking = [self._views[i] for i in places if self.parameters[i].grad is None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])  # pyright: ignore
        if lacking:
            torch._foreach_zero_(lacking)  # pyright: ignore[reportPrivateImportUsage]
        for bucket in buckets:
            self._full[bucket] = True
            if self._marks:
                self._marks[bucket].record()

    @torch.no_grad()
    def _send(self) -> None:
        number = len(self._sent)
        flat = self._flats[number]
        if self._marks:
            self._marks[number].wait()
        if self.room is not None:
            self._sent.append((flat, self.room.sum_async(number, flat)))
            return
        flat = flat.cpu() if self.on_cpu else flat
        with self.ranks.peer_failures_named():
            self._sent.append((flat, self.ranks.sum_async(flat)))

    def launch(self) -> None:
        """Send all buckets that were not sent."""
        while len(self._sent) < len(self._buckets):
            self._send()

    def sum_last(self, pair: torch.Tensor) -> None:
        """Replace two numbers, float64 ``(2,)``, by their sum over ranks; between `launch` and `wait`."""
        if self.room is not None:
            self.room.sum_last(pair)
        else:
            self.ranks.sum_(pair)

    @torch.no_grad()
    def wait(self, missing: Sequence[int] = ()) -> None:
        """Wait for the sums, and set them as gradients of all parameters except at ``missing`` positions."""
        for flat, (sent, handle) in zip(self._flats, self._sent, strict=True):
            with self.ranks.peer_failures_named():
                handle.wait()
            if sent is not flat:
                flat.copy_(sent)
        if self.room is not None:
            self.room.finish()
        self._sent = []
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view
        for place in missing:
            self.parameters[place].grad = None

    def abandon(self) -> None:
        """Discard sent buckets after a failed capture."""
        self._sent, self._begun = [], False

    def __call__(self, figures: Sequence[float]) -> list[list[float]]:
        """Sum gradients, and return the rows of figures of all ranks; errors as for `send`."""
        return [list(figures)] if self.ranks.solo else self.finish(self.send(), figures)

    def send(self) -> tuple[int, ...]:
        """Send all gradients; return the positions of parameters without one.

        Raises:
            TrainError: a gradient changed after it had been sent.
        """
        lacking = self.fill_buckets()
        self.launch()
        return lacking

    def finish(self, lacking: Sequence[int], figures: Sequence[float]) -> list[list[float]]:
        """Wait for the sums of what `send` sent, and return the rows of figures of all ranks."""
        rows, missing = self.agree(lacking, figures)
        self.wait(missing)
        return rows

    def agree(self, lacking: Sequence[int], figures: Sequence[float]) -> tuple[list[list[float]], tuple[int, ...]]:
        """Return the rows of figures of all ranks, and the positions of parameters without a gradient on any rank.

        Args:
            lacking: positions of parameters without a gradient on this rank, as returned by `fill_buckets`.
            figures: numbers that all ranks receive.
        """
        rows = self.ranks.table([float(len(lacking)), *figures])
        missing: tuple[int, ...] = ()
        if any(row[0] for row in rows):
            lacks = [0.0] * len(self.parameters)
            for place in lacking:
                lacks[place] = 1.0
            missing = tuple(i for i, column in enumerate(zip(*self.ranks.table(lacks), strict=True)) if all(column))
        return [row[1:] for row in rows], missing

    def _refuse_late(self) -> None:
        if not self._late:
            return
        wanted = {id(self.parameters[place]) for place in self._late}
        names = [name for name, p in self.model.named_parameters() if id(p) in wanted]
        raise TrainError(
            f"rank {self.ranks.rank}: the gradient of {', '.join(names[:5])} changed after it was sent to the other "
            "ranks. Expected one backward pass to complete each gradient. Check for a second backward() in train_step, "
            "or for checkpointing with use_reentrant=True; use use_reentrant=False.",
            rank=self.ranks.rank,
            tensors=names,
        )


def _early_and_late(members: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield positions of a bucket: large ones first, small ones at the end, because everything waits for the last."""
    rest = sum(member.numel() for member in members)
    late, first = rest // 4, 0
    while first < len(members) and rest > late:
        rest -= members[first].numel()
        first += 1
    yield from buckets_of(members[:first], CAPTURED_BUCKET)
    for places in buckets_of(members[first:], GRADIENT_BUCKET):
        yield [first + place for place in places]
