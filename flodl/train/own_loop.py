"""The body of a loop that the user writes: batches out, gradients in, everything else as in `flodl.train.loop`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flodl.distributed.sync import Sync
from flodl.errors import TrainError
from flodl.train.console import ShowProgress
from flodl.train.feed import as_feed
from flodl.train.loop import Loop
from flodl.train.loss import as_loss, batch_len
from flodl.train.monitored import monitor_of, orders_of
from flodl.train.route import warn_of_own_loop
from flodl.train.settings import Settings
from flodl.train.step import StepResult

__all__ = ["OwnLoop"]


class OwnLoop(Loop):
    """Made by `Trainer.setup`. Iterate ``epochs`` and ``epoch``, call ``backward`` on losses and ``step``."""

    _samples = 0  # rows of the step so far
    _batches = 0
    _rows = 0  # of the batch at hand
    _passed = False  # whether that had its backward pass by `backward`
    _summed = False  # whether any batch of the step had
    _turn: int | None = None
    _last = False
    _restored = _begun = False

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from the present one (after a resume: where it stopped) to ``count`` - 1."""
        self.settings = replace(self.settings, num_epochs=count)
        with self._leaving_cleanly(), contextlib.closing(self._shown), contextlib.ExitStack() as left:
            for tracker in self._trackers:
                left.callback(getattr(tracker, "end", lambda: None))
            self._restore_once()
            while self.epoch_number < count and not self.stopping:
                yield self.epoch_number
            self._begin_once()
            self._end_run()

    @functools.cached_property
    def _seen(self) -> list[dict[str, Any]]:
        """What was watched in the forward passes of this step."""
        return []

    @functools.cached_property
    def _shown(self) -> ShowProgress:
        return ShowProgress(self.settings.progress)

    @functools.cached_property
    def _trackers(self) -> list[Any]:
        return self.settings.made_trackers() if self.ranks.rank == 0 else []

    def _restore_once(self) -> None:
        if not self._restored:
            self._restored = True
            if (monitor := monitor_of(self.settings, self.ranks.rank == 0)) is not None:
                self.events.subscribe(monitor)
                monitor.enable_control(orders_of(self.settings, judged=False), self.ask)
            if self.ranks.rank == 0 and self.settings.progress is not False:
                self.events.subscribe(self._shown)
            for tracker in self._trackers:
                self.events.subscribe(tracker)
            if hasattr(self.optimizer, "register_step_pre_hook"):
                self.optimizer.register_step_pre_hook(self._refuse_own_step)
            self.model.train()
            self.restore()

    def _begin_once(self) -> None:
        """Report that the run begins. The first call of `epoch` does this, because it has the number of steps."""
        self._restore_once()
        if not self._begun:
            self._begun = True
            self._report_begin()
            warn_of_own_loop(self)

    def _refuse_own_step(self, *_: Any) -> None:
        """Refuse ``optimizer.step()`` in a batch of `epoch`: the parameters would move twice.

        Raises:
            TrainError: the call does not come from `step`.
        """
        if self._turn is not None:
            raise TrainError(
                "optimizer.step(): found a call inside of trainer.epoch(); expected trainer.step() alone, which moves "
                "the parameters and clears the gradients. Remove optimizer.step() and optimizer.zero_grad()."
            )

    def epoch(self, loader: Any) -> Iterator[Any]:
        """Yield this rank's batches of the present epoch, on its device; call `step` for each.

        With ``accumulate`` or ``micro_batch_size`` several batches make one step; `step` then acts at
        the last of them and returns None before.

        Args:
            loader: a `flodl.data.DataLoader`, or anything that yields batches and yields the same on every rank; what
                has no length is one epoch of ``max_steps`` steps.

        Raises:
            DataError: no length, and no ``max_steps``.
            TrainError: a batch cannot be cut into shares, or there is none.
            TrainInterrupted: SIGINT (Ctrl-C) came; the state is saved.
            SystemExit: SIGTERM came; the state is saved.
        """
        if not self._restored and self.settings.num_epochs == Settings.num_epochs:
            self.settings = replace(self.settings, num_epochs=0)  # without `epochs` the number is unknown
        settings: Any = self.settings
        self.feed = as_feed(
            loader,
            self.ranks.device,
            batch_size=settings.batch_size,
            seed=settings.seed,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
            accumulate=settings.accumulate,
            micro_batch_size=settings.micro_batch_size,
            max_steps=settings.max_steps,
        )
        self._begin_once()
        for turn, batches in self._work(self.feed):
            self._samples = self._batches = 0
            self._summed = False
            if not batches:  # too few samples for every rank; the others still need this one
                self._finish(turn)
            for place, batch in enumerate(batches):
                self._turn, self._last = turn, place + 1 == len(batches)
                self._rows, self._passed = batch_len(batch), False
                self._samples += self._rows
                self._batches += 1
                self.ranks.phase("forward", self.policy.lr_step)
                timer = self.step_.timed()
                timer.__enter__()
                self._timer = timer
                self.graphs.cut()
                with self.observing.watching:  # until the caller steps, or leaves
                    try:
                        yield batch
                    except GeneratorExit:
                        self._turn = None  # the caller left the loop
                        raise
                if self._turn is not None:  # the caller did not step
                    self.step()
            if self.stopping:
                return
        if not self.stopping:
            self._end_epoch()

    def backward(self, loss: Any, count: float | None = None) -> None:
        """Add the gradient of one batch, exactly for any split into micro-batches and ranks.

        Args:
            loss: what a ``train_step`` may return, see `flodl.train.Loss`; of all that the batch is to teach, since
                it counts once.
            count: how many items a plain mean stands for; None for the samples of the batch.

        Raises:
            TrainError: the batch had its backward pass already, or there is none.
        """
        if self._passed or self._turn is None:
            raise TrainError(
                "backward: the batch has had its backward pass, and would count twice. Expected one for each batch of "
                "epoch(); add losses up: trainer.backward(first + second)."
            )
        if not self._summed and any(p.grad is not None for p in self.model.parameters()):
            raise TrainError(
                "backward: there are gradients that loss.backward() left, of which nobody knows how many samples they "
                "stand for. Expected trainer.backward(loss) alone; add losses up: trainer.backward(first + second)."
            )
        self._passed = self._summed = True
        self.ranks.phase("backward")
        self.step_.backward(as_loss(loss, self._rows if count is None else count), self._rows)

    def step(self) -> StepResult | None:
        """Take one optimiser step over all ranks and clear gradients; None while batches of it are to come.

        After a plain ``loss.backward()`` the gradients count as means over the samples of the batch, and the loss is
        told as NaN, since nobody said it; ``trainer.backward(loss)`` does.

        Raises:
            TrainError: called without a batch from `epoch`, or after a plain ``backward()`` on one of
                several micro-batches, whose weight cannot be known.
        """
        if self._turn is None:
            raise TrainError("step: there is no batch to step for. Expected one step() for each batch of epoch().")
        self._timer.__exit__(None, None, None)
        self.observing.watching.__exit__()
        self._seen.append(self.observing.watching.take())
        if not self._last:
            self._turn = None
            return None
        turn, self._turn = self._turn, None
        return self._finish(turn)

    def _finish(self, turn: int) -> StepResult:
        step = self.step_
        self._check_precision()
        if not self._summed and self._batches:
            if self._batches > 1:
                raise TrainError(
                    f"step: {self._batches} micro-batches came and loss.backward() was called on them directly, "
                    "so their weights are unknown. Call trainer.backward(loss) instead."
                )
            if not any(p.grad is not None for p in self.model.parameters()):
                raise TrainError(
                    "step: no parameter has a gradient, so nothing would be learned. Expected trainer.backward(loss) "
                    "or loss.backward() before it; trainer.step() moves parameters and clears gradients by itself, so "
                    "optimizer.step() and zero_grad() are left out."
                )
            if self.precision.scaler is not None:
                raise TrainError(
                    "step: loss.backward() was called on a loss without the scale that float16 needs. Expected "
                    "trainer.backward(loss), which has it."
                )
            step.own_gradients(float(self._samples))
        while self._seen:
            step.observe(self._seen.pop(0))
        result = step.update(step=self.policy.lr_step, flags=self._flags())
        self._after_step(turn, result)
        return result

    def _check_precision(self) -> None:
        """Refuse a precision that passes of this loop do not have.

        Raises:
            TrainError: no forward pass was in the context of half precision.
        """
        if self.precision.name in ("bf16", "fp16") and self._batches and not self.precision.entered:
            raise TrainError(
                f"step: precision={self.precision.name!r} and a forward pass without it; a loop of your own says where "
                "it holds. Expected `with trainer.precision.context():` around model and loss, or precision='fp32'."
            )

    @property
    def is_sync(self) -> bool:
        """Whether all ranks step together."""
        return isinstance(self.policy, Sync)
