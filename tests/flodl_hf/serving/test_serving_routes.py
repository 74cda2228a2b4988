"""Every door answers what the model's own method gives, and refuses what is wrong in the words of its convention."""

from __future__ import annotations

import base64
import importlib.util
import io
from typing import Any

import numpy as np
import pytest
from serving_models import CLOSE, MASKED, QUESTIONS, TEXTS, asked, close

pytestmark = pytest.mark.filterwarnings("ignore:.*truncated")
ARROW = "application/vnd.apache.arrow.stream"


def test_vectors_are_those_of_embed(http: Any, local: dict[str, Any]) -> None:
    expected = local["embed"].embed(TEXTS).numpy()
    tei = np.array(asked(http, "/embed", inputs=TEXTS), np.float32)
    assert np.abs(tei - expected).max() < CLOSE
    floats = asked(http, "/v1/embeddings", input=TEXTS, model="embed")["data"]
    assert [row["index"] for row in floats] == list(range(len(TEXTS)))
    assert np.abs(np.array([row["embedding"] for row in floats]) - expected).max() < CLOSE
    pack_message = asked(http, "/v1/embeddings", input=TEXTS, model="embed", encoding_format="base64")["data"]
    read = np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in pack_message])
    assert np.abs(read - expected).max() < CLOSE
    assert np.abs(np.array(asked(http, "/", inputs=TEXTS, model="embed", truncate=True)) - expected).max() < CLOSE


def test_vectors_are_scaled_and_shortened_as_asked(http: Any, local: dict[str, Any]) -> None:
    for given, ours in (
        ({"normalize": False}, {"normalize": False}),
        ({"dimensions": 8}, {"truncate_dim": 8}),
        ({"truncate": True}, {}),
        ({"windows": True}, {"windows": True}),
    ):
        expected = local["embed"].embed(TEXTS, **ours).numpy()
        found = np.array(asked(http, "/embed", inputs=TEXTS, **given), np.float32)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 10 * CLOSE


def test_ids_are_taken_as_they_are(http: Any, local: dict[str, Any]) -> None:
    ids = [list(local["embed"].tokenizer.encode_rows([text])[0][0].ids) for text in TEXTS[:3]]
    expected = local["embed"].embed(TEXTS[:3]).numpy()
    assert np.abs(np.array(asked(http, "/embed", inputs=ids)) - expected).max() < CLOSE
    one = asked(http, "/v1/embeddings", input=ids[1], model="embed")["data"]
    assert np.abs(np.array(one[0]["embedding"]) - expected[1]).max() < CLOSE
    assert "ids" in http.post("/embed", json={"model": "embed", "inputs": [[1, 10_000]]}).json()["error"]
    mixed = asked(http, "/embed", inputs=[TEXTS[0], ids[1], TEXTS[2]])
    assert np.abs(np.array(mixed) - expected).max() < CLOSE


def test_ids_are_truncated_where_it_is_requested(http: Any, local: dict[str, Any]) -> None:
    most = local["embed"].max_tokens
    long = [2, *([5] * most), 3]
    for given, kept in (({}, long[:most]), ({"truncation_direction": "Left"}, long[-most:])):
        (found,) = asked(http, "/embed", inputs=[long], truncate=True, **given)
        assert found == asked(http, "/embed", inputs=[kept])[0]
    assert http.post("/embed", json={"model": "embed", "inputs": [long]}).status_code == 413


def test_ids_behind_a_prompt_are_read_as_their_text(http: Any, local: dict[str, Any]) -> None:
    ids = list(local["m3"].tokenizer.encode_rows(["the cat"])[0][0].ids)
    given = {"model": "m3", "prompt_name": "query"}
    (found,) = asked(http, "/embed", inputs=ids, **given)
    assert found == asked(http, "/embed", inputs="the cat", **given)[0]


def test_states_of_tokens(http: Any, local: dict[str, Any]) -> None:
    from torch import no_grad

    text = TEXTS[1]
    encoded = local["embed"].tokenizer([text], return_tensors="pt")
    with no_grad():
        expected = local["embed"](**{n: encoded[n] for n in ("input_ids", "attention_mask")}).last_hidden_state[0]
    (found,) = asked(http, "/embed_all", inputs=text)
    assert np.abs(np.array(found) - expected.numpy()).max() < 10 * CLOSE
    (pooled,) = asked(http, "/pooling", input=text, model="embed")["data"]
    close(pooled["data"], found)
    long = asked(http, "/embed_all", inputs=[TEXTS[4], text], windows=True)
    assert len(long[0]) > 64
    assert np.abs(np.array(long[1]) - np.array(found)).max() < 10 * CLOSE


def test_classes_are_those_of_predict(http: Any, local: dict[str, Any]) -> None:
    expected = [one.to_rows() for one in local["classes"].predict(TEXTS)]
    found = asked(http, "/v1/classify", inputs=TEXTS, model="classes")
    close([row["labels"] for row in found["results"]], expected)
    assert found["usage"]["windows"] > len(TEXTS)
    tei = asked(http, "/predict", inputs=[[text] for text in TEXTS], model="classes")
    close(tei, [[{"score": one["score"], "label": one["label"]} for one in row] for row in expected])
    close(asked(http, "/predict", inputs=TEXTS[0], model="classes"), tei[0])
    vllm = asked(http, "/classify", input=TEXTS, model="classes")["data"]
    assert [row["label"] for row in vllm] == [row[0]["label"] for row in expected]
    assert [sum(row["probs"]) for row in vllm] == pytest.approx([1.0] * len(TEXTS))
    raw = asked(http, "/predict", inputs=TEXTS[0], model="classes", raw_scores=True)
    plain = local["classes"].predict(TEXTS[0], function_to_apply="none")
    close([one["score"] for one in raw], [one.score for one in plain])
    hub = asked(http, "/models/classes/-", inputs=TEXTS[0])
    close(hub, [[{"label": one["label"], "score": one["score"]} for one in expected[0]]])


def test_pairs_and_texts_may_be_mixed(http: Any, local: dict[str, Any]) -> None:
    model = local["classes"]
    found = asked(http, "/predict", inputs=[["a cat"], ["a cat", "the dog"]], model="classes")
    expected = [model.predict("a cat"), model.predict([("a cat", "the dog")])[0]]
    close([row[0]["score"] for row in found], [one.score for one in expected])


def test_ranking_is_that_of_rerank(http: Any, local: dict[str, Any]) -> None:
    query = "who lives in paris"
    expected = local["ranker"].rerank(query, TEXTS)
    order = [one.index for one in expected]
    tei = asked(http, "/rerank", query=query, texts=TEXTS, return_text=True)
    assert [one["index"] for one in tei] == order
    assert [one["text"] for one in tei] == [TEXTS[i] for i in order]
    close([one["score"] for one in tei], [one.score for one in expected])
    for path in ("/v1/rerank", "/v2/rerank"):
        found = asked(http, path, query=query, documents=TEXTS, model="ranker", top_n=2)
        assert [one["index"] for one in found["results"]] == order[:2]
    objects = asked(http, "/v2/rerank", query=query, documents=[{"text": t} for t in TEXTS], model="ranker")
    assert [one["index"] for one in objects["results"]] == order
    scores = asked(http, "/score", text_1=query, text_2=TEXTS, model="ranker")["data"]
    by_place = {one.index: one.score for one in expected}
    close([one["score"] for one in scores], [by_place[i] for i in range(len(TEXTS))])
    short = http.post(
        "/v2/rerank", json={"query": "cat", "documents": TEXTS, "model": "ranker", "max_tokens_per_doc": 2}
    )
    assert "tokens were truncated" in short.json()["meta"]["warnings"][0]


def test_likeness_is_that_of_similarity(http: Any, local: dict[str, Any]) -> None:
    expected = local["embed"].similarity(TEXTS[:1], TEXTS[1:])[0].tolist()
    body = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    close(asked(http, "/similarity", inputs=body, parameters={"truncate": True}), expected)
    close(asked(http, "/", inputs=body, model="embed", parameters={"truncate": True}), expected)
    scores = asked(http, "/score", text_1=TEXTS[0], text_2=TEXTS[1:], model="embed", truncate_prompt_tokens=-1)["data"]
    close([one["score"] for one in scores], expected)


def test_entities_answers_masks_and_labels_of_ones_own(http: Any, local: dict[str, Any]) -> None:
    entities = asked(http, "/v1/entities", inputs=TEXTS)["results"]
    close([row["entities"] for row in entities], [as_lists(one.to_rows()) for one in local["ner"].predict(TEXTS)])
    for text, row in zip(TEXTS, entities, strict=True):
        assert all(text[one["start"] : one["end"]] == one["word"] for one in row["entities"])
    answers = asked(http, "/v1/answer", inputs=QUESTIONS, top_k=2)["results"]
    expected = local["qa"].answer_batch([tuple(pair) for pair in QUESTIONS], top_k=2)
    close([row["answers"] for row in answers], [one.to_rows() for one in expected])
    objects = asked(http, "/v1/answer", inputs={"question": QUESTIONS[0][0], "context": QUESTIONS[0][1]}, top_k=2)
    close(objects["results"][0], answers[0])
    for more in ({"top_k": 3}, {"targets": ["cat", "paris"]}):
        masks = asked(http, "/v1/fill-mask", inputs=MASKED, **more)["results"]
        close(
            [row["masks"] for row in masks],
            [as_lists(o.to_dict()["masks"]) for o in local["mlm"].fill_mask(MASKED, **more)],
        )
    labels = ["animal", "city", "work"]
    zero = asked(http, "/v1/zero-shot", inputs=TEXTS, labels=labels, multi_label=True)["results"]
    expected = local["nli"].zero_shot(TEXTS, labels, multi_label=True)
    close([row["labels"] for row in zero], [one.to_rows() for one in expected])


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_lists(part) for name, part in value.items()}
    return [as_lists(part) for part in value] if isinstance(value, (list, tuple)) else value


def test_weights_of_words_and_vectors_of_tokens(http: Any, local: dict[str, Any]) -> None:
    for name in ("m3", "mlm"):
        found = asked(http, "/embed_sparse", inputs=TEXTS[:4], model=name)
        expected = local[name].embed_sparse(TEXTS[:4])
        for place, row in enumerate(found):
            assert {one["index"]: one["value"] for one in row} == pytest.approx(expected[place], abs=10 * CLOSE)
            assert [one["index"] for one in row] == sorted(one["index"] for one in row)
    for query in (False, True):
        answer = http.post("/v1/late-interaction", json={"inputs": TEXTS, "query": query})
        rows = [np.array(row["vectors"]) for row in answer.json()["results"]]
        for mine, expected in zip(rows, local["m3"].embed_tokens(TEXTS, query=query), strict=True):
            assert mine.shape == tuple(expected.shape)
            assert np.abs(mine - expected.numpy()).max() < 10 * CLOSE
        # What the folder cuts is told.
        assert answer.json()["usage"]["dropped_tokens"] > 0
        assert int(answer.headers["x-flodl-dropped-tokens"]) == answer.json()["usage"]["dropped_tokens"]


def test_prompts_of_the_folder(http: Any, local: dict[str, Any]) -> None:
    found = np.array(asked(http, "/embed", inputs=TEXTS, model="m3", prompt_name="query"))
    assert np.abs(found - local["m3"].embed(TEXTS, prompt_name="query").numpy()).max() < 10 * CLOSE


def test_the_root_answers_as_pipelines_do(http: Any) -> None:
    (entity, *_) = asked(http, "/models/ner/-", inputs=TEXTS[0])
    assert set(entity) == {"entity_group", "score", "word", "start", "end"}
    answer = asked(http, "/models/qa/-", inputs={"question": "who", "context": "ada lives in paris"})
    assert set(answer) == {"answer", "score", "start", "end"}
    fills = asked(http, "/models/mlm/-", inputs=MASKED[0], parameters={"top_k": 2})
    assert [set(one) for one in fills] == [{"score", "token", "token_str", "sequence"}] * 2
    zero = asked(http, "/models/nli/-", inputs="a cat", parameters={"candidate_labels": ["animal", "city"]})
    assert sum(one["score"] for one in zero) == pytest.approx(1.0)


def test_tokens_go_out_and_come_back(http: Any) -> None:
    (tokens,) = asked(http, "/tokenize", inputs="The cat", model="embed")
    assert [(one["text"], one["start"], one["stop"]) for one in tokens if not one["special"]] == [
        ("The", 0, 3), ("cat", 4, 7),
    ]  # fmt: skip
    assert asked(http, "/decode", ids=[one["id"] for one in tokens], model="embed") == ["the cat"]
    plain = asked(http, "/tokenize", inputs="The cat", model="embed", add_special_tokens=False)
    assert len(plain[0]) == 2


# ---- forms and faults ----------------------------------------------------------------------------------


def test_binary_answers(http: Any) -> None:
    expected = np.array(asked(http, "/embed", inputs=TEXTS), np.float32)
    npy = http.post(
        "/embed", json={"model": "embed", "inputs": TEXTS, "truncate": True}, headers={"accept": "application/x-npy"}
    )
    assert npy.headers["content-type"] == "application/x-npy"
    assert np.abs(np.load(io.BytesIO(npy.content)) - expected).max() < CLOSE
    arrow = {"accept": "application/vnd.apache.arrow.stream"}
    if importlib.util.find_spec("pyarrow") is None:
        assert http.post("/embed", json={"model": "embed", "inputs": TEXTS}, headers=arrow).status_code == 406
    else:
        import pyarrow as pa

        answer = http.post("/embed", json={"model": "embed", "inputs": TEXTS, "truncate": True}, headers=arrow)
        assert answer.headers["content-type"] == arrow["accept"]
        table = pa.ipc.open_stream(answer.content).read_all()
        assert table.column_names == ["vector"]
        assert np.abs(np.array(table["vector"].to_pylist()) - expected).max() < CLOSE
        assert http.post("/v1/entities", json={"inputs": "a"}, headers=arrow).status_code == 406
    msgpack = pytest.importorskip("msgpack")
    body = {"model": "embed", "inputs": TEXTS, "truncate": True}
    found = msgpack.unpackb(http.post("/embed", json=body, headers={"accept": "application/msgpack"}).content)
    assert np.abs(np.frombuffer(found["data"], found["dtype"]).reshape(found["shape"]) - expected).max() < CLOSE
    tokens = http.post("/tokenize", json={"model": "embed", "inputs": "a"}, headers={"accept": "application/msgpack"})
    assert msgpack.unpackb(tokens.content) == asked(http, "/tokenize", model="embed", inputs="a")
    rows = http.post("/v1/entities", json={"inputs": TEXTS[0]}, headers={"accept": "application/msgpack"})
    assert msgpack.unpackb(rows.content)["model"] == "ner"
    assert http.post("/v1/entities", json={"inputs": "a"}, headers={"accept": "application/x-npy"}).status_code == 406
    assert (
        http.post("/embed", json={"model": "embed", "inputs": "a"}, headers={"accept": "image/png"}).status_code == 406
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"model": "embed", "inputs": TEXTS, "truncate": True}),
        ("/embed_all", {"model": "embed", "inputs": TEXTS, "truncate": True}),
        ("/v1/embeddings", {"model": "embed", "input": TEXTS, "truncate": True}),
        ("/v1/late-interaction", {"inputs": TEXTS}),
        ("/v1/entities", {"inputs": TEXTS, "aggregation": "none", "ignore_labels": []}),
        ("/tokenize", {"model": "embed", "inputs": TEXTS}),
    ],
)
@pytest.mark.parametrize("form", ["application/json", "application/msgpack", "application/x-npy", ARROW])
def test_a_large_answer_is_that_in_one_piece(
    http: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], form: str
) -> None:
    from flodl_hf.serving import responses

    headers = {"accept": form}
    whole = http.post(path, json=body, headers=headers)
    for name, few in (("CHUNK_NUMBERS", 8), ("SEND_CHUNK_BYTES", 100)):
        monkeypatch.setattr(responses, name, few)
    pieces = http.post(path, json=body, headers=headers)
    assert pieces.status_code == whole.status_code
    assert pieces.content == whole.content
    assert pieces.headers["content-length"] == whole.headers["content-length"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": [[]] * 3000}),
        ("/decode", {"ids": [[]] * 3000}),
        ("/predict", {"inputs": ["a"] * 3000}),
        ("/v1/classify", {"inputs": [["a", "b"]] * 3000}),
        ("/v1/answer", {"inputs": [{}] * 3000}),
        ("/v2/rerank", {"query": "a", "documents": [{}] * 3000}),
        ("/", {"inputs": [["a"]] * 3000}),
    ],
)
def test_of_too_many_inputs_none_is_looked_at(http: Any, path: str, body: dict[str, Any]) -> None:
    """Looked at one by one, those of a full body would keep all other requests waiting."""
    answer = http.post(path, json={"model": "embed", **body})
    assert answer.status_code == (400 if path == "/v2/rerank" else 413)
    assert "3000 inputs, expected at most 2048" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/embed", {}, 422, "inputs is missing, "),
        ("/embed", {"text": "a", "model": "embed"}, 422, "inputs is missing (unknown: 'text'), expected a string"),
        ("/embed", {"inputs": ["a"] * 200 + [None, "a"]}, 422, "inputs: entry 200 is None, expected a string"),
        ("/embed", {"inputs": [[1], [2, 0.5]]}, 422, "inputs: entry 1 is [2, 0.5], expected"),
        ("/embed", {"inputs": [[1], 5]}, 422, "inputs is [[1], 5], expected"),
        ("/v1/answer", {"inputs": [{"question": "a", "context": "b"}, {"question": "a"}]}, 422, "inputs: entry 1 is"),
        ("/rerank", {"documents": ["a"], "model": "ranker"}, 422, "query is missing, expected it"),
        ("/embed/", {}, 404, "did you mean '/embed'?"),
        ("/health", {}, 405, "/health: found method POST, expected GET"),
        ("/embed", {"inputs": 3}, 422, "expected a string"),
        ("/embed", {"inputs": ["a", 3]}, 422, "expected a string"),
        ("/embed", {"inputs": "a", "truncate": "yes"}, 422, "true or false"),
        ("/embed", {"inputs": "a", "dimensions": 4000}, 422, "dimensions"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "prompt"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "left"),
        ("/embed", {"inputs": ["a"] * 3000}, 413, "at most 2048"),
        ("/embed", {"inputs": "a", "model": "none"}, 404, "embed"),
        ("/embed", {"inputs": "a", "model": "ner"}, 424, "no head"),
        ("/embed_sparse", {"inputs": "a", "model": "ner"}, 424, "no head for embed_sparse"),
        ("/v1/late-interaction", {"inputs": "a", "model": "embed"}, 424, "no head for late_interaction"),
        ("/v1/late-interaction", {"inputs": TEXTS[4], "truncate": False}, 413, "limit of"),
        ("/predict", {"inputs": "a"}, 404, "several models"),
        ("/predict", {"inputs": [["a", "b", "c"]], "model": "classes"}, 422, "pair"),
        ("/v1/classify", {"inputs": "a", "model": "classes", "top": 1}, 422, "top_k"),
        ("/v1/answer", {"inputs": "a"}, 422, "question"),
        ("/v1/fill-mask", {"inputs": "no mask"}, 422, "[MASK]"),
        ("/v1/zero-shot", {"inputs": "a", "labels": []}, 400, "labels"),
        ("/v1/zero-shot", {"inputs": "a", "labels": ["a"] * 3000}, 413, "pairs"),
        (
            "/",
            {"inputs": "a", "model": "classes", "parameters": {"function_to_apply": 0}},
            422,
            "function_to_apply is 0",
        ),
        ("/", {"inputs": "a", "model": "classes", "parameters": {"top_k": "two"}}, 422, "top_k is 'two'"),
        ("/", {"inputs": "a", "model": "ner", "parameters": {"ignore_labels": 3}}, 422, "ignore_labels is 3"),
        ("/v1/embeddings", {"input": "a", "model": "gpt"}, 404, "gpt"),
        ("/v1/embeddings", {"input": [], "model": "embed"}, 400, "at least one"),
        ("/v2/rerank", {"query": "a", "documents": "b"}, 400, "documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3, "model": "ranker"}, 400, "the same number"),
    ],
)
def test_faults_say_what_is_wrong(http: Any, path: str, body: Any, status: int, word: str) -> None:
    answer = http.post(path, json={"model": "embed", **body} if path == "/embed" else body)
    assert answer.status_code == status, answer.text
    told = answer.json()
    message = told.get("message") or (told["error"]["message"] if isinstance(told["error"], dict) else told["error"])
    assert word in message
    if path in ("/v1/embeddings", "/score"):
        assert set(told["error"]) == {"message", "type", "param", "code"}
    elif path == "/v2/rerank":
        assert set(told) == {"message"}
    else:
        assert set(told) == {"error", "error_type"}


def test_vllms_word_for_cutting(http: Any, local: dict[str, Any]) -> None:
    long, model = "good film " * 60, local["classes"]
    for size, expected in ((None, model.predict([long])), (-1, model.predict([long], truncate=True))):
        answer = http.post("/classify", json={"input": [long], "model": "classes", "truncate_prompt_tokens": size})
        (found,) = answer.json()["data"]
        scores = {one.label: one.score for one in expected[0]}
        assert found["probs"] == pytest.approx([scores[label] for label in model.config.labels], abs=CLOSE)
        assert (int(answer.headers.get("x-flodl-dropped-tokens", 0)) > 0) == (size == -1)
        assert (answer.json()["usage"]["dropped_tokens"] > 0) == (size == -1)
    assert model.predict([long])[0][0].score != model.predict([long], truncate=True)[0][0].score
    for path, fields in (
        ("/score", {"text_1": "a", "text_2": long, "model": "ranker"}),
        ("/pooling", {"input": long, "model": "embed"}),
    ):
        cut = http.post(path, json={**fields, "truncate_prompt_tokens": -1})
        shorter = http.post(path, json={**fields, "truncate_prompt_tokens": 10})
        dropped = [int(answer.headers["x-flodl-dropped-tokens"]) for answer in (cut, shorter)]
        assert dropped[1] - dropped[0] == 64 - 10
        refused = http.post(path, json={**fields, "truncate_prompt_tokens": 0})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_what_is_said_of_the_server(http: Any, served: tuple[str, Any]) -> None:
    from flodl_hf.serving.routes.route import ROUTES

    info = http.get("/info").json()
    for name in ("model_id", "model_dtype", "model_type", "max_concurrent_requests", "max_input_length",
                 "max_batch_tokens", "max_client_batch_size", "auto_truncate", "version"):  # fmt: skip
        assert name in info
    assert info["max_input_length"] == 64
    assert [row["id"] for row in http.get("/v1/models").json()["data"]] == list(info["models"])
    document = http.get("/openapi.json").json()
    routes = {(route.path.replace(":path", ""), *route.methods - {"HEAD"}) for route in served[1].routes}
    assert {(path, method.upper()) for path, said in document["paths"].items() for method in said} == routes
    names = [one["operationId"] for said in document["paths"].values() for one in said.values() if "operationId" in one]
    assert len(names) == len(set(names)) == 2 * len(ROUTES)
    assert document["paths"]["/v1/classify"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "required"
    ] == ["inputs"]
    asked(http, "/embed", inputs="a")
    metrics = http.get("/metrics").text
    for name in ("te_request_count", "te_request_success", "te_request_duration_bucket", "te_batch_next_tokens_sum",
                 "te_queue_size", "flodl_tokens_total", "flodl_batch_fill", "flodl_operations_total"):  # fmt: skip
        assert f"\n{name}" in metrics
    gauges = dict(line.split() for line in metrics.splitlines() if line.startswith("flodl_device"))
    assert float(gauges["flodl_device_peak_operations"]) > 1e6
    assert 0 < float(gauges["flodl_device_share"]) < 1
    # Of two layers: query, key, value and output of 32 x 32, up and down of 32 x 48; a pooler has no part in it.
    assert info["models"]["embed"]["operations"] == 2 * 2 * (4 * 32 * 32 + 2 * 32 * 48)
    for line in metrics.splitlines():
        assert line.startswith("#") or (len(line.split()) == 2 and float(line.split()[1]) >= 0)
    page = http.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "access-control-allow-origin" not in page.headers
    assert "server" not in page.headers
    assert http.get("/health").json() == http.get("/ping").json() == {"ready": True}
    get = http.get("/embed")
    assert (get.status_code, get.headers["allow"]) == (405, "POST")
    pack_message = http.post(
        "/embed", content=b"{}", headers={"content-type": "application/json", "content-encoding": "gzip"}
    )
    assert pack_message.status_code == 415
    assert "not compressed" in pack_message.text
