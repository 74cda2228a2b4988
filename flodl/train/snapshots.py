"""A run's weights at a step, taken while it goes on.

Who wants one asks, from any thread or, where ranks are processes of ours, from the process that started them. The
training thread copies the weights where they are, at the next point where all ranks have the same; a thread of its own
brings the copy to host memory, so training waits for neither.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flodl.checkpoint import load_tensors, save_tensors
from flodl.distributed.group import Ranks
from flodl.errors import CheckpointError, TrainError
from flodl.train.saving.state import load_model
from flodl.train.saving.tensor_stream import copies

__all__ = ["ModelSnapshot", "Snapshots"]

KEY = "snapshot"


@dataclass(frozen=True)
class ModelSnapshot:
    """The weights of a run at a step, on the CPU, by name; those of the average where the run keeps one (``ema``).

    Attributes:
        step: steps that were done.
        epoch: epochs that were done.
        parameters: every parameter.
        buffers: every persistent buffer.
        metrics: the newest figures that were known: of evaluations, and ``loss`` of training.
    """

    step: int
    epoch: int
    parameters: dict[str, torch.Tensor] = field(repr=False)
    buffers: dict[str, torch.Tensor] = field(repr=False)
    metrics: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers together."""
        return {**self.parameters, **self.buffers}

    def load_into(self, model: nn.Module) -> nn.Module:
        """Copy the weights into ``model`` and return it.

        Raises:
            CheckpointError: names, shapes or dtypes differ.
        """
        load_model(model, self.state_dict())
        return model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.safetensors`` file that `load` reads, or an ``.fdl`` file, which holds the tensors alone.

        Raises:
            CheckpointError: another suffix.
        """
        about = {"step": self.step, "epoch": self.epoch, "metrics": self.metrics, "buffers": sorted(self.buffers)}
        plain = os.fspath(path).endswith((".fdl", ".fdl.gz"))
        save_tensors(path, self.state_dict(), metadata=None if plain else {KEY: json.dumps(about)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelSnapshot:
        """Return the snapshot that `save` wrote.

        Raises:
            CheckpointError: the file is damaged, or no snapshot.
        """
        found = load_tensors(path)
        try:
            about = json.loads(found.metadata[KEY])
            buffers = set(about["buffers"])
            metrics = {str(name): float(value) for name, value in about["metrics"].items()}
            step, epoch = int(about["step"]), int(about["epoch"])
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise CheckpointError(
                f"{os.fspath(path)}: found no word of a snapshot in it ({type(fault).__name__}: {fault}); expected a "
                ".safetensors file that ModelSnapshot.save wrote. load_tensors reads any other.",
                problems=[KEY],
            ) from None
        tensors = found.tensors
        return cls(
            step,
            epoch,
            {name: tensor for name, tensor in tensors.items() if name not in buffers},
            {name: tensor for name, tensor in tensors.items() if name in buffers},
            metrics,
        )


class Snapshots:
    """The snapshots of one run, as one rank takes them.

    Args:
        ranks: who trains; rank 0 is asked by other processes, through its board.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._row = ranks.rank % ranks.board.world
        self._wanted: deque[Future[ModelSnapshot]] = deque()
        self._files: deque[str] = deque()
        self._threads: list[threading.Thread] = []
        self._over = False

    def ask(self) -> Future[ModelSnapshot]:
        """Return the next snapshot, as soon as it is there; from any thread.

        The training thread itself must not wait for it, since it is the one that takes it.

        Raises:
            TrainError: the run is over.
        """
        if self._over:
            raise TrainError("snapshot: the run is over; its model has the weights. Ask while it trains.")
        wanted: Future[ModelSnapshot] = Future()
        self._wanted.append(wanted)
        return wanted

    def serve(
        self,
        model: nn.Module,
        average: Mapping[str, torch.Tensor],
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Take a snapshot if somebody asked for one, and hand on those that are ready.

        Args:
            average: weights in place of the model's own, by name.
        """
        files = self.ranks.board.new_snapshots(self._row)
        if files or self._wanted:
            futures = [self._wanted.popleft() for _ in range(len(self._wanted))]
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            state = {name: average.get(name, tensor) for name, tensor in model.state_dict().items()}
            kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
            tensors = copies(state)
            ready = _recorded(tensors)
            made = ModelSnapshot(step, epoch, {}, {}, dict(metrics))

            def bring() -> None:
                try:
                    for name, tensor in _brought(tensors, ready).items():
                        (made.parameters if name in names else made.buffers)[name] = tensor.to(kinds[name])
                    for _ in range(files):
                        self._files.append(_written(made))
                except BaseException as fault:
                    for future in futures:
                        future.set_exception(fault)
                    return
                for future in futures:
                    future.set_result(made)

            thread = threading.Thread(target=bring, name="flodl-snapshot", daemon=True)
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()
        self._send()

    def _send(self) -> None:
        # By the training thread, whose pipe it is.
        while self._files:
            self.ranks.pipe.send(("snapshot", self._files.popleft()))

    def close(self) -> None:
        """Hand on what is on its way; nobody may ask any more."""
        self._over = True
        for thread in self._threads:
            thread.join()
        self._send()
        self.fail("the run is over")

    def fail(self, reason: str) -> None:
        """Tell all that wait that there will be none."""
        self._over = True
        while self._wanted:
            self._wanted.popleft().set_exception(TrainError(f"snapshot: none was taken, since {reason}."))


def _recorded(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return an event after the copies were launched; None where nothing is on CUDA."""
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _brought(tensors: Mapping[str, torch.Tensor], ready: Any) -> dict[str, torch.Tensor]:
    """Return copies in host memory, brought by a stream of their own."""
    if ready is None:
        return dict(tensors)
    device = next(tensor.device for tensor in tensors.values() if tensor.is_cuda)
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            found = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        stream.synchronize()
    return found


def _written(made: ModelSnapshot) -> str:
    """Write a snapshot to a file that whoever asked removes; return its path."""
    folder = Path(tempfile.mkdtemp(prefix="flodl-snapshot-"))
    made.save(folder / "model.safetensors")
    return str(folder / "model.safetensors")


def taken_from(path: str) -> ModelSnapshot:
    """Return the snapshot in a file that another process wrote for this one, and remove the file."""
    try:
        return ModelSnapshot.load(path)
    finally:
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
