"""When a run is saved, and how it is taken up again: the checkpoints of a trainer, as far as the loop knows them.

What is in a checkpoint is decided in `flodl.train.saving.resume`, how it lies on disk in `flodl.train.saving.keeper`.
Figures are written beside the weights that they were taken of and no others, so that the best checkpoint is the best
model.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flodl.errors import TrainError
from flodl.train.events import Past, Warned
from flodl.train.saving import resume
from flodl.train.saving.keeper import Keeper

if TYPE_CHECKING:
    from flodl.train.trainer_parts import TrainerParts

__all__ = ["Saves"]


class Saves:
    """The checkpoints of one trainer.

    Attributes:
        keeper: writes and finds them; None where the run has no folder.
        at_step: the step of the last one.
        resumed_from: the checkpoint that the run went on from.
        changes: settings that were changed on the way, by the step at which they were.
    """

    def __init__(self, trainer: TrainerParts) -> None:
        settings = trainer.settings
        self.trainer, self.settings = trainer, settings
        self.keeper = (
            Keeper(settings.folder, trainer.ranks, keep_last=settings.keep_last, best=settings.keep_best)
            if settings.folder
            else None
        )
        self.at_step = 0
        self.resumed_from: str | None = None
        self.changes: list[dict[str, object]] = []
        self._seconds, self._since = 0.0, time.monotonic()

    def past(self) -> Past:
        """Return what the run has done so far, earlier parts of it included."""
        log, evaluator = self.trainer.log, self.trainer.evaluator
        seconds = self._seconds + time.monotonic() - self._since
        return Past(tuple(log.losses), tuple(evaluator.history), seconds, tuple(self.changes))

    # ---- when ----------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether as many steps were taken as lie between two checkpoints."""
        every = self.settings.save_every
        return bool(self.keeper and every and self.trainer.policy.steps // every > self.at_step // every)

    @property
    def best_due(self) -> bool:
        """Whether the model was judged just now and found the best so far; all ranks ask this."""
        return self.keeper is not None and self.keeper.is_best(self.trainer.evaluator.of_step(self.step), self.step)

    @property
    def needless_at_end(self) -> bool:
        """Whether a run that ended now would leave its end out; the first rank's word counts."""
        wanted = self.settings.save_end
        if self.keeper is None or wanted is True:
            return False
        return wanted is False or self.keeper.uncovered_s < wanted

    @property
    def at_epochs_end(self) -> bool:
        """Whether this epoch's end is saved; it need not be while a save is under way that would be waited for."""
        if not self.settings.save_epochs or self.keeper is None:
            return False
        return self.settings.save_epochs != "idle" or not self.keeper.is_writing

    @property
    def step(self) -> int:
        """The step that a checkpoint made now is of."""
        return self.trainer.policy.steps

    # ---- what ----------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint in the background; all ranks must call this at the same step."""
        trainer = self.trainer
        trainer.log.settle(trainer.tally)
        if self.keeper is None:
            return
        trainer.ranks.phase("checkpoint")
        self.keeper.join()  # before copies are made, so that there are never two sets of them
        self.keeper.settle_best()
        figures = trainer.evaluator.of_step(self.step)
        self.keeper.note_best(figures, self.step)
        self.at_step = self.step
        files = resume.snapshot(trainer, self.past(), self.keeper.best_record())
        self.keeper.save(files, step=self.step, metrics=figures, wait=wait)

    def restore(self) -> bool:
        """Go on from the newest whole checkpoint if the settings say so and there is one.

        Raises:
            CheckpointError: the checkpoints are damaged, or do not fit the model or optimiser.
            TrainError: settings differ from the checkpoint's.
        """
        trainer = self.trainer
        if self.keeper is None or not self.settings.resume:
            return False
        found = self.keeper.latest(trainer.events.emit, parted=trainer.sharded)
        paths = trainer.ranks.gather(str(found.path) if found is not None else None)
        if len(set(paths)) > 1:
            raise TrainError(
                f"resume: ranks found different checkpoints ({paths}); they must share the folder.", paths=paths
            )
        if found is None:
            return False
        changes = resume.restore(trainer, found)
        past = resume.past_of(found)
        trainer.log.losses, trainer.evaluator.history = list(past.losses), [dict(row) for row in past.evaluations]
        self._seconds, self.changes = past.seconds, [*past.changes, *changes]
        for message in self.keeper.resume_best(found.values["run"].get("best")):
            trainer.events.emit(Warned(rank=trainer.ranks.rank, step=self.step, message=message))
        self.at_step = self.step
        self.resumed_from = str(found.path)
        return True

    def end(self) -> None:
        """Save where the run ends, unless it is left out; all ranks call this."""
        if self.keeper is None:
            return
        left_out = self.trainer.ranks.tell(self.needless_at_end)
        if not (self.best_due and left_out):
            self.keeper.settle_best()
        if left_out:
            if self.settings.save_epochs == "idle":  # else the caller asked for the save that is under way
                self.keeper.drop()  # what is being written is not the best, or the model at hand is better
        elif self.at_step != self.step or self.best_due:
            self.save()

    def begin(self) -> None:
        """Note that the run begins now."""
        self._since = time.monotonic()

    def close(self) -> None:
        """Finish writing, tell of it, and free the folder."""
        if self.keeper is not None:
            self.keeper.join()
            self.report_saves()
            self.keeper.close()

    def report_saves(self) -> None:
        """Tell subscribers what happened in the background."""
        if self.keeper is not None:
            for event in self.keeper.news():
                self.trainer.events.emit(event)
