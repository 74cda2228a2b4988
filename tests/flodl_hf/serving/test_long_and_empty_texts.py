"""Texts that are too long or empty, at every route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from serving_models import CLOSE, TEXTS, asked, close

pytestmark = pytest.mark.filterwarnings("ignore:.*truncated")


def test_nothing_is_truncated_silently(http: Any, local: dict[str, Any]) -> None:
    long = TEXTS[4]
    dropped = len(local["embed"].tokenizer.encode_rows([long])[0][0].ids) - local["embed"].max_tokens
    whole = http.post("/embed", json={"model": "embed", "inputs": long, "windows": True})
    assert int(whole.headers["x-flodl-windows"]) > 1
    assert "x-flodl-truncated-texts" not in whole.headers
    cut = http.post("/embed", json={"model": "embed", "inputs": [long, "a"], "truncate": True})
    assert (cut.headers["x-flodl-dropped-tokens"], cut.headers["x-flodl-truncated-texts"]) == (str(dropped), "1")
    assert int(cut.headers["x-flodl-windows"]) == 2
    said = http.post("/v1/embeddings", json={"input": [long], "truncate": True, "model": "embed"}).json()
    assert said["usage"]["dropped_tokens"] == dropped
    classes = http.post("/v1/classify", json={"inputs": [long], "truncate": True, "model": "classes"}).json()
    assert classes["usage"]["dropped_tokens"] == dropped
    assert classes["usage"]["windows"] == 1
    both = http.post("/v1/entities", json={"inputs": long, "truncate": True})
    assert both.status_code == 422
    assert "windows" in both.json()["error"]


@pytest.mark.parametrize("truncate", [None, False])
@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/embed", 413, {"inputs": TEXTS}),
        ("/embed_all", 413, {"inputs": TEXTS}),
        ("/embed_sparse", 413, {"inputs": TEXTS, "model": "m3"}),
        ("/embed_sparse", 413, {"inputs": TEXTS, "model": "mlm"}),
        ("/similarity", 413, {"inputs": {"source_sentence": "a", "sentences": TEXTS}}),
        ("/", 413, {"inputs": TEXTS}),
        ("/", 413, {"inputs": {"source_sentence": "a", "sentences": TEXTS}}),
        ("/v1/embeddings", 400, {"input": TEXTS}),
        ("/pooling", 400, {"input": TEXTS}),
        ("/pooling", 400, {"input": TEXTS, "task": "embed"}),
        ("/score", 400, {"text_1": "a", "text_2": TEXTS}),
    ],
)
def test_vectors_of_texts_that_are_too_long_are_refused(
    http: Any, path: str, status: int, body: dict[str, Any], truncate: bool | None
) -> None:
    more: dict[str, Any] = {} if path in ("/pooling", "/score") else {"truncate": truncate}
    more = {"parameters": more} if path == "/similarity" else more
    answer = http.post(path, json={"model": "embed", **body, **more})
    assert answer.status_code == status, answer.text
    assert "86 tokens" in answer.text


def test_empty_texts_have_the_scores_of_python_and_a_flag(http: Any, local: dict[str, Any]) -> None:
    classes, ranker = local["classes"], local["ranker"]
    items: list[Any] = ["", "a cat", ["a cat", ""], ["", ""], "  "]
    empty = [True, False, False, True, True]
    rows = [classes.predict([tuple(item)] if isinstance(item, list) else [item])[0].to_rows() for item in items]
    found = asked(http, "/v1/classify", inputs=items, model="classes")["results"]
    close([row["labels"] for row in found], rows)
    assert [row["empty"] for row in found] == empty
    inputs = [item if isinstance(item, list) else [item] for item in items]
    answer = http.post("/predict", json={"inputs": inputs, "model": "classes"})
    assert answer.headers["x-flodl-empty-texts"] == "3"
    close([[one["score"] for one in row] for row in answer.json()], [[one["score"] for one in row] for row in rows])
    assert [[one.get("empty", False) for one in row] for row in answer.json()] == [[flag] * 3 for flag in empty]
    vllm = asked(http, "/classify", input=["", "a cat"], model="classes")["data"]
    assert [(row["label"], row.get("empty", False)) for row in vllm] == [
        (rows[0][0]["label"], True), (rows[1][0]["label"], False),
    ]  # fmt: skip
    pooled = asked(http, "/pooling", input=[""], model="classes", use_activation=True)["data"][0]["data"]
    close(sorted(pooled, reverse=True), [one["score"] for one in rows[0]])
    for query, documents in (("a cat", ["dog", "", " "]), ("", ["dog", ""])):
        expected = {one.index: one for one in ranker.rerank(query, documents)}
        tei = asked(http, "/rerank", query=query, texts=documents)
        answers = [(one["index"], one["score"], one.get("empty", False)) for one in tei]
        for path in ("/v1/rerank", "/v2/rerank"):
            ranked = asked(http, path, query=query, documents=documents, model="ranker")["results"]
            answers += [(one["index"], one["relevance_score"], one.get("empty", False)) for one in ranked]
        for index, score, flag in answers:
            close(score, expected[index].score)
            assert flag == expected[index].empty
        scores = asked(http, "/score", text_1=query, text_2=documents, model="ranker")["data"]
        close([one["score"] for one in scores], [expected[i].score for i in range(len(documents))])
        assert [one.get("empty", False) for one in scores] == [not query and not text for text in documents]


def test_empty_texts_of_other_tasks(http: Any, local: dict[str, Any]) -> None:
    for path, name in (("/v1/entities", "entities"), ("/v1/fill-mask", "masks")):
        assert asked(http, path, inputs=["  "])["results"] == [{name: [], "empty": True}], path
    (zero,) = asked(http, "/v1/zero-shot", inputs=[""], labels=["a", "b"])["results"]
    close(zero["labels"], local["nli"].zero_shot([""], ["a", "b"])[0].to_rows())
    assert zero["empty"]
    pairs = [["", "ada"], ["who", ""], ["", ""]]
    answers = asked(http, "/v1/answer", inputs=pairs)["results"]
    expected = local["qa"].answer_batch([tuple(pair) for pair in pairs])
    close([row["answers"] for row in answers], [one.to_rows() for one in expected])
    assert [row["empty"] for row in answers] == [one.empty for one in expected] == [False, True, True]
    vector = local["embed"].embed([""]).numpy()
    for path, body in (
        ("/embed", {"inputs": ""}), ("/", {"inputs": [""]}), ("/v1/embeddings", {"input": [""]}),
        ("/pooling", {"input": [""], "task": "embed"}),
    ):  # fmt: skip
        answer = http.post(path, json={"model": "embed", **body})
        assert answer.headers["x-flodl-empty-texts"] == "1"
        found = answer.json()
        row = found[0] if isinstance(found, list) else found["data"][0].get("embedding", found["data"][0].get("data"))
        assert np.abs(np.array(row) - vector[0]).max() < CLOSE
    for path, body in (("/embed", {"inputs": []}), ("/rerank", {"query": "a", "texts": []})):
        answer = http.post(path, json={"model": "embed", **body} if path == "/embed" else body)
        assert (answer.status_code, answer.json()["error_type"]) == (400, "Empty")
