"""Adapters of embedding tables: a low-rank sum (LoRA), and separate rows for some tokens.

The order of operations is peft's, so that logits are the same to the bit where both multiply the same matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.adapter_layers.module_replacement import stand_in_for


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
        ratio = (self.magnitude / self._lengths(table.weight)).view(1, -1)
        return (ratio * result + ratio * low * self.scale).to(result.dtype)

    def _lengths(self, weight: Tensor) -> Tensor:
        """Return the 2-norms of the columns of table and sum together, ``(width,)``, without a gradient."""
        with torch.no_grad():
            return torch.linalg.norm(weight.t() + self.scale * (self.down.t() @ self.up.t()).t(), dim=1)

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
        """Show the number of rows in ``print(model)``."""
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
