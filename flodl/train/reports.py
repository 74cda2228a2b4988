"""Events that a run emits about its start, its failure, its evaluations and the averages of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flodl.errors import TrainInterrupted
from flodl.train.events import EvalDone, RunDone, RunFailed, RunStarted, Synced

if TYPE_CHECKING:
    from flodl.distributed.rounds import Round
    from flodl.train.trainer_parts import TrainerParts


def about(trainer: TrainerParts) -> dict[str, Any]:
    """Return the fields that the events have in common."""
    return {"rank": trainer.ranks.rank, "step": trainer.policy.lr_step, "epoch": trainer.epoch_number}


def report_start(trainer: TrainerParts) -> None:
    """Report that the run starts or resumes, with its past."""
    feed, settings = trainer.feed, trainer.settings
    started = RunStarted(
        **about(trainer),
        world=trainer.ranks.world,
        policy=trainer.policy.name,
        policy_reason=trainer.policy_choice.reason,
        epochs=settings.num_epochs,
        steps_per_epoch=feed.turns(trainer.epoch_number) if feed is not None else 0,
        max_steps=settings.max_steps,
        resumed_from=trainer.saves.resumed_from,
        past=trainer.saves.past(),
    )
    trainer.events.emit(started)


def report_end(trainer: TrainerParts, reason: str, step: int) -> None:
    """Report that the run finished, was stopped, or ended by a signal."""
    recorded, summed = trainer.step_.recorded(trainer.policy.steps), trainer.step_.summed
    trainer.events.emit(RunDone(**{**about(trainer), "step": step}, reason=reason, recorded=recorded, summed=summed))


def report_failure(trainer: TrainerParts, fault: BaseException) -> None:
    """Report an error of the run; leaving the loop, and an end by a signal, are not errors."""
    if isinstance(fault, (GeneratorExit, SystemExit, TrainInterrupted)):
        return
    ranks = trainer.ranks
    phase = ranks.board.phase(ranks.rank % ranks.board.world)
    reason = f"{type(fault).__name__}: {fault}"
    trainer.events.emit(RunFailed(**about(trainer), reason=reason, failed_rank=ranks.rank, phase=phase))


def report_round(trainer: TrainerParts, round_: Round) -> None:
    """Report that ranks averaged their parameters."""
    figures = {name: getattr(round_, name) for name in ("batches", "work_ms", "sync_ms", "wait_ms", "divergence")}
    cadence = round_.cadence
    trainer.events.emit(
        Synced(**about(trainer), round=round_.number, **figures, anchor=cadence.anchor, counts=cadence.counts)
    )


def evaluate_now(trainer: TrainerParts, *, counts: bool = True) -> bool:
    """Evaluate, report the figures, and return whether early stopping ends the run.

    Args:
        trainer: the trainer.
        counts: whether the figures may determine the best model and early stopping.
    """
    trainer.log.settle(trainer.tally)
    policy, evaluator = trainer.policy, trainer.evaluator
    with trainer.averaged_weights(), trainer.graphs.apart():
        found = evaluator.run(
            trainer.model, trainer.ranks, trainer.precision, policy.steps, policy.speeds, counts=counts
        )
        if found is None:
            return False
        if counts:
            trainer.observing.evaluated(found)
        details = evaluator.details
        record = {"step": policy.steps, "epoch": trainer.epoch_number, **found}
        evaluator.history.append(record | ({"details": details} if details else {}))
        # Emitted here, so that subscribers see the weights that were evaluated.
        done = {**about(trainer), "step": policy.steps, "wall_ms": trainer.loop.wall_ms()}
        trainer.events.emit(EvalDone(**done, metrics=found, details=details))
    trainer.hooks.call("on_evaluate", found)
    trainer.loop.wall_ms()
    return evaluator.is_spent
