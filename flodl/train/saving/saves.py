"""When a run is saved, and from which checkpoint it resumes.

`flodl.train.saving.resume` defines the contents of a checkpoint, `flodl.train.saving.keeper` its files. A checkpoint
contains the figures of its weights only, so the best checkpoint is the best model.
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


class Saves:
    """The checkpoints of one trainer.

    Attributes:
        keeper: writes and finds checkpoints; None without a folder.
        at_step: the step of the last checkpoint.
        resumed_from: the checkpoint from which the run resumed.
        changes: settings that were changed by a resume, with the step.
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
        """Return the past of the run, with the parts before a resume."""
        log, evaluator = self.trainer.log, self.trainer.evaluator
        seconds = self._seconds + time.monotonic() - self._since
        return Past(tuple(log.losses), tuple(evaluator.history), seconds, tuple(self.changes))

    # ---- when ----------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether ``save_every`` steps were taken since the last checkpoint."""
        every = self.settings.save_every
        return bool(self.keeper and every and self.trainer.policy.steps // every > self.at_step // every)

    @property
    def best_due(self) -> bool:
        """Whether the model was evaluated at this step and is the best so far; all ranks call this."""
        return self.keeper is not None and self.keeper.is_best(self.trainer.evaluator.of_step(self.step), self.step)

    @property
    def needless_at_end(self) -> bool:
        """Whether the final save would be skipped; rank 0 decides."""
        wanted = self.settings.save_end
        if self.keeper is None or wanted is True:
            return False
        return wanted is False or self.keeper.uncovered_s < wanted

    @property
    def at_epochs_end(self) -> bool:
        """Whether the end of this epoch is saved; with ``"idle"`` not during another save."""
        if not self.settings.save_epochs or self.keeper is None:
            return False
        return self.settings.save_epochs != "idle" or not self.keeper.is_writing

    @property
    def step(self) -> int:
        """The step of a checkpoint that is written now."""
        return self.trainer.policy.steps

    # ---- what ----------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint in the background; all ranks must call this at the same step."""
        trainer = self.trainer
        trainer.log.settle(trainer.tally)
        if self.keeper is None:
            return
        trainer.ranks.phase("checkpoint")
        self.keeper.join()  # before the copies, so that there is one set of copies at a time
        self.keeper.settle_best()
        figures = trainer.evaluator.of_step(self.step)
        self.keeper.note_best(figures, self.step)
        self.at_step = self.step
        files = resume.snapshot(trainer, self.past(), self.keeper.best_record())
        self.keeper.save(files, step=self.step, metrics=figures, wait=wait)

    def restore(self) -> bool:
        """Resume from the newest complete checkpoint if ``resume`` is set and there is one.

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
        """Save the end of the run unless ``save_end`` skips it; all ranks call this."""
        if self.keeper is None:
            return
        left_out = self.trainer.ranks.tell(self.needless_at_end)
        if not (self.best_due and left_out):
            self.keeper.settle_best()
        if left_out:
            if self.settings.save_epochs == "idle":  # otherwise the save in progress was requested
                self.keeper.drop()  # it is not the best, or the present model is better
        elif self.at_step != self.step or self.best_due:
            self.save()

    def begin(self) -> None:
        """Start to measure the time of the run."""
        self._since = time.monotonic()

    def close(self) -> None:
        """Finish writing, report it, and release the folder."""
        if self.keeper is not None:
            self.keeper.join()
            self.report_saves()
            self.keeper.close()

    def report_saves(self) -> None:
        """Emit the events of the background."""
        if self.keeper is not None:
            for event in self.keeper.news():
                self.trainer.events.emit(event)
