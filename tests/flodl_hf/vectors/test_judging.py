"""Figures of vectors: those of definitions written out in loops, and of sentence-transformers where it is installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import DataError
from flodl_hf.errors import PredictError
from flodl_hf.inference.search import semantic_search
from flodl_hf.training.evaluators import (
    binary_figures,
    clustering_figures,
    matryoshka_curve,
    mining_figures,
    ranking_figures,
    reranking_figures,
    retrieval_figures,
    similarity_figures,
    triplet_figures,
    v_measure,
)

COUNT, SIZE = 40, 6


def drawn(seed: int) -> Tensor:
    """Few distinct values, so that equal similarities occur."""
    draw = torch.Generator().manual_seed(seed)
    return torch.round(torch.randn(COUNT, SIZE, generator=draw)) + 0.25


A, B, C = drawn(0), drawn(1), drawn(2)
SCORES = torch.randint(0, 6, (COUNT,), generator=torch.Generator().manual_seed(5)).tolist()
ALIKE = [int(score > 2) for score in SCORES]
RELEVANT = [set(np.random.default_rng(i).choice(2 * COUNT, 3, replace=False).tolist()) for i in range(COUNT)]


def by_hand(query: Tensor, corpus: Tensor) -> list[int]:
    found = (F.normalize(query[None], dim=-1) @ F.normalize(corpus, dim=-1).T)[0]
    return sorted(range(len(corpus)), key=lambda i: (-float(found[i]), i))


@pytest.mark.parametrize(("queries", "block"), [(1024, 65_536), (7, 11), (COUNT, 3)])
@pytest.mark.parametrize("top", [1, 5, 80, 200])
def test_search_finds_the_most_alike_whatever_the_blocks(queries: int, block: int, top: int) -> None:
    corpus = torch.cat([B, C, B[:10]])  # the last ten tie with the first, and sums of these numbers are exact
    found = semantic_search(A, corpus, top_k=top, measure="dot", query_chunk_size=queries, corpus_chunk_size=block)
    table = A @ corpus.T
    hand = [sorted(range(len(corpus)), key=lambda k: (-float(row[k]), k))[:top] for row in table]
    assert found.indices.tolist() == hand
    assert torch.equal(found.scores, table.gather(1, found.indices))
    assert found[0][0] == {"corpus_id": found.indices[0, 0].item(), "score": found.scores[0, 0].item()}


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean", "manhattan"])
def test_search_by_each_measure_takes_arrays_and_single_vectors(measure: str) -> None:
    found = semantic_search(A[0].numpy(), B.numpy(), top_k=3, measure=measure, corpus_chunk_size=9)
    table = {
        "cosine": lambda: F.cosine_similarity(A[:1], B),
        "dot": lambda: (A[:1] * B).sum(1),
        "euclidean": lambda: -(A[:1] - B).norm(dim=1),
        "manhattan": lambda: -(A[:1] - B).abs().sum(1),
    }[measure]()
    torch.testing.assert_close(found.scores[0], table.sort(descending=True).values[:3], rtol=1e-5, atol=1e-5)
    assert len(semantic_search(A[:0], B)) == 0
    with pytest.raises(PredictError, match="measure 'cosin'"):
        semantic_search(A, B, measure="cosin")
    with pytest.raises(PredictError, match="6 features and a corpus of 4"):
        semantic_search(A, B[:, :4])


def test_retrieval_by_hand() -> None:
    corpus = torch.cat([B, C]) + torch.linspace(0, 1, 2 * COUNT)[:, None]  # no ties, whose order rounding would decide
    found = retrieval_figures(A, corpus, RELEVANT, corpus_chunk_size=13)
    rows: dict[str, list[float]] = {}
    for query, belongs in zip(A, RELEVANT, strict=True):
        hits = [place in belongs for place in by_hand(query, corpus)]
        for k in (1, 3, 5, 10):
            rows.setdefault(f"accuracy@{k}", []).append(float(any(hits[:k])))
            rows.setdefault(f"precision@{k}", []).append(sum(hits[:k]) / k)
            rows.setdefault(f"recall@{k}", []).append(sum(hits[:k]) / 3)
        rows.setdefault("mrr@10", []).append(next((1 / (i + 1) for i, hit in enumerate(hits[:10]) if hit), 0.0))
        gains = sum(1 / math.log2(i + 2) for i, hit in enumerate(hits[:10]) if hit)
        rows.setdefault("ndcg@10", []).append(gains / sum(1 / math.log2(i + 2) for i in range(3)))
        seen = [sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits[:100]) if hit]
        rows.setdefault("map@100", []).append(sum(seen) / 3)
    assert found == pytest.approx({name: float(np.mean(values)) for name, values in rows.items()}, abs=1e-12)
    with pytest.raises(DataError, match="no query"):
        retrieval_figures(A, corpus, [set()] * COUNT)


def test_pairs_by_hand() -> None:
    cosines = F.cosine_similarity(A, B).double().numpy()
    found = similarity_figures(A, B, SCORES)
    assert found["pearson"] == pytest.approx(np.corrcoef(cosines, SCORES)[0, 1], abs=1e-6)
    ranks = [[(values < v).sum() + (values == v).sum() / 2 for v in values]
             for values in (F.cosine_similarity(A, B).numpy(), np.asarray(SCORES))]  # fmt: skip
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=2e-2)  # equal cosines may round apart
    near, far = F.cosine_similarity(A, B), F.cosine_similarity(A, C)
    share = triplet_figures(A, B, C)["triplet_accuracy"]
    assert share == pytest.approx((near > far + 1e-6).double().mean().item(), abs=2 / COUNT)


def test_thresholds_by_hand() -> None:
    from flodl_hf.training.evaluators import threshold_figures

    scores, truth = np.array([0.9, 0.8, 0.8, 0.5, 0.4, 0.1]), np.array([1, 1, 0, 1, 0, 0], bool)
    found = threshold_figures(scores, truth)
    best = max((2 * (truth & (scores >= t)).sum() / ((scores >= t).sum() + 3), t) for t in scores)
    assert found["f1"] == pytest.approx(best[0])
    assert found["accuracy"] == pytest.approx(max(((scores >= t) == truth).mean() for t in scores))
    # recall goes up by 1/3 at 0.9, at the two of 0.8, at 0.5
    assert found["ap"] == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    said = scores >= found["f1_threshold"]
    assert found["precision"] == pytest.approx((truth & said).sum() / said.sum())
    assert found["mcc"] == pytest.approx(np.corrcoef(truth, said)[0, 1])
    assert threshold_figures(scores, ~truth)["accuracy"] >= 0.5


def test_rankings_by_hand() -> None:
    found = ranking_figures([[3.0, 2.0, 1.0], [1.0, 1.0, 0.0], [5.0, 4.0]], [[0, 2, 1], [1, 0, 0], [1, 1]], at=2)
    first = (2 / math.log2(3)) / (2 + 1 / math.log2(3))
    tied = (1 + 1 / math.log2(3)) / 2
    assert found["ndcg@2"] == pytest.approx((first + tied) / 2)
    assert found["mrr@2"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["map"] == pytest.approx(((1 / 2 + 2 / 3) / 2 + 1 / 2) / 2)
    by_vectors = reranking_figures(A[:2], [B[:1], B[1:3]], [C[:4], C[:0]])
    scores = F.cosine_similarity(A[:1], torch.cat([B[:1], C[:4]]))
    assert by_vectors == pytest.approx(ranking_figures([scores.numpy()], [[1, 0, 0, 0, 0]]))
    with pytest.raises(DataError, match="different relevance"):
        ranking_figures([[1.0, 2.0]], [[1, 1]])


@pytest.mark.parametrize(
    "figures",
    [
        lambda: clustering_figures(A, [0, 1]),
        lambda: ranking_figures([[1.0, 2.0]], [[1, 0], [0, 1]]),
        lambda: ranking_figures([[1.0, 2.0]], [[1, 0, 0]]),
        lambda: reranking_figures(A[:2], [B[:1]], [C[:4], C[:2]]),
        lambda: similarity_figures(A, B, SCORES[:3]),
    ],
)
def test_parts_of_different_lengths_are_refused(figures: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match="expected equal numbers"):
        figures()


def test_groups() -> None:
    apart = torch.cat([A + 9, A - 9])
    found = clustering_figures(apart, ["x"] * COUNT + ["y"] * COUNT)
    assert found == {"neighbour_accuracy": 1.0, "v_measure": pytest.approx(1.0)}
    mixed = clustering_figures(A, [i % 2 for i in range(COUNT)])
    assert mixed["neighbour_accuracy"] < 0.9
    assert mixed["v_measure"] < 0.5
    assert v_measure([0, 0, 1, 1], [5, 5, 3, 3]) == pytest.approx(1.0)
    # classes are halved: pure groups, classes that are not whole: h = 1, c = log 2 / log 4
    assert v_measure([0, 0, 1, 1], [0, 1, 2, 3]) == pytest.approx(2 / 3)
    assert v_measure([0, 1, 0, 1], [0, 0, 1, 1]) == pytest.approx(0.0)


def test_a_curve_over_sizes() -> None:
    curve = matryoshka_curve(similarity_figures, [A, B], [6, 2], SCORES)
    assert curve == {6: similarity_figures(A, B, SCORES), 2: similarity_figures(A[:, :2], B[:, :2], SCORES)}


# --- beside sentence-transformers ----------------------------------------------------------------------------------


class Card:
    def set_evaluation_metrics(self, *_: Any, **__: Any) -> None:
        """Take figures."""


class Model:
    """Gives texts, which are numbers, the vectors of this file."""

    similarity_fn_name = "cosine"
    model_card_data = Card()

    def __init__(self, similarity: Any) -> None:
        self.similarity, self.vectors = similarity, torch.cat([A, B, C])

    def encode(self, texts: list[str], convert_to_tensor: bool = False, **_: Any) -> Any:
        found = self.vectors[[int(text) for text in texts]]
        return found if convert_to_tensor else found.numpy()

    encode_query = encode_document = encode


@pytest.mark.filterwarnings("ignore")
def test_as_the_evaluators_of_sentence_transformers() -> None:
    library = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    util = pytest.importorskip("sentence_transformers.util")
    names = [f"{i:03d}" for i in range(3 * COUNT)]
    a, b, c = names[:COUNT], names[COUNT : 2 * COUNT], names[2 * COUNT :]
    relevant = {query: {names[COUNT + k] for k in places} for query, places in zip(a, RELEVANT, strict=True)}
    samples = [{"query": a[i], "positive": b[i : i + 2], "negative": c[i : i + 4]} for i in range(COUNT - 4)]
    model = Model(util.cos_sim)
    evaluators = [
        (library.EmbeddingSimilarityEvaluator(a, b, [float(s) for s in SCORES], write_csv=False), "{}_cosine",
         similarity_figures(A, B, SCORES)),
        (library.BinaryClassificationEvaluator(a, b, ALIKE, write_csv=False), "cosine_{}", binary_figures(A, B, ALIKE)),
        (library.InformationRetrievalEvaluator({q: q for q in a}, {t: t for t in [*b, *c]}, relevant, write_csv=False),
         "cosine_{}", retrieval_figures(A, torch.cat([B, C]), RELEVANT, corpus_chunk_size=17)),
        (library.RerankingEvaluator(samples, write_csv=False), "{}", reranking_figures(
            A[: COUNT - 4], [B[i : i + 2] for i in range(COUNT - 4)], [C[i : i + 4] for i in range(COUNT - 4)])),
    ]  # fmt: skip
    for evaluator, pattern, ours in evaluators:
        theirs = evaluator(model)
        assert ours == pytest.approx({name: float(theirs[pattern.format(name)]) for name in ours}, abs=1e-7)
    said = [(i, i + 3) for i in range(0, COUNT - 3, 4)]
    everything = {name: name for name in a}
    mined = library.ParaphraseMiningEvaluator(everything, [(a[i], a[j]) for i, j in said], top_k=60, write_csv=False)
    assert mining_figures(A, said, top_k=60) == pytest.approx(mined(model), abs=1e-6)
    accuracy = library.TripletEvaluator(a, b, c, write_csv=False)(model)["cosine_accuracy"]
    assert triplet_figures(A, B, C)["triplet_accuracy"] == pytest.approx(accuracy, abs=1e-7)


def test_mined_pairs_by_hand() -> None:
    vectors = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.3, 1.0], [-1.0, 0.2]]), dim=-1)
    found = mining_figures(vectors, [(1, 0), (2, 3), (0, 4)])  # the first two are the most alike, the third the least
    assert (found["precision"], found["recall"]) == (1.0, pytest.approx(2 / 3))
    assert found["f1"] == pytest.approx(0.8)
    assert found["average_precision"] == pytest.approx((1 + 1 + 3 / 10) / 3)
    assert 0.3 < found["threshold"] < 0.95
    with pytest.raises(DataError, match="no duplicates"):
        mining_figures(vectors, [])


def test_as_pytrec_eval() -> None:
    library = pytest.importorskip("pytrec_eval")
    vectors = torch.randn(3 * COUNT, SIZE, generator=torch.Generator().manual_seed(8))  # no two scores alike
    queries, corpus = vectors[:COUNT], vectors[COUNT:]
    scores = F.normalize(queries, dim=-1) @ F.normalize(corpus, dim=-1).T
    truth = {f"q{i}": {f"d{k}": 1 for k in places} for i, places in enumerate(RELEVANT)}
    ranked = {f"q{i}": {f"d{k}": float(score) for k, score in enumerate(row)} for i, row in enumerate(scores)}
    measures = {"ndcg_cut.10", "map_cut.100", "recall.10", "P.5", "recip_rank"}
    rows = library.RelevanceEvaluator(truth, measures).evaluate(ranked).values()
    theirs = {name: np.mean([row[name] for row in rows]) for name in next(iter(rows))}
    ours = retrieval_figures(
        queries, corpus, RELEVANT, at={"ndcg": (10,), "map": (100,), "recall": (10,), "precision": (5,), "mrr": (80,)}
    )
    names = {"ndcg@10": "ndcg_cut_10", "recall@10": "recall_10", "precision@5": "P_5", "mrr@80": "recip_rank"}
    assert {name: ours[name] for name in names} == pytest.approx({n: theirs[t] for n, t in names.items()}, abs=1e-6)
    assert ours["map@100"] == pytest.approx(theirs["map_cut_100"], abs=1e-6)
