"""Everything that defines a run, in one record that is sent to the processes of ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from flodl.distributed.average import model_tensors
from flodl.distributed.group import Ranks, join_ranks, under_torchrun
from flodl.distributed.sharded import shard_model, spread
from flodl.errors import TrainError
from flodl.train.callback import Callback, Hooks
from flodl.train.events import EpochMetrics, Event
from flodl.train.feed import as_feed, check_data, gives_batches
from flodl.train.observing import Observing
from flodl.train.optim.optimizers import OptimizerMaker, make_optimizer
from flodl.train.saving.state import check_same_model, seed_all
from flodl.train.schedule import make_schedule
from flodl.train.settings import Precision, Settings, check_settings
from flodl.train.step.decide import hash_triton
from flodl.train.step.host import TrainStep


@dataclass(frozen=True)
class GivenModel:
    """A model factory that returns an existing model."""

    model: nn.Module

    def __call__(self, device: torch.device) -> nn.Module:
        """Return the model."""
        return self.model


def model_factory_of(model: Any) -> Callable[[torch.device], nn.Module]:
    """Return a function of the device for a model, an object with a model as its ``graph``, or such a function.

    Raises:
        TrainError: it cannot be called with a device.
    """
    if isinstance(model, nn.Module):
        return GivenModel(model)
    graph = getattr(model, "graph", None)
    graph = graph() if callable(graph) and not isinstance(graph, nn.Module) else graph
    if isinstance(graph, nn.Module):
        return GivenModel(graph)
    name = getattr(model, "__qualname__", type(model).__name__)
    try:
        parameters = inspect.signature(model)
        parameters.bind(None)
        fits = not (isinstance(model, type) and issubclass(model, nn.Module)) or "device" in parameters.parameters
    except TypeError:
        fits = False
    except ValueError:  # functions written in C have no signature
        fits = True
    if not fits:
        raise TrainError(
            f"model: found {name}; expected a model, or a function of the device: lambda device: ...", found=name
        )
    return model


@dataclass(frozen=True)
class RunPlan:
    """Definition of a run; its functions must be importable where ranks are processes of their own.

    Attributes:
        model_factory: ``model_factory(device)`` returns the model.
        optimizer_factory: ``optimizer_factory(parameters)`` returns the optimiser.
        train_step: ``train_step(model, batch)`` returns the loss.
        settings: the settings.
        data: training data, any that `flodl.train.feed.as_feed` accepts with ``data_options``.
        evals: step, data and options of each evaluation set.
        eval_fn: function of the model that returns figures.
        functions: callbacks of ``epoch_fn`` and ``checkpoint_fn``.
        metrics_fn: called in the starting process with the figures of each epoch; False stops the run.
        subscribers: called in the starting process with events of rank 0.
        total: optimiser steps of the whole run for the progress display, if known.
        listening: ``"all"`` sends every event to the starting process, ``"some"`` a few per second, ``""`` none.
        start: how processes of ranks are started: ``"spawn"``, or ``"fork"`` for CPU ranks.
    """

    model_factory: Callable[[torch.device], nn.Module]
    optimizer_factory: OptimizerMaker
    train_step: TrainStep | None
    settings: Settings
    data: Any = None
    data_options: Mapping[str, Any] = field(default_factory=dict)
    evals: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = field(default_factory=dict)
    eval_fn: Callable[[nn.Module], Mapping[str, Any]] | None = None
    functions: tuple[Callback, ...] = ()
    metrics_fn: Callable[[EpochMetrics], Any] | None = None
    subscribers: tuple[tuple[Callable[[Any], Any], tuple[type[Event], ...]], ...] = ()
    total: int | None = None
    listening: str = ""
    start: str = "spawn"

    @property
    def evaluates(self) -> bool:
        """Whether the run has anything to evaluate with."""
        return bool(self.evals or self.eval_fn)

    @property
    def world(self) -> int:
        """Number of ranks that this process starts or is; 1 under torchrun."""
        return 1 if under_torchrun() else len(self.settings.device_names)

    def join_ranks(self) -> Ranks:
        """Return the ranks of torchrun, or the one of this process on the first device."""
        return join_ranks(device=self.settings.device_names[0], timeout_s=self.settings.knobs.timeout_s)

    def with_data(self, data: Any, options: Mapping[str, Any]) -> RunPlan:
        """Return the plan with this training data."""
        return replace(self, data=data, data_options={k: v for k, v in options.items() if v is not None})

    def with_evaluation(self, step: Any, data: Any, name: str | None = None, **options: Any) -> RunPlan:
        """Return the plan with another evaluation set; without a name it replaces all others."""
        others = {key: part for key, part in self.evals.items() if name and key}
        return replace(self, evals={**others, name or "": (step, data, options)})

    def check(self, world: int) -> None:
        """Check everything that needs no rank, before ranks are started.

        Raises:
            TrainError: settings that cannot be combined, a model that cannot be trained, or rows without a batch size.
            DataError: data without a length.
            GraphPathError: a path of ``watch`` or ``rules`` that the model does not have.
        """
        missing = [name for name in ("data", "train_step") if getattr(self, name) is None]
        if missing:
            raise TrainError(
                f"run: found no {' and no '.join(missing)}; expected Trainer(model, optimizer, train_step, ...)"
                ".fit(data), or .dataset(data) of the builder. Use Trainer.setup for a loop of your own.",
                missing=missing,
            )
        check_settings(self.settings, world=world, run=self)
        Hooks(None, self.settings.callbacks)
        check_data(self.data, **{**self._sizes(), **self.data_options})
        for _, data, options in self.evals.values():
            check_data(data, **{**self._eval_sizes(data), "max_steps": None, **options})
        if isinstance(self.model_factory, GivenModel) and world > 1:
            model, maker, groups = self.model_factory.model, self.optimizer_factory, self.settings.parameter_groups
            observing = Observing(model, Ranks(), self.settings)
            with contextlib.closing(observing.watching):
                if not isinstance(maker, torch.optim.Optimizer):
                    made = observing.optimizer(lambda: make_optimizer(model, maker, groups))
                    make_schedule(self.settings.schedule, made)

    def make_model(self, ranks: Ranks) -> tuple[nn.Module, Precision]:
        """Return the model on the device of this rank with the weights of rank 0, and its precision.

        Raises:
            TrainError: ranks with different models, or settings that cannot be combined.
        """
        settings = self.settings
        ranks.phase("model build")
        if ranks.device.type == "cuda":
            hash_triton()
        model = self.model_factory(ranks.device)
        check_settings(settings, world=ranks.world, run=self)
        is_sharded = settings.shard is not None and not ranks.solo
        if not is_sharded:  # a sharded model is moved layer by layer
            model = model.to(ranks.device)
        check_same_model(ranks, model)
        ranks.phase("first broadcast")
        if is_sharded:
            spread(model, ranks)
        else:
            with torch.no_grad():
                ranks.copy_from(0, model_tensors(model))
        seed_all(settings.seed + ranks.rank)
        if settings.deterministic:
            torch.use_deterministic_algorithms(True)
        precision = Precision(settings.precision, ranks.device)
        if is_sharded:
            # Kernels of prepared layers may require float32 parameters.
            plain = not getattr(settings.prepare_model, "needs_float32", False) or ranks.device.type == "cpu"
            shard_model(model, ranks, precision.products if plain else None)
        return model, precision

    def _sizes(self) -> dict[str, Any]:
        """Return the settings that determine the batches of training data."""
        names, micro = ("batch_size", "seed", "accumulate", "max_steps"), self.settings.micro_batch_size
        sizes = {name: getattr(self.settings, name) for name in names}
        return {**sizes, "micro_batch_size": None if micro == "auto" else micro}  # found before the first step

    def _eval_sizes(self, data: Any) -> dict[str, Any]:
        """Return the settings that determine the batches of evaluation data."""
        micro = self._sizes()["micro_batch_size"]
        if gives_batches(data):
            return {"micro_batch_size": micro}
        return {"batch_size": micro or self.settings.batch_size, "shuffle": False}

    def feed(self, data: Any, device: torch.device, **options: Any) -> Any:
        """Return the feed of training data on ``device``."""
        return as_feed(data, device, **{**self._sizes(), **options})

    def feeds(self, device: torch.device) -> tuple[Any, dict[str, Any]]:
        """Return the feed of training data, None without data, and step and feed of each evaluation set."""
        feed = None if self.data is None else self.feed(self.data, device, **self.data_options)
        evals = {
            name: (step, as_feed(data, device, **{**self._eval_sizes(data), **options}))
            for name, (step, data, options) in self.evals.items()
        }
        return feed, evals
