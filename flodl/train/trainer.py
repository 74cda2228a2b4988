"""The trainer as users hold it: made in one of four ways, and the loop of those who hand over a ``train_step``.

The loop is the same on a CPU, a GPU, several GPUs and several hosts. What surrounds its body is in `flodl.train.loop`,
the body that users write in `flodl.train.own_loop`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from flodl.distributed.group import Ranks, join_ranks, launched_world
from flodl.errors import TrainError
from flodl.train.builder import TrainerBuilder
from flodl.train.faults import check_settings
from flodl.train.fitting import fit_micro_batch
from flodl.train.optim.optimizers import OptimizerMaker
from flodl.train.own_loop import OwnLoop
from flodl.train.replicas import Replicas
from flodl.train.route import choose_route
from flodl.train.settings import make_settings
from flodl.train.step import TrainStep

__all__ = ["Trainer"]


class Trainer(OwnLoop):
    """Trains one model; on several ranks each process holds one of these.

    Make one with `Trainer.setup` (you write the loop), `Trainer.builder` (you give functions), or use
    `Trainer.wrap` for the bare collectives.

    Attributes:
        model: the model, on this rank's device.
        optimizer: its optimiser.
        ranks: this process among its peers; ``ranks.device`` is where batches should be.
        events: subscribe here to what happens.
        epoch_number: the epoch that is running or comes next, counted from 0.
    """

    # ---- making one ----------------------------------------------------------------------------------

    @classmethod
    def setup(cls, model: nn.Module, *, optimizer: OptimizerMaker, ranks: Ranks | None = None, **settings: Any) -> Self:
        """Return a trainer for a loop that you write; the same code runs on a CPU, a GPU, or under torchrun.

        ::

            trainer = Trainer.setup(model, optimizer=adamw(1e-3))
            for epoch in trainer.epochs(3):
                for batch in trainer.epoch(loader):
                    loss = cross_entropy(model(batch["x"]), batch["y"])
                    loss.backward()
                    trainer.step()

        Args:
            model: moved to this rank's device; every rank starts from rank 0's numbers.
            optimizer: a factory such as `flodl.train.adamw`, a ``torch.optim`` class with its options
                bound, or an optimiser over the model's parameters.
            ranks: who takes part; None asks the environment that torchrun sets, else this process alone.
            **settings: fields of `flodl.train.Settings`.

        Raises:
            TrainError: a setting that does not exist, or ranks that built different models.
        """
        chosen = make_settings(settings)
        check_settings(chosen, world=launched_world() if ranks is None else ranks.world, own_loop=True)
        joined = ranks or join_ranks(timeout_s=chosen.timeout_s, frozen_after_s=chosen.frozen_after_s)
        return cls(model, optimizer, settings=chosen, ranks=joined)

    @classmethod
    def setup_head(cls, head: Any, *, optimizer: OptimizerMaker, **settings: Any) -> Self:
        """Return `setup` of the graph that ``head`` holds (``head.graph``, attribute or method), or of ``head``."""
        graph = getattr(head, "graph", head)
        graph = graph if isinstance(graph, nn.Module) else graph()
        return cls.setup(graph, optimizer=optimizer, **settings)

    @classmethod
    def builder(
        cls,
        model_factory: nn.Module | Callable[[torch.device], nn.Module],
        optimizer_factory: OptimizerMaker,
        train_step: TrainStep,
    ) -> TrainerBuilder:
        """Return a builder for a run whose loop is ours: add data and settings, then ``run().join()``.

        Args:
            model_factory: ``model_factory(device)`` gives the model; or the model itself, which is trained in place
                where this process trains, and copied where ranks are processes of their own.
            optimizer_factory: ``optimizer_factory(parameters)`` gives the optimiser.
            train_step: ``train_step(model, batch)`` gives a `flodl.train.Loss`, a pair ``(sum, count)``, or
                the mean over the samples of the batch.
        """
        return TrainerBuilder(model_factory, optimizer_factory, train_step, cls)

    @staticmethod
    def wrap(*models: nn.Module, ranks: Ranks | None = None) -> Replicas:
        """Return the bare collectives over ``models``, for loops with several of them (GANs and the like)."""
        return Replicas(models, ranks or join_ranks())

    def fit(self) -> Trainer:
        """Train until the last epoch or a reason to stop, and return self.

        Raises:
            TrainError: a loss is not finite (``on_nan="stop"``), a rank is lost, or a checkpoint does not fit.
            TrainInterrupted: SIGINT (Ctrl-C) came; the state is saved.
            SystemExit: SIGTERM came; the state is saved, the code is 143.
        """
        if self.feed is None or self.train_step is None:
            raise TrainError(
                "fit: found no data or no train_step; use Trainer.builder, or write the loop with epoch()."
            )
        with self._leaving_cleanly():
            self._begin_run()
            self.step_.train_step = self._cutting(self.train_step)
            if self.settings.micro_batch_size == "auto":
                fit_micro_batch(self)
            choose_route(self)
            while self.epoch_number < self.settings.num_epochs and not self.stopping:
                self._call("epoch_fn", self.epoch_number, self, may_stop=True)
                for turn, batches in self._work(self.feed):
                    self.log.begin(self.ranks.device)
                    result = self.step_.run(batches, step=self.policy.lr_step, flags=self._flags())
                    self._after_step(turn, result)
                    if self.stopping:
                        break
                if not self.stopping:
                    self._end_epoch()
            self._end_run()
        return self

    def _cutting(self, train_step: TrainStep) -> TrainStep:
        """Return the step for models that remember: the history of what they remember is over with each pass."""
        if not self.graphs.remembers:
            return train_step

        def step(model: nn.Module, batch: Any) -> Any:
            self.graphs.cut()
            return train_step(model, batch)

        return step
