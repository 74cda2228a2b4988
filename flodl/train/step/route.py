"""Creation of the step of a run, and choice of the fastest way to compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flodl.distributed.policy import Sync
from flodl.errors import TrainError
from flodl.train.settings import Settings
from flodl.train.step.cuda_graphs import CudaCapturer
from flodl.train.step.device import Step
from flodl.train.step.host import TrainStep


def make_step(trainer: Any) -> Step:
    """Return the step that belongs to the policy of the trainer."""
    settings, ranks, hooks = trainer.settings, trainer.ranks, trainer.hooks
    step = Step(
        trainer.model,
        trainer.optimizer,
        None,
        ranks=ranks,
        precision=trainer.precision,
        share_gradients=trainer.policy.shares_gradients,
        max_grad_norm=settings.max_grad_norm,
        on_nan=settings.on_nan,
        sum_of_means=settings.sum_of_means,
        slowdown=settings.knobs.slowdown.get(ranks.rank, 1.0),
        reduce_on_cpu=settings.knobs.backend == "cpu",
        sharded=trainer.sharded,
    )
    step.hooks = hooks if hooks.around else None
    step.watching = trainer.observing.watching
    return step


def choose_route(trainer: Any) -> None:
    """Set up the fastest way to compute steps that settings and device allow.

    Steps in float32, TF32 or bfloat16 with Adam, AdamW or SGD are captured on a CUDA device. All others synchronise
    with the device once per step.

    Raises:
        TrainError: ``capture=True`` where steps cannot be captured.
    """
    settings, step, ranks, around = trainer.settings, trainer.step_, trainer.ranks, trainer.hooks.around
    capturer = make_capturer(ranks.device, settings)
    reason = None
    if capturer is None:
        reason = f"the device is a {ranks.device.type}, and CUDA devices capture graphs"
    elif settings.knobs.shares == "measured" and not ranks.solo:
        reason = "shares follow the time of each rank's own part, which is measured separately"
    elif trainer.graphs.remembers:
        reason = "the model has a state between calls, which a captured graph would not pass on"
    elif around:
        names = ", ".join(dict.fromkeys(type(call).__name__ for call in around))
        reason = f"{names} acts around the backward pass, which a captured graph would not repeat"
    else:
        reason = step.decide_on_device(
            capturer if settings.capture is not False else None,
            trainer.warn,
            deferred=isinstance(trainer.policy, Sync) and not settings.knobs.slowdown,
            strict=settings.capture is True,
            num_rows=getattr(trainer.plan.train_step, "reads_num_rows", True),
        )
    if capturer is not None:
        step.unrecorded = "the settings disable it (capture=False)" if settings.capture is False else reason
    trainer.log.before, step.arrived = step.count_writes, trainer.log.arrived
    if reason is not None and settings.capture is True:
        raise TrainError(f"capture: steps cannot be captured, because {reason}. Leave it at 'auto'.", reason=reason)
    if reason is not None and settings.capture == "auto" and capturer is not None:
        trainer.warn(f"capture: steps run one operation at a time, because {reason}")


def make_capturer(device: torch.device, settings: Settings) -> CudaCapturer | None:
    """Return the capturer of a device; None for devices other than CUDA."""
    return CudaCapturer(device, tune=not settings.deterministic) if device.type == "cuda" else None


def without_history(train_step: Any, graphs: Any) -> TrainStep:
    """Return a train_step that detaches the state of graphs with memory before each pass."""
    if not graphs.remembers:
        return train_step

    def step(model: nn.Module, batch: Any) -> Any:
        graphs.cut()
        return train_step(model, batch)

    return step


def compiled(model: nn.Module) -> Callable[[], Any]:
    """Compile the model, or its ``graph``, with ``torch.compile``; return a function that reverts it."""
    inner = getattr(model, "graph", model)
    target = inner if isinstance(inner, nn.Module) else model
    # Each bucket of lengths is a shape; torch compiles at most so many.
    before = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(before, 64)
    target.compile()

    def undo() -> None:
        target._compiled_call_impl = None
        torch._dynamo.config.recompile_limit = before

    return undo
