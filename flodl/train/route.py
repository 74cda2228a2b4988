"""How the steps of a run are carried out: captured and replayed, decided on the device, or step by step on the host.

What each of these computes is in `flodl.train.step`. Captured are runs of `Trainer.builder` on a CUDA device in
float32, TF32 or bfloat16 with Adam, AdamW or SGD, on one rank and on several. All others synchronise with it once
per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flodl.distributed.sync import Sync
from flodl.errors import TrainError
from flodl.train.core import TrainerCore
from flodl.train.settings import Settings
from flodl.train.step.capturer import Capturer, CudaCapturer

__all__ = ["choose_route", "compiled", "warn_of_own_loop"]

CHOICES = ("auto", True, False)


def make_capturer(device: torch.device, settings: Settings) -> Capturer | None:
    """Return what captures steps on this device; None where nothing does."""
    if device.type != "cuda":
        return None
    return CudaCapturer(device, tune=not settings.deterministic)


def choose_route(trainer: TrainerCore) -> None:
    """Have the steps of ``trainer`` carried out the fastest way that its settings and device allow.

    Raises:
        TrainError: ``capture`` is none of its values, or True where nothing can be captured.
    """
    settings, device = trainer.settings, trainer.ranks.device
    if settings.capture not in CHOICES:
        raise TrainError(
            f"capture: found {settings.capture!r}, expected 'auto', True or False.", found=settings.capture
        )
    capturer = make_capturer(device, settings)
    reason = f"the device is a {device.type}, and CUDA devices capture graphs" if capturer is None else None
    if reason is None and settings.knobs.shares == "measured" and not trainer.ranks.solo:
        reason = "shares follow the time of each rank's own part, which is measured apart"
    if reason is None and trainer.graphs.remembers:
        reason = "the model remembers values of its last call, which a captured graph would not pass on"
    if reason is None and trainer.hooks.around:
        names = ", ".join(dict.fromkeys(type(call).__name__ for call in trainer.hooks.around))
        reason = f"{names} acts around the backward pass, which a captured graph would not repeat"
    if reason is None:
        reason = trainer.step_.decide_on_device(
            capturer if settings.capture is not False else None,
            trainer.warn,
            deferred=isinstance(trainer.policy, Sync) and not trainer.settings.slowdown,
            strict=settings.capture is True,
            num_rows=settings.capture_num_rows,
        )
    if capturer is not None:
        trainer.step_.unrecorded = "it is not asked for (capture=False)" if settings.capture is False else reason
    trainer.log.before = trainer.step_.count_writes
    trainer.step_.arrived = trainer.log.arrived
    if reason is None or settings.capture is False:
        return
    if settings.capture is True:
        raise TrainError(f"capture: steps cannot be captured, because {reason}. Leave it at 'auto'.", reason=reason)
    if capturer is not None:
        trainer.warn(f"capture: steps run one operation at a time, because {reason}")


def warn_of_own_loop(trainer: TrainerCore) -> None:
    """Warn that the steps of a loop that the user writes are not captured."""
    reason = "the loop is your own (Trainer.setup); those of Trainer.builder are captured"
    if trainer.ranks.device.type == "cuda" and trainer.settings.capture == "auto":
        trainer.warn(f"capture: steps run one operation at a time, because {reason}")


def compiled(model: nn.Module) -> Callable[[], Any]:
    """Have ``torch.compile`` translate the model, or the graph that it holds as ``graph``; return what undoes it."""
    inner = getattr(model, "graph", model)
    target = inner if isinstance(inner, nn.Module) else model
    # Buckets are shapes of their own: a second one makes a version for any size, and then no more are made.
    before = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(before, 64)
    target.compile()

    def undo() -> None:
        target._compiled_call_impl = None
        torch._dynamo.config.recompile_limit = before

    return undo
