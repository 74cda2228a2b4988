"""Training without labels: a decoder reconstructs a text from the vector of its damaged version.

TSDAE (Wang et al. 2021, arXiv:2104.06979), under sentence-transformers' name. The decoder shares the layers of the
encoder, with causal attention, so that both are trained. Each layer attends to the vector before its feed-forward.
With
one vector to attend to, weights of attention are 1, so there are no queries and keys. New weights (values of the
vector, the LM head if the folder has none) are trained in the run and discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.data import Where
from flodl.data.rng import Rng
from flodl.errors import ConfigError
from flodl.train import Loss
from flodl_hf.nn.attention import SelfAttention
from flodl_hf.nn.buckets import round_up
from flodl_hf.nn.layers import EncoderLayer
from flodl_hf.nn.layout import Padded
from flodl_hf.nn.task_heads import IGNORED_LABEL
from flodl_hf.training.losses.pairs import Form, VectorLoss
from flodl_hf.training.rows import SPECIAL, CollateRows, Laid, TakenRows, filled
from flodl_hf.training.task import Examples, LengthLimits, Prepared
from flodl_hf.training.vectors.step import PARTS, CollateTexts, TextRows, VectorObjective
from flodl_hf.training.vectors.tables import read_table
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class DenoisingAutoEncoderLoss(VectorLoss):
    """A decoder predicts the words of a text from the vector of its damaged version.

    Of texts alone words are deleted, others in each epoch; of pairs the first is the damaged text.

    Attributes:
        del_ratio: the share of words that are deleted.
    """

    del_ratio: float = 0.6

    forms: ClassVar[tuple[Form, ...]] = ("texts", "pairs")

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        right = 0 <= self.del_ratio < 1
        return [] if right else [f"del_ratio is {self.del_ratio}; expected 0 or more and less than 1"]


DENOISING: dict[str, Any] = {"DenoisingAutoEncoderLoss": DenoisingAutoEncoderLoss}
"""By name."""


DENOISES = ("denoisingautoencoder", "denoising", "tsdae")
"""Names of this loss, as `is_named` compares them."""


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


def attach_decoder(model: EncoderModel, seed: int) -> None:
    """Attach a decoder with new weights to a model, unless it has one.

    Raises:
        ConfigError: the family's layers cannot decode.
    """
    if model.beside is not None:
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = _head_of(model)
    if not _can_decode(model, head):
        raise ConfigError(
            f"DenoisingAutoEncoderLoss: layers of {model.config.model_type} cannot decode; expected a family with "
            "the layers of BERT or RoBERTa, or another loss",
            problems=["vector_loss"],
        )
    model.beside = Decoder(model, head, torch.Generator().manual_seed(seed))


def _head_of(model: EncoderModel) -> Any:
    """Return a masked-LM head: from the folder of the model if it has one, else a new one."""
    from flodl_hf.heads.auto import head_named

    kind: Any = head_named("masked_lm").model
    if "masked_lm" not in model.config.family.heads:
        return None
    if model.source is None:
        return kind.from_config(model.config).graph.head
    return kind.from_pretrained(model.source.folder, dtype=torch.float32).graph.head


def _can_decode(model: EncoderModel, head: Any) -> bool:
    encoder: Any = model.graph.get_submodule("encoder")
    parts, whole = (set(dict(module.named_children())) for module in (head or nn.Module(), encoder))
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


WORDS = "words"
SLACK = 1.08
"""Factor for the number of target tokens above its mean: random deletions vary."""
TARGET_STEPS, LEAST_TARGETS = 2, 16
"""Lengths that whole texts are filled up to: steps from one power of two to the next, and the least."""


@dataclass(frozen=True)
class DenoisingObjective(VectorObjective):
    """The reconstruction loss, independent of micro-batches; arguments as for `VectorObjective`."""

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the sum of each text's losses and the number of its tokens, ``(examples, 1, 2)``."""
        return model.beside(model, super().score(model, batch)[:, 0], batch)[:, None]

    def of(self, vectors: Tensor, batch: Any) -> Loss:
        """Return the loss of computed sums, over all tokens that are to be found."""
        total, count = vectors.sum((0, 1)).unbind()
        return Loss(total, count)


@dataclass
class DenoisingTask(EmbeddingTask):
    """Vectors from which texts are written again; arguments as of `EmbeddingTask`."""

    usual: ClassVar[Mapping[Any, str]] = dict.fromkeys(("texts", "pairs"), "DenoisingAutoEncoderLoss")
    table: ClassVar[Mapping[str, Any]] = DENOISING
    refused: ClassVar[tuple[str, ...]] = ("matryoshka", "guide", "prompts", "cache_tokens")
    trained: ClassVar[type[VectorObjective]] = DenoisingObjective

    @property
    def start(self) -> Callable[[EncoderModel], None]:
        """Attaches the decoder to a model, on every rank."""
        return partial(attach_decoder, seed=self.options.seed)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the examples as rows; rows that are reconstructed include the word numbers of their tokens."""
        self.needs_words = training or read_table(examples, self.options.columns, "eval").form == "texts"
        return super().prepare(examples, tokenizer, limits, training=training)

    def laid(self, rows: TextRows) -> Laid:
        """Return the lengths of texts in a batch after one random deletion."""
        table, share = rows.tables[0], self._share
        parts = table.values[PARTS]
        lengths = parts[:, 0]
        if share is not None:
            # The tokens of a word are adjacent; this deletion defines only lengths, not the deleted words.
            words = table.columns[WORDS]
            begins = np.diff(words, prepend=SPECIAL) != 0
            left = np.random.default_rng(self.options.seed).random(int(begins.sum())) >= share
            kept = (words == SPECIAL) | left[np.cumsum(begins) - 1]
            starts = np.cumsum(parts.reshape(-1)) - parts.reshape(-1)
            lengths = np.maximum(np.add.reduceat(kept, starts)[::2], 1)
        return Laid(lengths, parts[:, 0])

    @property
    def _share(self) -> float | None:
        """The share of words that are deleted; None where texts are damaged already."""
        return self.losses[0].del_ratio if self.first.form == "texts" else None

    def collate(self, usual: CollateRows, rows: TextRows, batches: Any, accumulate: int) -> CollateDamaged:
        """Return the collate function for damaged texts and their originals."""
        made, whole = super().collate(usual, rows, batches, accumulate), rows.tables[0].values[PARTS][:, 1]
        room = SLACK * float((whole - 1).sum() / self.laid(rows).lengths.sum())
        further = {"del_ratio": self._share, "longest": int(whole.max()) - 1, "targets": room}
        return CollateDamaged.like(usual, lengths=made.lengths, **further)

    def _fitting(self, form: Any) -> list[Any]:
        return list(self.losses) if form == "texts" else []


@dataclass(frozen=True)
class CollateDamaged(CollateTexts):
    """Collates damaged texts and the targets of their reconstruction.

    An example is the text to damage and the original text; rows without word numbers are unchanged.
    In addition to `CollateTexts` there are ``target_ids`` and ``target_mask``, ``(examples, tokens)``, and for
    each token after the first its position minus one, its id and its example. If batches have few shapes,
    these are padded with the id -100.

    Args:
        del_ratio: the share of words that are deleted; None where texts are damaged already.
        longest: most tokens of a whole text, less one.
        targets: number of target slots per token of the damaged texts.
    """

    del_ratio: float | None = None
    longest: int = 0
    targets: float = 0.0

    def __call__(self, rows: Sequence[Mapping[str, Any]], position: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        taken = TakenRows.of(rows)
        if WORDS not in taken.columns:
            return super().__call__(taken, position)
        columns = dict(taken.columns)
        words, lengths = columns.pop(WORDS), np.asarray(taken.values[PARTS])
        kept = np.ones(len(words), bool)
        starts = np.cumsum(lengths) - lengths.reshape(-1)
        for row, index in enumerate(position.indices if self.del_ratio is not None else ()):
            part = slice(starts[2 * row], starts[2 * row] + lengths[row, 0])
            kept[part] = _kept(words[part], position.rng("deletion", int(index)), self.del_ratio or 0.0)
        owner = np.repeat(np.arange(lengths.size), lengths.reshape(-1))
        damaged = kept & (owner % 2 == 0)
        left = np.bincount(owner[damaged] // 2, minlength=len(lengths))
        kept_columns = {name: column[damaged] for name, column in columns.items()}
        rest = TakenRows(kept_columns, left, {**taken.values, PARTS: left[:, None]})
        count, room = int((lengths[:, 1] - 1).sum()), None
        batch = replace(self, least=math.ceil(count / max(self.targets, 1e-9)))(rest, position)
        if self.layout == "bucketed":
            room = math.ceil(len(batch["input_ids"]) * self.targets)
        elif self.settled:
            room = round_up(count, TARGET_STEPS, LEAST_TARGETS)
        return {**batch, **self._targets(columns["input_ids"][owner % 2 == 1], lengths[:, 1], room)}

    def _targets(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], room: int | None) -> dict[str, Tensor]:
        """Return the original texts without their last token, and the next token of each position, padded."""
        most = int(lengths.max()) - 1
        if room is not None:
            most = max(most, min(round_up(most, TARGET_STEPS, LEAST_TARGETS), self.longest))
        place = np.arange(most + 1)
        real, known = place < lengths[:, None], place[:-1] < lengths[:, None]
        whole = np.full(real.shape, self.pad_id, np.int64)
        whole[real] = ids
        texts, at = np.nonzero(place[:-1] < lengths[:, None] - 1)
        per_token = {"target_places": texts * most + at, "target_labels": whole[texts, at + 1], "target_texts": texts}
        found = {"target_ids": whole[:, :-1], "target_mask": known}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in found.items()}
        return tensors | filled(per_token, len(texts) if room is None else room)


def _kept(words: NDArray[np.int64], rng: Rng, ratio: float) -> NDArray[np.bool_]:
    """Return the remaining tokens of a text: special tokens, and words that are not deleted (at least one)."""
    numbers = np.unique(words[words != SPECIAL])
    if not len(numbers):
        return np.ones(len(words), bool)
    drawn = rng.uniforms(len(numbers))
    drawn[drawn.argmax()] = 1.0
    return (words == SPECIAL) | np.isin(words, numbers[drawn >= ratio])
