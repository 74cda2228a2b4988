"""flodl_hf.compat.sentence_transformers beside sentence-transformers: vectors, scores, attributes, training, other libraries."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import GOLDEN, TEXTS

PAIRS = [("a query", "some words here"), ("b", "hello there world " * 9), ("c d", "x")] * 2


@pytest.fixture
def st() -> Any:
    return pytest.importorskip("sentence_transformers", minversion="6.0")


@pytest.fixture
def ours(st: Any) -> Any:
    import flodl_hf.compat.sentence_transformers

    return flodl_hf.compat.sentence_transformers


def test_missing_library_is_explained() -> None:
    code = """
import sys
sys.modules["sentence_transformers"] = None
from flodl_hf.compat.sentence_transformers import CrossEncoder
try:
    CrossEncoder("model")
except ImportError as error:
    print("sentence-transformers" in str(error), "flodl_hf.load" in str(error))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]


FORMS: list[dict[str, Any]] = [
    {},
    {"normalize_embeddings": True},
    {"truncate_dim": 12},
    {"truncate_dim": 12, "normalize_embeddings": True},
    {"prompt": "query: "},
    {"batch_size": 2},
    {"precision": "ubinary"},
    {"convert_to_tensor": True},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_vectors(st: Any, ours: Any, encoder: str, check: Any, form: dict[str, Any]) -> None:
    model, reference = ours.SentenceTransformer(encoder, device="cpu"), st.SentenceTransformer(encoder, device="cpu")
    assert isinstance(model, st.SentenceTransformer)
    assert "sentence_transformers" in str(type(model))
    check("sentence-transformers encode", model.encode(TEXTS, **form), reference.encode(TEXTS, **form))
    check("sentence-transformers encode", model.encode(TEXTS[0], **form), reference.encode(TEXTS[0], **form))


def test_the_engine_computes_them(ours: Any, encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours.SentenceTransformer(encoder, device="cpu")
    monkeypatch.setattr(type(model), "forward", None)  # the library's loop would call it
    assert model.encode(TEXTS).shape[0] == len(TEXTS)


def test_attributes(st: Any, ours: Any, encoder: str, check: Any) -> None:
    given = {"device": "cpu", "prompts": {"query": "find: ", "document": "text: "}, "default_prompt_name": "query"}
    model, reference = ours.SentenceTransformer(encoder, **given), st.SentenceTransformer(encoder, **given)
    for name in ("max_seq_length", "prompts", "similarity_fn_name", "device", "truncate_dim"):
        assert getattr(model, name) == getattr(reference, name)
    assert model.get_sentence_embedding_dimension() == reference.get_sentence_embedding_dimension()
    check("prompts", model.encode(TEXTS), reference.encode(TEXTS))
    check("prompts", model.encode_document(TEXTS), reference.encode_document(TEXTS))
    model.max_seq_length = reference.max_seq_length = 8
    model.truncate_dim = reference.truncate_dim = 5
    check("max_seq_length", model.encode_query(TEXTS), reference.encode_query(TEXTS))
    assert model.get_sentence_embedding_dimension() == 5
    model.similarity_fn_name = reference.similarity_fn_name = "euclidean"
    vectors = reference.encode(TEXTS)
    check("similarity", model.similarity(vectors, vectors), reference.similarity(vectors, vectors), 0)


def test_token_vectors_and_the_outputs_of_modules(st: Any, ours: Any, encoder: str, check: Any) -> None:
    model, reference = ours.SentenceTransformer(encoder, device="cpu"), st.SentenceTransformer(encoder, device="cpu")
    for mine, theirs in zip(
        model.encode(TEXTS, output_value="token_embeddings"),
        reference.encode(TEXTS, output_value="token_embeddings"),
        strict=True,
    ):
        check("token vectors", mine, theirs, 1e-5)
    mine, theirs = model.encode(TEXTS, output_value=None), reference.encode(TEXTS, output_value=None)
    assert [set(one) for one in mine] == [set(one) for one in theirs]
    assert model.encode([]).shape == reference.encode([]).shape


def test_changed_modules_change_the_vectors(st: Any, ours: Any, encoder: str, check: Any) -> None:
    model, reference = ours.SentenceTransformer(encoder, device="cpu"), st.SentenceTransformer(encoder, device="cpu")
    for one in (model, reference):
        one[1].pooling_mode = "cls"
        one[1].pooling_mode_cls_token, one[1].pooling_mode_mean_tokens = True, False
    check("changed pooling", model.encode(TEXTS), reference.encode(TEXTS))


def test_saved_folders_and_pickles(st: Any, ours: Any, encoder: str, tmp_path: Path) -> None:
    model = ours.SentenceTransformer(encoder, device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    expected = st.SentenceTransformer(encoder, device="cpu").encode(TEXTS)
    assert np.array_equal(st.SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(TEXTS), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).encode(TEXTS), model.encode(TEXTS))


@pytest.mark.slow
def test_processes(ours: Any, encoder: str, check: Any) -> None:
    model = ours.SentenceTransformer(encoder, device="cpu")
    expected = model.encode(TEXTS)
    check("device=[...]", model.encode(TEXTS, device=["cpu", "cpu"]), expected)
    pool = model.start_multi_process_pool(["cpu"])
    check("pool", model.encode(TEXTS, pool=pool), expected)
    model.stop_multi_process_pool(pool)


@pytest.mark.parametrize("kind", ["cross_encoder", "classifier"])
def test_scores(st: Any, ours: Any, kind: str, check: Any, request: pytest.FixtureRequest) -> None:
    import torch

    folder = request.getfixturevalue(kind)
    model, reference = ours.CrossEncoder(folder, device="cpu"), st.CrossEncoder(folder, device="cpu")
    assert isinstance(model, st.CrossEncoder)
    for form in ({}, {"apply_softmax": True}, {"activation_fn": torch.nn.Tanh()}, {"prompt": "q: "}):
        check("sentence-transformers predict", model.predict(PAIRS, **form), reference.predict(PAIRS, **form))
    check("sentence-transformers predict", model.predict(PAIRS[0]), reference.predict(PAIRS[0]))
    if kind == "cross_encoder":
        mine, theirs = (one.rank("a query", TEXTS, return_documents=True) for one in (model, reference))
        assert [found["corpus_id"] for found in mine] == [found["corpus_id"] for found in theirs]
        check("sentence-transformers rank", [f["score"] for f in mine], [f["score"] for f in theirs])


def test_sparse_vectors(st: Any, ours: Any, check: Any, tmp_path: Path) -> None:
    folder = str(GOLDEN / "bert-masked_lm")
    model, reference = ours.SparseEncoder(folder, device="cpu"), st.SparseEncoder(folder, device="cpu")
    for form in ({}, {"max_active_dims": 4}, {"prompt": "q: "}):
        mine, theirs = model.encode(TEXTS, **form), reference.encode(TEXTS, **form)
        assert mine.layout == theirs.layout
        check("sentence-transformers sparse", mine.to_dense(), theirs.to_dense())
    model.save_pretrained(str(tmp_path / "saved"))
    again = st.SparseEncoder(str(tmp_path / "saved"), device="cpu")
    assert np.array_equal(again.encode(TEXTS).to_dense(), reference.encode(TEXTS).to_dense())


def test_training_equals_the_library_and_saves_folders(
    st: Any, ours: Any, check: Any, tmp_path: Path, without_dropout: str
) -> None:
    datasets = pytest.importorskip("datasets")
    import torch
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    data = datasets.Dataset.from_dict({"anchor": ["a b", "c d", "hello", "words"] * 3, "positive": TEXTS[:4] * 3})
    found = {}
    for library in (st, ours):
        torch.manual_seed(0)
        model = library.SentenceTransformer(without_dropout, device="cpu")
        out = tmp_path / library.__name__
        settings = st.SentenceTransformerTrainingArguments(
            str(out), max_steps=3, per_device_train_batch_size=4, save_steps=3, logging_steps=1, learning_rate=1e-3,
            report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = st.SentenceTransformerTrainer(
            model=model, args=settings, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
        )
        trainer.train()
        found[library] = ([log["loss"] for log in trainer.state.log_history if "loss" in log], model.encode(TEXTS))
        loaded = st.SentenceTransformer(str(out / "checkpoint-3"), device="cpu")
        check("checkpoint", loaded.encode(TEXTS), found[library][1])
    check("SentenceTransformerTrainer losses", *(found[library][0] for library in (ours, st)))
    check("SentenceTransformerTrainer vectors", *(found[library][1] for library in (ours, st)), 1e-5)
    assert np.abs(found[ours][1] - st.SentenceTransformer(without_dropout, device="cpu").encode(TEXTS)).max() > 1e-3


def test_evaluators_accept_the_models(st: Any, ours: Any, encoder: str, cross_encoder: str) -> None:
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
    from sentence_transformers.sentence_transformer import evaluation as kinds

    first, second, scores = TEXTS[:4], TEXTS[1:], [0.1, 0.9, 0.4, 0.2]
    queries, corpus = {"q": TEXTS[0]}, dict(enumerate(TEXTS))
    evaluators = [
        kinds.EmbeddingSimilarityEvaluator(first, second, scores),
        kinds.BinaryClassificationEvaluator(first, second, [0, 1, 1, 0]),
        kinds.TripletEvaluator(first, second, TEXTS[:4][::-1]),
        kinds.InformationRetrievalEvaluator(
            queries, {str(n): text for n, text in corpus.items()}, {"q": {"0", "2"}}, show_progress_bar=False
        ),
        kinds.RerankingEvaluator([{"query": TEXTS[0], "positive": first[1:2], "negative": second[2:]}]),
    ]
    models = [library.SentenceTransformer(encoder, device="cpu") for library in (ours, st)]
    for evaluator in evaluators:
        mine, theirs = (evaluator(model) for model in models)
        assert mine == pytest.approx(theirs, abs=1e-5)
    evaluator = CrossEncoderCorrelationEvaluator(list(zip(first, second, strict=True)), scores)
    mine, theirs = (evaluator(library.CrossEncoder(cross_encoder, device="cpu")) for library in (ours, st))
    assert mine == pytest.approx(theirs, abs=1e-5)


def test_bertopic_uses_the_given_model(ours: Any, encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bertopic = pytest.importorskip("bertopic")
    from bertopic.backend import _utils

    model = ours.SentenceTransformer(encoder, device="cpu")
    assert _utils.select_backend(model).embedding_model is model
    topics = bertopic.BERTopic(embedding_model=model, min_topic_size=2)
    used = []
    encode = type(model).encode
    monkeypatch.setattr(type(model), "encode", lambda self, *a, **k: used.append(self) or encode(self, *a, **k))
    documents = [f"{text} {number}" for number in range(12) for text in TEXTS]
    topics.fit_transform(documents)
    assert used
    assert all(one is model for one in used)
    assert np.array_equal(topics._extract_embeddings(TEXTS), encode(model, TEXTS))


def test_keybert_uses_the_given_model(ours: Any, st: Any, encoder: str, check: Any) -> None:
    keybert = pytest.importorskip("keybert")
    model = ours.SentenceTransformer(encoder, device="cpu")
    extractor = keybert.KeyBERT(model)
    assert extractor.model.embedding_model is model
    text = " ".join(TEXTS)
    found, expected = (
        keybert.KeyBERT(one).extract_keywords(text) for one in (model, st.SentenceTransformer(encoder, device="cpu"))
    )
    assert [word for word, _ in found] == [word for word, _ in expected]
    check("KeyBERT", [score for _, score in found], [score for _, score in expected], 1e-3)
    vectors, words = extractor.extract_embeddings(text)
    check("KeyBERT embeddings", vectors, model.encode([text]), 1e-6)
    assert len(words)
