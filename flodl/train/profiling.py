"""torch.profiler over some steps of a run, as a callback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flodl.train.callback import Callback

if TYPE_CHECKING:
    from flodl.train.step.outcome import StepResult
    from flodl.train.trainer import Trainer

__all__ = ["Profiler"]


class Profiler(Callback):
    """Writes what host and device did in some steps to ``<folder>/rank-0-step-8.json``, for Perfetto or chrome://tracing.

    Steps on CUDA are captured as graphs as ever, after which a trace shows launches of whole steps; ``capture=False``
    shows their operations one by one.

    Args:
        folder: where traces go.
        skip: steps before anything is looked at; captured graphs and choices of kernels are made in them.
        warmup: steps in which the profiler runs and is not believed.
        steps: steps that are kept.
        ranks: which ranks are looked at.
        **options: further arguments of ``torch.profiler.profile``, such as ``profile_memory=True``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        skip: int = 4,
        warmup: int = 2,
        steps: int = 3,
        ranks: tuple[int, ...] = (0,),
        **options: Any,
    ) -> None:
        self.folder, self.skip, self.warmup, self.steps = Path(folder), skip, warmup, steps
        self.ranks, self.options = ranks, options
        self.written: list[Path] = []
        self._profile: Any = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Begin to count steps."""
        if trainer.ranks.rank not in self.ranks:
            return
        self.folder.mkdir(parents=True, exist_ok=True)

        def write(profile: Any) -> None:
            path = self.folder / f"rank-{trainer.ranks.rank}-step-{trainer.policy.lr_step}.json"
            profile.export_chrome_trace(str(path))
            self.written.append(path)

        activities = [torch.profiler.ProfilerActivity.CPU]
        if trainer.ranks.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=self.skip, warmup=self.warmup, active=self.steps, repeat=1)
        self._profile = torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=write, **self.options
        )
        self._profile.start()

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Count a step."""
        if self._profile is not None:
            self._profile.step()

    def close(self, trainer: Trainer) -> None:
        """Stop, and write what there is."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
