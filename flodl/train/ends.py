"""The start and the end of a run, and the end of its epochs."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from flodl.distributed.board import SAVE
from flodl.distributed.policy import Sync
from flodl.errors import TrainError, TrainInterrupted
from flodl.signals import stop_by
from flodl.train.events import RunDone, RunFailed, RunStarted
from flodl.train.handle import Trained
from flodl.train.saving.resume import past_of
from flodl.train.step.route import compiled
from flodl.train.steplog import Tally, epoch_metrics


@contextlib.contextmanager
def running(trainer: Any) -> Iterator[None]:
    """Handle signals inside, and release the model and the checkpoint folder at the end."""
    settings = trainer.settings
    try:
        with contextlib.ExitStack() as stack, trainer.requests.signals:
            stack.callback(lambda: trainer.step_.drop_captures())  # of the step at the end
            stack.callback(trainer.hooks.call, "close")
            stack.callback(trainer.observing.watching.close)
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
    trainer.has_begun, trainer.began_s = True, time.monotonic()
    feed, settings = trainer.feed, trainer.settings
    started = RunStarted(
        **trainer.about(),
        world=trainer.ranks.world,
        policy=trainer.policy.name,
        policy_reason=trainer.policy_choice.reason,
        epochs=settings.num_epochs,
        steps_per_epoch=feed.turns(trainer.epoch_number) if feed is not None else 0,
        max_steps=settings.max_steps,
        resumed_from=trainer.saves.resumed_from if trainer.saves is not None else None,
        past=past_of(trainer),
    )
    trainer.events.emit(started)
    trainer.hooks.call("on_train_begin")
    trainer.wall_ms()


def end_epoch(trainer: Any) -> None:
    """Close an epoch: evaluate, report its figures, apply rules, and save."""
    for round_ in trainer.policy.close_epoch(trainer.requests.flags()):
        trainer.after_round(round_)
        if trainer.stopping:
            return
    trainer.log.settle(trainer.tally)
    trainer.tally.wall_ms += trainer.wall_ms()
    done, steps, evaluator = trainer.epoch_number, trainer.policy.steps, trainer.evaluator
    trainer.epoch_number += 1
    if evaluator.at_step != steps and (not trainer.settings.eval_every or _is_over(trainer)):
        evaluator.scheduled()
    parts = trainer.ranks.gather(trainer.tally.to_dict())
    shared = trainer.step_.share_gradients
    metrics = epoch_metrics(parts, shared_loss=shared, epoch=done, step=steps, evaluated=evaluator.found)
    observed = trainer.observing.end_epoch(metrics, parts)
    trainer.hooks.call("on_epoch_end", done)
    trainer.tally = Tally()
    trainer.rates.end_epoch(metrics, evaluator)
    trainer.events.emit(metrics)
    if observed is not None:
        trainer.events.emit(observed)
    trainer.observing.apply_rules(trainer)
    trainer.ranks.phase("callback")
    # All ranks decide whether to stop and whether to save.
    stops = trainer.ranks.rank == 0 and trainer.metrics_fn(trainer.warn, metrics) is False
    saves, requests = trainer.saves, trainer.requests
    row = [stops or requests.flags()[2], *((saves.skips_epoch, saves.skips_end) if saves is not None else ())]
    rows = trainer.ranks.table([float(value) for value in row])
    trainer.stopping = trainer.stopping or any(row[0] for row in rows) or trainer.policy.steps >= trainer.last_step
    flags, trainer.pending = trainer.pending, ()
    if any(flags[:3]):
        trainer.act(flags)
    elif saves is not None:
        ends = trainer.stopping or _is_over(trainer)
        wanted = not rows[0][2] if ends else saves.is_best() or not any(row[1] for row in rows)
        if wanted or any(flags[SAVE:]):
            saves.save()
        saves.report()
    requests.acknowledge(flags[2:] or (0.0, 0.0, 0.0))
    trainer.snapshots.serve()  # ranks that average rarely may be equal nowhere else


def _is_over(trainer: Any) -> bool:
    return trainer.policy.steps >= trainer.last_step or 0 < trainer.settings.num_epochs <= trainer.epoch_number


def run_out(trainer: Any) -> None:
    """End the run because the data ended early.

    Raises:
        TrainError: there were no data, or other ranks wait for the missing batches.
    """
    step, policy = trainer.policy.lr_step, trainer.policy
    if not step:
        raise TrainError(
            "trainer: found no batches in the data; expected at least one. Check what the loader reads and filters."
        )
    message = f"data: the batches ended after step {step} and cannot be read again (a generator)"
    if not isinstance(policy, Sync):
        raise TrainError(f"{message}; policy {policy.name!r} expects batches for all ranks. Use 'sync'.")
    trainer.warn(f"{message}; the run ends here")
    trainer.stopping = True


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
    done = {**trainer.about(), "step": step}
    trainer.events.emit(RunDone(**done, reason=reason, recorded=recorded, summed=summed))
