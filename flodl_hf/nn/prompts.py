"""Virtual tokens before each text (prompt tuning), and learned keys and values in every layer (prefix tuning).

Virtual tokens have ids beyond every vocabulary, so that rows of tokens grow by them before the graph is called
(`PromptedEmbedding.rows`), and everything behind the word table sees ordinary tokens: positions, attention, the first
token that a head reads. Results of tokens exclude the virtual ones.

With a prefix, rows stay as they are; each token attends to so many places more, and the places of tokens are counted
after them, as transformers counts them behind keys and values of earlier texts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.adapter_layers import stand_in_for
from flodl_hf.nn.attention import SelfAttention
from flodl_hf.nn.layout import Layout

FIRST_VIRTUAL_ID = 1 << 30
"""The id of the first virtual token."""
WORDS = "encoder.embeddings.word"


class PromptPart(nn.Module):
    """The vectors of virtual tokens.

    Args:
        vectors: ``(count, width)``.
        encoder: network applied to them before use (P-tuning); None for none.
    """

    def __init__(self, vectors: nn.Parameter, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.vectors = vectors
        self.encoder = encoder

    def virtual_tokens(self) -> Tensor:
        """Return the vectors as the model reads them, ``(count, width)``."""
        return self.vectors if self.encoder is None else self.encoder(self.vectors)

    def extra_repr(self) -> str:
        """Show how many there are in ``print(model)``."""
        return f"tokens={len(self.vectors)}"


class BiLstmEncoder(nn.Module):
    """Vectors read by an LSTM from both ends, in two layers, and two linear layers behind it.

    Args:
        width: of a vector.
        inner: of the LSTM, each way.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.reader = nn.LSTM(width, inner, 2, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * inner, 2 * inner), nn.ReLU(), nn.Linear(2 * inner, width))

    def forward(self, vectors: Tensor) -> Tensor:
        """Return vectors, ``(count, width)``.

        The LSTM is computed with plain operations: those can be recorded with the steps of a run, and give the same
        bits with and without gradients.
        """
        for layer in range(2):
            ways = []
            for end in ("", "_reverse"):
                names = (f"{kind}_l{layer}{end}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
                into, back, bias, again = (getattr(self.reader, name) for name in names)
                read = list(F.linear(vectors, into, bias).unbind(0))
                state = cell = vectors.new_zeros(self.reader.hidden_size)
                found = []
                for gates in reversed(read) if end else read:
                    enter, keep, new, out = (gates + F.linear(state, back, again)).chunk(4)
                    cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
                    state = out.sigmoid() * cell.tanh()
                    found.append(state)
                ways.append(torch.stack(found[::-1] if end else found))
            vectors = torch.cat(ways, 1)
        return self.head(vectors)


class PromptedEmbedding(nn.Embedding):
    """A word table with vectors of virtual tokens after its words; its weight keeps the table's parameter and name.

    Args:
        words: the table, which stays as it is.
        part: the vectors.
    """

    def __init__(self, words: nn.Embedding, part: PromptPart) -> None:
        stand_in_for(self, words)
        self.prompt = part

    @property
    def count(self) -> int:
        """Number of virtual tokens before each text."""
        return len(self.prompt.vectors)

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of ids, virtual tokens included."""
        virtual = input >= FIRST_VIRTUAL_ID
        words = F.embedding(input.masked_fill(virtual, 0), self.weight)
        made = self.prompt.virtual_tokens().to(words.dtype)
        return torch.where(virtual[..., None], F.embedding((input - FIRST_VIRTUAL_ID).clamp(min=0), made), words)

    def rows(self, ids: Tensor, types: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None, Layout]:
        """Return ids, token types and layout with the virtual tokens; their type is 0."""
        numbers = torch.arange(FIRST_VIRTUAL_ID, FIRST_VIRTUAL_ID + self.count, device=ids.device)
        kinds = None if types is None else layout.before(torch.zeros_like(numbers), types)
        return layout.before(numbers, ids), kinds, layout.led(self.count)

    def embedded(self, embeds: Tensor) -> Tensor:
        """Return the given embeddings, ``(batch, seq, width)``, with the virtual tokens' before them."""
        made = self.prompt.virtual_tokens().to(embeds)
        return torch.cat([made.expand(len(embeds), -1, -1), embeds], 1)


def prefix_of(graph: Any) -> PromptedEmbedding | None:
    """Return the word table with the virtual tokens that a graph's texts are to begin with; None without."""
    words = graph.get_submodule(WORDS)
    return words if type(words) is PromptedEmbedding else None


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
