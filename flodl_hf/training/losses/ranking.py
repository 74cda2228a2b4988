"""Losses that rank a text's partner above all other texts of the batch, and losses at several sizes or layers.

Multiple negatives ranking (Henderson et al. 2017, arXiv:1705.00652), with its symmetric and combined forms (Li et al.
2023, arXiv:2308.03281) and weights of hard negatives (Lan et al. 2025); margins from the nearest other partner of a
large batch (Wieting and Gimpel 2018, arXiv:1711.05732); GIST, which excludes texts that a guide finds
nearer than the partner (Solatorio 2024, arXiv:2402.16829). Matryoshka (Kusupati et al. 2022, arXiv:2205.13147) and
layer-wise learning (Li et al. 2024, arXiv:2402.14776).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flodl.errors import ConfigError
from flodl_hf.inference.similarity import MEASURES
from flodl_hf.training.losses.pairs import Form, VectorLoss


@dataclass(frozen=True)
class Wrapped:
    """A loss with the requirements of another one: ``forms``, ``in_batch``, ``by_guide`` and ``ragged``."""

    loss: Any

    def __getattr__(self, name: str) -> Any:
        if name not in ("forms", "in_batch", "by_guide", "ragged"):
            raise AttributeError(name)
        return getattr(self.loss, name)


@dataclass(frozen=True)
class MatryoshkaLoss(Wrapped):
    """Sum of a loss over several sizes of truncated, normalised vectors.

    Attributes:
        loss: the loss.
        dims: sizes.
        weights: of each size; None weighs all alike.
    """

    dims: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None, **further: Any) -> Tensor:
        """Return the sum over the sizes; ``further`` is for the loss."""
        size = vectors[0].shape[-1]
        total = vectors[0].new_zeros(())
        pairs = zip(self.dims, self.weights or [1.0] * len(self.dims), strict=True)
        # from the largest on, each cut from the one before, as the reference does
        for dim, weight in sorted(pairs, reverse=True):
            vectors = [F.normalize(each[..., :dim], dim=-1) for each in vectors]
            cut = labels is not None and not self.by_guide and labels.dim() > 1 and labels.shape[-1] == size
            total = total + weight * self.loss(
                vectors, labels[..., :dim] if cut and labels is not None else labels, own, **further
            )
        return total


@dataclass(frozen=True)
class AdaptiveLayerLoss(Wrapped):
    """Sum of a loss over all layers, and their distance from the last layer.

    It takes vectors of all layers, the embeddings' first and the last layer's last; all of them in each step.

    Attributes:
        loss: the loss.
        last_layer_weight: of the last layer.
        prior_layers_weight: of all others together.
        kl_div_weight: of the distance from the last layer's vectors.
        kl_temperature: that both are divided by.
        layer_weighting: "uniform", "log" or "linear": lower layers weigh alike, or more.
    """

    last_layer_weight: float = 1.0
    prior_layers_weight: float = 1.0
    kl_div_weight: float = 1.0
    kl_temperature: float = 0.3
    layer_weighting: str = "uniform"

    ragged: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.layer_weighting not in (valid := ("uniform", "log", "linear")):
            fault = f"layer_weighting is {self.layer_weighting!r}; expected one of {', '.join(valid)}"
            raise ConfigError(f"AdaptiveLayerLoss: {fault}", problems=[fault])

    def __call__(self, layers: Sequence[Sequence[Tensor]], labels: Any, own: slice | None = None) -> Tensor:
        """Return the sum over the layers."""
        *prior, last = layers
        total = self.loss(last, labels, own) * self.last_layer_weight
        heat = self.kl_temperature
        goal = F.softmax(torch.cat(list(last)) / heat, -1).detach() if heat > 0 else None
        for index, vectors in enumerate(prior):
            weights = {"uniform": 1.0, "log": 1 / (1 + math.log(1 + index)), "linear": 1 / (1 + index)}
            share = weights[self.layer_weighting] / len(prior) * self.prior_layers_weight
            total = total + self.loss(vectors, labels, own) * share
            if goal is not None:
                mine = F.log_softmax(torch.cat(list(vectors)) / heat, -1)
                total = total + F.kl_div(mine, goal, reduction="batchmean") * heat * self.kl_div_weight
        return total


MAX_SCORES = 1 << 26
"""Maximum number of similarities in memory; larger batches are computed in parts, and again for the gradient."""
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def _mean_in_parts(losses: Callable[[int, int], Tensor], own: slice, rows: int) -> Tensor:
    """Return the mean of the losses of some anchors; more than ``rows`` are computed in parts, and again backward."""
    first, last = own.start, own.stop
    if rows >= last - first:
        return losses(first, last).mean()
    parts = [checkpoint(losses, i, min(i + rows, last), use_reentrant=False) for i in range(first, last, rows)]
    return torch.cat([part for part in parts if part is not None]).mean()


@dataclass(frozen=True)
class MultipleNegativesRankingLoss(VectorLoss):
    """The partner of a text against all other partners, and all negatives, of the batch.

    Attributes:
        scale: what similarities are multiplied by, 1 / temperature.
        similarity: a name of `flodl_hf.inference.similarity.MEASURES`.
        directions: ranked directions: "query_to_doc" always; "doc_to_query", "query_to_query", "doc_to_doc".
        partition_mode: "joint" ranks all directions together, "per_direction" each alone.
        hardness_mode: negatives that weigh more the nearer they are: "in_batch_negatives", "hard_negatives" or
            "all_negatives".
        hardness_strength: how much more.
    """

    scale: float = 20.0
    similarity: str = "cosine"
    directions: tuple[str, ...] = ("query_to_doc",)
    partition_mode: str = "joint"
    hardness_mode: str | None = None
    hardness_strength: float = 0.0

    forms: ClassVar[tuple[Form, ...]] = ("pairs", "triplets", "texts")
    in_batch: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    positive = ("scale",)
    choices: ClassVar[Mapping[str, Collection[Any]]] = {
        "similarity": MEASURES,
        "partition_mode": ("joint", "per_direction"),
        "hardness_mode": (None, "in_batch_negatives", "hard_negatives", "all_negatives"),
    }

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        found = super().faults()
        if {*self.directions} - {*DIRECTIONS} or "query_to_doc" not in self.directions:
            found.append(f"directions are {list(self.directions)}; expected query_to_doc and any of {DIRECTIONS[1:]}")
        if self.partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & {*self.directions}:
            found.append("partition_mode is per_direction; query_to_query and doc_to_doc have no partner to rank alone")
        if self.hardness_strength < 0:
            found.append(f"hardness_strength is {self.hardness_strength}; expected 0 or more")
        return found

    def __call__(
        self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None, *, there: Tensor | None = None
    ) -> Tensor:
        """Return the mean over the anchors; with ``own`` over those alone, against the texts of all."""
        queries, partners, docs = vectors[0], vectors[1], torch.cat(list(vectors[1:]))
        absent = None if there is None else ~torch.cat(list(there[:, 1:].unbind(1)))
        rows = max(1, MAX_SCORES // (len(docs) * len(self.directions)))
        losses = partial(self._losses, queries, partners, docs, absent)
        return _mean_in_parts(losses, own or slice(0, len(queries)), rows)

    def _losses(
        self, queries: Tensor, partners: Tensor, docs: Tensor, absent: Tensor | None, first: int, last: int
    ) -> Tensor:
        """Return the loss of each anchor from ``first`` to ``last``; ``absent`` is true for documents to leave out."""
        measure = MEASURES[self.similarity]
        here = torch.arange(first, last, device=queries.device)
        row = torch.arange(last - first, device=queries.device)
        mine, their = queries[first:last], partners[first:last]
        of_mine = torch.arange(len(docs), device=docs.device)[None] % len(queries) == here[:, None]
        table = measure(mine, docs)
        near, table, left_out = table.detach(), table * self.scale, of_mine
        if self.hardness_mode is not None and self.hardness_strength:
            partner = torch.arange(len(docs), device=docs.device)[None] < len(queries)
            counted = {
                "hard_negatives": of_mine & ~partner,
                "in_batch_negatives": ~of_mine,
                "all_negatives": ~(of_mine & partner),
            }[self.hardness_mode]
            table = table + torch.where(counted, self.hardness_strength * near, 0.0)
        if absent is not None:
            table, left_out = table.masked_fill(absent, -torch.inf), of_mine | absent
        positive, tables = table[row, here], [table]
        for direction in DIRECTIONS[1:]:
            if direction not in self.directions:
                continue
            if direction == "query_to_query":
                table = measure(mine, queries).index_put((row, here), queries.new_full((), -torch.inf)) * self.scale
            elif direction == "doc_to_query":
                table = measure(queries, their).T * self.scale
            else:
                table = measure(docs, their).T.masked_fill(left_out, -torch.inf) * self.scale
            tables.append(table)
        if self.partition_mode == "joint":
            among = torch.logsumexp(torch.cat(tables, 1) if len(tables) > 1 else tables[0], 1)
        else:
            among = torch.stack([torch.logsumexp(table, 1) for table in tables]).sum(0) / len(tables)
        return -(positive - among)


@dataclass(frozen=True)
class MultipleNegativesSymmetricRankingLoss(MultipleNegativesRankingLoss):
    """The same both ways: a text's partner among all partners, and the text among all texts."""

    directions: tuple[str, ...] = ("query_to_doc", "doc_to_query")
    partition_mode: str = "per_direction"


@dataclass(frozen=True)
class MegaBatchMarginLoss(VectorLoss):
    """Margin loss: a text is close to its partner, and distant from the nearest other partner.

    Attributes:
        positive_margin: the cosine that a partner shall have.
        negative_margin: the cosine that the nearest other shall not have.
    """

    positive_margin: float = 0.8
    negative_margin: float = 0.3

    forms: ClassVar[tuple[Form, ...]] = ("pairs", "texts")
    in_batch: ClassVar[bool] = True

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over the anchors; with ``own`` over those alone, against the partners of all."""
        queries, partners = vectors[0], vectors[1]
        rows = max(1, MAX_SCORES // len(partners))
        return _mean_in_parts(partial(self._losses, queries, partners), own or slice(0, len(queries)), rows)

    def _losses(self, queries: Tensor, partners: Tensor, first: int, last: int) -> Tensor:
        """Return the loss of each anchor from ``first`` to ``last``."""
        table = MEASURES["cosine"](queries[first:last], partners)
        row, here = torch.arange(last - first, device=table.device), torch.arange(first, last, device=table.device)
        nearest = table.index_put((row, here), table.new_full((), -torch.inf)).amax(1)
        return F.relu(self.positive_margin - table[row, here]) + F.relu(nearest - self.negative_margin)


@dataclass(frozen=True)
class GISTEmbedLoss(VectorLoss):
    """Multiple negatives ranking without texts that a guide finds nearer to the text than its partner.

    Labels are the guide's vectors of all texts.

    Attributes:
        temperature: what similarities are divided by.
        margin_strategy: "absolute" or "relative".
        margin: how far below the partner's similarity a text is left out already.
        contrast_anchors: count other anchors as negatives too.
        contrast_positives: count partners against partners too.
    """

    temperature: float = 0.01
    margin_strategy: str = "absolute"
    margin: float = 0.0
    contrast_anchors: bool = True
    contrast_positives: bool = True

    forms: ClassVar[tuple[Form, ...]] = ("pairs", "triplets", "texts")
    in_batch: ClassVar[bool] = True
    by_guide: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
    positive = ("temperature",)
    choices: ClassVar[Mapping[str, Collection[Any]]] = {"margin_strategy": ("absolute", "relative")}

    def __call__(
        self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None, *, there: Tensor | None = None
    ) -> Tensor:
        """Return the mean over the anchors; with ``own`` over those alone, against the texts of all."""
        own = own or slice(0, len(vectors[0]))
        guide = labels.unbind(1)
        here = torch.arange(own.start, own.stop, device=vectors[0].device)
        bound = _cosines(guide[0][own], guide[1]).gather(1, here[:, None])
        lowered = self.margin if self.margin_strategy == "absolute" else bound.abs() * self.margin
        # sentence-transformers excludes anchors of other ranks; here, all anchors of a batch count
        pairs = [(vectors[0], vectors[1], guide[0], guide[1])]
        if self.contrast_anchors:
            pairs.append((vectors[0], vectors[0], guide[0], guide[0]))
        if self.contrast_positives:
            pairs.append((vectors[1], vectors[1], guide[1], guide[1]))
        pairs += [(vectors[0], negative, guide[0], of) for negative, of in zip(vectors[2:], guide[2:], strict=True)]
        tables, first = [], len(pairs) - len(vectors[2:])
        for at, (a, b, guide_a, guide_b) in enumerate(pairs):
            left_out = _cosines(guide_a[own], guide_b) > bound - lowered
            if there is not None and at >= first:
                left_out = left_out | ~there[:, 2 + at - first]
            if at == 0:
                left_out = left_out.scatter(1, here[:, None], False)
            tables.append(_cosines(a[own], b).masked_fill(left_out, -torch.inf))
        return F.cross_entropy(torch.cat(tables, 1) / self.temperature, here)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a[:, None], b[None], dim=-1)


@dataclass(frozen=True)
class GlobalOrthogonalRegularizationLoss(VectorLoss):
    """Distance of the vectors of a batch from an even spread; used in addition to a ranking loss.

    Attributes:
        mean_weight: of the squared mean of similarities.
        second_moment_weight: weight of the mean square above that of random directions.
        aggregation: "mean" or "sum" over anchors, partners and negatives.
        similarity: a name of `flodl_hf.inference.similarity.MEASURES`.
        ranking_weight: of multiple negatives ranking, added to it; 0 for the spread alone.
        scale: factor of similarities in the ranking.
    """

    mean_weight: float = 1.0
    second_moment_weight: float = 1.0
    aggregation: str = "mean"
    similarity: str = "cosine"
    ranking_weight: float = 0.0
    scale: float = 20.0

    forms: ClassVar[tuple[Form, ...]] = ("pairs", "triplets", "texts")
    in_batch: ClassVar[bool] = True
    positive = ("scale",)
    choices: ClassVar[Mapping[str, Collection[Any]]] = {"aggregation": ("mean", "sum"), "similarity": MEASURES}

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        both = self.mean_weight or self.second_moment_weight
        wrong = [] if both else ["mean_weight and second_moment_weight are 0; expected one of them above 0"]
        return super().faults() + wrong

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the loss of the batch, in which each of an example's texts is spread among its like."""
        terms = torch.stack([self._of(column) for column in vectors])
        value = terms.sum() if self.aggregation == "sum" else terms.mean()
        if not self.ranking_weight:
            return value
        return value + self.ranking_weight * MultipleNegativesRankingLoss(self.scale)(vectors, labels, own)

    def _of(self, texts: Tensor) -> Tensor:
        """Return what texts of one kind cost, a scalar."""
        count, size = texts.shape
        near = MEASURES[self.similarity](texts, texts)
        near = near.masked_fill(torch.eye(count, dtype=torch.bool, device=near.device), 0.0)
        among = max(count * (count - 1), 1)
        mean, square = near.sum() / among, near.square().sum() / among
        return self.mean_weight * mean.square() + self.second_moment_weight * torch.relu(square - 1.0 / size)
