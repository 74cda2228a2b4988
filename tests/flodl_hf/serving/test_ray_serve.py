"""Replicas of the server in Ray Serve, started here: answers are those of `predict`, and replicas share requests."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_models import TEXTS

from flodl.errors import ConfigError
from flodl_hf.errors import PredictError
from flodl_hf.jobs.ray import deployment

# Ray warns of itself.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def address(folders: dict[str, Path]) -> Iterator[str]:
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    paths = os.pathsep.join(sys.path)
    # Ray kills a proxy that is not there soon and starts it anew, which on a busy machine goes on for ever.
    for name in ("READY_CHECK", "HEALTH_CHECK"):
        os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", "300")
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with suppress(TimeoutError):  # it waits a minute for the proxy, which goes on being started
            serve.start(http_options={"port": port})
        models = [f"{name}={folders[name]}" for name in ("embed", "ner")]
        serve.run(deployment(models, replicas=2, max_inputs=50), name="heads", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.slow
def test_replicas_answer_as_in_python(address: str, local: dict[str, Any]) -> None:
    import httpx

    with httpx.Client(base_url=address, timeout=60) as client:
        assert client.get("/ready").json() == {"ready": True}
        single = client.post("/embed", json={"inputs": TEXTS[:1], "model": "embed"})
        assert torch.equal(torch.tensor(single.json()), local["embed"].embed(TEXTS[:1]))
        entities = client.post("/v1/entities", json={"inputs": TEXTS}).json()
        assert [one["entities"] for one in entities["results"]] == [
            one.to_rows() for one in local["ner"].predict(TEXTS)
        ]
        assert client.post("/v1/embeddings", json={"input": ["a"] * 51}).status_code == 400
        asked = {"input": TEXTS, "model": "embed", "truncate": True}
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: client.post("/v1/embeddings", json=asked), range(40)))
    assert {answer.status_code for answer in found} == {200}
    expected = local["embed"].embed(TEXTS)
    for answer in found:
        vectors = torch.tensor([row["embedding"] for row in answer.json()["data"]])
        torch.testing.assert_close(vectors, expected, rtol=0, atol=2e-5)


def test_what_makes_no_sense_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(PredictError, match=r"flodl-hf\[ray\]"):
        deployment("m")
    monkeypatch.setitem(sys.modules, "ray.serve", object())
    with pytest.raises(ConfigError, match="no model"):
        deployment([])
