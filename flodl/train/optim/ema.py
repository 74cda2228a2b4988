"""A moving average of the weights, which is evaluated and returned in their place.

After each applied optimiser step the average moves towards the weights by ``1 - decay``. It depends only on the weights
after each such step, so it is as exact as the step, and the step may be captured. A skipped step does not change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from flodl.checked_fields import check_fields, number
from flodl.distributed.average import wide
from flodl.train.saving.state import fixed_names, whole_model
from flodl.train.step.outcome import StepResult


@dataclass(frozen=True)
class Ema:
    """Options of the average.

    Attributes:
        decay: share of the average that remains at each step, above 0 and below 1.
        warmup: let the average follow faster at first: at update n the share is at most ``(1 + n) / (10 + n)``.

    Raises:
        TrainError: a decay outside of these bounds.
    """

    decay: float
    warmup: bool = True

    def __post_init__(self) -> None:
        """Check the decay."""
        check_fields(self, {"decay": number(above=0, below=1)}, "ema")


class WeightAverage:
    """An exponential moving average of the parameters of a model; 16-bit parameters are averaged in float32.

    Args:
        model: buffers are not averaged, nor parameters that the model lists as fixed.
        decay: as of `Ema`.
        warmup: as of `Ema`.

    Attributes:
        updates: number of updates.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = True) -> None:
        self.decay, self.warmup, self.updates = decay, warmup, 0
        fixed = fixed_names(model)
        named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point() and n not in fixed]
        self.names = [name for name, _ in named]
        self._parameters: list[torch.Tensor] = [p for _, p in named]
        self._average = [wide(p.detach()).clone() for p in self._parameters]
        places = {id(p): place for place, p in enumerate(self._parameters)}
        every = model.named_parameters(remove_duplicate=False)
        self._place_of = {name: places[id(p)] for name, p in every if id(p) in places}

    def update(self, number: int | None = None) -> None:
        """Add the weights after an applied step; ``number`` of the update is the next by default."""
        self.updates = self.updates + 1 if number is None else number
        weights, share = [wide(p.detach()) for p in self._parameters], self.decay
        if self.warmup:
            share = min(share, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._average, weights, 1 - share)  # pyright: ignore[reportPrivateImportUsage]

    def after_step(self, result: StepResult) -> None:
        """Add the weights after a step, unless it was skipped."""
        if result.moved():
            self.update()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside, in the memory of the model's weights."""
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
        """Return the averaged tensors themselves, by each name of a parameter; tied parameters have several."""
        return {name: self._average[place] for name, place in self._place_of.items()}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor], updates: int = 0) -> None:
        """Load a saved average with its number of updates."""
        self.updates = updates
        for name, tensor in zip(self.names, self._average, strict=True):
            tensor.copy_(tensors[name])


def averaged_state(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the weights that the figures of a checkpoint belong to: the average if there is one.

    Args:
        tensors: ``tensors`` of a `flodl.train.saving.reading.Checkpoint`.
    """
    state = whole_model(tensors)
    return state | {name: tensor.to(state[name].dtype) for name, tensor in tensors.get("ema", {}).items()}
