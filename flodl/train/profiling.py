"""torch.profiler over some steps of a run, as a callback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flodl.train.callback import Callback

if TYPE_CHECKING:
    from flodl.train.step.outcome import StepResult


class Profiler(Callback):
    """Writes traces of some steps to ``<folder>/rank-0-step-8.json``, for Perfetto or chrome://tracing.

    Captured steps on CUDA appear as launches of whole steps; with ``capture=False`` as single operations.

    Args:
        folder: folder of the traces.
        skip: steps before the profiler starts, such as those that capture graphs and select kernels.
        warmup: steps that are profiled and discarded.
        steps: steps that are kept.
        ranks: ranks that are profiled.
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
        self.folder, self.ranks, self.options = Path(folder), ranks, options
        self._steps = {"wait": skip, "warmup": warmup, "active": steps, "repeat": 1}
        self.written: list[Path] = []
        self._profile: Any = None

    def on_train_begin(self, trainer: Any) -> None:
        """Start the profiler."""
        if trainer.ranks.rank not in self.ranks:
            return
        self.folder.mkdir(parents=True, exist_ok=True)

        def write(profile: Any) -> None:
            path = self.folder / f"rank-{trainer.ranks.rank}-step-{trainer.policy.lr_step}.json"
            profile.export_chrome_trace(str(path))
            self.written.append(path)

        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CPU, *([activity.CUDA] if trainer.ranks.device.type == "cuda" else [])]
        self._profile = torch.profiler.profile(
            activities=kinds, schedule=torch.profiler.schedule(**self._steps), on_trace_ready=write, **self.options
        )
        self._profile.start()

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Count a step."""
        if self._profile is not None:
            self._profile.step()

    def close(self, trainer: Any) -> None:
        """Stop the profiler and write the trace."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
