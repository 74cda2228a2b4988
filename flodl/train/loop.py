"""The training loop of one rank: steps, epochs, what happens between steps, and the start and end of a run.

`train` is the loop of `Trainer.fit`; a loop that a user writes (`flodl.train.own_loop`) calls the other methods.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from flodl.distributed.rounds import Round
from flodl.distributed.sync import Sync
from flodl.errors import TrainError
from flodl.graph.graph import Graph
from flodl.signals import stop_by
from flodl.train.events import EpochMetrics
from flodl.train.feed import Feed, Share
from flodl.train.fitting import fit_micro_batch
from flodl.train.handle import Trained
from flodl.train.parts import unoptimised
from flodl.train.reports import evaluate_now, report_end, report_failure, report_round, report_start
from flodl.train.requests import EVALUATE, SAVE
from flodl.train.route import choose_route, compiled
from flodl.train.step import StepResult, TrainStep
from flodl.train.steplog import Tally, epoch_metrics

if TYPE_CHECKING:
    from flodl.train.trainer_parts import TrainerParts


class Loop:
    """The loop of one rank.

    Args:
        trainer: a trainer whose parts were created.
    """

    def __init__(self, trainer: TrainerParts) -> None:
        self.trainer = trainer
        self.step_number = 0  # of the step whose batches come next, as schedules count them
        self._since = time.perf_counter()
        self._pending: tuple[float, ...] = ()  # flags that are handled when the epoch is closed
        self._metrics_fn_failed = False
        self._after_step: list[Callable[[StepResult], Any]] = []
        if trainer.average is not None:
            self._after_step.append(trainer.average.after_step)
        if any(isinstance(module, Graph) for module in trainer.model.modules()):
            self._after_step.append(lambda result: trainer.graphs.end_step())

    def train(self) -> None:
        """Run until the last epoch, or a reason to stop."""
        trainer = self.trainer
        settings, requests = trainer.settings, trainer.requests
        assert trainer.train_step is not None
        assert trainer.feed is not None
        with self.cleanup():
            trainer.model.train()
            trainer.saves.restore()
            self.begin()
            step = trainer.step_  # another one if the policy of the checkpoint differs
            step.train_step = self._without_history(trainer.train_step)
            if settings.micro_batch_size == "auto":
                fit_micro_batch(trainer)
            choose_route(trainer)
            while trainer.epoch_number < settings.num_epochs and not trainer.stopping:
                for position, batches in self.batches(trainer.feed):
                    result = step.run(batches, step=self.step_number, flags=requests.flags())
                    self.end_step(position, result)
                    if trainer.stopping:
                        break
                if not trainer.stopping:
                    self.end_epoch()
            self.end()

    # ---- steps ---------------------------------------------------------------------------------------

    def batches(self, feed: Feed) -> Iterator[tuple[int, list[Any]]]:
        """Yield the position in the epoch and the micro-batches of this rank, one optimiser step at a time."""
        trainer = self.trainer
        policy, ranks, epoch = trainer.policy, trainer.ranks, trainer.epoch_number
        trainer.hooks.call("on_epoch_begin", epoch)
        trainer.observing.refresh()
        trainer.step_.invalidate_if_changed()
        self._check_learners()
        self.wall_ms()
        total, times_steps, alone = feed.turns(epoch), ranks.device.type == "cuda", ranks.solo
        self.step_number = policy.lr_step
        for turns, ratios in policy.turns(total):
            share = Share(ranks.rank, ratios, trainer.min_rows) if ratios else Share(0, (1.0,), trainer.min_rows)
            ranks.phase("data")
            done = -1
            for done, batches in feed.work(epoch, turns, share):
                if trainer.rates.schedule is not None:
                    trainer.rates.set(self.step_number)
                for hook in trainer.hooks.on_step_begin:
                    hook(trainer, batches)
                if times_steps:
                    trainer.log.begin(ranks.device)
                yield done, batches
                if alone:
                    ranks.progress[1] = self.step_number
                else:
                    ranks.phase("data", self.step_number)
            if done != turns[-1]:
                self._ran_out()
                return
        if not total:
            self._ran_out()

    def end_step(self, turn: int, result: StepResult) -> None:
        """Report a step, and act if all ranks are equal after it."""
        trainer = self.trainer
        policy = trainer.policy
        round_ = policy.after_step(turn, result.samples, result.compute_ms, result.flags)
        for hook in self._after_step:
            hook(result)
        self.step_number = policy.steps if isinstance(policy, Sync) else policy.lr_step
        about: Any = {"epoch": trainer.epoch_number, "rates": trainer.rates, "wall_ms": self.wall_ms()}
        trainer.log.note(trainer.tally, result, step=self.step_number, **about)
        for hook in trainer.hooks.on_step_end:
            hook(trainer, result)
        if round_ is not None:
            self._after_round(round_)
        elif isinstance(policy, Sync):
            self._between_steps(result.flags)

    def _after_round(self, round_: Round) -> None:
        report_round(self.trainer, round_)
        if round_.held and not round_.all_dry:
            self._between_steps(round_.flags)
        elif round_.all_dry:
            self._pending = round_.flags

    def _between_steps(self, flags: Any) -> None:
        """Act where all ranks are equal and have the same flags: evaluate, apply rules, save, stop."""
        trainer, saves, requested = self.trainer, self.trainer.saves, any(flags)
        settings, steps, evaluator = trainer.settings, trainer.policy.steps, trainer.evaluator
        every = settings.eval_every
        if every and evaluator.at_step // every < steps // every >= settings.eval_delay / every:
            self._evaluate()
        elif requested and flags[EVALUATE]:
            trainer.stopping = evaluate_now(trainer) or trainer.stopping
        if requested:
            trainer.requests.acknowledge(flags[2:])
        if settings.rules:
            if trainer.observing.due(steps):
                trainer.log.settle(trainer.tally)
                trainer.observing.end_window(trainer.tally, steps, shared_loss=trainer.step_.share_gradients)
            self._decide()
        if requested and any(flags[:3]):
            saves.save(wait=True)
            if flags[0]:
                self._leave(round(flags[1] / flags[0]))
            trainer.stopping = True
        elif (
            (saves.keeper is not None and (saves.due or saves.best_due)) or any(flags[SAVE:])
        ) and not self._epoch_ends():
            saves.save()
        if settings.max_steps is not None and steps >= settings.max_steps:
            trainer.stopping = True
        if saves.keeper is not None:
            saves.report_saves()
        if trainer.requests.snapshots or trainer.snapshots.wanted:
            self._serve_snapshots()

    # ---- epochs --------------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Close an epoch: evaluate, report its figures, apply rules, and save."""
        trainer = self.trainer
        for round_ in trainer.policy.close_epoch(trainer.requests.flags()):
            self._after_round(round_)
            if trainer.stopping:
                return
        trainer.log.settle(trainer.tally)
        trainer.tally.wall_ms += self.wall_ms()
        done, steps, evaluator = trainer.epoch_number, trainer.policy.steps, trainer.evaluator
        trainer.epoch_number += 1
        if evaluator.at_step != steps and (not trainer.settings.eval_every or self._over()):
            self._evaluate()
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
        self._decide()
        self._finish_epoch(stops=trainer.ranks.rank == 0 and self._stopped_by_metrics_fn(metrics))

    def _finish_epoch(self, *, stops: bool) -> None:
        """Decide with all ranks whether to stop and whether to save after an epoch."""
        trainer, saves, requests = self.trainer, self.trainer.saves, self.trainer.requests
        row = [stops or requests.flags()[2], not saves.at_epochs_end, saves.needless_at_end]
        rows = trainer.ranks.table([float(value) for value in row])
        stops = trainer.stopping = trainer.stopping or any(row[0] for row in rows) or trainer.out_of_steps
        skips_end = (stops or self._over()) and rows[0][2]
        flags, self._pending = self._pending, ()
        if any(flags[:3]):
            self._between_steps(flags)
        elif any(flags[SAVE:]) or (not skips_end and (stops or saves.best_due or not any(row[1] for row in rows))):
            saves.save()
        requests.acknowledge(flags[2:] or (0.0, 0.0, 0.0))
        saves.report_saves()
        self._serve_snapshots()  # ranks that average rarely may be equal nowhere else

    def _stopped_by_metrics_fn(self, metrics: EpochMetrics) -> bool:
        """Return whether ``metrics_fn`` stops the run; an error in it is logged once."""
        trainer = self.trainer
        trainer.ranks.phase("callback")
        try:
            return trainer.metrics_fn is not None and trainer.metrics_fn(metrics) is False
        except Exception as error:
            if not self._metrics_fn_failed:
                trainer.warn(f"metrics_fn raised {type(error).__name__}: {error}; training continues")
            self._metrics_fn_failed = True
            return False

    def _evaluate(self) -> None:
        trainer = self.trainer
        if trainer.policy.steps >= trainer.settings.eval_delay or self._over():
            trainer.stopping = evaluate_now(trainer) or trainer.stopping
            trainer.rates.evaluated(trainer.evaluator)

    def _decide(self) -> None:
        """Apply the rules of the run."""
        trainer = self.trainer
        for decided in trainer.observing.decide(trainer.policy.steps, trainer.epoch_number):
            trainer.events.emit(decided)
            trainer.step_.loaded()
            trainer.stopping = trainer.stopping or decided.action == "stop"

    def _serve_snapshots(self) -> None:
        """Take a snapshot if one was requested."""
        trainer = self.trainer
        if trainer.sharded:
            return
        average = trainer.average.tensors() if trainer.average is not None else {}
        losses = trainer.log.losses
        metrics = {**({"loss": losses[-1]} if losses else {}), **trainer.evaluator.found}
        about: Any = {"step": trainer.policy.steps, "epoch": trainer.epoch_number, "metrics": metrics}
        about["remote"] = trainer.requests.take_snapshots()
        trainer.snapshots.serve(trainer.model, average, **about)

    def _epoch_ends(self) -> bool:
        """Return whether the save after the epoch follows at once."""
        policy, feed = self.trainer.policy, self.trainer.feed
        if not isinstance(policy, Sync) or feed is None or self.trainer.settings.save_epochs is not True:
            return False
        return policy.position >= feed.turns(self.trainer.epoch_number)

    def _over(self) -> bool:
        trainer = self.trainer
        return trainer.out_of_steps or 0 < trainer.settings.num_epochs <= trainer.epoch_number

    def _ran_out(self) -> None:
        """End the run because the data ended early.

        Raises:
            TrainError: there were no data, or other ranks wait for the missing batches.
        """
        trainer = self.trainer
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

    def _check_learners(self) -> None:
        """Check that the optimiser has all parameters that were unfrozen since the run began.

        Raises:
            TrainError: it lacks some; ``names`` lists them.
        """
        trainer = self.trainer
        names = [name for name, _ in unoptimised(trainer) if name not in trainer.unoptimised_at_start]
        if names:
            raise TrainError(
                f"epoch {trainer.epoch_number}: {', '.join(names[:5])} require gradients but are not in the optimiser. "
                "Unfreeze them before the run, use a rule (rules=[thaw_when('PATH', after_epochs(2))]), or call "
                "trainer.optimizer.add_param_group before the epoch.",
                names=names,
            )

    def _without_history(self, train_step: TrainStep) -> TrainStep:
        """Return a train_step that detaches the state of graphs with memory before each pass."""
        graphs = self.trainer.graphs
        if not graphs.remembers:
            return train_step

        def step(model: nn.Module, batch: Any) -> Any:
            graphs.cut()
            return train_step(model, batch)

        return step

    def wall_ms(self) -> float:
        """Return the milliseconds since the last call."""
        now = time.perf_counter()
        ms, self._since = (now - self._since) * 1e3, now
        return ms

    # ---- start and end -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def cleanup(self) -> Iterator[None]:
        """Handle signals inside, and release the model and the checkpoint folder at the end."""
        trainer, settings = self.trainer, self.trainer.settings
        try:
            with contextlib.ExitStack() as stack, trainer.requests.signals:
                stack.callback(trainer.step_.drop_captures)
                stack.callback(trainer.hooks.call, "close")
                stack.callback(trainer.observing.close)
                for change in (compiled if settings.compile else None, settings.prepare_model):
                    undo = change(trainer.model) if change is not None else None
                    if undo is not None:
                        stack.callback(undo)
                yield
        except BaseException as fault:
            trainer.snapshots.close(f"the run ended by {type(fault).__name__}")
            report_failure(trainer, fault)
            if trainer.saves.keeper is not None:
                trainer.saves.keeper.close(give_up=True)
            raise

    def begin(self) -> None:
        """Report that the run begins."""
        trainer = self.trainer
        trainer.saves.begin()
        report_start(trainer)
        trainer.hooks.call("on_train_begin")
        if trainer.settings.eval_start and not trainer.policy.steps:
            evaluate_now(trainer, counts=False)
        self.wall_ms()

    def end(self) -> None:
        """End the run: evaluate and save what is not yet evaluated and saved."""
        trainer = self.trainer
        trainer.log.settle(trainer.tally)
        if trainer.evaluator.at_step != trainer.policy.steps:
            evaluate_now(trainer)  # the run ended inside an epoch
        trainer.saves.end()
        if trainer.average is not None:
            trainer.average.put()
        trainer.hooks.call("on_train_end")
        self._serve_snapshots()
        trainer.snapshots.close()
        reason = "finished" if trainer.epoch_number >= trainer.settings.num_epochs else "stopped"
        self._close()
        report_end(trainer, reason, trainer.policy.steps)

    def _leave(self, number: int) -> NoReturn:
        """Leave because of a signal; after Ctrl-C the error contains the trained weights."""
        trainer = self.trainer
        trainer.log.settle(trainer.tally)
        step = trainer.policy.lr_step
        report_end(trainer, "signal", step)
        state: dict[str, Any] = {}
        if number == signal.SIGINT:
            if trainer.average is not None:
                trainer.average.put()
            trained = Trained.of(trainer.model, keep=trainer.ranks.rank == 0 or not trainer.sharded)
            state = {"step": step, "folder": trainer.settings.folder, "trained": trained}
        self._close()
        stop_by(number, **state)

    def _close(self) -> None:
        trainer = self.trainer
        trainer.ranks.phase("shutdown")
        trainer.saves.close()
