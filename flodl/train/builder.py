"""The fluent form of a run: `Trainer.builder(...)` with methods that fill the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flodl.distributed.group import Ranks
from flodl.distributed.rounds import Knobs
from flodl.train.callback import Callback, CheckpointFunction, EpochFunction
from flodl.train.handle import Handle, Trained
from flodl.train.settings import ALIASES, Settings, make_settings
from flodl.train.trials import RateSearch, Rehearsal

OPTIONS = {*Settings.__dataclass_fields__, *Knobs.__dataclass_fields__, *ALIASES} - {"knobs"}
# Methods with other arguments than the setting of the same name.
FORMS: dict[str, Callable[..., dict[str, Any]]] = {
    "backend": lambda name: {"backend": "cpu" if name == "gloo" else name},
    "early_stopping": lambda metric, patience=3: {"early_stopping": (metric, patience)},
    "policy": lambda name: {"policy": name.lower()},
    "shares": lambda shares: {"shares": shares if isinstance(shares, str) else tuple(shares)},
    "speed_hint": lambda slow, ratio: {"speed_hint": (slow, ratio)},
}


class TrainerBuilder:
    """Builds a run step by step; made by `Trainer.builder`.

    Each setting of `flodl.train.Settings` and each option of the policy is a method that returns the builder:
    ``builder.batch_size(32).num_epochs(3)``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._plan = trainer, trainer.plan

    def __getattr__(self, name: str) -> Callable[..., TrainerBuilder]:
        """Return a method that sets the setting ``name``."""
        if name not in OPTIONS and name not in FORMS:
            raise AttributeError(f"Trainer.builder: no method or setting {name!r}; see flodl.train.Settings.")
        form = FORMS.get(ALIASES.get(name, name), lambda value: {name: value})
        return lambda *args, **options: self.set(**form(*args, **options))

    def __dir__(self) -> list[str]:
        """Return methods and settings."""
        return sorted({*super().__dir__(), *OPTIONS, *FORMS})

    def set(self, **settings: Any) -> TrainerBuilder:
        """Set any settings by keyword.

        Raises:
            TrainError: an unknown name or an invalid value.
        """
        return self._with(settings=make_settings(settings, self._plan.settings))

    def _with(self, **changes: Any) -> TrainerBuilder:
        self._plan = replace(self._plan, **changes)
        return self

    def _function(self, callback: Callback) -> TrainerBuilder:
        others = (one for one in self._plan.functions if type(one) is not type(callback))
        return self._with(functions=(*others, callback))

    def dataset(self, data: Any, **options: Any) -> TrainerBuilder:
        """Set the training data: anything that `flodl.data.DataLoader` accepts, such a loader, or a torch loader.

        Args:
            data: the data.
            **options: ``collate`` makes a batch of rows; ``batches`` is a source of batches (token budget, length
                groups) instead of ``batch_size``; ``shuffle``, ``drop_last``.
        """
        self._plan = self._plan.with_data(data, options)
        return self

    def evaluate(
        self, step: Callable[..., Any], data: Any, *, every: int | None = None, name: str | None = None, **options: Any
    ) -> TrainerBuilder:
        """Evaluate on ``data`` after each epoch, or every so many steps; the ranks share the work.

        Args:
            step: ``step(model, batch)`` returns ``{name: (sum, count)}``, or a loss like a training step.
            data: as for `dataset`.
            every: steps between evaluations; the last call determines it for all sets.
            name: adds a set with figures named ``<name>/<figure>``; without it there is one set.
            **options: ``batch_size``, ``collate``, ``batches`` of this data.
        """
        self._plan = self._plan.with_evaluation(step, data, name, **options)
        return self.set(eval_every=every)

    def eval_fn(self, call: Callable[[Any], Any] | None) -> TrainerBuilder:
        """Evaluate by ``call(model) -> {name: value}`` on rank 0.

        Numbers are figures, also in nested mappings; lists, arrays and texts are in `EvalDone.details`.
        """
        return self._with(eval_fn=call)

    def epoch_fn(self, call: Callable[[int, Any], Any]) -> TrainerBuilder:
        """Call ``call(epoch, trainer)`` on every rank before each epoch; it may unfreeze, set rates or stop."""
        return self._function(EpochFunction(call))

    def checkpoint_fn(self, call: Callable[[int, Any], Any], every: int = 1) -> TrainerBuilder:
        """Call ``call(epochs done, model)`` on rank 0 after every so many epochs."""
        return self._function(CheckpointFunction(call, every))

    def metrics_fn(self, call: Callable[[Any], Any]) -> TrainerBuilder:
        """Call ``call(metrics)`` in this process after each epoch; returning False stops the run."""
        return self._with(metrics_fn=call)

    def subscribe(self, call: Callable[[Any], Any], *kinds: type) -> TrainerBuilder:
        """Call ``call(event)`` in this process for the events of rank 0 of these kinds; all kinds by default."""
        return self._with(subscribers=(*self._plan.subscribers, (call, kinds)))

    def devices(self, devices: Any, *, start: str = "spawn") -> TrainerBuilder:
        """Set the devices; ``start="fork"`` starts ranks on CPUs by fork, which allows lambdas."""
        return self._with(start=start).set(devices=devices)

    def slowdown(self, rank: int, factor: float) -> TrainerBuilder:
        """Make ``rank`` slower by a factor, for experiments."""
        return self.set(slowdown={**self._plan.settings.knobs.slowdown, rank: factor})

    def checkpoints(
        self, folder: Any, *, every: int | None = None, resume: bool = True, **options: Any
    ) -> TrainerBuilder:
        """Save into ``folder`` after each epoch and every so many steps, and resume from there.

        Args:
            folder: where checkpoints are written.
            every: steps between checkpoints.
            resume: resume from the newest complete checkpoint.
            **options: ``keep_last``, ``keep_best``, ``allow_change``.
        """
        if "allow_change" in options:
            options["allow_change"] = tuple(options["allow_change"])
        return self.set(folder=str(folder), save_every=every, resume=resume, **options)

    def progress(self, show: bool | None, *, total: int | None = None) -> TrainerBuilder:
        """Show the progress: True always, None after one second, False never.

        Args:
            show: when.
            total: optimiser steps of the whole run, where epochs differ in length.
        """
        return self._with(total=total).set(progress=show)

    def trainer(self, ranks: Ranks | None = None) -> Any:
        """Return a new `Trainer` of these settings, for ``ranks`` if given."""
        return type(self._trainer).from_plan(self._plan, ranks)

    def run(self) -> Trained:
        """Train and return the result; see `Trainer.fit`."""
        return self.trainer().fit()

    def start(self) -> Handle:
        """Start the run in the background; see `Trainer.start`."""
        return self.trainer().start()

    def find_lr(self, low: float = 1e-7, high: float = 1.0, steps: int = 100) -> RateSearch:
        """Search a learning rate; see `Trainer.find_lr`."""
        return self.trainer().find_lr(low, high, steps)

    def dry_run(self, steps: int = 3) -> Rehearsal:
        """Return the requirements of the run; see `Trainer.dry_run`."""
        return self.trainer().dry_run(steps)
