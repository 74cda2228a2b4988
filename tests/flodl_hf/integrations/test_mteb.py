"""mteb's tasks of four kinds on local data: the scores equal those of sentence-transformers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

# Words of the tiny models' vocabulary, so that a pair fits into their 20 tokens: truncated pairs become equal, and
# the rank of equal pairs depends on rounding.
SUBJECTS = ["cat", "dog", "film", "mat", "acme corp", "paris"]
TEXTS = [f"{start} {subject}." for subject in SUBJECTS for start in ("ada lives in", "not a good", "who ran for the")]
QUERIES = [f"is the {subject} very bad" for subject in SUBJECTS]


def tasks() -> list[Any]:
    """Return one task of each kind."""
    from datasets import Dataset, DatasetDict
    from mteb.mocks.mock_tasks import MockClassificationTask, MockRerankingTask, MockRetrievalTask, MockSTSTask

    numbers = range(len(TEXTS))
    labels = [number // 9 for number in numbers]
    table = Dataset.from_dict({"text": TEXTS, "label": labels})
    pairs = {"sentence1": TEXTS, "sentence2": TEXTS[2:] + TEXTS[:2], "score": [number % 3 for number in numbers]}
    queries = [{"id": f"q{number}", "text": query} for number, query in enumerate(QUERIES)]
    split = {
        "queries": Dataset.from_list(queries),
        "corpus": Dataset.from_list([{"id": f"d{n}", "text": text, "title": ""} for n, text in enumerate(TEXTS)]),
        "relevant_docs": {f"q{n}": {f"d{3 * n}": 1, f"d{3 * n + 1}": 1} for n in range(len(SUBJECTS))},
        "top_ranked": None,
    }
    ranked = {**split, "top_ranked": {f"q{n}": [f"d{m}" for m in numbers] for n in range(len(SUBJECTS))}}
    found = []
    for task, data in (
        (MockSTSTask(), DatasetDict({"test": Dataset.from_dict(pairs)})),
        (MockClassificationTask(), DatasetDict({"train": table, "test": table})),
        (MockRetrievalTask(), {"default": {"test": split, "val": split}}),
        (MockRerankingTask(), {"default": {"test": ranked}}),
    ):
        task.dataset, task.data_loaded = data, True
        task.load_data = lambda *args, **options: None
        task.unload_data = lambda *args, **options: None
        found.append(task)
    return found


def scores_of(model: Any, chosen: list[Any]) -> dict[str, dict[str, float]]:
    """Return all scores of a model, by task."""
    import mteb

    results = mteb.evaluate(model, chosen, cache=None, co2_tracker=False, show_progress_bar=False)
    found = {}
    for result in results.task_results:
        (scores,) = result.scores["test"]
        found[result.task_name] = {name: value for name, value in scores.items() if isinstance(value, float)}
    return found


def compare(ours: Any, reference: Any, chosen: list[Any]) -> None:
    mine, theirs = scores_of(ours, chosen), scores_of(reference, chosen)
    assert len(mine) == len(chosen)
    for task, scores in theirs.items():
        difference = max(abs(mine[task][name] - value) for name, value in scores.items() if value == value)
        print(f"\ndifference of mteb {task}: {difference:.1e}, main score {scores['main_score']:.4f}")
        assert difference <= 1e-6


def test_encoder(encoder: str) -> None:
    pytest.importorskip("mteb")
    st = pytest.importorskip("sentence_transformers", minversion="6.0")
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper

    from flodl_hf.compat.mteb import FlodlEncoder
    from flodl_hf.compat.sentence_transformers import SentenceTransformer

    reference = st.SentenceTransformer(encoder, device="cpu")
    compare(FlodlEncoder(encoder, device="cpu"), SentenceTransformerEncoderWrapper(reference), tasks())
    compare(SentenceTransformer(encoder, device="cpu"), reference, tasks()[:1])


def test_cross_encoder(cross_encoder: str) -> None:
    pytest.importorskip("mteb")
    st = pytest.importorskip("sentence_transformers", minversion="6.0")
    from mteb.models.sentence_transformer_wrapper import CrossEncoderWrapper

    from flodl_hf.compat.mteb import FlodlCrossEncoder

    reference = st.CrossEncoder(cross_encoder, device="cpu")
    for query in QUERIES:
        scores = sorted(reference.predict([(query, text) for text in TEXTS]).tolist())
        assert min(high - low for low, high in pairwise(scores)) > 1e-6
    compare(FlodlCrossEncoder(cross_encoder, device="cpu"), CrossEncoderWrapper(reference), tasks()[3:])
