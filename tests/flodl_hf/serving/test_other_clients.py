"""Clients of other makers against the server: what they send is understood, and they understand the answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
from serving_models import MASKED
from serving_models import TEXTS as ALL

CLOSE = 2e-5
TEXTS, LONG_CHARACTERS = [text for text in ALL if len(text) < 100], ALL[4]
# Their libraries warn of themselves.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_openais(served: tuple[str, Any], local: dict[str, Any]) -> None:
    openai = pytest.importorskip("openai")
    expected = local["embed"].embed(TEXTS).numpy()
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0) as client:
        # By default it asks for base64 and reads that.
        found = client.embeddings.create(model="embed", input=TEXTS)
        assert np.abs(np.array([row.embedding for row in found.data]) - expected).max() < CLOSE
        assert found.usage.prompt_tokens > 0
        floats = client.embeddings.create(model="embed", input=TEXTS[0], encoding_format="float", dimensions=8)
        assert len(floats.data[0].embedding) == 8
        ids = list(local["embed"].tokenizer.encode_rows([TEXTS[0]])[0][0].ids)
        by_ids = client.embeddings.create(model="embed", input=ids)
        assert np.abs(np.array(by_ids.data[0].embedding) - expected[0]).max() < CLOSE
        assert "embed" in {model.id for model in client.models.list()}
        assert client.models.retrieve("embed").id == "embed"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="embed", input=[LONG_CHARACTERS])
        cut = client.embeddings.create(
            model="embed", input=[LONG_CHARACTERS], extra_body={"truncate_prompt_tokens": 10}
        )
        assert cut.usage.prompt_tokens == 10
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.embeddings.create(model="embed", input="a", extra_body={"instruction": "b"})
        assert refused.value.param == "instruction"
        with pytest.raises(openai.NotFoundError) as caught:
            client.embeddings.create(model="gpt", input="a")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="embed", input=[])


def test_coheres(served: tuple[str, Any], local: dict[str, Any]) -> None:
    cohere = pytest.importorskip("cohere")
    httpx = pytest.importorskip("httpx")
    with httpx.Client() as connections:
        client = cohere.ClientV2(api_key="none", base_url=served[0], httpx_client=connections)
        _ask_cohere(cohere, client, local)


def _ask_cohere(cohere: Any, client: Any, local: dict[str, Any]) -> None:
    expected = local["ranker"].rerank("who lives in paris", TEXTS)
    found = client.rerank(model="ranker", query="who lives in paris", documents=TEXTS, top_n=3)
    assert [one.index for one in found.results] == [one.index for one in expected][:3]
    assert [one.relevance_score for one in found.results] == pytest.approx(
        [one.score for one in expected][:3], abs=CLOSE
    )
    vectors = local["embed"].embed(TEXTS).numpy()
    answer = client.embed(model="embed", texts=TEXTS, input_type="search_document", embedding_types=["float", "base64"])
    assert np.abs(np.array(answer.embeddings.float_) - vectors).max() < CLOSE
    assert np.abs(np.frombuffer(base64.b64decode(answer.embeddings.base64[0]), "<f4") - vectors[0]).max() < CLOSE
    with pytest.raises(cohere.errors.NotFoundError):
        client.rerank(model="none", query="a", documents=["b"])


def test_hugging_faces(served: tuple[str, Any], local: dict[str, Any]) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def client(name: str) -> Any:
        return hub.InferenceClient(model=f"{served[0]}/models/{name}/-")

    vectors = client("embed").feature_extraction(TEXTS[0])
    shorter = client("m3").feature_extraction(
        LONG_CHARACTERS, normalize=True, prompt_name="query", truncate=True, truncation_direction="left"
    )
    assert np.asarray(shorter).shape == (1, 32)
    assert np.abs(np.asarray(vectors).reshape(-1) - local["embed"].embed(TEXTS[0]).numpy().reshape(-1)).max() < CLOSE
    labels = client("classes").text_classification(TEXTS[0])
    assert [one.label for one in labels] == [one.label for one in local["classes"].predict(TEXTS[0])]
    entities = client("ner").token_classification(TEXTS[0])
    assert [one.entity_group for one in entities] == [
        one.label for one in local["ner"].predict(TEXTS[0], aggregation="simple")
    ]
    answer = client("qa").question_answering(question="who lives in paris", context=TEXTS[0])
    best = answer[0] if isinstance(answer, list) else answer
    assert best.answer == local["qa"].answer("who lives in paris", TEXTS[0]).text
    masks = client("mlm").fill_mask(MASKED[0], top_k=2)
    assert [one.token_str for one in masks] == [one.token for one in local["mlm"].fill_mask(MASKED[0], top_k=2)[0]]
    zero = client("nli").zero_shot_classification(TEXTS[0], candidate_labels=["city", "animal"])
    assert [one.label for one in zero] == [one.label for one in local["nli"].zero_shot(TEXTS[0], ["city", "animal"])]
    alike = client("embed").sentence_similarity(TEXTS[0], TEXTS[1:3])
    assert alike == pytest.approx(local["embed"].similarity(TEXTS[:1], TEXTS[1:3])[0].tolist(), abs=CLOSE)


def test_langchains(served: tuple[str, Any], local: dict[str, Any]) -> None:
    langchain = pytest.importorskip("langchain_openai")
    httpx = pytest.importorskip("httpx")
    expected = local["embed"].embed(TEXTS).numpy()
    given = {"base_url": f"{served[0]}/v1", "api_key": "none", "model": "embed", "check_embedding_ctx_length": False}

    async def awaited() -> Any:
        async with httpx.AsyncClient() as connections:
            embeddings = langchain.OpenAIEmbeddings(**given, http_client=client, http_async_client=connections)
            return await embeddings.aembed_documents(TEXTS[:3])

    with httpx.Client() as client:
        embeddings = langchain.OpenAIEmbeddings(**given, http_client=client)
        assert np.abs(np.array(embeddings.embed_documents(TEXTS)) - expected).max() < CLOSE
        assert np.abs(np.array(embeddings.embed_query(TEXTS[0])) - expected[0]).max() < CLOSE
        # In requests of its own size, put together again.
        assert np.abs(np.array(embeddings.embed_documents(TEXTS, chunk_size=2)) - expected).max() < CLOSE
        assert np.abs(np.array(asyncio.run(awaited())) - expected[:3]).max() < CLOSE
        shorter = langchain.OpenAIEmbeddings(**given, dimensions=8, http_client=client)
        assert len(shorter.embed_query("a cat")) == 8


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(served: tuple[str, Any], local: dict[str, Any]) -> None:
    def curl(path: str, body: Any, *more: str) -> bytes:
        given = ["-H", "content-type: application/json", "-d", json.dumps(body), *more, f"{served[0]}{path}"]
        return subprocess.run(["curl", "-sS", "--fail", *given], check=True, capture_output=True).stdout

    answer = json.loads(curl("/v1/classify", {"inputs": TEXTS[0], "model": "classes"}))
    best = answer["results"][0]["labels"][0]["label"]
    assert best == local["classes"].predict([TEXTS[0]])[0][0].label
    array = curl("/embed", {"inputs": TEXTS, "model": "embed"}, "-H", "accept: application/x-npy")
    found = np.load(io.BytesIO(array), allow_pickle=False)
    assert np.abs(found - local["embed"].embed(TEXTS).numpy()).max() < CLOSE
