"""Values of model, optimiser and schedule that determine the numbers of a run; comparison of models over ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.errors import TrainError


def check_same_model(ranks: Ranks, model: nn.Module) -> None:
    """Compare names, shapes and dtypes of the model over ranks, before any collective depends on them.

    Raises:
        TrainError: they differ; ``ranks_apart`` lists the ranks that differ from rank 0.
    """
    if ranks.solo:
        return
    lines = [f"{name} {t.dtype} {tuple(t.shape)} {t.requires_grad}" for name, t in model.named_parameters()]
    lines += [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in model.named_buffers()]
    marks = ranks.gather(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    apart = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if apart:
        raise TrainError(
            f"the model of rank {', '.join(map(str, apart))} has other parameters or buffers than that of rank 0; "
            "expected equal models. Look for code that depends on the rank.",
            ranks_apart=apart,
        )


def identity(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> dict[str, Any]:
    """Return the values of a new model, optimiser and schedule that determine the numbers of a run."""
    dropouts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            dropouts[str(module.p)] = dropouts.get(str(module.p), 0) + 1
    left_out = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
    if getattr(schedule, "reference", None) != 1.0 and hasattr(schedule, "lr"):
        left_out.add("lr")  # the schedule has the rate
    options = {name: None for group in optimizer.param_groups for name in group if name not in left_out}
    groups = {f"optimizer.{name}": [_plain(group.get(name)) for group in optimizer.param_groups] for name in options}
    return {"dropout": dropouts, "schedule": _value_of(schedule), **groups}


def _value_of(schedule: Any) -> Any:
    """Return the value of a schedule, without memory addresses."""
    text = repr(schedule)
    if " at 0x" not in text:
        return text
    kind = getattr(schedule, "__qualname__", type(schedule).__qualname__)
    skipped = {"optimizer"}  # compared with its own options
    return {"kind": kind, **{k: _plain(v) for k, v in vars(schedule).items() if k not in skipped}}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(type(value), "__qualname__", "?")
