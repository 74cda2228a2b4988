"""A server of one model, used by clients of other servers that do not know its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import ConfigError
from flodl_hf.serving import Served, Settings, served, serving
from flodl_hf.serving.settings import usual_http_processes


@pytest.fixture(scope="module")
def encoder(folders: dict[str, Path]) -> Iterator[Any]:
    import httpx

    with serving(folders["embed"].as_posix(), devices=("cpu",)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture(scope="module")
def ranker(folders: dict[str, Path]) -> Iterator[Any]:
    import httpx

    models = Settings(models=(Served("*", str(folders["ranker"])), Served("ner", str(folders["ner"])))).models
    with serving(models, devices=("cpu",)) as url, httpx.Client(base_url=url) as client:
        yield client


def test_any_model_name_is_accepted(encoder: Any, folders: dict[str, Path]) -> None:
    expected = encoder.post("/embed", json={"inputs": "a cat"}).json()
    found = encoder.post("/v1/embeddings", json={"model": "text-embedding-3-small", "input": "a cat"}).json()
    assert found["data"][0]["embedding"] == expected[0]
    assert found["model"] == folders["embed"].name
    assert encoder.get("/v1/models/text-embedding-3-small").json()["id"] == found["model"]
    info = encoder.get("/info").json()
    assert (info["model_id"], info["served_model_name"]) == (found["model"], found["model"])


def test_a_star_answers_for_unknown_names(ranker: Any) -> None:
    body = {"query": "cat", "texts": ["a cat", "dog"]}
    expected = ranker.post("/rerank", json={**body, "model": "*"}).json()
    assert ranker.post("/rerank", json={**body, "model": "any"}).json() == expected
    assert ranker.post("/v1/entities", json={"inputs": "ada", "model": "ner"}).status_code == 200
    assert ranker.post("/v1/entities", json={"inputs": "ada", "model": "any"}).status_code == 424
    # The root of a ranking model, as in text-embeddings-inference, SageMaker and Vertex AI.
    named = {**body, "model": "any"}
    assert ranker.post("/", json=named).json() == expected
    assert ranker.post("/invocations", json=named).json() == expected
    assert ranker.post("/vertex", json={"instances": [named, named]}).json() == {"predictions": [expected, expected]}
    assert ranker.post("/", json={"query": "cat", "model": "any"}).json()["error"].startswith("texts is missing")
    documents = ranker.post("/rerank", json={"query": "cat", "documents": body["texts"], "model": "any"}).json()
    assert [row["relevance_score"] for row in documents["results"]] == [row["score"] for row in expected]


def test_instances_are_bodies_of_the_root(encoder: Any) -> None:
    bodies = [{"inputs": "a cat"}, {"inputs": ["a", "b"], "normalize": False}]
    expected = [encoder.post("/", json=body).json() for body in bodies]
    assert encoder.post("/vertex", json={"instances": bodies}).json() == {"predictions": expected}
    refused = encoder.post("/vertex", json={"instances": [{"inputs": "a"}, {"inputs": "a", "nothing": 1}]})
    assert refused.status_code == 422
    assert "instances[1].nothing" in refused.json()["error"]


def test_paths_of_other_servers(encoder: Any) -> None:
    assert encoder.get("/ping").status_code == 200
    whole = encoder.post("/embeddings", json={"input": "a cat", "model": "m"})
    assert whole.json() == encoder.post("/v1/embeddings", json={"input": "a cat", "model": "m"}).json()
    pairs = {"text_1": "a cat", "text_2": ["a dog", "a mat"]}
    scores = [encoder.post(path, json=pairs).json()["data"] for path in ("/score", "/v1/score")]
    assert scores[0] == scores[1]
    page = encoder.get("/docs")
    assert (page.status_code, "openapi.json" in page.text) == (200, True)
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_times_of_a_request(encoder: Any) -> None:
    headers = encoder.post("/embed", json={"inputs": "a cat"}).headers
    parts = [float(headers[f"x-{name}-time"]) for name in ("tokenization", "queue", "inference")]
    assert min(parts) >= 0
    assert sum(parts) <= float(headers["x-total-time"]) + 0.2
    assert headers["x-compute-time"] == headers["x-total-time"]
    assert (headers["x-compute-characters"], headers["x-compute-tokens"]) == ("5", "4")


@pytest.mark.parametrize(("path", "key"), [("/v1/none", "error.message"), ("/v2/none", "message"), ("/none", "error")])
def test_unknown_paths_have_the_error_of_their_convention(encoder: Any, path: str, key: str) -> None:
    answer = encoder.post(path, json={})
    found = answer.json()
    for part in key.split("."):
        found = found[part]
    assert answer.status_code == 404
    assert path in found


def test_names_of_models() -> None:
    def names(*models: str | Served, **options: Any) -> list[str]:
        return [model.name for model in served(models, **options)]

    assert names("models/a/", "org/b", "c=models/a", Served("d", "e")) == ["a", "b", "c", "d"]
    assert names("x/a", "y/a") == ["x/a", "y/a"]
    assert names("models/a", name="mine") == ["mine"]
    assert names("x=models/a", name="mine") == ["mine"]
    with pytest.raises(ConfigError):
        names("a", "b", name="mine")


def test_the_number_of_http_processes_follows_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cores in (1, 8, 15, 16, 64):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        found.append(usual_http_processes())
    assert found == [1, 1, 1, 2, 4]
