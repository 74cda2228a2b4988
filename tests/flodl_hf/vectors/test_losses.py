"""Losses of vectors: the numbers of their formulas, those of sentence-transformers where it is installed, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import plain_losses as plain
import pytest
import torch
from torch import Tensor

from flodl.errors import ConfigError, TrainError
from flodl_hf.training.losses import LOSSES, AdaptiveLayerLoss, MatryoshkaLoss, ranking
from flodl_hf.training.losses import make_loss as make

EXAMPLES, SIZE = 9, 8


def labels_of(kind: str | None, texts: int) -> Tensor | None:
    draw = torch.Generator().manual_seed(3)
    return {
        None: lambda: None,
        "scores": lambda: torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 0.3, 0.7, 0.2, 1.0]),
        "binary": lambda: torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 1]),
        "classes": lambda: torch.tensor([0, 1, 0, 2, 1, 0, 2, 1, 0]),
        "teacher": lambda: torch.randn(EXAMPLES, texts - 1, generator=draw),
        "margins": lambda: torch.randn(EXAMPLES, texts - 2, generator=draw),
        "vectors": lambda: torch.randn(EXAMPLES, texts, SIZE, generator=draw),
    }[kind]()


# name, settings, texts of an example, labels, the formula
TABLE: list[tuple[str, dict[str, Any], int, str | None, plain.Loss]] = [
    ("MultipleNegativesRankingLoss", {}, 2, None, plain.ranking),
    ("MultipleNegativesRankingLoss", {"temperature": "0.1"}, 4, None, partial(plain.ranking, scale=10.0)),
    ("MultipleNegativesSymmetricRankingLoss", {}, 3, None, partial(plain.ranking, both=True)),
    ("GISTEmbedLoss", {}, 2, "vectors", plain.guided),
    ("GISTEmbedLoss", {}, 4, "vectors", plain.guided),
    ("CoSENTLoss", {}, 2, "scores", plain.ordered),
    ("AnglELoss", {}, 2, "scores", partial(plain.ordered, alike=plain.angle)),
    ("CosineSimilarityLoss", {}, 2, "scores", plain.cosine),
    ("ContrastiveLoss", {}, 2, "binary", plain.contrastive),
    ("OnlineContrastiveLoss", {}, 2, "binary", plain.online),
    ("TripletLoss", {}, 3, None, plain.triplet),
    ("BatchAllTripletLoss", {}, 1, "classes", partial(plain.of_classes, how="all")),
    ("BatchHardTripletLoss", {}, 1, "classes", partial(plain.of_classes, how="hard")),
    ("BatchHardSoftMarginTripletLoss", {}, 1, "classes", partial(plain.of_classes, how="soft")),
    ("BatchSemiHardTripletLoss", {}, 1, "classes", partial(plain.of_classes, how="semi")),
    ("MSELoss", {}, 2, "vectors", plain.nearer),
    ("MarginMSELoss", {}, 4, "margins", plain.margins),
    ("DistillKLDivLoss", {}, 4, "teacher", plain.shares),
    ("EmbedDistillLoss", {}, 2, "vectors", partial(plain.near_teacher, how="cosine")),
    ("EmbedDistillLoss", {"distance_metric": "l2"}, 1, "vectors", partial(plain.near_teacher, how="l2")),
    ("EmbedDistillLoss", {"distance_metric": "mse"}, 3, "vectors", plain.nearer),
    ("MegaBatchMarginLoss", {}, 2, None, plain.large_margin),
    ("GlobalOrthogonalRegularizationLoss", {}, 3, None, plain.spread),
    ("GlobalOrthogonalRegularizationLoss", {"ranking_weight": 1.0}, 2, None, partial(plain.spread, beside=True)),
]


def vectors_of(texts: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(texts)
    # some texts are near their partners, so that no term of a loss is empty
    first = torch.randn(EXAMPLES, SIZE, generator=draw)
    rows = [first] + [first * 0.7 + torch.randn(EXAMPLES, SIZE, generator=draw) for _ in range(texts - 1)]
    return [row.to(dtype).requires_grad_() for row in rows]


def same(ours: Callable[..., Tensor], theirs: plain.Loss, texts: int, labels: Tensor | None) -> None:
    mine, exact = vectors_of(texts), vectors_of(texts, torch.float64)
    found = ours(mine, labels)
    wanted = theirs(exact, labels.double() if labels is not None and labels.is_floating_point() else labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    for a, b in zip(torch.autograd.grad(found, mine), torch.autograd.grad(wanted, exact), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=2e-4, atol=2e-5)


def test_each_loss_is_in_the_table() -> None:
    assert {name for name, *_ in TABLE} == set(LOSSES)


@pytest.mark.parametrize(("name", "settings", "texts", "kind", "formula"), TABLE, ids=[f"{r[0]}-{r[2]}" for r in TABLE])
def test_losses_and_gradients_are_those_of_the_formula(
    name: str, settings: dict[str, Any], texts: int, kind: str | None, formula: plain.Loss
) -> None:
    same(make(name, settings), formula, texts, labels_of(kind, texts))


def test_a_loss_at_several_sizes_and_after_several_layers() -> None:
    loss = make("MultipleNegativesRanking")
    same(MatryoshkaLoss(loss, (4, 8), (0.5, 1.0)), plain.matryoshka, 2, None)

    def layers(vectors: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[v * factor + factor for v in vectors] for factor in (0.5, 0.3, 1.0)]

    ours = AdaptiveLayerLoss(loss, layer_weighting="log")
    mine, exact = vectors_of(2), vectors_of(2, torch.float64)
    found, wanted = ours(layers(mine), None), plain.layerwise(layers(exact), None)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    for a, b in zip(torch.autograd.grad(found, mine), torch.autograd.grad(wanted, exact), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=2e-4, atol=2e-5)


def test_settings_and_teachers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_weighting"):
        AdaptiveLayerLoss(make("MultipleNegativesRanking"), layer_weighting="exponential")
    with pytest.raises(TrainError) as caught:
        make("MSE")([torch.ones(2, 4)], torch.ones(2, 6))
    assert caught.value.details["found"] == (2, 6)


@pytest.mark.parametrize("directions", ["query_to_doc", "query_to_doc+doc_to_query+query_to_query+doc_to_doc"])
def test_a_large_table_of_similarities_is_computed_in_parts(monkeypatch: Any, directions: str) -> None:
    _in_parts(monkeypatch, make("MultipleNegativesRanking", {"directions": directions}), 3, len(directions.split("+")))


def test_margins_of_a_large_batch_are_computed_in_parts(monkeypatch: Any) -> None:
    _in_parts(monkeypatch, make("MegaBatchMargin"), 2, 1)


def _in_parts(monkeypatch: Any, loss: Any, texts: int, tables: int) -> None:
    whole = vectors_of(texts)
    expected = torch.autograd.grad(loss(whole, None), whole)
    monkeypatch.setattr(ranking, "MAX_SCORES", 2 * (texts - 1) * EXAMPLES * tables)
    parts = vectors_of(texts)
    for a, b in zip(torch.autograd.grad(loss(parts, None), parts), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", [r for r in TABLE if LOSSES[r[0]].in_batch], ids=lambda r: f"{r[0]}-{r[2]}")
def test_shares_of_a_batch_weigh_up_to_the_batch(row: tuple[str, dict[str, Any], int, str | None, plain.Loss]) -> None:
    """What ranks compute of their own examples, against those of all, is the loss of the batch when it is averaged."""
    name, settings, texts, kind, _ = row
    loss, labels, vectors = make(name, settings), labels_of(kind, texts), vectors_of(texts)
    shares = [slice(0, 2), slice(2, 7), slice(7, EXAMPLES)]
    parts = torch.stack([loss(vectors, labels, own) * (own.stop - own.start) for own in shares])
    assert parts.sum().item() / EXAMPLES == pytest.approx(loss(vectors, labels).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("word", "settings", "said"),
    [
        ("MultipleNegative", {}, "MultipleNegativesRankingLoss"),
        ("CoSENT", {"scales": 3}, "scale"),
        ("MultipleNegativesRanking", {"scale": -1}, "above 0"),
        ("MultipleNegativesRanking", {"directions": "doc_to_query"}, "query_to_doc"),
        ("Triplet", {"distance": "far"}, "euclidean"),
        ("EmbedDistill", {"distance_metric": "far"}, "cosine"),
        ("GlobalOrthogonalRegularization", {"aggregation": "most"}, "mean, sum"),
        ("GISTEmbed", {"contrast_anchors": "perhaps"}, "yes or no"),
    ],
)
def test_what_cannot_be_is_refused(word: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(word, settings)


# --- beside sentence-transformers ----------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Hands out vectors as sentence-transformers' models do."""

    def get_embedding_dimension(self) -> int:
        return SIZE

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "sentence_embedding": features["vectors"]}


@pytest.mark.parametrize(
    "row",
    [r for r in TABLE if r[0] != "GISTEmbedLoss" and "ranking_weight" not in r[1]],
    ids=lambda r: f"{r[0]}-{r[2]}",
)  # the guide there is a model with a tokenizer; a sum of two losses is none
@pytest.mark.filterwarnings("ignore")
def test_as_sentence_transformers(row: tuple[str, dict[str, Any], int, str | None, plain.Loss]) -> None:
    theirs = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    name, settings, texts, kind, _ = row
    settings = {"scale": 10.0} if "temperature" in settings else settings
    labels, mine, other = labels_of(kind, texts), vectors_of(texts), vectors_of(texts)
    whole = {"use_mini_batched_version": False} if name == "MegaBatchMarginLoss" else {}
    ours, reference = make(name, settings)(mine, labels), getattr(theirs, name)(Model(), **settings, **whole)
    given: Any = list(labels.unbind(1)) if kind == "vectors" and labels is not None else labels
    wanted: Any = None
    if whole:
        wanted = reference.calculate_loss([[vectors] for vectors in other])
    else:
        wanted = reference.compute_loss_from_embeddings(other, given)
    wanted = sum(wanted.values()) if isinstance(wanted, dict) else wanted
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(ours, mine), torch.autograd.grad(wanted, other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore")
def test_matryoshka_as_sentence_transformers() -> None:
    theirs = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    mine, other, model = vectors_of(2), vectors_of(2), Model()
    found = MatryoshkaLoss(make("MultipleNegativesRanking"), (4, 8), (0.5, 1.0))(mine, None)
    loss = theirs.MatryoshkaLoss(model, theirs.MultipleNegativesRankingLoss(model), [4, 8], [0.5, 1.0])
    wanted = loss([{"vectors": vector} for vector in other], None)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(found, mine), torch.autograd.grad(wanted, other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
