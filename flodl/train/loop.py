"""The training loop without its body: runs begin, epochs end, ranks meet, figures are taken, checkpoints written.

The body, what is done with a batch, is `flodl.train.trainer` for loops of ours and `flodl.train.own_loop` for loops
that users write. What a step computes is in `flodl.train.step`, who does which part of the data and when ranks meet in
`flodl.distributed.policy`, what is saved in `flodl.train.saving.resume`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

from torch import nn

from flodl.distributed.group import Ranks
from flodl.distributed.rounds import Round
from flodl.distributed.sync import Sync
from flodl.errors import TrainError
from flodl.signals import stop_by
from flodl.train.core import TrainerCore
from flodl.train.epoch_figures import Tally, epoch_metrics
from flodl.train.evaluate import Callbacks
from flodl.train.events import EpochMetrics, RunDone
from flodl.train.feed import Feed, Share
from flodl.train.handle import Trained
from flodl.train.optim.optimizers import OptimizerMaker
from flodl.train.reports import evaluate_now, report_failure, report_round, report_start
from flodl.train.route import compiled
from flodl.train.saving.saves import Saves
from flodl.train.settings import Settings
from flodl.train.snapshots import ModelSnapshot, Snapshots
from flodl.train.step import StepResult, TrainStep

__all__ = ["Loop"]


class Loop(TrainerCore):
    """What happens around steps, the same whoever writes the body of the loop.

    Attributes:
        saves: the run's checkpoints.
        snapshots: weights that somebody asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        train_step: TrainStep | None = None,
        *,
        settings: Settings,
        ranks: Ranks,
        feed: Feed | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        super().__init__(model, optimizer, train_step, settings=settings, ranks=ranks, feed=feed, callbacks=callbacks)
        self.saves = Saves(self)
        self.keeper = self.saves.keeper
        self.snapshots = Snapshots(ranks)

    def _due(self) -> bool:
        return self.saves.due or super()._due()

    # ---- steps and meetings --------------------------------------------------------------------------

    def _work(self, feed: Feed) -> Iterator[tuple[int, list[Any]]]:
        """Yield this rank's part of what is left of the epoch, one optimiser step at a time, its rates set."""
        self.observing.refresh()
        self.step_.invalidate_if_changed()
        self.watch.restart()
        self.hooks.call("on_epoch_begin", self.epoch_number)
        self.check_learners()
        total = feed.turns(self.epoch_number)
        for turns, ratios in self.policy.turns(total):
            share = Share(self.ranks.rank, ratios, self.min_rows) if ratios else Share(0, (1.0,), self.min_rows)
            self.ranks.phase("data")
            done = -1
            for done, batches in feed.work(self.epoch_number, turns, share):
                self.rates.set(self.policy.lr_step)
                self.hooks.call("on_step_begin", batches)
                yield done, batches
                self.ranks.phase("data")
            if done != turns[-1]:
                self._ran_out()
                return
        if not total:
            self._ran_out()

    def _ran_out(self) -> None:
        """Have the run end where there are no further batches.

        Raises:
            TrainError: there was none at all, or other ranks wait for what is missing.
        """
        step = self.policy.lr_step
        if not step:
            raise TrainError(
                "trainer: found no batches in the data; expected one at least. Check what the loader reads and filters."
            )
        said = f"data: they ended after step {step} and do not begin anew (a generator cannot)"
        if not isinstance(self.policy, Sync):
            raise TrainError(f"{said}; expected {self.policy.name!r} to have turns for all ranks. Use policy='sync'.")
        self.warn(f"{said}; the run ends here")
        self.stopping = True

    def _after_step(self, turn: int, result: StepResult) -> None:
        round_ = self.policy.after_step(turn, result.samples, result.compute_ms, self._flags())
        if self.average is not None and result.moved():
            self.average.update()
        about: Any = {"epoch": self.epoch_number, "lr": self.rates.first, "wall_ms": self.watch.restart()}
        self.log.note(self.tally, result, step=self.policy.lr_step, **about)
        self.graphs.end_step()
        self.hooks.call("on_step_end", result)
        if round_ is not None:
            self._met(round_)
        elif isinstance(self.policy, Sync):
            self._at_rest(result.flags)

    def _met(self, round_: Round) -> None:
        report_round(self, round_)
        if round_.held and not round_.all_dry:
            self._at_rest(round_.flags)
        elif round_.all_dry:
            self._left_over = round_.flags  # heeded when the epoch is closed

    def _at_rest(self, flags: Any) -> None:
        """All ranks are equal here and know the same; what they must decide alike is decided here."""
        every = self.settings.eval_every
        if every and self.evaluator.at_step // every < self.policy.steps // every >= self.settings.eval_delay / every:
            self._evaluate()
        elif flags[3]:
            self.stopping = evaluate_now(self) or self.stopping
        self.wishes.heed(flags[2:])
        if self.observing.due(self.policy.steps):
            self.log.settle(self.tally)
            self.observing.end_window(self.tally, self.policy.steps, shared_loss=self.step_.share_gradients)
        self._decide()
        if any(flags[:3]):
            self.save(wait=True)
            if flags[0]:
                self._leave(round(flags[1] / flags[0]))
            self.stopping = True
        elif (self.saves.due or self.saves.best_due or flags[4]) and not self._epoch_ends():
            self.save()
        self.stopping = self.stopping or self.out_of_steps
        self.saves.report_saves()
        self._serve_snapshots()

    def _serve_snapshots(self) -> None:
        """Take a snapshot if somebody asked for one."""
        if self.sharded:
            return
        average = self.average.tensors() if self.average is not None else {}
        losses = self.log.losses
        metrics = {**({"loss": losses[-1]} if losses else {}), **self.evaluator.found}
        self.snapshots.serve(self.model, average, step=self.policy.steps, epoch=self.epoch_number, metrics=metrics)

    def snapshot(self) -> Future[ModelSnapshot]:
        """Return the run's weights as they are where ranks have the same next, without stopping it; from any thread.

        ``trainer.snapshot().result()`` waits for it; the training thread, and so a callback, must not.

        Raises:
            TrainError: the run is over.
        """
        if self.sharded:
            raise TrainError("snapshot: the weights are sharded; expected them whole. Save, and read the checkpoint.")
        return self.snapshots.ask()

    def _decide(self) -> None:
        """Act on the rules of the run, where all ranks know the same."""
        for decided in self.observing.decide(self.policy.steps, self.epoch_number):
            self.events.emit(decided)
            self.step_.loaded()
            self.stopping = self.stopping or decided.action == "stop"

    def _flags(self) -> list[float]:
        """Return what this rank wants all to know: a signal that came (as 1 and its number), and `Wishes.flags`."""
        number = self.signals.number
        return [float(bool(number)), float(number), *self.wishes.flags()]

    _left_over: tuple[float, ...] = ()

    def _leave(self, number: int) -> NoReturn:
        """Leave because of a signal, the state saved; after Ctrl-C the model has the trained weights."""
        self.log.settle(self.tally)
        self._report_end("signal", self.policy.lr_step)
        about: dict[str, Any] = {}
        if number == signal.SIGINT:
            if self.average is not None:
                self.average.put()
            trained = Trained.of(self.model, keep=self.ranks.rank == 0 or not self.sharded)
            about = {"step": self.policy.lr_step, "folder": self.settings.folder, "trained": trained}
        self._close()
        stop_by(number, **about)

    def _epoch_ends(self) -> bool:
        """Return whether a save after the epoch follows at once."""
        if not isinstance(self.policy, Sync) or self.feed is None or self.settings.save_epochs is not True:
            return False
        return self.policy.position >= self.feed.turns(self.epoch_number)

    def _end_epoch(self) -> None:
        for round_ in self.policy.close_epoch(self._flags()):
            self._met(round_)
            if self.stopping:
                return
        self.log.settle(self.tally)
        self.tally.wall_ms += self.watch.restart()
        done = self.epoch_number
        self.epoch_number += 1
        if self.evaluator.at_step != self.policy.steps and (not self.settings.eval_every or self._over()):
            self._evaluate()
        parts = self.ranks.gather(self.tally.to_dict())
        metrics = epoch_metrics(
            parts,
            shared_loss=self.step_.share_gradients,
            epoch=done,
            step=self.policy.steps,
            evaluated=self.evaluator.found,
        )
        observed = self.observing.end_epoch(metrics, parts)
        self.hooks.call("on_epoch_end", done)
        self.tally = Tally()
        self._observe(metrics)
        self.events.emit(metrics)
        if observed is not None:
            self.events.emit(observed)
        self._decide()
        wanted = self._call("metrics_fn", metrics) if self.ranks.rank == 0 else None
        every = self.settings.checkpoint_every
        if every and (done + 1) % every == 0 and self.ranks.rank == 0:
            # The weights that were judged, as in evaluations.
            with self.average.applied() if self.average is not None else contextlib.nullcontext():
                self._call("checkpoint_fn", done + 1, self.model)
        rows = self.ranks.table(
            [
                float(wanted is False or self.wishes.flags()[0]),
                float(not self.saves.at_epochs_end),
                float(self.saves.needless_at_end),
            ]
        )
        self.stopping = self.stopping or any(row[0] for row in rows)
        self.stopping = self.stopping or self.out_of_steps
        left_out = (self.stopping or self._over()) and rows[0][2]  # what the end of the run is saved for, or not
        left_over, self._left_over = self._left_over, ()
        if any(left_over[:3]):
            self._at_rest(left_over)
        elif any(left_over[4:]) or (
            not left_out and (self.stopping or self.saves.best_due or not any(row[1] for row in rows))
        ):
            self.save()
        self.wishes.heed(left_over[2:] or (0.0, 0.0, 0.0))  # the end of an epoch is judged and saved as was asked for
        self.saves.report_saves()
        self._serve_snapshots()  # ranks that meet seldom may be equal nowhere else

    def _evaluate(self) -> None:
        if self.policy.steps >= self.settings.eval_delay or self._over():
            self.stopping = evaluate_now(self) or self.stopping
            name = self.settings.schedule_metric
            if name != "loss" and name in self.evaluator.found:
                self.rates.observe(self.evaluator.found, name)

    def _observe(self, metrics: EpochMetrics) -> None:
        """Give the schedule a training figure of an epoch; it has figures of evaluations when they are taken."""
        name, evaluated = self.settings.schedule_metric, self.evaluator.found
        known = {**evaluated, **metrics.metrics, "loss": metrics.loss}
        is_to_come = name not in known and not evaluated and self.evaluator.evaluates
        if name == "loss" or not (name in evaluated or is_to_come):
            self.rates.observe(known, name)

    def _over(self) -> bool:
        return self.out_of_steps or 0 < self.settings.num_epochs <= self.epoch_number

    def _call(self, name: str, *args: Any, may_stop: bool = False) -> Any:
        """Call a function of the user; one that only looks on may fail without ending the run."""
        call = getattr(self.callbacks, name)
        if call is None:
            return None
        self.ranks.phase("callback")
        try:
            return call(*args)
        except Exception as error:
            if may_stop:
                raise
            if name not in self.callbacks.warned:
                self.callbacks.warned.add(name)
                self.warn(f"{name} raised {type(error).__name__}: {error}; training continues")
            return None

    # ---- beginning and ending ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _leaving_cleanly(self) -> Iterator[None]:
        """Listen to signals while inside, and free the checkpoint folder however the inside ends."""
        try:
            with contextlib.ExitStack() as arranged, self.signals:
                arranged.callback(self.step_.drop_captures)
                arranged.callback(self.hooks.call, "close")
                arranged.callback(self.observing.close)
                for way in (compiled if self.settings.compile else None, self.settings.arrange):
                    if way is not None:
                        arranged.callback(way(self.model))
                yield
        except BaseException as fault:
            self.snapshots.fail(f"the run ended by {type(fault).__name__}")
            report_failure(self, fault)
            if self.keeper is not None:
                self.keeper.close(give_up=True)
            raise

    def _begin_run(self) -> None:
        self.model.train()
        self.restore()
        self._report_begin()

    def _report_begin(self) -> None:
        self.saves.begin()
        report_start(self, self.saves.past(), self.resumed_from)
        self.hooks.call("on_train_begin")
        if self.settings.eval_start and not self.policy.steps:
            evaluate_now(self, counts=False)
        self.watch.restart()

    def _end_run(self) -> None:
        self.log.settle(self.tally)
        if self.evaluator.at_step != self.policy.steps:
            evaluate_now(self)  # the run ended inside an epoch
        self.saves.end()
        if self.average is not None:
            self.average.put()
        self.hooks.call("on_train_end")
        self._serve_snapshots()
        self.snapshots.close()
        reason = "finished" if self.epoch_number >= self.settings.num_epochs else "stopped"
        self._close()
        self._report_end(reason, self.policy.steps)

    def _report_end(self, reason: str, step: int) -> None:
        done = RunDone(
            rank=self.ranks.rank,
            step=step,
            epoch=self.epoch_number,
            reason=reason,
            recorded=self.step_.recorded(self.policy.steps),
            summed=self.step_.summed,
        )
        self.events.emit(done)

    def _close(self) -> None:
        self.ranks.phase("shutdown")
        self.saves.close()

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint in the background; all ranks must call this at the same step."""
        self.saves.save(wait=wait)

    def restore(self) -> bool:
        """Go on from the newest whole checkpoint if the settings say so and there is one; errors as of `Saves`."""
        return self.saves.restore()

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint that the run went on from."""
        return self.saves.resumed_from
