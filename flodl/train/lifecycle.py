"""Start and end of a run on one rank: signals, checkpoints, and the events that report both."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from flodl.errors import TrainInterrupted
from flodl.signals import stop_by
from flodl.train.events import RunDone, RunFailed, RunStarted
from flodl.train.handle import Trained
from flodl.train.parts import compiled
from flodl.train.saving.resume import past_of


@contextlib.contextmanager
def running(trainer: Any) -> Iterator[None]:
    """Handle signals inside, and release the model and the checkpoint folder at the end."""
    settings = trainer.settings
    try:
        with contextlib.ExitStack() as stack, trainer.requests.signals:
            stack.callback(lambda: trainer.step_.drop_captures())
            stack.callback(trainer.hooks.call, "close")
            stack.callback(trainer.observing.close)
            for change in (compiled if settings.compile else None, settings.prepare_model):
                undo = change(trainer.model) if change is not None else None
                if undo is not None:
                    stack.callback(undo)
            yield
    except BaseException as fault:
        trainer.snapshots.close(f"the run ended by {type(fault).__name__}")
        if not isinstance(fault, (GeneratorExit, SystemExit, TrainInterrupted)):
            ranks, reason = trainer.ranks, f"{type(fault).__name__}: {fault}"
            about = {**trainer.about(), "failed_rank": ranks.rank, "phase": ranks.board.phase(ranks.row)}
            trainer.events.emit(RunFailed(**about, reason=reason))
        if trainer.saves is not None:
            trainer.saves.close(give_up=True)
        raise


def restore(trainer: Any) -> None:
    """Resume from a checkpoint if the settings request it and there is one."""
    trainer.model.train()
    if trainer.saves is not None and trainer.settings.resume:
        trainer.saves.restore()


def begin(trainer: Any) -> None:
    """Report that the run begins, with its past."""
    trainer.began_s = time.monotonic()
    feed, settings, choice = trainer.feed, trainer.settings, trainer.policy_choice
    started = RunStarted(
        **trainer.about(),
        world=trainer.ranks.world,
        policy=trainer.policy.name,
        policy_reason=choice.reason,
        epochs=settings.num_epochs,
        steps_per_epoch=feed.turns(trainer.epoch_number) if feed is not None else 0,
        max_steps=settings.max_steps,
        resumed_from=trainer.saves.resumed_from if trainer.saves is not None else None,
        past=past_of(trainer),
    )
    trainer.events.emit(started)
    trainer.hooks.call("on_train_begin")
    trainer.wall_ms()


def end(trainer: Any) -> None:
    """End the run: evaluate and save what is not yet evaluated and saved."""
    trainer.log.settle(trainer.tally)
    if trainer.evaluator.at_step != trainer.policy.steps:
        trainer.evaluator.run()  # the run ended inside an epoch
    if trainer.saves is not None:
        trainer.saves.end()
    if trainer.average is not None:
        trainer.average.put()
    trainer.hooks.call("on_train_end")
    trainer.snapshots.serve()
    trainer.snapshots.close()
    reason = "finished" if trainer.epoch_number >= trainer.settings.num_epochs else "stopped"
    _close(trainer, reason, trainer.policy.steps)


def leave(trainer: Any, number: int) -> NoReturn:
    """Leave because of a signal; after Ctrl-C the error contains the trained weights."""
    trainer.log.settle(trainer.tally)
    step = trainer.policy.lr_step
    state: dict[str, Any] = {}
    if number == signal.SIGINT:
        if trainer.average is not None:
            trainer.average.put()
        trained = Trained.of(trainer.model, keep=trainer.ranks.rank == 0 or not trainer.sharded)
        state = {"step": step, "folder": trainer.settings.folder, "trained": trained}
    _close(trainer, "signal", step)
    stop_by(number, **state)


def _close(trainer: Any, reason: str, step: int) -> None:
    trainer.ranks.phase("shutdown")
    if trainer.saves is not None:
        trainer.saves.join()
        trainer.saves.close()
    recorded, summed = trainer.step_.recorded(trainer.policy.steps), trainer.step_.summed
    trainer.events.emit(RunDone(**{**trainer.about(), "step": step}, reason=reason, recorded=recorded, summed=summed))
