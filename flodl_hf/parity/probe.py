"""Where two sides part: the modules of both compared in graph order, by the rows of the key table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.parity.cell import gap


@dataclass(frozen=True)
class Parting:
    """The first pair of modules whose outputs differ.

    Attributes:
        ours: our module's name.
        theirs: the module's name on the other side.
        call: the index of the call, from 0: shared layers are called repeatedly.
        difference: the largest.
        inputs_equal: whether both had equal inputs, so that the fault is inside.
    """

    ours: str
    theirs: str
    call: int
    difference: float
    inputs_equal: bool

    def __str__(self) -> str:
        cause = "its own arithmetic or weights" if self.inputs_equal else "its inputs"
        return f"{self.ours} ({self.theirs}), call {self.call}: differs by {self.difference:.3g}, because of {cause}"


def first_parting(ours: EncoderModel, theirs: nn.Module, inputs: dict[str, Tensor]) -> Parting | None:
    """Return the first module, in graph order, whose outputs differ; None if none does.

    Args:
        ours: our model.
        theirs: transformers' model of the same checkpoint.
        inputs: one batch.
    """
    family = ours.config.family
    pairs = family.key_map(ours.config.encoder, ours.head).pairs
    our_modules, their_modules = dict(ours.graph.named_modules()), dict(theirs.named_modules())
    prefix = family.base_prefix + "."
    names: dict[str, str] = {}
    for mine, other in pairs.items():
        name = next((n for n in (other, other.removeprefix(prefix)) if n in their_modules), None)
        if mine in our_modules and name is not None:
            names[mine] = name
    left = _record({mine: our_modules[mine] for mine in names}, lambda: ours(**inputs))
    right = _record({other: their_modules[other] for other in names.values()}, lambda: theirs(**inputs))
    # Dictionaries keep the order in which our side called its modules, which is the graph's.
    for (mine, call), (given, made) in left.items():
        other = names[mine]
        if (other, call) not in right:
            return Parting(mine, other, call, float("nan"), False)
        their_given, their_made = right[other, call]
        if (difference := _difference(made, their_made)) != 0.0:  # NaN too
            return Parting(mine, other, call, difference, _difference(given, their_given) == 0.0)
    return None


def _record(modules: dict[str, nn.Module], run: Callable[[], Any]) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """Return first input and output of each call, by module and index of the call."""
    calls: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    counts: Counter[str] = Counter()

    def note(name: str, _: nn.Module, inputs: tuple[Any, ...], made: Any) -> None:
        value = made[0] if isinstance(made, tuple) else made
        entry = inputs[0] if inputs and isinstance(inputs[0], Tensor) else torch.zeros(0)
        calls[name, counts[name]] = entry.detach().clone(), value.detach().clone()
        counts[name] += 1

    hooks = [module.register_forward_hook(partial(note, name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _difference(a: Tensor, b: Tensor) -> float:
    return gap(a, b) if a.shape == b.shape else float("inf")
