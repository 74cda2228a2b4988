"""A running average of the weights, which is judged and returned in their place.

After each optimiser step that was applied the average moves towards the weights by ``1 - decay``. It depends on nothing
but the weights after each such step, so it is as exact as the step is, however that was cut; and it stands outside of
the step, which may be captured as ever. A step that is left out leaves it where it is, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from flodl.distributed.average import wide
from flodl.errors import TrainError
from flodl.train.saving.state import fixed_names, whole_model

__all__ = ["WeightAverage", "averaged_state"]


class WeightAverage:
    """An exponential moving average of the parameters of a model; of 16-bit ones it is kept in float32.

    Args:
        model: whose parameters; buffers are not averaged, nor what the model says is fixed.
        decay: share of the average that stays at each step, above 0 and below 1.
        warmup: let the average follow faster at first: at update n the share is at most ``(1 + n) / (10 + n)``.

    Attributes:
        updates: how often it took in weights.

    Raises:
        TrainError: a decay outside of these bounds.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = True) -> None:
        if not 0 < decay < 1:
            raise TrainError(
                f"ema: found {decay!r}; expected a number above 0 and below 1, such as 0.999.", found=decay
            )
        self.decay, self.warmup, self.updates = decay, warmup, 0
        fixed = fixed_names(model)
        named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point() and n not in fixed]
        self.names = [name for name, _ in named]
        self._parameters: list[torch.Tensor] = [p for _, p in named]
        self._average = [wide(p.detach()).clone() for p in self._parameters]
        places = {id(p): place for place, p in enumerate(self._parameters)}
        every = model.named_parameters(remove_duplicate=False)
        self._place_of = {name: places[id(p)] for name, p in every if id(p) in places}

    def share(self, number: int) -> float:
        """Return the share that stays at the update with this number, counted from 1."""
        return min(self.decay, (1 + number) / (10 + number)) if self.warmup else self.decay

    def update(self, number: int | None = None) -> None:
        """Take in the weights after a step that was applied; ``number`` of the update is the next if not given."""
        self.updates = self.updates + 1 if number is None else number
        weights = [wide(p.detach()) for p in self._parameters]
        torch._foreach_lerp_(self._average, weights, 1 - self.share(self.updates))  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the model hold the average while inside, in the memory that its weights have."""
        before = [p.detach().clone() for p in self._parameters]
        self.put()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, before)  # pyright: ignore[reportPrivateImportUsage]

    def put(self) -> None:
        """Copy the average into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._average)  # pyright: ignore[reportPrivateImportUsage]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average itself, which goes on, by each name of a parameter: tied ones have several."""
        return {name: self._average[place] for name, place in self._place_of.items()}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor], updates: int = 0) -> None:
        """Take up a saved average that was updated so often."""
        self.updates = updates
        for name, tensor in zip(self.names, self._average, strict=True):
            tensor.copy_(tensors[name])


def averaged_state(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint that its figures are of: the average where there is one.

    Args:
        tensors: ``tensors`` of a `flodl.train.saving.reading.Checkpoint`.
    """
    state = whole_model(tensors)
    return state | {name: tensor.to(state[name].dtype) for name, tensor in tensors.get("ema", {}).items()}
