"""Our client, with and without asyncio."""

from __future__ import annotations

import asyncio
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from serving_models import MASKED, QUESTIONS, TEXTS
from typer.testing import CliRunner

from flodl.errors import DataError
from flodl_hf import load, predict_file
from flodl_hf.cli.app import app
from flodl_hf.serving import serving
from flodl_hf.serving.client import AsyncClient, Client, ServerError

pytestmark = pytest.mark.filterwarnings("ignore:.*truncated")


def test_both_clients_give_what_the_models_give(served: tuple[str, Any], local: dict[str, Any]) -> None:
    url = served[0]
    vectors = local["embed"].embed(TEXTS).numpy()

    async def asked() -> list[Any]:
        async with AsyncClient(url) as client:
            return await asyncio.gather(
                client.embed(TEXTS, model="embed"), client.classify(TEXTS[:2], model="classes", top_k=1), client.entities(TEXTS),
                client.answer(QUESTIONS), client.fill_mask(MASKED, top_k=2), client.zero_shot(TEXTS[0], ["a", "b"]),
                client.rerank("cat", TEXTS, top_k=3), client.models(),
                client.embed_sparse(TEXTS, model="m3"), client.embed_tokens(TEXTS, query=True),
            )  # fmt: skip

    with Client(url) as client:
        ours = [
            client.embed(TEXTS, model="embed"), client.classify(TEXTS[:2], model="classes", top_k=1), client.entities(TEXTS),
            client.answer(QUESTIONS), client.fill_mask(MASKED, top_k=2), client.zero_shot(TEXTS[0], ["a", "b"]),
            client.rerank("cat", TEXTS, top_k=3), client.models(), client.embed_sparse(TEXTS, model="m3"),
            client.embed_tokens(TEXTS, query=True),
        ]  # fmt: skip
        assert client.healthy()
        assert client.embed("a", model="embed").shape == (32,)
        with pytest.raises(ServerError) as caught:
            client.embed("a", model="ner")
        assert (caught.value.status, caught.value.kind) == (424, "Backend")
    theirs = asyncio.run(asked())
    assert np.abs(ours[0] - vectors).max() < 2e-5
    assert np.abs(theirs[0] - vectors).max() < 2e-5
    assert [row["labels"][0]["label"] for row in ours[1]] == [one.label for one in local["classes"].predict(TEXTS[:2])]
    assert [i for i, _ in ours[6]] == [one.index for one in local["ranker"].rerank("cat", TEXTS, top_k=3)]
    assert [len(row["entities"]) for row in ours[2]] == [len(row["entities"]) for row in theirs[2]]
    assert ours[7] == theirs[7]
    sparse = local["m3"].embed_sparse(TEXTS)
    tokens = local["m3"].embed_tokens(TEXTS, query=True)
    for found in (ours, theirs):
        for (ids, weights), right, values in zip(found[8], sparse.ids, sparse.weights, strict=True):
            assert ids.tolist() == right.tolist()
            assert np.abs(weights - np.asarray(values)).max(initial=0) < 2e-5
        for vectors, right in zip(found[9], tokens, strict=True):
            assert vectors.shape == tuple(right.shape)
            assert np.abs(vectors - right.numpy()).max() < 2e-5


def test_a_server_that_is_not_there_is_told_of() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert not client.healthy()
        with pytest.raises(ServerError, match="no response"):
            client.embed("a")


@pytest.mark.parametrize("limit", ["max_inputs", "max_tokens", "max_body"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_requests_above_a_limit_of_the_server_are_split(
    served: tuple[str, Any], limit: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{text} {word}" for word in ("cat", "dog", "film", "mat") for text in ("a", "the", "good")]
    calls = {
        "embed": ((texts,), {"model": "embed"}),
        "classify": ((texts,), {"model": "classes"}),
        "entities": ((texts,), {}),
        "answer": (([("who", text) for text in texts],), {}),
        "fill_mask": (([f"{text} [MASK]" for text in texts],), {"top_k": 1}),
        "zero_shot": ((texts, ["a", "b"]), {}),
        "rerank": (("cat", texts), {"top_k": 5}),
        "embed_sparse": ((texts,), {"model": "m3"}),
        "embed_tokens": ((texts,), {}),
    }

    def answers() -> list[Any]:
        if kind is Client:
            with Client(served[0]) as client:
                return [getattr(client, name)(*args, **given) for name, (args, given) in calls.items()]

        async def awaited() -> list[Any]:
            async with AsyncClient(served[0]) as client:
                return [await getattr(client, name)(*args, **given) for name, (args, given) in calls.items()]

        return asyncio.run(awaited())

    whole = answers()
    state = served[1].state.server
    value = {"max_inputs": 5, "max_tokens": 30, "max_body": 250}[limit]
    monkeypatch.setattr(state, "settings", replace(state.settings, **{limit: value}))
    for name, one, other in zip(calls, answers(), whole, strict=True):
        assert len(one) == len(other), name
        if name == "rerank":
            assert [index for index, _ in one] == [index for index, _ in other]
        elif name in ("embed", "embed_tokens", "embed_sparse"):
            for a, b in zip(one, other, strict=True):
                assert np.abs(np.asarray(a) - np.asarray(b)).max(initial=0) < 2e-5, name
        else:
            names = [[sorted(map(str, row)) for row in rows] for rows in (one, other)]
            assert names[0] == names[1]


def test_a_text_that_no_request_has_room_for_is_refused(
    served: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = served[1].state.server
    with Client(served[0]) as client:
        with pytest.raises(ServerError) as caught:
            client.embed(["a", TEXTS[4]], model="embed", truncate=False)
        assert (caught.value.status, caught.value.reason) == (413, "long")
        monkeypatch.setattr(state, "settings", replace(state.settings, max_tokens=10))
        with pytest.raises(ServerError) as caught:
            client.embed(["a", TEXTS[4]], model="embed")
        assert (caught.value.status, caught.value.reason) == (413, "limit")


@pytest.mark.parametrize("windows", [False, True])
def test_long_texts_have_the_vector_of_python(served: tuple[str, Any], local: dict[str, Any], windows: bool) -> None:
    expected = local["embed"].embed(TEXTS, windows=windows).numpy()
    with Client(served[0]) as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert np.abs(client.embed(TEXTS, model="embed", windows=windows) - expected).max() < 2e-5
        assert np.abs(client.embed(TEXTS[4], model="embed", windows=windows) - expected[4]).max() < 2e-5
    assert [one.category for one in caught] == ([] if windows else [UserWarning, UserWarning])


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("embed", ("a\ud800b",)),
        ("embed", (["a", "\udfff"],)),
        ("classify", ([("a", "\ud800")],)),
        ("rerank", ("\ud800", ["a"])),
        ("rerank", ("a", ["\ud800"])),
        ("zero_shot", ("a", ["\ud800"])),
        ("embed", ([b"a"],)),
        ("embed", ([float("nan")],)),
    ],
)
def test_texts_that_cannot_be_sent_are_refused(kind: Any, method: str, given: Any) -> None:
    async def awaited() -> None:
        async with AsyncClient("http://127.0.0.1:9") as client:
            await getattr(client, method)(*given)

    def waited() -> None:
        with Client("http://127.0.0.1:9") as client:
            getattr(client, method)(*given)

    with pytest.raises(DataError) as caught:
        waited() if kind is Client else asyncio.run(awaited())
    str(caught.value).encode()  # the message can be written


# Of sentence_transformers.SentenceTransformer(folder).encode(texts, normalize_embeddings=True), version 6.2, with texts
# shorter and longer than the 64 tokens of the model: the first four numbers.
BY_SENTENCE_TRANSFORMERS = [
    [-0.0697475225, 0.0477690101, -0.0354044698, -0.1312908828],
    [-0.0343670882, -0.1402464658, -0.0020148042, -0.2214272469],
]


def test_a_text_has_one_vector_everywhere(folders: dict[str, Path], tmp_path: Path) -> None:
    texts, exact = [TEXTS[3], TEXTS[4]], {"batch_invariant": True}
    model = load(folders["embed"])
    expected = model.embed(texts, **exact).numpy()
    assert np.abs(expected[:, :4] - np.array(BY_SENTENCE_TRANSFORMERS)).max() < 1e-6
    found = {
        "encode": model.encode(texts, normalize_embeddings=True, **exact),
        "alone": np.stack([model.embed(text, **exact).numpy() for text in texts]),
        "iterator": np.stack([vector.numpy() for vector in model.embed(iter(texts), **exact)]),
    }
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    predict_file(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", **exact)
    rows = (tmp_path / "out.jsonl").read_text().splitlines()
    found["file"] = np.array([json.loads(row)["embedding"] for row in rows], np.float32)
    done = CliRunner().invoke(app, ["predict", str(folders["embed"]), *texts, "--json", "--batch-invariant"])
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found["command"] = np.array([json.loads(line)["result"] for line in lines], np.float32)
    with serving(f"m={folders['embed']}", devices=("cpu",), **exact) as url, Client(url) as client:  # type: ignore[arg-type]
        found["client"] = client.embed(texts)
        for path, body in (
            ("/embed", {"inputs": texts, "truncate": True}),
            ("/", {"inputs": texts, "parameters": {"truncate": True}}),
            ("/v1/embeddings", {"input": texts, "truncate": True}),
            ("/pooling", {"input": texts, "truncate_prompt_tokens": -1, "task": "embed"}),
        ):
            answer = httpx.post(f"{url}{path}", json=body).json()
            rows = answer["data"] if isinstance(answer, dict) else answer
            vectors = [row.get("embedding", row.get("data")) if isinstance(row, dict) else row for row in rows]
            found[path] = np.array(vectors, np.float32)
    for name, vectors in found.items():
        assert np.array_equal(vectors, expected), name
