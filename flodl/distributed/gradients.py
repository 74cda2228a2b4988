"""Sums of gradients over ranks, in buckets at fixed addresses.

Gradients are copied into flat buckets, those of the last layers first, since a backward pass computes them first. The
buckets are summed over ranks, and then are the gradients; as their addresses stay, CUDA graphs can capture the backward
pass and what follows. A sum is `fill_buckets`, `launch` and `wait`. Without capture, buckets may be sent while the
backward pass still runs (`reducing_in_backward`), so that communication overlaps with it; with capture, events mark
buckets as they fill (`filling_in_backward`), and sums wait for these alone. Every rank sends the same buckets in the
same order, whichever gradients it has.
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
from flodl.distributed.peer_memory import SWITCH, PeerRoom, Unreached, unfit
from flodl.errors import TrainError

__all__ = ["GradientSum"]

GRADIENT_BUCKET = 1 << 22
"""Elements of a bucket: few enough that the first leaves early, enough to fill a link."""

EVEN = 16
"""Each gradient in a bucket begins at a multiple of so many elements, since kernels read what is aligned faster."""

CAPTURED_BUCKET = 1 << 24
"""The same where sums are captured: they cost no call of the host, and a link of 450 GB/s is filled by more."""


class GradientSum:
    """Sums gradients over ranks; a parameter that no rank used keeps no gradient.

    Args:
        model: its trainable parameters are asked for at every step, so unfreezing takes effect.
        on_cpu: send gradients through host memory (gloo) whatever the device.

    Attributes:
        early: whether `reducing_in_backward` sends at all; off, everything leaves after the backward pass.
        room: what two ranks that reach each other's memory sum through; None where a collective does.
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
        self.room: PeerRoom | None = None

    @property
    def summed(self) -> Summed | None:
        """By what gradients are summed, and why not by what would be faster; None with one rank."""
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
            event: makes an event with ``record()`` and ``wait()``: each bucket is marked by one when it is full, which
                its sum waits for. None has sums wait for whatever was launched before.
            fault: why two ranks do not reach each other's memory; None has them sum through it, on both alike.
            tell: told once where that turns out not to be possible after all.
        """
        self._captured, self._event, self.parameters = True, event, []
        self._fault, self._tell = fault or "", tell
        if fault is None:
            self.refresh_buckets()

    def refresh_buckets(self) -> bool:
        """Look which parameters are trained; return whether they changed, so that buckets lie elsewhere now."""
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
                # In the order that the parameter has in memory, which fused optimisers rely on; without its gaps.
                strides = torch.empty_like(p, device="meta").stride()
                self._views[place] = piece[: p.numel()].as_strided(p.shape, strides, piece.storage_offset())
            self._flats.append(flat)
        self._marks = [self._event() for _ in self._buckets] if self._event is not None else []
        self._make_room()
        return True

    def _make_room(self) -> None:
        """Make room for the other rank's gradients, where both reach each other's memory and have enough of it."""
        self.room = None
        if self._fault or not self._flats:
            return
        try:
            self.room = PeerRoom(self.ranks, self._flats)
        except Unreached as fault:
            self._fault = f"there is no room for gradients in peer memory ({fault})"
            if self._tell is not None:
                self._tell(
                    f"gradients are summed by NCCL from here on, with the same numbers, because {self._fault}. "
                    f"Smaller batches leave more memory; {SWITCH}=0 says that this is expected."
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
        """Look which parameters there are, and be ready to send the first bucket."""
        self.refresh_buckets()
        self._made = [False] * len(self.parameters)
        self._left = [len(places) for places in self._buckets]
        self._full = [False] * len(self._buckets)
        self._sent, self._late = [], []

    def _note(self, place: int, bucket: int, _parameter: torch.Tensor) -> None:
        """Record that the gradient of a parameter is complete."""
        if not self._watching:
            return
        if self._full[bucket]:
            self._late.append(place)
        elif not self._made[place]:
            self._made[place] = True
            self._left[bucket] -= 1
            if self._marks and self._left[bucket] == 0:
                self._fill([bucket])
            while not self._marks and len(self._sent) < len(self._buckets) and self._left[len(self._sent)] == 0:
                self._fill([len(self._sent)])
                self._send()

    # ---- one sum -------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill_buckets(self) -> tuple[int, ...]:
        """Bring gradients that have not left to the buckets; return the places of parameters that have none.

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
        """Send all buckets that have not left."""
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
        """Wait for the sums, and make them the gradients of all parameters but those at ``missing`` places."""
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
        """Forget what was sent: it was captured, and the capture failed."""
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
            f"rank {self.ranks.rank}: the gradient of {', '.join(names[:5])} grew again after it had been sent to the "
            "other ranks. Expected one backward pass to finish each gradient once. Look for a second backward() in "
            "train_step, or for checkpointing with use_reentrant=True; use use_reentrant=False.",
            rank=self.ranks.rank,
            tensors=names,
        )


def _early_and_late(members: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield places that travel together: much at once, but little of what is full last, for which everything waits."""
    rest = sum(member.numel() for member in members)
    late, first = rest // 4, 0
    while first < len(members) and rest > late:
        rest -= members[first].numel()
        first += 1
    yield from buckets_of(members[:first], CAPTURED_BUCKET)
    for places in buckets_of(members[first:], GRADIENT_BUCKET):
        yield [first + place for place in places]
