"""Callbacks: user code inside of a run, at steps, at epochs and around the backward pass.

Events (`flodl.train.events`) report what happened; callbacks run inside the loop, on every rank, and may change it. A
callback that acts around the backward pass changes the arithmetic of the step, which a captured step would not
repeat, so such a run captures no steps and logs the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flodl.errors import TrainError, nearest
from flodl.train.loss import Loss
from flodl.train.step.outcome import StepResult

AROUND = ("before_backward", "after_backward", "before_optimizer_step")


class Callback:
    """Base class of callbacks; override the methods you need.

    Each rank calls its own copy at the same steps. An error in a callback ends the run; ``trainer.stop()`` ends it in
    order. If ranks are separate processes, a callback must be picklable. ``trainer`` is the `flodl.train.Trainer`
    of this rank.

    Attributes:
        keeps_best: whether it loads the best weights into the model at the end, so that no checkpoint is needed for
            that; checkpoints of the best are then kept for a resume only.
    """

    keeps_best = False

    def on_train_begin(self, trainer: Any) -> None:
        """Called when the run starts or resumes, after its checkpoint was loaded."""

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        """Called before an epoch; the first epoch is 0."""

    def on_step_begin(self, trainer: Any, batches: Sequence[Any]) -> None:
        """Called before an optimiser step with the micro-batches of this rank."""

    def before_backward(self, trainer: Any, loss: Loss) -> Loss | None:
        """Called with the loss of a micro-batch; a returned `Loss` replaces it.

        A loop of your own that calls ``loss.backward()`` instead of ``trainer.backward(loss)`` skips this method and
        `after_backward`.
        """

    def after_backward(self, trainer: Any) -> None:
        """Called after the backward pass of a micro-batch; gradients are sums that are not divided yet."""

    def before_optimizer_step(self, trainer: Any) -> None:
        """Called with the gradients of the whole step, equal on all ranks, before they are clipped."""

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Called after a step; on CUDA its figures may still be on the device (``result.outcome``)."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Called with the figures of an evaluation, equal on all ranks."""

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """Called after an epoch and its evaluation, before its checkpoint."""

    def on_train_end(self, trainer: Any) -> None:
        """Called when the run finishes or is stopped."""

    def close(self, trainer: Any) -> None:
        """Called at the end of a run, also after an error."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return JSON values for checkpoints, equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the values that `state_dict` returned."""


class EpochFunction(Callback):
    """Calls ``call(epoch, trainer)`` on every rank before each epoch."""

    def __init__(self, call: Callable[[int, Any], Any]) -> None:
        self.call = call

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        """Call the function."""
        self.call(epoch, trainer)


class Guarded:
    """A function of the user; an error in it is reported once and training continues.

    Args:
        call: the function.
        name: for messages.
    """

    def __init__(self, call: Callable[..., Any] | None, name: str) -> None:
        self.call, self.name, self._failed = call, name, False

    def __call__(self, warn: Callable[[str], Any], *args: Any) -> Any:
        """Return the result of the function; None after an error, or without a function."""
        try:
            return None if self.call is None else self.call(*args)
        except Exception as error:
            if not self._failed:
                warn(f"{self.name} raised {type(error).__name__}: {error}; training continues")
            self._failed = True
            return None


class CheckpointFunction(Callback):
    """Calls ``call(epochs done, model)`` on rank 0 after every so many epochs, with averaged weights if any."""

    def __init__(self, call: Callable[[int, nn.Module], Any], every: int = 1) -> None:
        self.call, self.every = Guarded(call, "checkpoint_fn"), every

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """Call the function if it is due."""
        if trainer.ranks.rank == 0 and (epoch + 1) % self.every == 0:
            trainer.ranks.phase("callback")
            with trainer.averaged_weights():
                self.call(trainer.warn, epoch + 1, trainer.model)


PREFIXES = ("on_", "before_", "after_")
# Methods that are called; a method with one of the prefixes that is not among them is a mistake.
KNOWN = tuple(name for name in vars(Callback) if name.startswith(PREFIXES))


class Hooks:
    """The callbacks of one run; the methods that callbacks override are attributes, each a list.

    Args:
        trainer: passed to callbacks as their first argument.

    Attributes:
        around: the callbacks that act around the backward pass.

    Raises:
        TrainError: a callback has a method that is never called.
    """

    on_step_begin: list[Callable[..., Any]]
    on_step_end: list[Callable[..., Any]]

    def __init__(self, trainer: Any, callbacks: Sequence[Callback]) -> None:
        self.trainer, self.callbacks = trainer, tuple(callbacks)
        self.around = self.acts(*AROUND)
        never = [
            f"{type(call).__name__}.{name}{nearest(name, KNOWN)}"
            for call in self.callbacks
            for name in dir(type(call))
            if name.startswith(PREFIXES) and name not in KNOWN and callable(getattr(type(call), name))
        ]
        if never:
            raise TrainError(
                f"callbacks: {'; '.join(never)} is never called; expected methods of flodl.train.Callback.",
                problems=never,
            )
        for name in (*KNOWN, "close"):
            if name != "before_backward":
                setattr(self, name, [getattr(call, name) for call in self.acts(name)])

    def acts(self, *names: str) -> list[Callback]:
        """Return the callbacks that override one of these methods."""
        return [
            call for call in self.callbacks if any(getattr(type(call), n) is not getattr(Callback, n) for n in names)
        ]

    def call(self, name: str, *args: Any) -> None:
        """Call the method ``name`` of all callbacks in order."""
        for method in getattr(self, name):
            method(self.trainer, *args)

    def before_backward(self, loss: Loss) -> Loss:
        """Return the loss after all callbacks have seen or replaced it."""
        for call in self.callbacks:
            given = call.before_backward(self.trainer, loss)
            if given is not None and not isinstance(given, Loss):
                raise TrainError(
                    f"{type(call).__name__}.before_backward: found {type(given).__name__}; expected a Loss, or None.",
                    found=type(given).__name__,
                )
            loss = loss if given is None else given
        return loss

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of callbacks with their positions; callbacks without state are left out."""
        states = [(place, call, call.state_dict()) for place, call in enumerate(self.callbacks)]
        return [{"place": p, "kind": type(call).__name__, "state": dict(state)} for p, call, state in states if state]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of `state_dict`.

        Raises:
            TrainError: a position has another callback than the checkpoint.
        """
        for entry in states:
            place = entry["place"]
            found = type(self.callbacks[place]).__name__ if place < len(self.callbacks) else None
            if found != entry["kind"]:
                raise TrainError(
                    f"resume: callback {place} was a {entry['kind']}, is {found}. Pass callbacks in their first order.",
                    place=place,
                )
            self.callbacks[place].load_state_dict(entry["state"])


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
