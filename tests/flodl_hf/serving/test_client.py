"""Our client, with and without asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from serving_models import MASKED, QUESTIONS, TEXTS

from flodl_hf.client import AsyncClient, Client, ServerError


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
        with pytest.raises(ServerError, match="no answer"):
            client.embed("a")
