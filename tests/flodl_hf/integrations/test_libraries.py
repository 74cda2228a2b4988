"""Classes for other libraries, each run by its library and compared with sentence-transformers' values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flodl_hf

from .conftest import GOLDEN, TEXTS


@pytest.fixture(scope="module")
def vectors(encoder: str) -> np.ndarray:
    """Vectors of the texts, by sentence-transformers where it is installed."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return flodl_hf.load(encoder, head="base").encode(TEXTS)
    return SentenceTransformer(encoder, device="cpu").encode(TEXTS)


@pytest.fixture(scope="module")
def scores(cross_encoder: str) -> np.ndarray:
    """Scores of the texts for the query "food", by sentence-transformers where it is installed."""
    pairs = [("food", text) for text in TEXTS]
    try:
        from sentence_transformers import CrossEncoder
    except ImportError:
        model = flodl_hf.load(cross_encoder, head="sequence_classification")
        return np.array([found.score for found in sorted(model.rerank("food", TEXTS), key=lambda one: one.index)])
    return CrossEncoder(cross_encoder, device="cpu").predict(pairs)


def test_langchain(encoder: str, cross_encoder: str, vectors: np.ndarray, scores: np.ndarray, check: Any) -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.documents import Document
    from langchain_core.vectorstores import InMemoryVectorStore

    from flodl_hf.compat.langchain import FlodlCrossEncoder, FlodlEmbeddings, FlodlReranker

    embeddings = FlodlEmbeddings(encoder)
    check("langchain Embeddings", embeddings.embed_documents(TEXTS), vectors)
    check("langchain Embeddings", embeddings.embed_query(TEXTS[0]), vectors[0])
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    assert store.similarity_search(TEXTS[1], k=1)[0].page_content == TEXTS[1]
    check("langchain cross-encoder", FlodlCrossEncoder(cross_encoder).score([("food", text) for text in TEXTS]), scores)
    documents = [Document(text, metadata={"n": n}) for n, text in enumerate(TEXTS)]
    found = FlodlReranker(model=cross_encoder, top_n=2).compress_documents(documents, "food")
    assert [document.metadata["n"] for document in found] == np.argsort(-scores, kind="stable")[:2].tolist()
    check("langchain compressor", [d.metadata["relevance_score"] for d in found], np.sort(scores)[::-1][:2])


def test_langchain_reranker_of_the_library(cross_encoder: str, scores: np.ndarray) -> None:
    pytest.importorskip("langchain_classic")
    from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
    from langchain_core.documents import Document

    from flodl_hf.compat.langchain import FlodlCrossEncoder

    reranker = CrossEncoderReranker(model=FlodlCrossEncoder(cross_encoder), top_n=1)
    found = reranker.compress_documents([Document(text) for text in TEXTS], "food")
    assert found[0].page_content == TEXTS[int(scores.argmax())]


def test_llama_index(encoder: str, cross_encoder: str, vectors: np.ndarray, scores: np.ndarray, check: Any) -> None:
    pytest.importorskip("llama_index.core")
    from llama_index.core.schema import NodeWithScore, TextNode

    from flodl_hf.compat.llama_index import FlodlEmbedding, FlodlReranker

    embedding = FlodlEmbedding(encoder)
    check("llama-index embedding", embedding.get_text_embedding_batch(TEXTS), vectors)
    check("llama-index embedding", embedding.get_query_embedding(TEXTS[0]), vectors[0])
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    found = FlodlReranker(cross_encoder, top_n=2).postprocess_nodes(nodes, query_str="food")
    check("llama-index reranker", [node.score for node in found], np.sort(scores)[::-1][:2])


def test_haystack(encoder: str, cross_encoder: str, vectors: np.ndarray, scores: np.ndarray, check: Any) -> None:
    haystack = pytest.importorskip("haystack")
    from flodl_hf.compat.haystack import FlodlDocumentEmbedder, FlodlRanker, FlodlTextEmbedder

    documents = [haystack.Document(content=text) for text in TEXTS]
    pipeline = haystack.Pipeline()
    pipeline.add_component("text", FlodlTextEmbedder(encoder))
    pipeline.add_component("documents", FlodlDocumentEmbedder(encoder))
    pipeline.add_component("ranker", FlodlRanker(cross_encoder, top_k=2))
    inputs = {
        "text": {"text": TEXTS[0]}, "documents": {"documents": documents},
        "ranker": {"query": "food", "documents": documents},
    }  # fmt: skip
    found = pipeline.run(inputs)
    check("haystack text embedder", found["text"]["embedding"], vectors[0])
    check("haystack document embedder", [d.embedding for d in found["documents"]["documents"]], vectors)
    check("haystack ranker", [d.score for d in found["ranker"]["documents"]], np.sort(scores)[::-1][:2])


def test_chroma(encoder: str, vectors: np.ndarray, check: Any) -> None:
    chromadb = pytest.importorskip("chromadb")
    from flodl_hf.compat.chroma import FlodlEmbeddingFunction

    function = FlodlEmbeddingFunction(encoder)
    check("chroma", function(TEXTS), vectors)
    collection = chromadb.EphemeralClient().create_collection("texts", embedding_function=function)
    collection.add(ids=[str(n) for n in range(len(TEXTS))], documents=TEXTS)
    assert collection.query(query_texts=[TEXTS[2]], n_results=1)["ids"] == [["2"]]
    again = FlodlEmbeddingFunction.build_from_config(function.get_config())
    check("chroma", again.embed_query(TEXTS), vectors)


def test_setfit(encoder: str, vectors: np.ndarray, check: Any, tmp_path: Path) -> None:
    setfit = pytest.importorskip("setfit")
    datasets = pytest.importorskip("datasets")
    from flodl_hf.compat.setfit import setfit_model

    model = setfit_model(str(GOLDEN / "bert-base"), labels=["low", "high"])
    check("setfit body", setfit_model(encoder).encode(TEXTS, show_progress_bar=False), vectors)
    data = datasets.Dataset.from_dict({"text": TEXTS[:4], "label": [0, 1, 0, 1]})
    settings = setfit.TrainingArguments(
        output_dir=str(tmp_path), num_epochs=1, num_iterations=1, batch_size=4, report_to="none", save_strategy="no"
    )
    before = model.encode(TEXTS, show_progress_bar=False)
    setfit.Trainer(model=model, args=settings, train_dataset=data).train()
    assert np.abs(model.encode(TEXTS, show_progress_bar=False) - before).max() > 0
    assert set(model.predict(TEXTS, show_progress_bar=False)) <= {"low", "high"}


def test_spacy() -> None:
    spacy = pytest.importorskip("spacy")
    import flodl_hf.compat.spacy

    nlp = spacy.blank("en")
    nlp.add_pipe("flodl_ner", config={"model": str(GOLDEN / "bert-token_classification")})
    nlp.add_pipe("flodl_textcat", config={"model": str(GOLDEN / "bert-sequence_classification")})
    documents = list(nlp.pipe(TEXTS))
    tagger, classifier = (flodl_hf.load(GOLDEN / f"bert-{head}_classification") for head in ("token", "sequence"))
    for document, entities, labels in zip(documents, tagger.predict(TEXTS), classifier.predict(TEXTS), strict=True):
        assert document.cats == {one.label: pytest.approx(one.score) for one in labels}
        assert bool(document.ents) == bool(entities)
        for span in document.ents:
            covered = [one for one in entities if one.start < span.end_char and span.start_char < one.end]
            assert span.label_ in [one.label for one in covered]


def test_sklearn(encoder: str, vectors: np.ndarray, check: Any) -> None:
    pytest.importorskip("sklearn")
    from sklearn.base import clone
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    from flodl_hf.compat.sklearn import TextClassifier, TextVectors

    check("scikit-learn", TextVectors(encoder).fit_transform(TEXTS), vectors)
    labels = ["a", "b", "a", "b", "a"]
    pipeline = clone(make_pipeline(TextVectors(encoder), LogisticRegression())).fit(TEXTS, labels)
    assert set(pipeline.predict(TEXTS)) <= {"a", "b"}
    options = {"epochs": 20, "batch_size": 5, "lr": 1e-2, "progress": False}
    classifier = clone(TextClassifier(str(GOLDEN / "bert-base"), options)).fit(TEXTS, labels)
    assert classifier.predict_proba(TEXTS).sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert classifier.score(TEXTS, labels) >= 0.6
    assert classifier.model_ is not None
