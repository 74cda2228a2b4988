"""Functions of the user that take part in a run, step by step and around the backward pass.

Events (`flodl.train.events`) tell what happened to whoever looks on; callbacks stand inside the loop, on every
rank, and may change what it does. Those that look at a step from outside leave it as fast as it is. Those that act
around the backward pass take part in its arithmetic, which a captured step would not repeat, so such a run captures
nothing and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flodl.errors import TrainError, nearest
from flodl.train.loss import Loss

if TYPE_CHECKING:
    from flodl.train.step.outcome import StepResult

__all__ = ["Callback", "Hooks"]

AROUND = ("before_backward", "after_backward", "before_optimizer_step")


class Callback:
    """Takes part in a run; override what you need.

    Every rank calls its own copy, at the same steps. An error in a callback ends the run. ``trainer.stop()`` ends
    it in order. Where ranks are processes of ours a callback has to be picklable. ``trainer`` is this rank's
    `flodl.train.Trainer`; your own classes may annotate it as such.
    """

    def on_train_begin(self, trainer: Any) -> None:
        """Called when the run begins or goes on, after checkpoints were read."""

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        """Called before an epoch, the first being 0."""

    def on_step_begin(self, trainer: Any, batches: Sequence[Any]) -> None:
        """Called before an optimiser step with this rank's micro-batches of it."""

    def before_backward(self, trainer: Any, loss: Loss) -> Loss | None:
        """Called with the loss of a micro-batch; what is returned takes its place, None leaves it.

        A loop of your own that calls ``loss.backward()`` instead of ``trainer.backward(loss)`` passes this by, and
        `after_backward` too.
        """

    def after_backward(self, trainer: Any) -> None:
        """Called when the gradient of a micro-batch was added to this rank's; a sum that nothing has divided yet."""

    def before_optimizer_step(self, trainer: Any) -> None:
        """Called when gradients are those of the whole step, the same on all ranks, before they are clipped."""

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Called when the step is done; on CUDA its figures may still be on the device (``result.outcome``)."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Called with the figures of an evaluation, the same on all ranks."""

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """Called after an epoch and its evaluation, before its checkpoint."""

    def on_train_end(self, trainer: Any) -> None:
        """Called when the run ended by itself."""

    def close(self, trainer: Any) -> None:
        """Called when the run is over, however it ended."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return JSON values that checkpoints hold, the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave when the checkpoint was made."""


PREFIXES = ("on_", "before_", "after_")
KNOWN = tuple(name for name in vars(Callback) if name.startswith(PREFIXES))
"""What is called at a time, so that a method of such a name that is none of these was meant for another library."""


class Hooks:
    """The callbacks of one run.

    Args:
        trainer: what callbacks are given.

    Raises:
        TrainError: one of them is no `Callback`.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Callback]) -> None:
        self.trainer, self.callbacks = trainer, tuple(callbacks)
        strange = [type(call).__name__ for call in self.callbacks if not isinstance(call, Callback)]
        if strange:
            raise TrainError(
                f"callbacks: found {', '.join(strange)}; expected instances of flodl.train.Callback. A function that "
                "looks on subscribes to events.",
                found=strange,
            )
        never = [
            f"{type(call).__name__}.{name}{nearest(name, KNOWN)}"
            for call in self.callbacks
            for name in dir(type(call))
            if name.startswith(PREFIXES) and name not in KNOWN and callable(getattr(type(call), name))
        ]
        if never:
            raise TrainError(
                f"callbacks: {'; '.join(never)} is never called. Expected the methods of flodl.train.Callback: "
                f"{', '.join(KNOWN)}.",
                problems=never,
            )

    def acts(self, *names: str) -> list[Callback]:
        """Return the callbacks that override one of these methods."""
        return [
            call for call in self.callbacks if any(getattr(type(call), n) is not getattr(Callback, n) for n in names)
        ]

    @property
    def around(self) -> list[Callback]:
        """Those that act around the backward pass."""
        return self.acts(*AROUND)

    def call(self, name: str, *args: Any) -> None:
        """Call the method of this name of all callbacks, in order."""
        for call in self.callbacks:
            getattr(call, name)(self.trainer, *args)

    def before_backward(self, loss: Loss) -> Loss:
        """Return the loss that callbacks leave or put in its place."""
        for call in self.callbacks:
            given = call.before_backward(self.trainer, loss)
            if given is not None and not isinstance(given, Loss):
                raise TrainError(
                    f"{type(call).__name__}.before_backward: found {type(given).__name__}; expected a "
                    "flodl.train.Loss, or None to leave it.",
                    found=type(given).__name__,
                )
            loss = loss if given is None else given
        return loss

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of callbacks that have any, by their place."""
        states = [(place, call, call.state_dict()) for place, call in enumerate(self.callbacks)]
        return [{"place": p, "kind": type(call).__name__, "state": dict(state)} for p, call, state in states if state]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up saved states.

        Raises:
            TrainError: there is no such callback at a place.
        """
        for entry in states:
            place = entry["place"]
            found = type(self.callbacks[place]).__name__ if place < len(self.callbacks) else None
            if found != entry["kind"]:
                raise TrainError(
                    f"resume: the checkpoint has the state of callback {place}, a {entry['kind']}; found {found}. Give "
                    "the callbacks of the run in their order.",
                    place=place,
                )
            self.callbacks[place].load_state_dict(entry["state"])
