"""What every rank of a run is told, and the trainer that it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.train.callback import Hooks
from flodl.train.core import seed_all
from flodl.train.evaluate import Callbacks
from flodl.train.faults import check_settings
from flodl.train.feed import as_feed, check_data, gives_batches
from flodl.train.observing import Observing
from flodl.train.optim.optimizers import OptimizerMaker, make_optimizer
from flodl.train.settings import Settings
from flodl.train.step import TrainStep

__all__ = ["GivenModel", "RunPlan"]


@dataclass(frozen=True)
class GivenModel:
    """A factory that returns a model that exists already."""

    model: nn.Module

    def __call__(self, device: torch.device) -> nn.Module:
        """Return the model."""
        return self.model


@dataclass(frozen=True)
class RunPlan:
    """All that makes a run, of importable functions where ranks are processes.

    Attributes:
        model_factory: ``model_factory(device)`` gives the model.
        optimizer_factory: ``optimizer_factory(parameters)`` gives the optimiser.
        train_step: ``train_step(model, batch)`` gives the loss.
        settings: how the run is done.
        make: the trainer's class.
        data: what is trained on; anything that `flodl.train.feed.as_feed` takes, with ``data_options``.
        evals: step, data and options of each set of held-out data, by name.
        callbacks: functions of the user that the loop calls.
        listening: ``"all"`` where somebody outside of this process wants every event, ``"some"`` where only those that
            people can see, an empty string where nobody does.
    """

    model_factory: Callable[[torch.device], nn.Module]
    optimizer_factory: OptimizerMaker
    train_step: TrainStep
    settings: Settings
    make: Callable[..., Any]
    data: Any = None
    data_options: Mapping[str, Any] = field(default_factory=dict)
    evals: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = field(default_factory=dict)
    callbacks: Callbacks = field(default_factory=Callbacks)
    listening: str = ""

    @property
    def is_judged(self) -> bool:
        """Whether there is anything to evaluate by."""
        return bool(self.evals or self.callbacks.eval_fn)

    def check(self, world: int) -> None:
        """Check everything that does not need a rank, before ranks are started.

        Raises:
            TrainError: settings that cannot be combined, a model that cannot be trained, or rows without a batch size.
            DataError: data without a length.
            GraphPathError: a path of ``watch`` or ``rules`` that the model does not have.
        """
        settings = self.settings
        check_settings(settings, world=world, callbacks=replace(self.callbacks, evals=self.evals))
        Hooks(None, settings.callbacks)
        sizes: dict[str, Any] = {"batch_size": settings.batch_size, "max_steps": settings.max_steps}
        check_data(self.data, **{**sizes, **self.data_options})
        micro = settings.micro_batch_size if isinstance(settings.micro_batch_size, int) else None
        for _, data, options in self.evals.values():
            check_data(data, **{"batch_size": None if gives_batches(data) else micro or settings.batch_size, **options})
        if isinstance(self.model_factory, GivenModel) and world > 1:
            model = self.model_factory.model
            observing = Observing(model, Ranks(), settings)
            try:
                if not isinstance(self.optimizer_factory, torch.optim.Optimizer):
                    observing.optimizer(
                        lambda: make_optimizer(model, self.optimizer_factory, settings.parameter_groups)
                    )
            finally:
                observing.close()

    def trainer(self, ranks: Ranks) -> Any:
        """Return this rank's trainer."""
        settings = self.settings
        if ranks.attempt:
            settings = replace(settings, resume=True)
        seed_all(settings.seed)
        device = ranks.device
        micro = settings.micro_batch_size
        if isinstance(micro, str):
            micro = None  # "auto": found out before the first step
        feed = as_feed(
            self.data,
            device,
            batch_size=settings.batch_size,
            seed=settings.seed,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
            accumulate=settings.accumulate,
            micro_batch_size=micro,
            **{"max_steps": settings.max_steps, **self.data_options},
        )
        rows = {"batch_size": micro or settings.batch_size, "shuffle": False}
        evals = {}
        for name, (step, data, options) in self.evals.items():
            cut = {"micro_batch_size": micro} if gives_batches(data) else rows
            evals[name] = step, as_feed(data, device, **{**cut, **options})
        callbacks = replace(self.callbacks, evals=evals)
        ranks.phase("model build")
        return self.make(
            self.model_factory(device),
            self.optimizer_factory,
            self.train_step,
            settings=settings,
            ranks=ranks,
            feed=feed,
            callbacks=callbacks,
        )
