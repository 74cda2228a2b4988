"""Learned keys and values before each text's in every layer (prefix tuning).

Rows stay as they are; each token attends to so many places more, and the places of tokens are counted after them, as
transformers counts them behind keys and values of earlier texts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.adapter_layers.module_replacement import stand_in_for
from flodl_hf.nn.attention.dot_product import SelfAttention


class PrefixPart(nn.Module):
    """Keys and values of one layer.

    Args:
        keys: ``(count, width)``, heads side by side.
        values: alike.
    """

    def __init__(self, keys: nn.Parameter, values: nn.Parameter) -> None:
        super().__init__()
        self.keys = keys
        self.values = values

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values as the layer reads them."""
        return self.keys, self.values

    def extra_repr(self) -> str:
        """Show how many there are in ``print(model)``."""
        return f"tokens={len(self.keys_and_values()[0])}"


class PrefixMaker(nn.Module):
    """Makes the keys and values of all layers of a few vectors while they are trained.

    Args:
        tokens: how many vectors.
        width: of a vector, and of a layer's keys.
        inner: width of the network.
        layers: of the encoder.
    """

    def __init__(self, tokens: int, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(tokens, width))
        self.first, self.last = nn.Linear(width, inner), nn.Linear(inner, layers * 2 * width)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, ``(tokens, width)`` each."""
        width = self.vectors.shape[1]
        rows = slice(2 * layer * width, 2 * (layer + 1) * width)
        hidden = torch.tanh(self.first(self.vectors))
        keys, values = F.linear(hidden, self.last.weight[rows], self.last.bias[rows]).split(width, 1)
        return keys, values


class MadePrefixPart(PrefixPart):
    """Keys and values of one layer that a network makes, which all layers share.

    Args:
        maker: the network.
        layer: the number of the layer.
    """

    def __init__(self, maker: PrefixMaker, layer: int) -> None:
        nn.Module.__init__(self)
        self.maker, self.layer = maker, layer

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values as the layer reads them."""
        return self.maker.of(self.layer)


class PrefixedAttention(SelfAttention):
    """Attention to learned keys and values in addition to the text's; it keeps the projections of its source.

    Args:
        attention: the source of projections and settings.
        part: the keys and values.
    """

    def __init__(self, attention: SelfAttention, part: PrefixPart) -> None:
        nn.Module.__init__(self)
        for name, value in vars(attention).items():
            if name not in vars(self):
                setattr(self, name, value)
        for name, child in attention.named_children():
            self.add_module(name, child)
        self.prefix = part
        self.train(attention.training)

    def lead(self) -> tuple[Tensor, Tensor]:
        """Return the learned keys and values."""
        return self.prefix.keys_and_values()


class ShiftPart(nn.Module):
    """By how much places are counted on.

    Args:
        count: number of keys and values before a text.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count


class ShiftedPositions(nn.Embedding):
    """A position table that counts after the prefix of a text; positions of padding stay unchanged.

    Args:
        table: the table, which stays as it is.
        part: by how much.
    """

    def __init__(self, table: nn.Embedding, part: ShiftPart) -> None:
        stand_in_for(self, table)
        self.prefix = part

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of places."""
        shifted = input + self.prefix.count
        if self.padding_idx is not None:
            shifted = shifted.masked_fill(input == self.padding_idx, self.padding_idx)
        return F.embedding(shifted, self.weight, self.padding_idx)
