"""``verify-endpoint`` against our own server, and against endpoints that make each mistake it names."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving_models import write
from typer.testing import CliRunner

from flodl_hf.cli.app import app
from flodl_hf.errors import PredictError
from flodl_hf.heads.auto import load
from flodl_hf.parity import onnx_session
from flodl_hf.parity.endpoint_checks import Report, TargetError, verify_endpoint
from flodl_hf.parity.endpoint_checks.targets import HttpTarget

PROMPT = "query: "
pytestmark = pytest.mark.filterwarnings("ignore:.*truncated")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of vectors, one of labels and one of ranks, whose tokenizers keep capitals."""
    root = tmp_path_factory.mktemp("sources")
    found = {"vectors": write(root, "embed"), "labels": write(root, "classes"), "ranking": write(root, "ranker")}
    for folder in found.values():
        told = json.loads((folder / "tokenizer.json").read_text())
        told["normalizer"]["lowercase"] = False
        (folder / "tokenizer.json").write_text(json.dumps(told))
        # transformers 5 reads do_lower_case here and ignores the normalizer of tokenizer.json.
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "do_lower_case": False}))
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    chain = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    place = found["vectors"]
    (place / "modules.json").write_text(json.dumps(chain))
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 32, "pooling_mode_mean_tokens": true}'
    )
    (place / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": PROMPT}}))
    return found


class Fake:
    """An endpoint: paths with functions of the body, or a status."""

    def __init__(self) -> None:
        self.paths: dict[str, Any] = {}


@pytest.fixture(scope="module")
def fake() -> Iterator[tuple[str, Fake]]:
    held = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answered(None)

        def do_POST(self) -> None:
            self._answered(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answered(self, body: Any) -> None:
            found = held.paths.get(self.path, 404)
            try:
                found = found(body) if callable(found) else found
            except PredictError:
                found = 413
            status, data = (found, {"error": "no"}) if isinstance(found, int) else (200, found)
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", held
    server.shutdown()
    thread.join()
    server.server_close()


def changed(folder: Path, to: Path, **settings: Any) -> Path:
    """Write a folder again with other settings in config.json."""
    to.mkdir()
    for file in folder.rglob("*"):
        if file.is_file():
            (to / file.relative_to(folder)).parent.mkdir(exist_ok=True)
            (to / file.relative_to(folder)).write_bytes(file.read_bytes())
    told = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**told, **settings}))
    return to


def rows_of(model: Any, texts: list[str], **given: Any) -> np.ndarray:
    return model.embed(texts, **given).numpy()


def padded(model: Any, texts: list[str], *, mask: bool, count: bool) -> np.ndarray:
    """Texts as one batch filled up to the longest, as a careless server runs them; vectors are means."""
    import torch

    found = dict(model.tokenizer(texts, padding=True, return_tensors="pt"))
    if not mask:
        found["attention_mask"] = torch.ones_like(found["attention_mask"])
    kept = model.tokenizer(texts, padding=True, return_tensors="pt")["attention_mask"][..., None].float()
    with torch.inference_mode():
        states = model(**found).last_hidden_state
    states = states.mean(1) if count else (states * kept).sum(1) / kept.sum(1)
    return torch.nn.functional.normalize(states).numpy()


def cut(model: Any, texts: list[str]) -> np.ndarray:
    import torch

    found = [model.tokenizer([text], truncation=True, max_length=32, return_tensors="pt") for text in texts]
    with torch.inference_mode():
        states = [model(**one).last_hidden_state[0].mean(0) for one in found]
    return torch.nn.functional.normalize(torch.stack(states)).numpy()


def tei(vectors: Callable[[list[str], dict[str, Any]], Any]) -> dict[str, Any]:
    return {
        "/info": {"model_id": "m", "model_type": {"embedding": {"pooling": "mean"}}},
        "/embed": lambda body: np.asarray(vectors(body["inputs"], body)).tolist(),
    }


def causes(report: Report) -> dict[str, str]:
    return {row.what: row.cause for row in report.rows if row.status == "differs"}


def right(model: Any) -> Callable[[list[str], dict[str, Any]], np.ndarray]:
    def answer(texts: list[str], body: dict[str, Any]) -> np.ndarray:
        return rows_of(model, texts, normalize=body["normalize"], prompt_name=body.get("prompt_name"))

    return answer


def sorted_by_length(model: Any, texts: list[str]) -> np.ndarray:
    return rows_of(model, sorted(texts, key=lambda text: len(model.tokenizer.encode(text))))


# What a server does, which comparison sees it, and what is said of it.
MISTAKES: dict[str, tuple[Callable[[Any, list[str], dict[str, Any]], Any], str, str]] = {
    "cls": (lambda m, t, b: rows_of(m, t, pooling="cls"), "vectors", "pooling is cls"),
    "max": (lambda m, t, b: rows_of(m, t, pooling="max"), "vectors", "pooling is max"),
    "unscaled": (lambda m, t, b: rows_of(m, t, normalize=False), "vectors", "not scaled to length 1"),
    "both": (
        lambda m, t, b: rows_of(m, t, pooling="cls", normalize=False), "vectors",
        "pooling is cls and vectors are not scaled",
    ),
    "prompted": (lambda m, t, b: rows_of(m, t, prompt=PROMPT), "vectors", "the prompt 'query: ' precedes"),
    "lower": (lambda m, t, b: rows_of(m, [x.lower() for x in t]), "vectors", "lower case"),
    "always scaled": (
        lambda m, t, b: rows_of(m, t, prompt_name=b.get("prompt_name")), "vectors not scaled", "vectors are scaled",
    ),
    "prompt passed over": (
        lambda m, t, b: rows_of(m, t, normalize=b["normalize"]), "prompt query", "the prompt is omitted",
    ),
    "padding read": (lambda m, t, b: padded(m, t, mask=False, count=False), "in a batch", "attention reads the padding"),
    "padding counted": (lambda m, t, b: padded(m, t, mask=True, count=True), "in a batch", "pooling counts the padding"),
    "unordered": (lambda m, t, b: sorted_by_length(m, t), "order", "sorted by length, and not put back"),
    "windows": (
        lambda m, t, b: rows_of(m, t, prompt_name=b.get("prompt_name"), normalize=b["normalize"], windows=True),
        "a long text", "all of it is read, in windows, where the model takes 64",
    ),
    "cut": (lambda m, t, b: cut(m, t), "a long text", "it is cut to 32 tokens, where the model takes 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, sources: dict[str, Path], fake: tuple[str, Fake]) -> None:
    url, held = fake
    model: Any = load(sources["vectors"])
    answer, what, cause = MISTAKES[name]
    held.paths = tei(lambda texts, body: answer(model, texts, body))
    found = causes(verify_endpoint(url, str(sources["vectors"])))
    assert cause in found[what], found
    # What one comparison found is not told again by the next, where that asks for the same.
    assert set(found) - {what} <= {"vectors not scaled", "prompt query"}


def test_what_is_right_has_no_fault(sources: dict[str, Path], fake: tuple[str, Fake]) -> None:
    url, held = fake
    model: Any = load(sources["vectors"])
    held.paths = tei(right(model))
    held.paths["/tokenize"] = lambda body: [[{"id": i} for i in model.tokenizer.encode(t)] for t in body["inputs"]]
    report = verify_endpoint(url, str(sources["vectors"]))
    assert report.passed
    assert {row.what: row.status for row in report.rows} == dict.fromkeys(
        ["token ids", "vectors", "vectors not scaled", "prompt query", "in a batch", "order", "a long text"], "equal"
    )
    assert all(row.difference is None or row.difference < 1e-5 for row in report.rows)
    assert report.rows[-1].cause == "it is cut to 64 tokens"
    # Half precision is seen, and is no mistake.
    half: Any = load(sources["vectors"], dtype="bfloat16")
    held.paths["/embed"] = lambda body: right(half)(body["inputs"], body).tolist()
    report = verify_endpoint(url, str(sources["vectors"]))
    assert report.passed, report.table()
    assert "rounding" in next(row for row in report.rows if row.what == "vectors").cause
    # A server that refuses long texts, always or without truncate=True.
    for always, cause in (
        (True, "refused with status 413, so nothing is truncated silently"),
        (False, "refused with status 413, and with truncate it is cut to 64 tokens"),
    ):
        held.paths["/embed"] = lambda body, always=always: (
            413
            if any(len(text) > 300 for text in body["inputs"]) and (always or not body.get("truncate"))
            else right(model)(body["inputs"], body).tolist()
        )
        report = verify_endpoint(url, str(sources["vectors"]))
        assert report.passed
        assert report.rows[-1].cause == cause


@pytest.mark.parametrize("task", ["vectors", "labels", "ranking"])
def test_gelu_by_its_tanh_form(task: str, sources: dict[str, Path], fake: tuple[str, Fake], tmp_path: Path) -> None:
    url, held = fake
    model: Any = load(changed(sources[task], tmp_path / "tanh", hidden_act="gelu_new"))
    what = {"vectors": "vectors", "labels": "scores of labels", "ranking": "scores of documents"}[task]
    if task == "vectors":
        held.paths = tei(right(model))
    else:
        held.paths = {
            "/info": {"model_id": "m", "model_type": {}},
            "/predict": lambda body: [
                [{"label": one.label, "score": one.score} for one in row]
                for row in model.predict([text for (text,) in body["inputs"]])
            ],
            "/rerank": lambda body: [
                {"index": one.index, "score": one.score} for one in model.rerank(body["query"], body["texts"])
            ],
        }
    found = causes(verify_endpoint(url, str(sources[task])))
    assert found[what] == "GELU is computed by its tanh form"
    # The folder itself can be asked too.
    found = causes(verify_endpoint(str(tmp_path / "tanh"), str(sources[task])))
    assert found[what] == "GELU is computed by its tanh form"


def test_scores_and_tokens(sources: dict[str, Path], fake: tuple[str, Fake]) -> None:
    url, held = fake
    labels: Any = load(sources["labels"])
    tokens = labels.tokenizer

    def raw(body: dict[str, Any]) -> Any:
        rows = labels.predict([text for (text,) in body["inputs"]], function_to_apply="none")
        return [[{"label": one.label, "score": one.score} for one in row] for row in rows]

    held.paths = {"/info": {"model_type": {}}, "/predict": raw}
    held.paths["/tokenize"] = lambda body: [[{"id": i} for i in tokens.encode(t.lower())] for t in body["inputs"]]
    found = causes(verify_endpoint(url, str(sources["labels"])))
    assert found["scores of labels"] == "scores are raw"
    assert found["token ids"] == "texts are put in lower case"
    held.paths["/tokenize"] = lambda body: [[{"id": 3}] for _ in body["inputs"]]
    assert "another tokenizer" in causes(verify_endpoint(url, str(sources["labels"])))["token ids"]
    ranker: Any = load(sources["ranking"])

    def swapped(body: dict[str, Any]) -> Any:
        return [
            {"index": i, "score": ranker.rerank(text, [body["query"]])[0].score} for i, text in enumerate(body["texts"])
        ]

    held.paths = {"/info": {"model_type": {}}, "/rerank": swapped}
    assert causes(verify_endpoint(url, str(sources["ranking"])))["scores of documents"] == (
        "documents precede the query"
    )


def test_other_interfaces(sources: dict[str, Path], fake: tuple[str, Fake]) -> None:
    url, held = fake
    model: Any = load(sources["vectors"])

    def embeddings(body: dict[str, Any]) -> Any:
        rows = [{"index": i, "embedding": row} for i, row in enumerate(model.embed(body["input"]).tolist())]
        return {"data": rows[::-1]}

    held.paths = {"/v1/models": {"data": [{"id": "m"}]}, "/v1/embeddings": embeddings}
    for address in (url, f"{url}/v1"):
        report = verify_endpoint(address, str(sources["vectors"]))
        assert report.passed
        assert "OpenAI, model m" in report.target

    def states(body: dict[str, Any]) -> Any:
        return [
            model(**model.tokenizer([text], return_tensors="pt")).last_hidden_state.tolist() for text in body["inputs"]
        ]

    held.paths = {"/": lambda body: rows_of(model, body["inputs"]).tolist()}
    assert verify_endpoint(url, str(sources["vectors"])).passed
    # Pipelines give a state for each token, which nobody has scaled.
    held.paths = {"/": lambda body: 413 if len(body["inputs"][0]) > 300 else states(body)}
    assert causes(verify_endpoint(url, str(sources["vectors"])))["vectors"] == "vectors are not scaled to length 1"
    labels: Any = load(sources["labels"])
    held.paths = {
        "/": lambda body: [
            [{"label": f"LABEL_{labels.config.labels.index(one.label)}", "score": one.score} for one in row]
            for row in labels.predict(body["inputs"])
        ]
    }
    assert verify_endpoint(url, str(sources["labels"])).passed
    for answer in ({"no": 1}, [[1.0]], [["a"]], 500):
        held.paths = {"/": lambda body, answer=answer: answer}
        assert not verify_endpoint(url, str(sources["vectors"])).passed
    with pytest.raises(TargetError, match="is the address right"):
        verify_endpoint("http://127.0.0.1:9", str(sources["vectors"]))
    with pytest.raises(TargetError, match="no such folder"):
        verify_endpoint("nowhere", str(sources["vectors"]))


@pytest.mark.parametrize(
    "rows",
    [
        [{"index": 1, "score": 0.9}, {"index": 2, "score": 0.1}],
        [{"index": 0, "score": 0.9}, {"index": 0, "score": 0.1}],
        [{"index": 0, "score": None}, {"index": 1, "score": 0.1}],
        [{"index": 0, "score": float("nan")}, {"index": 1, "score": 0.1}],
    ],
    ids=["from 1", "duplicate", "null", "nan"],
)
def test_ranks_have_each_index_once_and_numbers(rows: Any, fake: tuple[str, Fake]) -> None:
    url, held = fake
    target = HttpTarget(SimpleNamespace(task="ranking"), url, style="tei")  # type: ignore[arg-type]
    held.paths = {"/rerank": rows}
    with pytest.raises(TargetError) as fault:
        target.answers(["a", "b"])
    assert fault.value.details["status"] == 200
    held.paths = {"/rerank": [{"index": 1, "score": 0.1}, {"index": 0, "score": 0.9}]}
    assert target.answers(["a", "b"]).tolist() == [[0.9], [0.1]]


@pytest.mark.parametrize("name", ["embed", "m3", "classes", "ranker"])
@pytest.mark.parametrize("style", ["tei", "openai", "hf"])
def test_our_own_server(name: str, style: str, served: tuple[str, Any], folders: dict[str, Path]) -> None:
    address = f"{served[0]}/models/{name}/-" if style == "hf" else served[0]
    if style == "hf" and name == "ranker":
        return
    report = verify_endpoint(address, str(folders[name]), style=style, model=name)
    assert report.passed, report.table()
    assert all(row.status in ("equal", "not run") for row in report.rows), report.table()


def test_the_command(sources: dict[str, Path], fake: tuple[str, Fake]) -> None:
    url, held = fake
    model: Any = load(sources["vectors"])
    held.paths = tei(right(model))
    given = ["verify-endpoint", url, "--source", str(sources["vectors"])]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "it is cut to 64 tokens" in done.output
    held.paths = tei(lambda texts, body: rows_of(model, texts, pooling="cls"))
    done = CliRunner().invoke(app, [*given, "--json"])
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert not told["passed"]
    assert {"what": "vectors", "status": "differs"}.items() <= told["rows"][1].items()


HAS_ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_ONNX, reason="onnx, onnxscript or onnxruntime is not installed")
@pytest.mark.parametrize("task", ["vectors", "labels", "ranking"])
def test_an_onnx_file(task: str, sources: dict[str, Path], tmp_path: Path) -> None:
    from flodl_hf.export.engine import export_onnx

    out = export_onnx(load(sources[task]), tmp_path / "onnx").folder
    for target in (out, out / "onnx" / "model.onnx"):
        report = verify_endpoint(str(target), str(sources[task]))
        assert report.passed, report.table()
        assert "ONNX Runtime" in report.target
        statuses = {row.what: row.status for row in report.rows}
        assert statuses.pop("token ids") == "equal"
        assert set(statuses.values()) == {"equal"}, report.table()
        assert ("prompt query" in statuses) == (task == "vectors")
    # Long texts are cut where the model ends.
    assert report.rows[-1].cause == "it is cut to 64 tokens"
    wrong = load(changed(sources[task], tmp_path / "tanh", hidden_act="gelu_new"))
    out = export_onnx(wrong, tmp_path / "wrong").folder
    what = {"vectors": "vectors", "labels": "scores of labels", "ranking": "scores of documents"}[task]
    assert causes(verify_endpoint(str(out), str(sources[task])))[what] == "GELU is computed by its tanh form"


class Runtime:
    """In place of ONNX Runtime: a folder's model, asked as a session is."""

    __version__ = "0"
    model: Any = None

    class SessionOptions:
        pass

    class InferenceSession:
        def __init__(self, path: str, *_: Any, **__: Any) -> None:
            self.model = Runtime.model
            self.output = "last_hidden_state" if self.model.head == "base" else "logits"

        def get_inputs(self) -> list[Any]:
            return [
                SimpleNamespace(name=name, type="tensor(int64)", shape=("batch", "tokens"))
                for name in ("input_ids", "attention_mask", "token_type_ids")
            ]

        def get_outputs(self) -> list[Any]:
            axes = ("batch", "tokens", 32) if self.output == "last_hidden_state" else ("batch", 3)
            return [SimpleNamespace(name=self.output, shape=axes)]

        def run(self, _: Any, fed: dict[str, Any]) -> list[Any]:
            import torch

            with torch.inference_mode():
                found = self.model(**{name: torch.from_numpy(value) for name, value in fed.items()})
            return [found[self.output].numpy()]


@pytest.mark.parametrize("task", ["vectors", "labels", "ranking"])
def test_what_an_onnx_file_leaves_to_others_is_done_by_its_folder(
    task: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = Runtime
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    monkeypatch.setattr(onnx_session, "find_spec", lambda name: name)
    what = {"vectors": "vectors", "labels": "scores of labels", "ranking": "scores of documents"}[task]
    place = changed(sources[task], tmp_path / "onnx")
    (place / "model.safetensors").unlink()
    (place / "model.onnx").touch()
    monkeypatch.setattr(Runtime, "model", load(sources[task]))
    report = verify_endpoint(str(place), str(sources[task]))
    assert report.passed, report.table()
    assert {row.status for row in report.rows} == {"equal"}, report.table()
    assert report.rows[-1].cause == "it is cut to 64 tokens"
    monkeypatch.setattr(Runtime, "model", load(changed(sources[task], tmp_path / "tanh", hidden_act="gelu_new")))
    assert causes(verify_endpoint(str(place), str(sources[task])))[what] == "GELU is computed by its tanh form"
    if task == "vectors":
        (place / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
        assert "pooling is cls" in causes(verify_endpoint(str(place), str(sources[task])))[what]
    other = "labels" if task == "vectors" else "vectors"
    with pytest.raises(TargetError, match="the file gives"):
        verify_endpoint(str(place), str(sources[other]))


@pytest.mark.skipif(not HAS_ONNX, reason="onnx, onnxscript or onnxruntime is not installed")
def test_onnx_files_that_cannot_be_asked(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    for target in (tmp_path, tmp_path / "model.onnx"):
        with pytest.raises(TargetError, match="cannot read it"):
            verify_endpoint(str(target), str(sources["vectors"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_folder_read_by_sentence_transformers(sources: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    # It reads capitals by another file than tokenizer.json, which is seen in the ids.
    found = causes(verify_endpoint(str(sources["vectors"]), str(sources["vectors"])))
    assert "tokenizer" in found["token ids"] or "lower case" in found["token ids"]
    same = changed(sources["vectors"], tmp_path / "same")
    settings = json.loads((same / "tokenizer_config.json").read_text())
    (same / "tokenizer_config.json").write_text(json.dumps({**settings, "do_lower_case": False}))
    report = verify_endpoint(str(same), str(sources["vectors"]))
    assert "read by sentence-transformers" in report.target
    assert report.passed, report.table()
    other = changed(same, tmp_path / "cls")
    told = '{"word_embedding_dimension": 32, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    (other / "1_Pooling" / "config.json").write_text(told)
    assert causes(verify_endpoint(str(other), str(sources["vectors"])))["vectors"] == "pooling is cls"
