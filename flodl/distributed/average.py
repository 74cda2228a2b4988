"""Weighted means of parameters and buffers over ranks.

Floating-point buffers (BatchNorm's running statistics) are averaged as changes against their last common value, so that
an unchanged buffer keeps its bits. Whole-number buffers (``num_batches_tracked``) take the largest value over ranks.
`flodl.distributed.policy` decides when to average; `flodl.distributed.gradients` sums gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flodl.distributed.group import Ranks
from flodl.errors import TrainError

BUCKET = 1 << 24
"""Elements of one collective: 64 MiB of float32, enough to fill a link, and little memory for a second copy."""


def model_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return all parameters and buffers, each one time, in a fixed order."""
    return [*model.parameters(), *model.buffers()]


def buckets_of(tensors: Sequence[torch.Tensor], most: int = BUCKET) -> Iterator[list[int]]:
    """Yield positions of tensors for one collective: of one dtype and device, with about ``most`` elements."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(place)
    for places in groups.values():
        bucket: list[int] = []
        size = 0
        for place in places:
            if bucket and size + tensors[place].numel() > most:
                yield bucket
                bucket, size = [], 0
            bucket.append(place)
            size += tensors[place].numel()
        yield bucket


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements as one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts_like(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of ``flat`` in the shapes of ``like``."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit floating-point tensor as float32, any other tensor unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class BufferMean:
    """Average the buffers of a model over ranks; the call waits, ``begin`` and ``finish`` do not."""

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self.ranks, self.model = ranks, model
        self.refresh()

    def _floats(self) -> list[torch.Tensor]:
        return [b for b in self.model.buffers() if b.is_floating_point()]

    def _whole(self) -> list[torch.Tensor]:
        return [b for b in self.model.buffers() if not b.is_floating_point() and b.dtype != torch.bool]

    def __call__(self, weight: float | torch.Tensor) -> None:
        """Replace buffers by their mean; ``weight`` is this rank's work since the last call."""
        if self.ranks.solo:
            return
        handles = self.begin(weight)
        with self.ranks.peer_failures_named():
            for handle in handles:
                handle.wait()
        self.finish()

    @torch.no_grad()
    def begin(self, weight: float | torch.Tensor) -> list[Any]:
        """Send the changes since the last common values; return handles to wait for."""
        floats, whole = self._floats(), self._whole()
        handles = []
        self._sent_change = self._sent_whole = None
        if floats:
            change = flattened([b.to(torch.float64) - c for b, c in zip(floats, self._common, strict=True)])
            # a constant infinity minus itself is NaN; it did not change
            self._sent_change = change.nan_to_num_(nan=0.0)
            # a number would make the host wait for the device
            own = weight.reshape(1) if isinstance(weight, torch.Tensor) else change.new_tensor([weight])
            self._sum = torch.cat([change * weight, own])
            handles.append(dist.all_reduce(self._sum, async_op=True))
        if whole:
            self._sent_whole = flattened([b.to(torch.int64) for b in whole])
            self._max = self._sent_whole.clone()
            handles.append(dist.all_reduce(self._max, op=dist.ReduceOp.MAX, async_op=True))
        return handles

    @torch.no_grad()
    def finish(self, *, keep_progress: bool = False) -> None:
        """Set the buffers to the mean; with ``keep_progress`` add their changes since `begin`."""
        floats, whole = self._floats(), self._whole()
        if self._sent_change is not None:
            mean = self._sum[:-1] / self._sum[-1].clamp(min=torch.finfo(torch.float64).tiny)
            steps = zip(
                floats, self._common, parts_like(mean, floats), parts_like(self._sent_change, floats), strict=True
            )
            for buffer, common, step, sent in steps:
                since = (buffer.to(torch.float64) - common - sent).nan_to_num_(nan=0.0) if keep_progress else None
                # rounded to the dtype of checkpoints, so that a resumed run starts from the same bits
                moved = torch.where(step == 0, common, common + step).to(buffer.dtype)
                common.copy_(moved)
                buffer.copy_(common if since is None else torch.where(since == 0, common, common + since))
        if self._sent_whole is not None:
            gained = parts_like(self._max - self._sent_whole, whole)
            for buffer, gain in zip(whole, gained, strict=True):
                buffer.add_(gain.to(buffer.dtype))

    def refresh(self) -> None:
        """Use the present buffers as common values, after they were loaded or broadcast."""
        self._common = [b.detach().to(torch.float64, copy=True) for b in self._floats()]


@dataclass
class Flight:
    """An averaging in progress: the sent values, and the handles to wait for."""

    ranks: Ranks
    members: list[list[torch.Tensor]]
    sent: list[torch.Tensor]
    sums: list[torch.Tensor]
    table: torch.Tensor
    handles: list[Any]

    def landed(self) -> bool:
        """Return True if every collective is done."""
        return all(handle.is_completed() for handle in self.handles)

    def wait(self) -> None:
        """Wait until every collective is done."""
        with self.ranks.peer_failures_named():
            for handle in self.handles:
                handle.wait()
            if self.ranks.device.type == "cuda":  # there a handle only orders streams
                torch.cuda.current_stream(self.ranks.device).synchronize()


class ParameterMean:
    """Average trainable parameters and buffers over ranks, weighted by work; training may continue meanwhile.

    Args:
        on_cpu: send parameters through host memory (gloo) whatever the device.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, *, on_cpu: bool = False) -> None:
        self.ranks, self.model, self.on_cpu = ranks, model, on_cpu
        self.buffers = BufferMean(ranks, model)

    @torch.no_grad()
    def begin(self, weight: float, row: Sequence[float]) -> Flight:
        """Send this rank's parameters and its ``row`` of figures without waiting.

        Args:
            weight: this rank's work since the last averaging.
            row: figures that every rank receives; of the same length on all.
        """
        ranks = self.ranks
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        members, sent, sums, handles = [], [], [], []
        for places in buckets_of(parameters):
            bucket = [parameters[i] for i in places]
            flat = flattened(bucket)
            # Products with weights would overflow float16, and the mean of equal numbers would differ from them.
            flat = wide(flat.cpu() if self.on_cpu else flat)
            scaled = torch.cat([flat * weight, flat.new_tensor([weight])])
            handles.append(ranks.sum_async(scaled))
            members.append(bucket)
            sent.append(flat)
            sums.append(scaled)
        handles += self.buffers.begin(weight)
        table = torch.zeros(ranks.world, len(row), dtype=torch.float64)
        table[ranks.rank] = torch.tensor(row, dtype=torch.float64)
        handles.append(ranks.sum_async(table))
        return Flight(ranks, members, sent, sums, table, handles)

    @torch.no_grad()
    def finish(self, flight: Flight, *, keep_progress: bool) -> tuple[list[list[float]], float]:
        """Set parameters and buffers to the mean of ``flight``.

        Args:
            keep_progress: add the changes of this rank since `begin` to the mean, instead of dropping them.

        Returns:
            The rows of all ranks, and ``norm(sent - mean) / norm(mean)`` of this rank.
        """
        flight.wait()
        apart = torch.zeros(2, dtype=torch.float64, device=flight.sent[0].device if flight.sent else None)
        for bucket, sent, total in zip(flight.members, flight.sent, flight.sums, strict=True):
            mean = total[:-1] / total[-1].clamp(min=torch.finfo(total.dtype).tiny)
            change = mean - sent
            # both stay on the device until the end, so that the host waits only one time
            norms = [torch.linalg.vector_norm(values, dtype=torch.float64) for values in (change, mean)]
            apart += torch.stack(norms).square().to(apart.device)
            values = parts_like((change if keep_progress else mean).to(bucket[0].device), bucket)
            move = torch._foreach_add_ if keep_progress else torch._foreach_copy_  # pyright: ignore
            move(bucket, values)
        self.buffers.finish(keep_progress=keep_progress)
        drift, size = apart.tolist()
        return flight.table.tolist(), (drift / size) ** 0.5 if size > 0 else 0.0


@torch.no_grad()
def fingerprints(model: nn.Module) -> torch.Tensor:
    """Return one number for each parameter that changes with any of its bits, float64 ``(parameters,)``."""
    marks = []
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for parameter in model.parameters():
        bits = parameter.detach().contiguous().view(-1).view(whole[parameter.element_size()])
        # 52 bits survive the conversion to float64
        place = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
        marks.append((bits.to(torch.int64) * place).sum() & ((1 << 52) - 1))
    return torch.stack(marks).to(torch.float64) if marks else torch.zeros(0, dtype=torch.float64)


def check_equal(ranks: Ranks, model: nn.Module, step: int) -> None:
    """Compare the parameters of all ranks bit by bit.

    Raises:
        TrainError: they differ; ``rank`` and ``tensors`` identify the difference.
    """
    if ranks.solo:
        return
    marks = fingerprints(model)
    rows = torch.tensor(ranks.table(marks.tolist()), dtype=torch.float64)
    middle = rows.median(dim=0).values
    if bool((rows == rows[0]).all()):
        return
    names = [name for name, _ in model.named_parameters()]
    odd = [r for r in range(ranks.world) if bool((rows[r] != middle).any())] or [0]
    bad = [names[i] for i in torch.nonzero((rows != middle).any(dim=0)).flatten().tolist()]
    raise TrainError(
        f"step {step}: the parameters of rank {odd[0]} differ from the others' in {', '.join(bad[:5])}"
        f"{f' and {len(bad) - 5} more' if len(bad) > 5 else ''}. Expected equal bits after a common step. "
        "Check the memory, and code that treats ranks differently; resume from the last checkpoint.",
        rank=odd[0],
        tensors=bad,
        step=step,
    )
