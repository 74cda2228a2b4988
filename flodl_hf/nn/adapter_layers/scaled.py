"""Computation of learned scales of a projection (IA3), and their merge into one weight and bias.

The order of operations is peft's, so that logits are the same to the bit where both multiply the same matrices.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.adapter_layers.module_replacement import stand_in_for


class ScalePart(nn.Module):
    """Scales of one projection.

    Args:
        scales: ``(out,)``; or ``(in,)``, which projections of one matrix in the files share.
        on_input: whether they scale what goes in.
        spares_bias: whether the bias is added after scaling, instead of being scaled too.
    """

    def __init__(self, scales: nn.Parameter, on_input: bool, spares_bias: bool = False) -> None:
        super().__init__()
        self.scales = scales
        self.on_input = on_input
        self.spares_bias = spares_bias

    def merged(self, weight: Tensor) -> Tensor:
        """Return the merged weight of projection and scales: in float64, rounded once to the weight's dtype."""
        scales = self.scales.detach().double()
        return (weight.detach().double() * (scales if self.on_input else scales[:, None])).to(weight.dtype)

    def merged_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the merged bias, computed in the same way."""
        if bias is None or self.on_input or self.spares_bias:
            return bias
        return (bias.detach().double() * self.scales.detach().double()).to(bias.dtype)

    def extra_repr(self) -> str:
        """Show which side is scaled in ``print(model)``."""
        return "on_input" if self.on_input else "on_output"


class ScaledLinear(nn.Linear):
    """A projection with scales; weight and bias keep the projection's parameters and names.

    Args:
        linear: the projection, which stays as it is.
        part: the scales.
    """

    def __init__(self, linear: nn.Linear, part: ScalePart) -> None:
        stand_in_for(self, linear)
        self.ia3 = part

    def forward(self, input: Tensor) -> Tensor:
        """Return the projection, scaled."""
        scales = self.ia3.scales
        if self.ia3.on_input:
            return F.linear((input.to(scales.dtype) * scales).to(input.dtype), self.weight, self.bias)
        result = F.linear(input, self.weight, None if self.ia3.spares_bias else self.bias)
        scaled = (result * scales).to(result.dtype)
        return scaled + self.bias if self.ia3.spares_bias and self.bias is not None else scaled
