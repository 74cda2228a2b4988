"""Selects how the steps of a run are computed: captured and replayed, decided on the device, or on the host.

`flodl.train.step` implements each of these. Steps are captured on a CUDA device in float32, TF32 or bfloat16 with Adam,
AdamW or SGD. All others synchronise with the device once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flodl.distributed.sync import Sync
from flodl.errors import TrainError
from flodl.train.settings import Settings
from flodl.train.step.cuda_graphs import Capturer, CudaCapturer

if TYPE_CHECKING:
    from flodl.train.trainer_parts import TrainerParts


def make_capturer(device: torch.device, settings: Settings) -> Capturer | None:
    """Return the capturer of a device; None for devices other than CUDA."""
    if device.type != "cuda":
        return None
    return CudaCapturer(device, tune=not settings.deterministic)


def choose_route(trainer: TrainerParts) -> None:
    """Set up the fastest way to compute steps that settings and device allow.

    Raises:
        TrainError: ``capture=True`` where steps cannot be captured.
    """
    settings, device = trainer.settings, trainer.ranks.device
    capturer = make_capturer(device, settings)
    reason = f"the device is a {device.type}, and CUDA devices capture graphs" if capturer is None else None
    if reason is None and settings.knobs.shares == "measured" and not trainer.ranks.solo:
        reason = "shares follow the time of each rank's own part, which is measured separately"
    if reason is None and trainer.graphs.remembers:
        reason = "the model has a state between calls, which a captured graph would not pass on"
    if reason is None and trainer.hooks.around:
        names = ", ".join(dict.fromkeys(type(call).__name__ for call in trainer.hooks.around))
        reason = f"{names} acts around the backward pass, which a captured graph would not repeat"
    if reason is None:
        reason = trainer.step_.decide_on_device(
            capturer if settings.capture is not False else None,
            trainer.warn,
            deferred=isinstance(trainer.policy, Sync) and not trainer.settings.slowdown,
            strict=settings.capture is True,
            num_rows=getattr(trainer.train_step, "reads_num_rows", True),
        )
    if capturer is not None:
        trainer.step_.unrecorded = "the settings disable it (capture=False)" if settings.capture is False else reason
    trainer.log.before = trainer.step_.count_writes
    trainer.step_.arrived = trainer.log.arrived
    if reason is None or settings.capture is False:
        return
    if settings.capture is True:
        raise TrainError(f"capture: steps cannot be captured, because {reason}. Leave it at 'auto'.", reason=reason)
    if capturer is not None:
        trainer.warn(f"capture: steps run one operation at a time, because {reason}")


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
