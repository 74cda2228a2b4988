"""The loop of `Trainer.setup`: the user writes its body, everything else is the loop of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flodl.errors import TrainError
from flodl.train.audience import Audience
from flodl.train.loss import as_loss, batch_len
from flodl.train.settings import Settings
from flodl.train.step.outcome import StepResult


class OwnLoop:
    """Batches for a loop that a user writes, and the steps of that loop.

    Args:
        trainer: a trainer whose parts were created.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._position: int | None = None  # of the step in the epoch; None between batches
        self._is_last = False  # whether the batch is the last one of the step
        self._rows = self._samples = self._batches = 0  # of the batch, and of the step so far
        self._had_backward = self._summed = False  # whether the batch, or any of the step, was passed to `backward`
        self._observed: list[dict[str, Any]] = []
        self._begun = False
        self._audience: Audience | None = None

    def epochs(self, count: int) -> Iterator[int]:
        """Yield epochs from the present one to ``count`` - 1."""
        trainer = self.trainer
        trainer.settings = replace(trainer.settings, num_epochs=count)
        with trainer.running(), self._restored():
            while trainer.epoch_number < count and not trainer.stopping:
                yield trainer.epoch_number
            self._begin()
            trainer.end()

    def _restored(self) -> Audience:
        """Return the subscribers of the run; subscribe them and resume at the first call."""
        if self._audience is None:
            trainer = self.trainer
            self._audience = Audience(trainer.settings, trainer.plan.subscribers, first=trainer.ranks.rank == 0)
            self._audience.listen(trainer.events, trainer.ask, evaluates=False)
            if hasattr(trainer.optimizer, "register_step_pre_hook"):
                trainer.optimizer.register_step_pre_hook(self._refuse_own_step)
            trainer.restore()
        return self._audience

    def _begin(self) -> None:
        """Report that the run begins; `batches` does so first because it has the number of steps."""
        self._restored()
        if not self._begun:
            self._begun, trainer = True, self.trainer
            trainer.begin()
            if trainer.ranks.device.type == "cuda" and trainer.settings.capture == "auto":
                trainer.warn("capture: the steps of a loop of your own are not captured; Trainer.fit captures them")

    def _refuse_own_step(self, *_: Any) -> None:
        """Refuse ``optimizer.step()`` in the loop, which would update the parameters twice.

        Raises:
            TrainError: always between `batches` and `step`.
        """
        if self._position is not None:
            raise TrainError("optimizer.step(): found a call in trainer.batches(); expected trainer.step() alone.")

    def batches(self, loader: Any, **options: Any) -> Iterator[Any]:
        """Yield the batches of this rank in the present epoch; see `Trainer.batches`."""
        trainer = self.trainer
        if self._audience is None and trainer.settings.num_epochs == Settings.num_epochs:
            trainer.settings = replace(trainer.settings, num_epochs=0)  # the number is unknown without `epochs`
        trainer.feed = trainer.plan.feed(loader, trainer.ranks.device, **options)
        self._begin()
        for position, batches in trainer.steps(trainer.feed):
            self._samples = self._batches = 0
            self._summed = False
            if not batches:  # fewer samples than ranks; the other ranks still need this one
                self._end_step(position)
            for number, batch in enumerate(batches):
                self._position, self._is_last = position, number + 1 == len(batches)
                self._rows, self._had_backward = batch_len(batch), False
                self._samples += self._rows
                self._batches += 1
                trainer.ranks.phase("forward", trainer.policy.lr_step)
                trainer.step_.timer.__enter__()
                trainer.graphs.cut()
                with trainer.observing.watching:  # until the user steps, or leaves the loop
                    try:
                        yield batch
                    except GeneratorExit:
                        self._position = None
                        raise
                if self._position is not None:  # the user did not step
                    self.step()
            if trainer.stopping:
                return
        if not trainer.stopping:
            trainer.end_epoch()

    def backward(self, loss: Any, count: float | None = None) -> None:
        """Add the gradient of one batch; see `Trainer.backward`."""
        trainer = self.trainer
        problem = None
        if self._had_backward or self._position is None:
            problem = "a second call for one batch, or no batch; expected one call for each batch of batches()"
        elif not self._summed and self._has_gradients():
            problem = (
                "gradients of loss.backward(), whose number of samples is unknown; expected trainer.backward(loss) only"
            )
        if problem is not None:
            raise TrainError(f"backward: found {problem}. Add losses: trainer.backward(first + second).")
        self._had_backward = self._summed = True
        trainer.ranks.phase("backward")
        trainer.step_.backward(as_loss(loss, self._rows if count is None else count), self._rows)

    def step(self) -> StepResult | None:
        """Take one optimiser step; see `Trainer.step`."""
        position, self._position = self._position, None
        if position is None:
            raise TrainError("step: found no batch; expected one step() for each batch of batches().")
        watching = self.trainer.observing.watching
        self.trainer.step_.timer.__exit__(None, None, None)
        watching.__exit__()
        self._observed.append(watching.take())
        return self._end_step(position) if self._is_last else None

    def _end_step(self, position: int) -> StepResult:
        trainer, step = self.trainer, self.trainer.step_
        precision = trainer.precision
        if precision.name in ("bf16", "fp16") and self._batches and not precision.entered:
            raise TrainError(f"step: found precision={precision.name!r} without trainer.precision.context().")
        if not self._summed and self._batches:
            self._check_gradients()
            step.own_gradients(float(self._samples))
        for values in self._observed:
            step.observe(values)
        self._observed.clear()
        result = step.update(step=trainer.policy.lr_step, flags=trainer.requests.flags())
        trainer.end_step(position, result)
        return result

    def _check_gradients(self) -> None:
        """Check the gradients of a plain ``loss.backward()``.

        Raises:
            TrainError: their weights are unknown, there are none, or they lack the loss scale.
        """
        problem = None
        if self._batches > 1:
            problem = f"{self._batches} micro-batches with loss.backward(), so their weights are unknown"
        elif not self._has_gradients():
            problem = "no gradient (trainer.step() updates and clears: remove optimizer.step() and zero_grad())"
        elif self.trainer.precision.scaler is not None:
            problem = "loss.backward() on a loss without the scale that float16 needs"
        if problem is not None:
            raise TrainError(f"step: found {problem}; expected trainer.backward(loss).")

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.trainer.model.parameters())
