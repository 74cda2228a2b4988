"""What a run reports of itself: events of its beginning, of rounds of ranks and of evaluations, from its state."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from flodl.errors import TrainInterrupted
from flodl.train.core import TrainerCore
from flodl.train.events import EvalDone, Past, RunFailed, RunStarted, Synced, Warned

if TYPE_CHECKING:
    from flodl.distributed.rounds import Round

__all__ = ["evaluate_now", "report_failure", "report_round", "report_start"]


def report_start(trainer: TrainerCore, past: Past, resumed_from: str | None) -> None:
    """Report that the run begins or goes on.

    Args:
        past: what it has done so far.
        resumed_from: the checkpoint that it goes on from.
    """
    feed, settings = trainer.feed, trainer.settings
    trainer.events.emit(
        RunStarted(
            rank=trainer.ranks.rank,
            world=trainer.ranks.world,
            policy=trainer.policy.name,
            policy_reason=trainer.policy_choice.reason,
            epochs=settings.num_epochs,
            steps_per_epoch=feed.turns(trainer.epoch_number) if feed is not None else 0,
            max_steps=settings.max_steps,
            step=trainer.policy.lr_step,
            epoch=trainer.epoch_number,
            resumed_from=resumed_from,
            past=past,
        )
    )
    warning = trainer.policy_choice.warning
    remarks = (*settings.remarks, *([warning] if warning else []))
    for remark in remarks if trainer.ranks.rank == 0 else ():
        trainer.events.emit(Warned(rank=0, step=trainer.policy.lr_step, message=remark))


def report_failure(trainer: TrainerCore, fault: BaseException) -> None:
    """Report that the run ends by an error; a loop that is left, and an end by a signal, are none."""
    if isinstance(fault, (GeneratorExit, SystemExit, TrainInterrupted)):
        return
    ranks = trainer.ranks
    trainer.events.emit(
        RunFailed(
            rank=ranks.rank,
            step=trainer.policy.lr_step,
            epoch=trainer.epoch_number,
            reason=f"{type(fault).__name__}: {fault}",
            failed_rank=ranks.rank,
            phase=ranks.board.phase(ranks.rank % ranks.board.world),
        )
    )


def report_round(trainer: TrainerCore, round_: Round) -> None:
    """Report that ranks met and averaged their parameters."""
    trainer.events.emit(
        Synced(
            rank=trainer.ranks.rank,
            step=trainer.policy.lr_step,
            epoch=trainer.epoch_number,
            round=round_.number,
            batches=round_.batches,
            work_ms=round_.work_ms,
            sync_ms=round_.sync_ms,
            wait_ms=round_.wait_ms,
            divergence=round_.divergence,
            anchor=round_.cadence.anchor,
            counts=round_.cadence.counts,
        )
    )


def evaluate_now(trainer: TrainerCore, *, counts: bool = True) -> bool:
    """Evaluate, report the figures, and return whether the figures have stopped improving.

    Args:
        counts: whether the figures may decide which model is best, and when to stop.
    """
    trainer.log.settle(trainer.tally)
    average, policy = trainer.average, trainer.policy
    with average.applied() if average is not None else nullcontext(), trainer.graphs.apart():
        found = trainer.evaluator.run(
            trainer.model, trainer.ranks, trainer.precision, policy.steps, policy.speeds, counts=counts
        )
        if found is None:
            return False
        if counts:
            trainer.observing.evaluated(found)
        details = trainer.evaluator.details
        record = {"step": policy.steps, "epoch": trainer.epoch_number, **found}
        trainer.evaluator.history.append(record | ({"details": details} if details else {}))
        # Told here, so that whoever is told sees the model that was judged.
        trainer.events.emit(
            EvalDone(
                rank=trainer.ranks.rank,
                step=policy.steps,
                epoch=trainer.epoch_number,
                metrics=found,
                details=details,
                wall_ms=trainer.watch.ms,
            )
        )
    trainer.hooks.call("on_evaluate", found)
    trainer.watch.restart()
    return trainer.evaluator.is_spent
