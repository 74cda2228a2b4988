"""Layers with an adapter. `flodl_hf.models.adapters` creates, reads and writes adapters.

Projections with low-rank sums (LoRA, DoRA) or learned scales (IA3), tables with a low-rank sum or separate rows, and
their merge into one weight. The order of operations is peft's, so that logits are the same to the bit where both
multiply the same matrices. Virtual tokens and prefixes are in `flodl_hf.nn.prompts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def stand_in_for(module: nn.Module, other: nn.Linear | nn.Embedding) -> None:
    """Begin a module as another: its sizes, its parameters under their names, its mode.

    Args:
        module: not initialised yet; of a subclass of ``other``'s class.
        other: a linear layer or a table, which stays as it is.
    """
    nn.Module.__init__(module)
    for name in other.__constants__:
        setattr(module, name, getattr(other, name))
    for name, parameter in other._parameters.items():
        module.register_parameter(name, parameter)
    module.train(other.training)


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which run only when the module itself is called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class TablePart(nn.Module):
    """A low-rank sum for an embedding table: ``table[ids] + scale * (down.T[ids] @ up.T)``.

    Args:
        down: ``(rank, rows)``.
        up: ``(width, rank)``.
        scale: factor of the sum.
        magnitude: lengths of the columns, ``(width,)`` (DoRA); None without.
    """

    def __init__(self, down: nn.Parameter, up: nn.Parameter, scale: float, magnitude: nn.Parameter | None = None):
        super().__init__()
        self.down = down
        self.up = up
        self.magnitude = magnitude
        self.scale = scale

    def embedded(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        """Return the vectors of ids, ``(..., width)``."""
        result = F.embedding(ids, table.weight)
        low = F.embedding(ids, self.down.t(), table.padding_idx) @ self.up.t()
        if self.magnitude is None:
            return (result + low * self.scale).to(result.dtype)
        with torch.no_grad():  # 2-norms of the columns of table and sum together
            lengths = torch.linalg.norm(table.weight.t() + self.scale * (self.down.t() @ self.up.t()).t(), dim=1)
        ratio = (self.magnitude / lengths).view(1, -1)
        return (ratio * result + ratio * low * self.scale).to(result.dtype)

    def merged(self, weight: Tensor) -> Tensor:
        """Return one table with the sum: computed in float64, rounded once to the dtype of ``weight``."""
        with torch.no_grad():
            total = weight.double() + self.scale * (self.up.double() @ self.down.double()).t()
            if self.magnitude is not None:
                total *= self.magnitude.double() / torch.linalg.norm(total, dim=0)
            return total.to(weight.dtype)

    def extra_repr(self) -> str:
        """Show rank and scale in ``print(model)``."""
        return f"rank={self.down.shape[0]}, scale={self.scale:g}{'' if self.magnitude is None else ', dora'}"


class RowsPart(nn.Module):
    """Rows of an embedding table that replace the rows of some tokens (peft's ``trainable_token_indices``).

    Args:
        rows: ``(count, width)``.
        ids: the tokens, in the order of the rows.
    """

    ids: Tensor

    def __init__(self, rows: nn.Parameter, ids: Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("ids", ids, persistent=False)

    def embedded(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        """Return the vectors of ids, ``(..., width)``."""
        own = self.ids.to(table.weight.device)
        weight = table.weight.index_copy(0, own, self.rows.to(table.weight.dtype))
        return F.embedding(ids, weight, table.padding_idx)

    def merged(self, weight: Tensor) -> Tensor:
        """Return the table with the rows in it."""
        with torch.no_grad():
            return weight.index_copy(0, self.ids.to(weight.device), self.rows.to(weight))

    def extra_repr(self) -> str:
        """Show how many there are in ``print(model)``."""
        return f"rows={len(self.rows)}"


class AdaptedEmbedding(nn.Embedding):
    """An embedding table with a part; its weight keeps the table's parameter and name.

    Args:
        table: the table, which is not changed.
        part: the part.
    """

    def __init__(self, table: nn.Embedding, part: TablePart | RowsPart) -> None:
        stand_in_for(self, table)
        self.lora = part

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of ids."""
        return self.lora.embedded(input, self)


class LoraPart(nn.Module):
    """The sum added to one projection.

    Args:
        down: ``(rank, in)``; projections of one matrix in the files share it.
        up: ``(out, rank)``.
        scale: factor of the sum.
        dropout: probability of dropping a value that goes in, in [0, 1).
        magnitude: lengths of rows, ``(out,)`` (DoRA); None without.
        up_bias: a bias of ``up``, ``(out,)``; None without.
    """

    def __init__(
        self,
        down: nn.Parameter,
        up: nn.Parameter,
        scale: float,
        dropout: float,
        magnitude: nn.Parameter | None = None,
        up_bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.down = down
        self.up = up
        self.magnitude = magnitude
        self.up_bias = up_bias
        self.scale = scale
        self.dropout = dropout

    @property
    def dropped(self) -> float:
        """The probability of dropping a value now: none in evaluation."""
        return self.dropout if self.training else 0.0

    def merged(self, weight: Tensor) -> Tensor:
        """Return the merged weight of projection and part: in float64, rounded once to the weight's dtype."""
        with torch.no_grad():
            total = weight.double() + self.scale * (self.up.double() @ self.down.double())
            if self.magnitude is not None:
                total *= (self.magnitude.double() / torch.linalg.norm(total, dim=1)).view(-1, 1)
            return total.to(weight.dtype)

    def merged_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias of the merged projection, computed alike; unchanged without a bias of ``up``."""
        if self.up_bias is None:
            return bias
        with torch.no_grad():
            added = self.scale * self.up_bias.double()
            return added.to(self.up_bias.dtype) if bias is None else (bias.double() + added).to(bias.dtype)

    def extra_repr(self) -> str:
        """Show rank and scale in ``print(model)``."""
        kind = "" if self.magnitude is None else ", dora"
        return f"rank={self.down.shape[0]}, scale={self.scale:g}{kind}"


class AdaptedLinear(nn.Linear):
    """A projection with a low-rank part; weight and bias keep the projection's parameters and names.

    Args:
        linear: the projection, which stays as it is.
        lora: the part.
    """

    def __init__(self, linear: nn.Linear, lora: LoraPart) -> None:
        stand_in_for(self, linear)
        self.lora = lora

    def forward(self, input: Tensor) -> Tensor:
        """Return the projection with its part."""
        x, part = input, self.lora
        result = F.linear(x, self.weight, self.bias)
        return _added(x, result, part, part.up, part.up_bias, part.magnitude, self.weight, self.bias)


def joined_products(
    hidden: Tensor,
    out: Tensor,
    linears: Sequence[Any],
    join: Callable[[list[Tensor]], Tensor] = torch.cat,
    *,
    bias_apart: bool = False,
) -> Tensor:
    """Return one product for several adapted projections of one matrix, with their part, which is one in the files.

    Args:
        hidden: what went in, ``(..., in)``.
        out: the output of the joined weights, ``(..., all out)``.
        linears: the projections, all adapted, with one ``down``.
        join: joins the projections' outputs to the rows of the matrix.
        bias_apart: whether biases are added afterwards, and are not in ``out``.
    """
    parts = [linear.lora for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None and not bias_apart]
    magnitude = weight = None
    if parts[0].magnitude is not None:
        magnitude = join([part.magnitude for part in parts])
        weight = join([linear.weight for linear in linears])
    up = join([part.up for part in parts])
    up_bias = None if parts[0].up_bias is None else join([part.up_bias for part in parts])
    return _added(hidden, out, parts[0], up, up_bias, magnitude, weight, torch.cat(biases) if biases else None)


def _added(
    x: Tensor,
    result: Tensor,
    part: LoraPart,
    up: Tensor,
    up_bias: Tensor | None,
    magnitude: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return a projection's output plus its part; ``up`` and ``magnitude`` may be joined from several."""
    dtype = result.dtype
    x = x.to(part.down.dtype)
    x = F.dropout(x, part.dropped) if part.dropped else x
    low = F.linear(F.linear(x, part.down), up, up_bias)
    if magnitude is None:
        return (result + low * part.scale).to(dtype)
    assert weight is not None
    weight = weight.to(x.dtype)
    with torch.no_grad():  # 2-norms of the rows of weight and sum together (DoRA, 4.3)
        # By a product with the identity, as in peft; a product of the two does not always give the same bits.
        eye = torch.eye(part.down.shape[1], device=part.down.device, dtype=part.down.dtype)
        total = weight + part.scale * F.linear(F.linear(eye, part.down), up).T.to(weight.dtype)
        lengths = torch.linalg.norm(total, dim=1).to(weight.dtype)
    length = (magnitude / lengths).view(1, -1)
    plain = result if bias is None else result - bias
    base = F.linear(x, weight) if part.dropped else plain
    return (result + ((length - 1) * base + length * low * part.scale)).to(dtype)


class _Beside(Function):
    @staticmethod
    def forward(
        ctx: Any, result: Tensor, x: Tensor, down: Tensor, up: Tensor, down_half: Tensor, up_half: Tensor, scale: float
    ) -> Tensor:
        low = torch.mm(x, down_half.t())
        ctx.save_for_backward(x, low, down_half, up_half)
        ctx.scale = scale
        return torch.addmm(result, low, up_half.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_out,) = grad_outputs
        x, low, down_half, up_half = ctx.saved_tensors
        d_low = torch.mm(d_out, up_half).mul_(ctx.scale)
        d_x = torch.mm(d_low, down_half) if ctx.needs_input_grad[1] else None
        d_down = torch.mm(d_low.t(), x).float()
        d_up = torch.mm(d_out.t(), low).float().mul_(ctx.scale)
        return d_out, d_x, d_down, d_up, None, None, None


def beside(result: Tensor, x: Tensor, part: LoraPart, down_half: Tensor, up_half: Tensor) -> Tensor:
    """Return the output with LoRA's update added, with fused forward and backward products; not for DoRA.

    Args:
        result: the projection's output, ``(tokens, out)``, in half precision.
        x: what went in, ``(tokens, in)``, alike; with values dropped already.
        part: float32, gets the gradients.
        down_half: its ``down`` in half precision.
        up_half: its ``up``.
    """
    return _Beside.apply(result, x, part.down, part.up, down_half, up_half, part.scale)  # type: ignore[return-value]


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


def plain_linear(adapted: nn.Linear, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an ordinary projection with this weight and bias."""
    found = nn.Linear.__new__(nn.Linear)
    stand_in_for(found, adapted)
    found.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    fixed = bias is None or isinstance(bias, nn.Parameter)
    found.bias = bias if fixed else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return found


def folded(graph: nn.Module, *, merge: bool = True) -> int:
    """Put one weight in the place of each adapted projection of a graph that predicts, in place; return how many.

    Args:
        graph: a copy with replaceable modules.
        merge: compute the weights; else projections keep their own, for a graph that is only inspected.
    """
    made: dict[int, nn.Module] = {}
    for module in list(graph.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, (AdaptedLinear, ScaledLinear, AdaptedEmbedding)):
                continue
            if id(child) not in made:
                part: Any = child.ia3 if isinstance(child, ScaledLinear) else child.lora
                weight = part.merged(child.weight) if merge else child.weight
                if isinstance(child, AdaptedEmbedding):
                    table = nn.Embedding.from_pretrained(weight, padding_idx=child.padding_idx)
                    made[id(child)] = table.train(child.training)
                else:
                    bias = part.merged_bias(child.bias) if merge else child.bias
                    made[id(child)] = plain_linear(child, weight, bias)
            setattr(module, name, made[id(child)])
    return len(made)
