"""The activation functions that ``hidden_act`` may name, with the arithmetic transformers gives each name.

Names that share a curve but not their rounding (``gelu_new`` and ``gelu_pytorch_tanh``) are kept
apart, because equality to the bit is decided by the order of operations. One name of transformers is
missing: ``xielu`` keeps constants as stored buffers, and no checkpoint of these families uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_TANH_SCALE = math.sqrt(2.0 / math.pi)


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(_TANH_SCALE * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_10": lambda x: torch.clip(F.gelu(x), -10, 10),
    "gelu_accurate": _gelu_new,
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "gelu_new": _gelu_new,
    "gelu_python": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_python_tanh": _gelu_new,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "laplace": lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0)))),
    "leaky_relu": F.leaky_relu,
    "linear": lambda x: x,
    "mish": F.mish,
    "prelu": lambda x: F.prelu(x, x.new_full((1,), 0.25)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "swish": F.silu,
    "tanh": torch.tanh,
}


GELUS = {"gelu": False, "gelu_python": False, "gelu_new": True, "gelu_pytorch_tanh": True, "gelu_accurate": True}
GELUS |= {"gelu_fast": True, "gelu_python_tanh": True}
"""The names of variants of GELU, and whether they use its tanh form; they differ in rounding alone."""


class Activation(nn.Module):
    """An activation by its name in `ACTIVATIONS`, shapes kept; "prelu" has a trained slope."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        if name == "prelu":
            self.weight = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the activation of ``hidden``, same shape."""
        if self.name == "prelu":
            return F.prelu(hidden, self.weight)
        return ACTIVATIONS[self.name](hidden)

    def extra_repr(self) -> str:
        """Show the name in ``print(model)``."""
        return self.name
