"""The table of fields of each route: each field is applied, has no effect on numbers, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving_models import MASKED, MODELS, QUESTIONS, TEXTS

from flodl_hf.serving.routes.route import ROUTES, Field

pytestmark = pytest.mark.filterwarnings("ignore:.*truncated")
LONG_CHARACTERS = "good film " + TEXTS[4] + " the cat ran"
LABELS = MODELS["ner"][1]
CUT = {"truncate": True}
SHORT_CHARACTERS = {"truncate_prompt_tokens": 8}
PAIR = {"source_sentence": "a cat", "sentences": ["dog", "a mat"]}
LONG_PAIR = {"source_sentence": "a cat", "sentences": ["dog", LONG_CHARACTERS]}
RANKED = {"model": "ranker", "query": "cat", "documents": ["a cat", LONG_CHARACTERS]}
QA = {"model": "qa", "inputs": {"question": QUESTIONS[1][0], "context": QUESTIONS[1][1]}}
PARTS = {"model": "qa", "inputs": {"question": "who ran", "context": "catdogs ratmats goodfilms " * 3}}
NER = {"model": "ner", "inputs": LONG_CHARACTERS}

# A request to each route, and for each field that is applied a value that changes the answer: the value, and what is
# in both requests besides. Parameters of the Hugging Face routes have a request of their own.
REQUESTS: dict[str, dict[str, Any]] = {
    "/embed": {"model": "m3", "inputs": ["a cat", "dog"]},
    "/embed_all": {"model": "m3", "inputs": ["a cat", "dog"]},
    "/embed_sparse": {"model": "m3", "inputs": ["a cat", "dog"]},
    "/predict": {"model": "classes", "inputs": [["a cat"], ["dog"]]},
    "/rerank": {"model": "ranker", "query": "cat", "texts": ["a cat", "dog"]},
    "/similarity": {"model": "m3", "inputs": PAIR},
    "/tokenize": {"model": "m3", "inputs": ["a cat"]},
    "/decode": {"model": "m3", "ids": [[2, 5, 6, 3]]},
    "/v1/embeddings": {"model": "m3", "input": ["a cat", "dog"]},
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
    "/classify": {"model": "classes", "input": ["a cat", LONG_CHARACTERS]},
    "/score": {"model": "ranker", "text_1": "cat", "text_2": ["a cat", LONG_CHARACTERS]},
    "/pooling": {"model": "embed", "input": ["a cat", "dog"]},
    "/v1/classify": {"model": "classes", "inputs": ["a cat", LONG_CHARACTERS]},
    "/v1/entities": NER,
    "/v1/answer": QA,
    "/v1/fill-mask": {"model": "mlm", "inputs": MASKED},
    "/v1/zero-shot": {"model": "nli", "inputs": ["a cat"], "labels": ["animal", "city"]},
    "/v1/late-interaction": {"model": "m3", "inputs": ["a cat", "dog"]},
    "/": {"model": "m3", "inputs": ["a cat", "dog"]},
    "/v2/embed": {"model": "m3", "texts": ["a cat", LONG_CHARACTERS]},
    "/vertex": {"instances": [{"model": "m3", "inputs": ["a cat", "dog"]}]},
}
# Paths with the fields and the function of another.
SAME = {"/embeddings": "/v1/embeddings", "/v1/score": "/score", "/invocations": "/"}
REQUESTS |= {path: REQUESTS[other] for path, other in SAME.items()}
SHORTENED = {"truncate_prompt_tokens": (8, {}), "truncation_side": ("left", SHORT_CHARACTERS)}
TEI = {"truncation_direction": ("Left", {**CUT, "inputs": LONG_CHARACTERS}), "prompt_name": ("query", {})}
VECTORS = {**TEI, "normalize": (True, {}), "dimensions": (8, {})}
RAW = {"use_activation": (False, {}), "activation": (False, {}), "softmax": (False, {}), "raw_scores": (True, {})}
CLASSES = {"model": "classes", "inputs": ["a cat", LONG_CHARACTERS]}
APPLIED: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "/embed": VECTORS,
    "/embed_all": TEI,
    "/embed_sparse": TEI,
    "/predict": {
        "raw_scores": (True, {}),
        "truncate": (True, {"inputs": LONG_CHARACTERS}),
        "truncation_direction": ("left", {**CUT, "inputs": LONG_CHARACTERS}),
    },
    "/rerank": {
        "raw_scores": (True, {}),
        "return_text": (True, {}),
        "truncate": (True, {"texts": ["a", LONG_CHARACTERS]}),
        "truncation_direction": ("left", {**CUT, "texts": ["a", LONG_CHARACTERS]}),
    },
    "/similarity": {
        "parameters.truncation_direction": ("left", {"parameters": CUT, "inputs": LONG_PAIR}),
        "parameters.prompt_name": ("query", {}),
    },
    "/tokenize": {"add_special_tokens": (False, {}), "prompt_name": ("query", {})},
    "/decode": {"skip_special_tokens": (False, {})},
    "/v1/embeddings": {
        "encoding_format": ("base64", {}),
        "dimensions": (8, {}),
        "normalize": (True, {}),
        "use_activation": (True, {}),
        "truncate_prompt_tokens": (3, {}),
        "truncation_side": ("left", {"truncate_prompt_tokens": 3}),
        "prompt_name": ("query", {}),
        "input_type": ("query", {}),
    },
    "/v2/rerank": {
        "top_n": (1, {}),
        "max_tokens_per_doc": (1, {}),
        "return_documents": (True, {}),
        "truncate": (True, {}),
        **SHORTENED,
        **RAW,
    },
    "/v2/embed": {
        "input_type": ("search_query", {}),
        "embedding_types": (["base64"], {}),
        "truncate": ("START", {}),
        "max_tokens": (3, {}),
        "output_dimension": (8, {}),
    },
    "/classify": {**SHORTENED, **RAW},
    "/score": {**SHORTENED, **RAW},
    "/pooling": {
        "task": ("embed", {}),
        "dimensions": (8, {}),
        "normalize": (True, {}),
        "encoding_format": ("base64", {}),
        "use_activation": (True, {}),
        "truncate_prompt_tokens": (3, {}),
        "truncation_side": ("left", {"truncate_prompt_tokens": 3}),
        **{name: (name == "raw_scores", {"model": "classes"}) for name in ("activation", "softmax", "raw_scores")},
    },
    "/v1/classify": {
        "top_k": (1, {}),
        "threshold": (0.3, {}),
        "activation": ("none", {}),
        "truncate": (True, {}),
        "long_texts": ("truncate", {}),
        "truncation_direction": ("left", CUT),
    },
    "/v1/entities": {"aggregation": ("none", {}), "ignore_labels": (LABELS, {}), "constrained": (True, {})},
    "/v1/answer": {"top_k": (3, {}), "max_answer_length": (1, {"top_k": 9}), "no_answer": (True, {"top_k": 40})},
    "/v1/fill-mask": {"top_k": (1, {}), "targets": (["cat"], {})},
    "/v1/zero-shot": {"template": ("a {}", {}), "multi_label": (True, {})},
    "/": {
        **VECTORS,
        **{f"parameters.{name}": value for name, value in VECTORS.items()},
        "raw_scores": (True, CLASSES),
        "return_text": (True, {"model": "ranker", "query": "cat", "texts": ["a cat"], "inputs": None}),
        "parameters.top_k": (1, CLASSES),
        "parameters.function_to_apply": ("NONE", CLASSES),
        "parameters.threshold": (0.3, CLASSES),
        "parameters.truncate": (True, CLASSES),
        "parameters.truncation": (True, CLASSES),
        "parameters.hypothesis_template": (
            "a {}", {"model": "nli", "inputs": "a cat", "parameters": {"candidate_labels": "animal, city"}},
        ),
        "parameters.multi_label": (
            True, {"model": "nli", "inputs": "a cat", "parameters": {"candidate_labels": ["animal", "city"]}},
        ),
        "parameters.candidate_labels": ("animal, city", {"model": "nli", "inputs": "a cat"}),
        "parameters.aggregation_strategy": ("none", NER),
        "parameters.ignore_labels": (LABELS, NER),
        "parameters.stride": (30, NER),
        "parameters.topk": (3, QA),
        "parameters.max_answer_len": (1, {**QA, "parameters": {"top_k": 9}}),
        "parameters.handle_impossible_answer": (True, {**QA, "parameters": {"top_k": 40}}),
        "parameters.align_to_words": (False, {**PARTS, "parameters": {"top_k": 40}}),
        "parameters.doc_stride": (4, {**QA, "parameters": {"max_seq_len": 24}}),
        "parameters.max_seq_len": (24, QA),
        "parameters.targets": (["cat"], {"model": "mlm", "inputs": MASKED}),
    },
}  # fmt: skip
APPLIED["/v1/rerank"] = APPLIED["/v2/rerank"]
APPLIED["/rerank"] |= {
    name: (value, {**RANKED, "texts": None, **more})
    for name, (value, more) in APPLIED["/v2/rerank"].items()
    if name not in APPLIED["/rerank"]
}
# Fields that turn a refusal into an answer, or the reverse: truncate and windows of vectors.
DECIDES = {
    "truncate": {"/embed", "/embed_all", "/embed_sparse", "/v1/embeddings", "/"},
    "windows": {"/embed", "/embed_all", "/embed_sparse", "/v1/embeddings", "/"},
    "parameters.truncate": {"/similarity", "/"},
    "parameters.windows": {"/"},
}
# Refused on false, with a text that is read in windows otherwise.
REFUSES = {"/v1/entities", "/v1/answer", "/v1/zero-shot", "/v1/late-interaction"}
ONE_VALUE = {
    "add_special_tokens": (True, False),
    "embed_dtype": ("float32", "float16"),
    "endianness": ("little", "big"),
    "modality": ("text", "image"),
    "rank_fields": (["text"], ["title"]),
    "encoding_format": ("float", "base64"),
}
NO_EFFECT = {"options": {"wait_for_model": True}, "parameters": {}, "batch_size": 4, "padding": True, "priority": 3}
# In tests of their own; "query" changes vectors of other folders than this one's.
ELSEWHERE = {
    "model",
    "query",
    "texts",
    "documents",
    "inputs",
    "route",
    "parameters.route",
    "parameters.truncation_direction",
    "windows",
    "parameters.windows",
}


def put(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a request with a field, which may be one of an object."""
    name, _, inner = path.partition(".")
    return {**body, name: {**body.get(name, {}), inner: value} if inner else value}


def fields_of(table: tuple[Field, ...], path: str = "") -> Iterator[tuple[str, Field]]:
    for field in table:
        yield path + field.name, field
        yield from fields_of(field.fields, f"{path}{field.name}.")


def answered(http: Any, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if isinstance(found, dict):
        found = {name: value for name, value in found.items() if name not in ("id", "created", "usage", "meta")}
    return found


def param_of(answer: Any) -> str:
    """Return the text of a refusal."""
    found = answer.json()
    error = found.get("message") or found["error"]
    return error["message"] if isinstance(error, dict) else error


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (dict, list)) and type(a) is type(b) and len(a) == len(b):
        pairs = zip(a.items(), b.items(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
        return (
            all(same(x, y) for x, y in pairs)
            if isinstance(a, list)
            else all(x[0] == y[0] and same(x[1], y[1]) for x, y in pairs)
        )
    return bool(abs(a - b) < 1e-5) if isinstance(a, float) and isinstance(b, float) else bool(a == b)


def test_every_field_of_every_route_is_in_a_table_here() -> None:
    for route in ROUTES:
        if route.path in SAME:
            continue
        for path, field in fields_of(route.fields):
            name = path.rpartition(".")[2]
            inert = not field.effect or (name in ONE_VALUE and field.kind not in ("flag", "encoding"))
            known = inert or field.required or field.fields or path in APPLIED.get(route.path, ()) or path in ELSEWHERE
            known = (
                known
                or route.path in DECIDES.get(path, ())
                or (name in ("truncate", "long_texts") and route.path in REFUSES)
            )
            assert known, (route.path, path)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, fields in APPLIED.items() for name in fields])
def test_fields_are_applied(http: Any, path: str, name: str) -> None:
    value, context = APPLIED[path][name]
    body = {**REQUESTS[path], **context}
    before = {**body, "parameters": {}} if name == "parameters.candidate_labels" else body
    assert not same(answered(http, path, put(body, name, value)), answered(http, path, before))


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in DECIDES.items() for path in sorted(paths)])
def test_fields_decide_whether_long_texts_are_refused(http: Any, name: str, path: str) -> None:
    long: Any = LONG_PAIR if path == "/similarity" else LONG_CHARACTERS
    body = {**REQUESTS[path], "input" if path == "/v1/embeddings" else "inputs": long}
    assert http.post(path, json=body).status_code == (400 if path == "/v1/embeddings" else 413)
    assert http.post(path, json=put(body, name, False)).status_code in (400, 413)
    found = http.post(path, json=put(body, name, True))
    assert found.status_code == 200, found.text
    assert ("x-flodl-truncated-texts" in found.headers) == name.endswith("truncate")


@pytest.mark.parametrize("path", sorted(REFUSES))
def test_windows_are_refused_without_truncation(http: Any, path: str) -> None:
    body = {
        **REQUESTS[path],
        **({"inputs": [["who", LONG_CHARACTERS * 9]]} if path == "/v1/answer" else {"inputs": LONG_CHARACTERS}),
    }
    assert http.post(path, json=body).status_code == 200
    assert http.post(path, json={**body, "truncate": False}).status_code == 413
    assert http.post(path, json={**body, "long_texts": "error"}).status_code == 413
    default, other = ("truncate", "windows") if path == "/v1/late-interaction" else ("windows", "truncate")
    assert same(answered(http, path, {**body, "long_texts": default}), answered(http, path, body))
    for wrong in ({"long_texts": other}, {"long_texts": "error", "truncate": False}):
        assert http.post(path, json={**body, **wrong}).status_code == 422


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_fields_without_effect_and_unknown_fields(http: Any, route: Any) -> None:
    body = REQUESTS[route.path]
    plain = answered(http, route.path, body)
    for path, field in fields_of(route.fields):
        name = path.rpartition(".")[2]
        if not field.effect:
            assert same(answered(http, route.path, put(body, path, NO_EFFECT.get(name, "abc"))), plain), path
        elif name in ONE_VALUE and field.kind not in ("flag", "encoding"):
            right, wrong = ONE_VALUE[name]
            assert same(answered(http, route.path, put(body, path, right)), plain), path
            answer = http.post(route.path, json=put(body, path, wrong))
            assert answer.status_code in (400, 422)
            assert path in param_of(answer)
    objects = [
        f"{path}." for path, field in fields_of(route.fields) if field.fields and path in ("inputs", "parameters")
    ]
    for path in ("nothing_known", *(f"{path}nothing_known" for path in objects)):
        for address in (route.path, f"/models/{body.get('model', 'm3')}/-{'' if route.path == '/' else route.path}"):
            answer = http.post(address, json=put(body, path, 1))
            assert answer.status_code == 422, answer.text
            assert repr(path) in param_of(answer)
        # A field that is null is not given.
        assert same(answered(http, route.path, put(body, path, None)), plain)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"model": "ner", "inputs": "a"}, "parameters.top_k"),
        ({"model": "ner", "inputs": "a"}, "dimensions"),
        ({"model": "classes", "inputs": "a"}, "parameters.doc_stride"),
        ({"model": "embed", "inputs": "a"}, "parameters.top_k"),
        ({"model": "embed", "inputs": PAIR}, "parameters.dimensions"),
        ({"model": "nli", "inputs": "a", "parameters": {"candidate_labels": ["b"]}}, "parameters.top_k"),
    ],
)
def test_parameters_of_other_tasks_are_refused(http: Any, body: dict[str, Any], name: str) -> None:
    answer = http.post("/", json=put(body, name, 2))
    assert answer.status_code == 422, answer.text
    assert repr(name) in param_of(answer)


def test_no_object_of_the_document_takes_unknown_fields(http: Any) -> None:
    document = http.get("/openapi.json").json()
    for described in document["paths"].values():
        if "post" in described:
            schema = described["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schema["additionalProperties"] is False
            for part in ("inputs", "parameters"):
                if "properties" in schema["properties"].get(part, {}):
                    assert schema["properties"][part]["additionalProperties"] is False


def test_scores_of_pooling_are_activated_as_in_vllm(http: Any) -> None:
    texts = ["a cat", "dog"]
    pooled = answered(http, "/pooling", {"model": "classes", "input": texts})["data"]
    classified = answered(http, "/classify", {"model": "classes", "input": texts})["data"]
    assert same([one["data"] for one in pooled], [one["probs"] for one in classified])


# Ids of transformers' tokenizer with the same truncation.
@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_truncated_at_either_end(http: Any, local: dict[str, Any], side: str) -> None:
    model = local["embed"]
    whole = model.tokenizer.encode_rows([LONG_CHARACTERS])[0][0]
    for most in (9, 64):
        kept = whole.offsets[1:-1][-(most - 2) :] if side == "left" else whole.offsets[1 : most - 1]
        expected = model.embed(LONG_CHARACTERS[kept[0][0] : kept[-1][1]]).numpy()
        asked = {"input": LONG_CHARACTERS, "model": "embed", "truncation_side": side, "truncate_prompt_tokens": most}
        vectors = [answered(http, "/v1/embeddings", asked)["data"][0]["embedding"]]
        pooled = answered(http, "/pooling", {**asked, "task": "embed"})["data"][0]["data"]
        if most == 64:
            tei = {"inputs": LONG_CHARACTERS, "model": "embed", "truncate": True, "truncation_direction": side.title()}
            vectors += [answered(http, path, tei)[0] for path in ("/embed", "/")]
        for found in (*vectors, pooled):
            assert np.abs(np.array(found) - expected).max() < 2e-5
