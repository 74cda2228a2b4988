"""The loop of `Trainer.setup`: the user writes its body, everything else is the loop of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flodl.errors import TrainError
from flodl.train import ends
from flodl.train.audience import Audience
from flodl.train.loss import as_loss, batch_len
from flodl.train.settings import Settings
from flodl.train.step.outcome import OBSERVED, Part, StepResult


@dataclass
class OwnStep:
    """The step under way.

    Attributes:
        position: of the step in the epoch; None between batches.
        is_last: whether the batch is the last one of the step.
        rows: samples of the batch.
        batches: batches of the step so far.
        had_backward: whether the batch was passed to `backward`.
    """

    position: int | None = None
    is_last: bool = False
    rows: int = 0
    batches: int = 0
    had_backward: bool = False


def epochs(trainer: Any, count: int) -> Iterator[int]:
    """Yield epochs from the present one (after a resume: where it stopped) to ``count`` - 1."""
    _of(trainer)
    trainer.settings = replace(trainer.settings, num_epochs=count)
    with ends.running(trainer), _restored(trainer):
        while trainer.epoch_number < count and not trainer.stopping:
            yield trainer.epoch_number
        _begin(trainer)
        ends.end(trainer)


def _of(trainer: Any) -> OwnStep:
    if trainer.own_step is None:
        raise TrainError("trainer: found a call for a loop of your own; expected a trainer of Trainer.setup.")
    return trainer.own_step


def _restored(trainer: Any) -> Audience:
    """Return the subscribers of the run; subscribe them and resume at the first call."""
    if trainer.audience is None:
        trainer.audience = Audience(trainer.settings, trainer.plan.subscribers, first=trainer.ranks.rank == 0)
        trainer.audience.listen(trainer.events, trainer.ask, evaluates=False)

        def refuse(*_: Any) -> None:
            if trainer.own_step.position is not None:  # it would update the parameters twice
                raise TrainError("optimizer.step(): found a call in trainer.batches(); expected trainer.step() alone.")

        if hasattr(trainer.optimizer, "register_step_pre_hook"):
            trainer.optimizer.register_step_pre_hook(refuse)
        ends.restore(trainer)
    return trainer.audience


def _begin(trainer: Any) -> None:
    """Report that the run begins; `batches` does so first because it has the number of steps."""
    _restored(trainer)
    if not trainer.has_begun:
        ends.begin(trainer)
        if trainer.ranks.device.type == "cuda" and trainer.settings.capture == "auto":
            trainer.warn("capture: the steps of a loop of your own are not captured; Trainer.fit captures them")


def batches(trainer: Any, loader: Any, **options: Any) -> Iterator[Any]:
    """Yield the batches of this rank in the present epoch, on its device; call `step` for each.

    With ``accumulate`` or ``micro_batch_size`` several batches form one step; `step` acts at the last of them.

    Args:
        loader: a `flodl.data.DataLoader`, or an iterable of batches that is equal on all ranks; without a length
            an epoch has ``max_steps`` steps.
        **options: ``shuffle``, ``drop_last``, ``collate`` for rows with a ``batch_size``.

    Raises:
        DataError: no length, and no ``max_steps``.
        TrainError: a batch cannot be divided among ranks, or there is none.
        TrainInterrupted: SIGINT (Ctrl-C) ended the run after it saved its state.
        SystemExit: SIGTERM ended the run after it saved its state.
    """
    own = _of(trainer)
    if trainer.audience is None and trainer.settings.num_epochs == Settings.num_epochs:
        trainer.settings = replace(trainer.settings, num_epochs=0)  # the number is unknown without `epochs`
    trainer.feed = trainer.plan.feed(loader, trainer.ranks.device, **options)
    _begin(trainer)
    for position, parts in trainer.steps(trainer.feed):
        trainer.step_.part, own.batches = Part(), 0
        if not parts:  # fewer samples than ranks; the other ranks still need this one
            _end_step(trainer, position)
        for number, batch in enumerate(parts):
            own.position, own.is_last = position, number + 1 == len(parts)
            own.rows, own.had_backward = batch_len(batch), False
            own.batches += 1
            trainer.ranks.phase("forward", trainer.policy.lr_step)
            trainer.step_.timer.__enter__()
            trainer.graphs.cut()
            with trainer.observing.watching:  # until the user steps, or leaves the loop
                try:
                    yield batch
                except GeneratorExit:
                    own.position = None
                    raise
            if own.position is not None:  # the user did not step
                step(trainer)
        if trainer.stopping:
            return
    if not trainer.stopping:
        ends.end_epoch(trainer)


def backward(trainer: Any, loss: Any, count: float | None = None) -> None:
    """Add the gradient of one batch, exactly for any split into micro-batches and ranks.

    Args:
        loss: any value that a ``train_step`` may return, of everything the batch should teach.
        count: number of items of a plain mean; None for the samples of the batch.

    Raises:
        TrainError: the batch already had its backward pass, or there is no batch.
    """
    own, problem, part = _of(trainer), None, trainer.step_.part
    if own.had_backward or own.position is None:
        problem = "a second call for one batch, or no batch; expected one call for each batch of batches()"
    elif part.total is None and _has_gradients(trainer):
        problem = "gradients of loss.backward(), of an unknown number of samples; expected only trainer.backward(loss)"
    if problem is not None:
        raise TrainError(f"backward: found {problem}. Add losses: trainer.backward(first + second).")
    own.had_backward = True
    trainer.ranks.phase("backward")
    part.samples += own.rows
    trainer.step_.add(part, as_loss(loss, own.rows if count is None else count))


def step(trainer: Any, loss: Any = None) -> StepResult | None:
    """Take one optimiser step over all ranks and clear gradients; return None before the last micro-batch.

    Args:
        loss: passed to `backward` first. Without it, gradients of a plain ``loss.backward()`` count as means over
            the samples of the batch, and the reported loss is NaN.

    Raises:
        TrainError: there is no batch, or a plain ``backward()`` was called on one of several micro-batches.
    """
    if loss is not None:
        backward(trainer, loss)
    own, watching = _of(trainer), trainer.observing.watching
    position, own.position = own.position, None
    if position is None:
        raise TrainError("step: found no batch; expected one step() for each batch of batches().")
    trainer.step_.timer.__exit__(None, None, None)
    watching.__exit__()
    trainer.step_.part.add_metrics(watching.take(), OBSERVED)
    return _end_step(trainer, position) if own.is_last else None


def _end_step(trainer: Any, position: int) -> StepResult:
    own, taken, precision = trainer.own_step, trainer.step_, trainer.precision
    if precision.name in ("bf16", "fp16") and own.batches and not precision.entered:
        raise TrainError(f"step: found precision={precision.name!r} without trainer.precision.context().")
    if taken.part.total is None and own.batches:
        problem = None
        if own.batches > 1:
            problem = f"{own.batches} micro-batches with loss.backward(), so their weights are unknown"
        elif not _has_gradients(trainer):
            problem = "no gradient (trainer.step() updates and clears: remove optimizer.step() and zero_grad())"
        elif precision.scaler is not None:
            problem = "loss.backward() on a loss without the scale that float16 needs"
        if problem is not None:
            raise TrainError(f"step: found {problem}; expected trainer.backward(loss).")
        taken.own_gradients(own.rows)
    result = taken.update(step=trainer.policy.lr_step, flags=trainer.requests.flags())
    trainer.end_step(position, result)
    return result


def _has_gradients(trainer: Any) -> bool:
    return any(p.grad is not None for p in trainer.model.parameters())
