"""A decoder that reconstructs a text from its vector, with the layers of the encoder and causal attention.

It shares the layers of the encoder, so that both are trained. Each layer attends to the vector before its feed-forward.
Where there is one thing to look at, weights of attention are 1, and queries and keys decide nothing: they are left out.
New weights (values of the vector, the LM head if the folder has none) are trained in the run and discarded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.errors import ConfigError
from flodl_hf.nn.attention.dot_product import SelfAttention
from flodl_hf.nn.encoder.losses import IGNORED_LABEL
from flodl_hf.nn.layers.encoder_layer import EncoderLayer
from flodl_hf.nn.layout.layouts import Padded

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["Decoder", "DecoderStart"]


class Crossing(nn.Module):
    """Cross-attention of a decoder layer to the vector.

    Args:
        attention: the self-attention of the layer, which defines width and dropout.
        eps: of the norm.
    """

    def __init__(self, attention: SelfAttention, eps: float) -> None:
        super().__init__()
        size = attention.output.out_features
        self.num_heads, self.attention_dropout = attention.num_heads, attention.attention_dropout
        self.value, self.output = nn.Linear(size, size), nn.Linear(size, size)
        self.dropout, self.norm = nn.Dropout(attention.dropout.p), nn.LayerNorm(size, eps)

    def forward(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        """Return states shaped like ``hidden``, ``(texts, tokens, size)``, of vectors ``(texts, size)``."""
        values = self.value(vectors)[:, None]
        if self.training and self.attention_dropout:
            texts, tokens, size = hidden.shape
            weights = F.dropout(values.new_ones(texts, tokens, self.num_heads, 1), self.attention_dropout)
            values = (weights * values.view(texts, 1, self.num_heads, -1)).reshape(texts, tokens, size)
        taken = self.output(values).expand_as(hidden)
        return self.norm(self.dropout(taken) + hidden)


class Decoder(nn.Module):
    """The weights of a decoder other than the layers of the encoder.

    Args:
        model: the encoder's.
        head: a head of masked words.
        draw: gives new values.
    """

    def __init__(self, model: EncoderModel, head: nn.Module, draw: torch.Generator) -> None:
        super().__init__()
        config: Any = model.config
        parts = dict(head.named_children())
        layers = layers_of(model)
        self.crossings = nn.ModuleList(Crossing(layer.attention, layer.attention_norm.eps) for layer in layers)
        self.dense, self.activation, self.norm = parts["dense"], parts["activation"], parts["norm"]
        self.bias = nn.Parameter(parts["decoder"].bias.detach().clone())  # type: ignore[union-attr]
        scale = float(config.source.get("initializer_range", 0.02))
        for module in self.crossings.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, scale, generator=draw)
                nn.init.zeros_(module.bias)

    def forward(self, model: EncoderModel, vectors: Tensor, batch: Any) -> Tensor:
        """Return for each text the sum of its tokens' losses and their number, ``(texts, 2)``.

        Args:
            model: the model whose layers decode.
            vectors: of damaged texts, ``(texts, size)``.
            batch: has ``target_ids``, ``(texts, tokens)``, and of each token that is to be found ``target_places``,
                ``target_labels`` and ``target_texts``; with the label -100 none is to be found.
        """
        encoder: Any = model.graph.get_submodule("encoder")
        ids = batch["target_ids"]
        hidden = encoder.get_submodule("embeddings")(ids, layout=Padded(batch["target_mask"]))
        for layer, crossing in zip(layers_of(model), self.crossings, strict=True):
            hidden = layer.attention_norm(_from_the_left(layer.attention, hidden) + hidden)
            hidden = crossing(hidden, vectors)
            hidden = layer.feed_forward_norm(layer.feed_forward(hidden) + hidden)
        states = self.norm(self.activation(self.dense(hidden.flatten(0, 1)[batch["target_places"]])))
        scores = F.linear(states, encoder.get_submodule("embeddings").word.weight, self.bias)
        losses = F.cross_entropy(scores.float(), batch["target_labels"], reduction="none")
        real = batch["target_labels"] != IGNORED_LABEL
        found = torch.stack([losses, real.to(losses.dtype)], 1)
        return found.new_zeros(len(ids), 2).index_add(0, batch["target_texts"], found)


def _from_the_left(attention: SelfAttention, hidden: Tensor) -> Tensor:
    """Return attended states, where each token sees itself and those before it."""
    parts = (attention.query(hidden), attention.key(hidden), attention.value(hidden))
    query, key, value = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in parts)
    dropped = attention.attention_dropout if attention.training else 0.0
    mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
    return attention.dropout(attention.output(mixed.transpose(1, 2).flatten(2)))


def layers_of(model: EncoderModel) -> list[Any]:
    """Return the layers of an encoder, one that is shared as often as it runs."""
    layers: Any = model.graph.get_submodule("encoder.layers")
    return list(layers.children())


@dataclass(frozen=True)
class DecoderStart:
    """Attach a decoder to a model, unless it has one.

    Args:
        seed: seed of new weights.
    """

    seed: int

    def __call__(self, model: EncoderModel) -> None:
        """Give the model its decoder.

        Raises:
            ConfigError: the family's layers cannot decode.
        """
        if model.beside is not None:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            head = _head_of(model)
        if not _can_decode(model, head):
            raise ConfigError(
                f"DenoisingAutoEncoderLoss: layers of {model.config.model_type} cannot decode; expected a family with "
                "the layers of BERT or RoBERTa, or another loss",
                problems=["vector_loss"],
            )
        model.beside = Decoder(model, head, torch.Generator().manual_seed(self.seed))


def _head_of(model: EncoderModel) -> Any:
    """Return a masked-LM head: from the folder of the model if it has one, else a new one."""
    from flodl_hf.auto import head_named

    kind: Any = head_named("masked_lm").model
    if "masked_lm" not in model.config.family.heads:
        return None
    if model.source is None:
        return kind.from_config(model.config).graph.head
    return kind.from_pretrained(model.source.folder, dtype=torch.float32).graph.head


def _can_decode(model: EncoderModel, head: Any) -> bool:
    encoder: Any = model.graph.get_submodule("encoder")
    parts = set() if head is None else {name for name, _ in head.named_children()}
    whole = {name for name, _ in encoder.named_children()}
    if parts != {"dense", "activation", "norm", "decoder"} or whole != {"embeddings", "layers"}:
        return False
    return all(
        type(layer) is EncoderLayer
        and layer.order == "post"
        and type(layer.attention) is SelfAttention
        and layer.attention.rotary is None
        and layer.attention.window is None
        and layer.attention.kv_heads == layer.attention.num_heads
        for layer in layers_of(model)
    )
