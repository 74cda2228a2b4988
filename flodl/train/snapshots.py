"""Weights of a run: at its end, and as snapshots that are taken while it continues.

A snapshot is requested from any thread, or from the process that started the ranks. The training thread copies the
weights on their device at the next point where all ranks are equal, and a background worker copies them to host memory,
so training does not wait.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any

import torch
from safetensors.torch import save as format_tensors
from torch import nn

from flodl.background import BackgroundWorker
from flodl.checkpoint import load_tensors, save_tensors
from flodl.errors import CheckpointError, TrainError
from flodl.train.saving.state import copy_in_background, load_model

KEY = "snapshot"
ALIGNMENT = 64
Tensors = dict[str, torch.Tensor]


class ModelWeights:
    """Parameters and buffers of a model on the CPU."""

    parameters: Tensors
    buffers: Tensors

    def state_dict(self) -> Tensors:
        """Return parameters and buffers in one dict."""
        return {**self.parameters, **self.buffers}

    @staticmethod
    def split(tensors: Tensors, buffers: Collection[str]) -> tuple[Tensors, Tensors]:
        """Return the parameters and the buffers among tensors."""
        kinds: tuple[Tensors, Tensors] = {}, {}
        for name, tensor in tensors.items():
            kinds[name in buffers][name] = tensor
        return kinds

    def load_into(self, model: nn.Module) -> nn.Module:
        """Copy the weights into ``model`` and return it.

        Raises:
            CheckpointError: names, shapes or dtypes differ.
        """
        load_model(model, self.state_dict())
        return model


class SharedWeights:
    """Memory in which rank 0 leaves its weights for the process that started it, which a pipe would copy slowly.

    Args:
        received: in a new process, the duplicate of the descriptor that pickle sent; None creates the memory.
    """

    def __init__(self, received: Any = None) -> None:
        if received is not None:
            self.descriptor = received.detach()
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("flodl")
        else:  # a file without a name
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def __reduce__(self) -> Any:
        """Return arguments with which a new process opens the same memory."""
        return SharedWeights, (reduction.DupFd(self.descriptor),)

    def write(self, tensors: Tensors) -> list[tuple[Any, ...]]:
        """Copy tensors of any device into the memory and return their table, for `read` in the other process."""
        table, size = [], 1
        for name, tensor in tensors.items():
            begin = -(-size // ALIGNMENT) * ALIGNMENT
            size = begin + tensor.nbytes
            table.append((name, tensor.dtype, tensor.shape, slice(begin, size)))
        os.ftruncate(self.descriptor, size)
        for name, view in self._views(table).items():
            view.copy_(tensors[name].detach())
        return table

    def read(self, table: list[tuple[Any, ...]]) -> Tensors:
        """Return private copies of the tensors of a table, and empty the memory."""
        tensors = {name: view.clone() for name, view in self._views(table).items()}
        os.ftruncate(self.descriptor, 0)
        return tensors

    def _views(self, table: list[tuple[Any, ...]]) -> Tensors:
        memory = torch.frombuffer(mmap.mmap(self.descriptor, 0), dtype=torch.uint8)
        return {name: memory[part].view(dtype).view(shape) for name, dtype, shape, part in table}


@dataclass(frozen=True)
class ModelSnapshot(ModelWeights):
    """The weights of a run at a step, on the CPU; the averaged weights if the run keeps an average (``ema``).

    Attributes:
        step: steps that were done.
        epoch: epochs that were done.
        parameters: all parameters, without tensors that the model lists as fixed (`fixed_names`), as in `Trained`.
        buffers: all persistent buffers, without fixed ones.
        metrics: the newest figures: of evaluations, and ``loss`` of training.
    """

    step: int
    epoch: int
    parameters: Tensors = field(repr=False)
    buffers: Tensors = field(repr=False)
    metrics: dict[str, float] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.safetensors`` file that `load` reads, or an ``.fdl`` file, which contains the tensors only.

        Raises:
            CheckpointError: another suffix.
        """
        about = {"step": self.step, "epoch": self.epoch, "metrics": self.metrics, "buffers": sorted(self.buffers)}
        plain = os.fspath(path).endswith((".fdl", ".fdl.gz"))
        save_tensors(path, self.state_dict(), metadata=None if plain else {KEY: json.dumps(about)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelSnapshot:
        """Return the snapshot of a file that `save` wrote.

        Raises:
            CheckpointError: the file is damaged, or is not a snapshot.
        """
        found = load_tensors(path)
        try:
            about = json.loads(found.metadata[KEY])
            names = set(about["buffers"])
            metrics = {str(name): float(value) for name, value in about["metrics"].items()}
            step, epoch = int(about["step"]), int(about["epoch"])
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise CheckpointError(
                f"{os.fspath(path)}: found {type(fault).__name__}: {fault}; expected a file of ModelSnapshot.save.",
                problems=[KEY],
            ) from None
        return cls(step, epoch, *cls.split(found.tensors, names), metrics)


class Snapshots:
    """The snapshots that one rank takes; rank 0 sends the snapshots that other processes request.

    Args:
        trainer: the trainer.

    Attributes:
        wanted: futures of requested snapshots.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.wanted: deque[Future[ModelSnapshot]] = deque()
        self._to_send: deque[ModelSnapshot] = deque()
        self._worker = BackgroundWorker("flodl-snapshot")
        self._closed: str | None = None

    def ask(self) -> Future[ModelSnapshot]:
        """Return a future of the next snapshot, from any thread; the training thread must not wait for it.

        Raises:
            TrainError: the run is over, or its weights are sharded.
        """
        reason = "the weights are sharded" if self.trainer.sharded else self._closed
        if reason is not None:
            raise TrainError(
                f"snapshot: none is taken, because {reason}. Read a checkpoint or the weights of the model."
            )
        wanted: Future[ModelSnapshot] = Future()
        self.wanted.append(wanted)
        return wanted

    def serve(self) -> None:
        """Take a snapshot if one was requested, and send complete ones."""
        trainer = self.trainer
        if trainer.sharded:
            return
        remote = trainer.requests.take_snapshots()
        if remote or self.wanted:
            names = {name for name, _ in trainer.model.named_parameters(remove_duplicate=False)}
            losses = trainer.log.losses
            metrics = {**({"loss": losses[-1]} if losses else {}), **trainer.evaluator.found}
            about = trainer.policy.steps, trainer.epoch_number
            with trainer.averaged_weights():
                copied = copy_in_background(trainer.model, self._worker)
            futures = list(self._open_requests())

            def finish(copied: Future[Tensors]) -> None:
                if fault := copied.exception():
                    for future in futures:
                        future.set_exception(fault)
                    return
                tensors = copied.result()
                made = ModelSnapshot(*about, *ModelWeights.split(tensors, tensors.keys() - names), metrics)
                self._to_send.extend([made] * remote)
                for future in futures:
                    future.set_result(made)

            copied.add_done_callback(finish)
        while self._to_send:  # by the training thread, which owns the pipe
            made = self._to_send.popleft()
            data = format_tensors(made.state_dict())
            trainer.ranks.pipe.send(("snapshot", (made.step, made.epoch, data, list(made.buffers), made.metrics)))

    def close(self, reason: str = "the run is over") -> None:
        """Accept no further requests, and end open requests with an error."""
        self._closed = reason
        self._worker.close()
        for future in self._open_requests():
            future.set_exception(TrainError(f"snapshot: none was taken, because {reason}."))

    def _open_requests(self) -> Iterator[Future[ModelSnapshot]]:
        """Yield the requested futures that were not cancelled; they can no longer be cancelled."""
        while self.wanted:
            future = self.wanted.popleft()
            if future.set_running_or_notify_cancel():
                yield future
