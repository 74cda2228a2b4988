"""A repository name becomes a folder of exactly the needed files, or an error that says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from flodl_hf import finetune, load
from flodl_hf.checkpoints.hub.download import resolve
from flodl_hf.errors import HubError

huggingface_hub = pytest.importorskip("huggingface_hub")

GOLDEN = Path(__file__).parents[2] / "golden"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = b"weights" * 1000
FILES = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}",
    "README.md": b"# not needed",
    "onnx/model.safetensors": b"not needed",
    "pytorch_model.bin": b"not needed",
    "tf_model.h5": b"not needed",
}


class Hub:
    """A fake Hub on the loopback interface; what it answers is set by its attributes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = dict(FILES)
        self.served: dict[str, bytes] = {}
        self.status: int | None = None
        self.error_code = ""
        self.token: str | None = None
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.moved: dict[str, str] = {}  # beginnings of paths, and the server that has them
        self.headers: dict[str, str] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def handle_any(self) -> None:
                path = unquote(self.path.split("?")[0])
                hub.requests.append(f"{self.command} {path}")
                hub.tokens.add(self.headers.get("Authorization"))
                if hub.status is not None:
                    return self.answer(hub.status, b"{}", X_Error_Code=hub.error_code)
                for start, server in hub.moved.items():
                    if path.startswith(start):
                        held = hub.files.get(path.rpartition(COMMIT + "/")[2], b"")
                        told: dict[str, Any] = {
                            "X_Linked_ETag": f'"{hashlib.sha256(held).hexdigest()}"',
                            "X_Repo_Commit": COMMIT,
                        }
                        return self.answer(302, Location=server + self.path, X_Linked_Size=str(len(held)), **told)
                if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                    return self.answer(401, b"{}")
                if path.startswith("/api/models/ada/tiny/revision/"):
                    revision = path.rsplit("/", 1)[1]
                    if revision not in ("main", "v1", COMMIT):
                        return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
                    siblings = [
                        {
                            "rfilename": name,
                            "size": len(data),
                            **(
                                {
                                    "lfs": {
                                        "sha256": hashlib.sha256(data).hexdigest(),
                                        "size": len(data),
                                        "pointerSize": 1,
                                    }
                                }
                                if name.endswith(".safetensors")
                                else {"blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
                            ),
                        }
                        for name, data in hub.files.items()
                    ]
                    body = json.dumps({"id": "ada/tiny", "sha": COMMIT, "siblings": siblings}).encode()
                    return self.answer(200, body, Content_Type="application/json")
                prefix = f"/ada/tiny/resolve/{COMMIT}/"
                if path.startswith(prefix):
                    name = path.removeprefix(prefix)
                    if name not in hub.files:
                        return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                    announced, body = hub.files[name], hub.served.get(name, hub.files[name])
                    etag = hashlib.sha256(announced).hexdigest()
                    if self.command == "HEAD":
                        self.send_response(200)
                        self.send_header("ETag", f'"{etag}"')
                        self.send_header("X-Repo-Commit", COMMIT)
                        self.send_header("Content-Length", str(len(announced)))
                        for key, value in hub.headers.items():
                            self.send_header(key, value)
                        self.end_headers()
                        return None
                    return self.answer(200, body, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
                return self.answer(404, b"{}", X_Error_Code="RepoNotFound")

            do_GET = do_HEAD = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    _point_at(monkeypatch, server.url)
    yield server
    # Connections that the client keeps open would outlive the test.
    close = getattr(huggingface_hub, "close_session", None)
    if close is not None:
        close()
    server.close()


def _point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_the_needed_files_are_fetched(hub: Hub, tmp_path: Path) -> None:
    found = resolve("ada/tiny", cache_dir=tmp_path)
    assert _names(found.folder) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "modules.json",
        "1_Pooling/config.json",
    }
    assert (found.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (found.name, found.revision, found.commit) == ("ada/tiny", "main", COMMIT)


def test_shards_are_taken_from_the_index(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    hub.files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode()
    hub.files["model-00001-of-00002.safetensors"] = b"one"
    hub.files["model-00002-of-00002.safetensors"] = b"two"
    found = resolve("ada/tiny", cache_dir=tmp_path)
    assert {name for name in _names(found.folder) if "model-" in name or "index" in name} == {
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    resolve("ada/tiny", cache_dir=tmp_path, local_files_only=True)
    (found.folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HubError) as caught:
        resolve("ada/tiny", cache_dir=tmp_path, local_files_only=True)
    assert caught.value.missing == ["model-00002-of-00002.safetensors"]


@pytest.mark.parametrize("subfolder", ["", "inside"])
@pytest.mark.parametrize(
    ("named", "others"),
    [
        ("odd.safetensors", []),
        ("deep/odd.safetensors", []),
        ("odd.safetensors.index.json", ["odd-00001-of-00002.safetensors", "odd-00002-of-00002.safetensors"]),
    ],
)
def test_weights_that_the_configuration_names_are_fetched(
    hub: Hub, tmp_path: Path, named: str, others: list[str], subfolder: str
) -> None:
    index = json.dumps({"weight_map": {name: name for name in others}}).encode()
    files = {"config.json": json.dumps({"model_type": "bert", "transformers_weights": named}).encode()}
    files |= {named: index, "other.safetensors": b"not needed"} | {name: name.encode() for name in others}
    hub.files = {f"{subfolder}/{name}" if subfolder else name: data for name, data in files.items()}
    found = resolve("ada/tiny", cache_dir=tmp_path, subfolder=subfolder)
    assert _names(found.folder) == {"config.json", named, *others}
    assert len([line for line in hub.requests if line.startswith("GET") and line.endswith("config.json")]) == 1
    resolve("ada/tiny", cache_dir=tmp_path, subfolder=subfolder, local_files_only=True)
    (found.folder / (others[-1] if others else named)).unlink()
    with pytest.raises(HubError, match="in the cache without"):
        resolve("ada/tiny", cache_dir=tmp_path, subfolder=subfolder, local_files_only=True)


def test_a_repository_with_only_bin_weights_gives_those(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    assert "pytorch_model.bin" in _names(resolve("ada/tiny", cache_dir=tmp_path).folder)


def test_an_adapter_brings_its_pooling(hub: Hub, tmp_path: Path) -> None:
    """A repository without these files fetched would give vectors, and other ones than its author's."""
    from flodl_hf import AutoModel
    from flodl_hf.models.adapters import Lora

    base = GOLDEN / "bert-base"
    model: Any = AutoModel.from_pretrained(base).add_adapter(Lora(rank=2))
    written = model.save_pretrained(tmp_path / "adapter")
    hub.files = {name: (written / name).read_bytes() for name in _names(written)} | {
        "modules.json": json.dumps([
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ]).encode(),
        "1_Pooling/config.json": b'{"word_embedding_dimension": 16, "pooling_mode_cls_token": true}',
        "sentence_bert_config.json": b'{"max_seq_length": 12, "do_lower_case": false}',
        "config_sentence_transformers.json": b'{"prompts": {"query": "q: "}}',
        "README.md": b"# not needed",
        "optimizer.pt": b"not needed",
    }  # fmt: skip
    del hub.files["checksums.json"]
    found: Any = AutoModel.from_pretrained(base, adapter="ada/tiny", cache_dir=tmp_path / "cache")
    recipe = found.sentence_recipe
    assert (recipe.pooling, recipe.normalize, recipe.max_tokens, recipe.prompts) == (
        ("cls",),
        True,
        12,
        {"query": "q: "},
    )
    assert not any("README" in request or "optimizer" in request for request in hub.requests)
    for name, data in hub.files.items():
        if name not in ("README.md", "optimizer.pt"):
            (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "local" / name).write_bytes(data)
    local: Any = AutoModel.from_pretrained(base, adapter=tmp_path / "local")
    texts = ["a good film", "bad"]
    assert found.embed(texts).equal(local.embed(texts))
    assert not found.embed(texts).equal(AutoModel.from_pretrained(base).embed(texts))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_model_whose_repository_has_only_bin_weights_is_loaded(hub: Hub, tmp_path: Path, parts: int) -> None:
    """Like SciBERT, FinBERT and many more; a safetensors file beside is taken instead, and the other not fetched."""
    import io

    import torch

    from flodl_hf import AutoConfig, AutoModel, load

    sizes = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 20, "type_vocab_size": 2,
    }  # fmt: skip
    made = AutoModel.from_config(AutoConfig.for_model("bert", **sizes))
    hub.files = {path.name: path.read_bytes() for path in made.save_pretrained(tmp_path / "made").iterdir()}
    weights = {name: value.clone() for name, value in _tensors(tmp_path / "made" / "model.safetensors").items()}
    names = sorted(weights)
    stored = {}
    for part in range(parts):
        file = "pytorch_model.bin" if parts == 1 else f"pytorch_model-{part + 1:05}-of-{parts:05}.bin"
        buffer = io.BytesIO()
        torch.save({name: weights[name] for name in names[part::parts]}, buffer)
        stored[file] = buffer.getvalue()
    if parts > 1:
        places = {name: sorted(stored)[index % parts] for index, name in enumerate(names)}
        stored["pytorch_model.bin.index.json"] = json.dumps({"metadata": {}, "weight_map": places}).encode()
    hub.files |= stored
    AutoModel.from_pretrained("ada/tiny", cache_dir=tmp_path / "both")
    assert not [name for name in _names(tmp_path / "both") if name.endswith(".bin")]
    del hub.files["model.safetensors"]
    found = load("ada/tiny", cache_dir=tmp_path / "one")
    assert found.load_report is not None
    for (name, mine), (_, other) in zip(found.graph.named_parameters(), made.graph.named_parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_weights_in_folders_of_modules_are_fetched(hub: Hub, tmp_path: Path) -> None:
    """As sentence-transformers wrote them long ago, and where routes have transformers of their own."""
    from flodl_hf import AutoConfig, AutoModel, AutoTokenizer, load

    sizes = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 20, "type_vocab_size": 2,
    }  # fmt: skip
    kind = "sentence_transformers.models."
    made = [AutoModel.from_config(AutoConfig.for_model("bert", **sizes)) for _ in range(2)]
    first, second = (
        {p.name: p.read_bytes() for p in one.save_pretrained(tmp_path / str(i)).iterdir() if p.name != "checksums.json"}
        for i, one in enumerate(made)
    )
    listed = [
        {"idx": 0, "name": "0", "path": "0_Encoder", "type": kind + "Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": kind + "Pooling"},
    ]
    pooling = {"1_Pooling/config.json": b'{"pooling_mode_cls_token": true}'}
    hub.files = {f"0_Encoder/{name}": data for name, data in first.items()} | pooling
    hub.files |= {"modules.json": json.dumps(listed).encode(), "0_Encoder/tf_model.h5": b"not needed", "a.bin": b"no"}
    found: Any = load("ada/tiny", cache_dir=tmp_path / "one")
    assert found.sentence_recipe.pooling == ("cls",)
    for mine, other in zip(found.graph.parameters(), made[0].graph.parameters(), strict=True):
        assert mine.equal(other)
    assert AutoConfig.from_pretrained("ada/tiny", cache_dir=tmp_path / "config").model_type == "bert"
    assert not [name for name in _names(tmp_path / "config") if name.endswith(".safetensors")]
    assert not [name for name in _names(tmp_path / "one") if name.endswith((".h5", ".bin"))]
    hub.files["0_Encoder/vocab.txt"] = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nada\n"
    tokenizer = AutoTokenizer.from_pretrained("ada/tiny", cache_dir=tmp_path / "tokenizer")
    assert tokenizer.encode("ada") == [2, 5, 3]
    assert not [name for name in _names(tmp_path / "tokenizer") if name.endswith(".safetensors")]

    router = {
        "types": {"a_0_Transformer": kind + "Transformer", "b_0_Transformer": kind + "Transformer"},
        "structure": {"a": ["a_0_Transformer"], "b": ["b_0_Transformer"]}, "parameters": {},
    }  # fmt: skip
    listed = [{"idx": 0, "name": "0", "path": "0_Router", "type": kind + "Router"}]
    hub.files = {
        f"0_Router/{part}_0_Transformer/{name}": data
        for part, files in (("a", first), ("b", second))
        for name, data in files.items()
    }
    hub.files |= {
        "modules.json": json.dumps(listed).encode(),
        "0_Router/router_config.json": json.dumps(router).encode(),
    }
    found = load("ada/tiny", cache_dir=tmp_path / "two")
    for route, one in zip("ab", made, strict=True):
        pairs = zip(found.on_route(route).graph.parameters(), one.graph.parameters(), strict=True)
        assert all(mine.equal(other) for mine, other in pairs)
    hub.status = 503
    assert load("ada/tiny", cache_dir=tmp_path / "two").routed is not None  # type: ignore[attr-defined]
    (weights,) = (tmp_path / "two").rglob("snapshots/*/0_Router/b_0_Transformer/model.safetensors")
    weights.unlink()
    with pytest.raises(HubError, match=r"in the cache without 0_Router/b_0_Transformer/model.safetensors"):
        load("ada/tiny", cache_dir=tmp_path / "two")
    hub.status = None
    del hub.files["0_Router/b_0_Transformer/model.safetensors"]
    with pytest.raises(HubError, match=r"no model.safetensors.* in 0_Router/b_0_Transformer/"):
        load("ada/tiny", cache_dir=tmp_path / "three")


def test_a_model_of_the_hub_is_compared_with_its_checksums(hub: Hub, tmp_path: Path) -> None:
    from flodl.errors import CheckpointError
    from flodl_hf import AutoConfig, AutoModel, load

    sizes = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 20, "type_vocab_size": 2,
    }  # fmt: skip
    made = AutoModel.from_config(AutoConfig.for_model("bert", **sizes))
    folder = made.save_pretrained(tmp_path / "made", extra_files={"README.md": b"# card"})
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = load("ada/tiny", cache_dir=tmp_path / "cache", verified=True)
    assert "README.md" not in _names(tmp_path / "cache")
    assert found.source is not None
    blob = (found.source.folder / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 4
    blob.chmod(0o644)
    blob.write_bytes(data)
    load("ada/tiny", cache_dir=tmp_path / "cache")  # as everyone serves it
    with pytest.raises(CheckpointError, match=r"model.safetensors: changed"):
        load("ada/tiny", cache_dir=tmp_path / "cache", verified=True)


def _tensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def test_a_repository_without_readable_weights_says_which_there_are(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"], hub.files["pytorch_model.bin"]
    with pytest.raises(HubError) as caught:
        resolve("ada/tiny", cache_dir=tmp_path)
    assert caught.value.others == ["onnx/model.safetensors", "tf_model.h5"]
    assert "flodl-hf convert" in str(caught.value)
    # A tokenizer alone can still be had; the configuration was asked for the name of its weights.
    found = resolve("ada/tiny", cache_dir=tmp_path, files=("tokenizer.json",))
    assert _names(found.folder) == {"config.json", "tokenizer.json"}


def test_a_subfolder_is_the_root_of_what_is_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files["onnx/config.json"] = b"{}"
    found = resolve("ada/tiny", subfolder="onnx", cache_dir=tmp_path)
    assert found.folder.name == "onnx"
    assert _names(found.folder) == {"model.safetensors", "config.json"}
    assert resolve("ada/tiny", subfolder="onnx", cache_dir=tmp_path, local_files_only=True) == found


@pytest.mark.parametrize(("name", "revision"), [("ada/tiny@v1", None), ("ada/tiny", "v1"), ("ada/tiny@v1", "v1")])
def test_a_revision_may_stand_in_the_name(hub: Hub, tmp_path: Path, name: str, revision: str | None) -> None:
    found = resolve(name, revision=revision, cache_dir=tmp_path)
    assert (found.name, found.revision, found.commit) == ("ada/tiny", "v1", COMMIT)


def test_two_different_revisions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HubError):
        resolve("ada/tiny@v1", revision="main", cache_dir=tmp_path)


class _NoSocket(socket.socket):
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")


_events: list[str] | None = None


def _watch(event: str, arguments: object) -> None:
    if _events is not None and event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        _events.append(event)


sys.addaudithook(_watch)


@pytest.mark.parametrize("switch", ["argument", "environment"])
def test_offline_opens_no_socket(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    global _events
    online = resolve("ada/tiny", cache_dir=tmp_path)
    if switch == "environment":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    only: dict[str, Any] = {"local_files_only": switch == "argument"}
    monkeypatch.setattr(socket, "socket", _NoSocket)
    _events = []
    try:
        assert resolve("ada/tiny", cache_dir=tmp_path, **only) == online
        with pytest.raises(HubError) as caught:
            resolve("ada/other", cache_dir=tmp_path, **only)
        events = _events
    finally:
        _events = None
    assert events == []
    assert caught.value.offline
    assert "hf download ada/other" in str(caught.value)


def test_a_revision_is_found_offline_where_files_cannot_be_locked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flodl.files.lock", lambda descriptor, **options: False)
    online = resolve("ada/tiny", cache_dir=tmp_path)
    assert resolve("ada/tiny", cache_dir=tmp_path, local_files_only=True) == online


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_in_place_of_a_revision_is_not_waited_for(hub: Hub, tmp_path: Path) -> None:
    resolve("ada/tiny", cache_dir=tmp_path)
    [ref] = (tmp_path / "models--ada--tiny" / "refs").iterdir()
    ref.unlink()
    os.mkfifo(ref)
    with pytest.raises(HubError, match="not in the cache"):
        resolve("ada/tiny", cache_dir=tmp_path, local_files_only=True)


def test_the_socket_watch_sees_a_connection(hub: Hub, tmp_path: Path) -> None:
    global _events
    _events = []
    try:
        resolve("ada/tiny", cache_dir=tmp_path)
        events = _events
    finally:
        _events = None
    assert "socket.connect" in events


def test_a_cached_commit_is_used_without_asking(hub: Hub, tmp_path: Path) -> None:
    first = resolve("ada/tiny", cache_dir=tmp_path)
    hub.requests.clear()
    again = resolve("ada/tiny", revision=COMMIT, cache_dir=tmp_path)
    assert again.folder == first.folder
    assert hub.requests == []


def test_a_second_load_asks_once_and_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    resolve("ada/tiny", cache_dir=tmp_path)
    hub.requests.clear()
    resolve("ada/tiny", cache_dir=tmp_path)
    assert hub.requests == ["GET /api/models/ada/tiny/revision/main"]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_failing_server_leaves_the_cache_in_use(hub: Hub, tmp_path: Path, status: int) -> None:
    first = resolve("ada/tiny", cache_dir=tmp_path)
    hub.status = status
    assert resolve("ada/tiny", cache_dir=tmp_path) == first
    with pytest.raises(HubError) as caught:
        resolve("ada/other", cache_dir=tmp_path)
    assert str(status) in str(caught.value)


def test_no_network_and_nothing_cached_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    _point_at(monkeypatch, f"http://127.0.0.1:{port}")
    with pytest.raises(HubError) as caught:
        resolve("ada/tiny", cache_dir=tmp_path)
    assert "cannot be reached" in str(caught.value)
    assert "hf download ada/tiny" in str(caught.value)
    assert caught.value.offline


def test_an_unknown_repository_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(HubError) as caught:
        resolve("ada/absent", cache_dir=tmp_path)
    assert caught.value.name == "ada/absent"
    assert caught.value.status == 404
    assert "no such repository" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_unknown_revision_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(HubError) as caught:
        resolve("ada/tiny@v9", cache_dir=tmp_path)
    assert caught.value.revision == "v9"
    assert "no such revision" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "", "token"),
        (403, "", "token"),
        (403, "GatedRepo", "granted on request"),
        (401, "GatedRepo", "granted"),
    ],
)
def test_refused_access_says_how_to_log_in(hub: Hub, tmp_path: Path, status: int, code: str, words: str) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(HubError) as caught:
        resolve("ada/tiny", cache_dir=tmp_path)
    assert caught.value.status == status
    assert words in str(caught.value)
    assert "hf auth login" in str(caught.value)


def test_the_token_is_sent(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    assert resolve("ada/tiny", token="hf_secret", cache_dir=tmp_path).commit == COMMIT
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("trusted", [False, True], ids=["a stranger", "of the client's Hubs"])
@pytest.mark.parametrize("moved", ["/api/", "/ada/"])
def test_a_token_follows_no_redirect_to_another_port(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: str, trusted: bool
) -> None:
    from huggingface_hub.utils import _http

    other = Hub()
    try:
        hub.moved = {moved: other.url}
        if trusted and hasattr(_http, "_HUB_ORIGINS"):  # as huggingface.co is for whoever asks a mirror
            monkeypatch.setattr(_http, "_HUB_ORIGINS", {*_http._HUB_ORIGINS, _http._url_origin(other.url)})
        assert resolve("ada/tiny", token="hf_secret", cache_dir=tmp_path).commit == COMMIT
        assert hub.tokens == {"Bearer hf_secret"}
        assert other.tokens == {None}
    finally:
        other.close()


@pytest.mark.parametrize("moved", ["/api/", "/ada/"])
def test_a_token_follows_no_redirect_after_a_connection_that_failed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    """huggingface_hub makes its client anew then; another thread's failure is enough."""
    from huggingface_hub.utils import _http, close_session

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    other, failed = Hub(), []

    def fails(client: Any, method: str, url: str, **options: Any) -> Any:
        if len(failed) < 3 and method in ("GET", "HEAD"):
            failed.append(url)
            close_session()
            client = _http.get_session()
        return as_it_was(client, method, url, **options)

    client = type(_http.get_session())
    as_it_was = client.request
    monkeypatch.setattr(client, "request", fails)
    try:
        hub.moved = {moved: other.url}
        if hasattr(_http, "_HUB_ORIGINS"):
            monkeypatch.setattr(_http, "_HUB_ORIGINS", {*_http._HUB_ORIGINS, _http._url_origin(other.url)})
        assert resolve("ada/tiny", token="hf_secret", cache_dir=tmp_path).commit == COMMIT
        assert failed
        assert hub.tokens == {"Bearer hf_secret"}
        assert other.tokens == {None}
    finally:
        other.close()


def test_a_token_is_not_sent_where_an_answer_names_another_server_for_keys(hub: Hub, tmp_path: Path) -> None:
    hub.headers = {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": "http://127.0.0.1:9/api/key"}
    with pytest.raises(HubError, match=r"sends the token to 'http://127\.0\.0\.1:9/api/key'.*check HF_ENDPOINT"):
        resolve("ada/tiny", token="hf_secret", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "served",
    [
        b"tampered" * 875,
        WEIGHTS[:-1],
        WEIGHTS + b"x",
    ],
    ids=["other bytes", "short", "long"],
)
def test_a_file_altered_on_the_way_is_refused_and_not_kept(hub: Hub, tmp_path: Path, served: bytes) -> None:
    assert served != WEIGHTS
    hub.served["model.safetensors"] = served
    with pytest.raises(HubError) as caught:
        resolve("ada/tiny", cache_dir=tmp_path)
    assert "model.safetensors" in str(caught.value)
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and ".incomplete" not in path.name]
    assert served not in kept
    hub.served.clear()
    assert (resolve("ada/tiny", cache_dir=tmp_path).folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_cut_short_in_the_cache_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    weights = resolve("ada/tiny", cache_dir=tmp_path).folder / "model.safetensors"
    weights.resolve().write_bytes(b"short")
    assert (resolve("ada/tiny", cache_dir=tmp_path).folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_local_folder_wins_and_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ada" / "tiny" / "sub").mkdir(parents=True)
    monkeypatch.setattr(socket, "socket", _NoSocket)
    assert resolve("ada/tiny").folder == Path("ada/tiny")
    assert resolve(tmp_path / "ada" / "tiny", subfolder="sub").folder == tmp_path / "ada" / "tiny" / "sub"
    refused: tuple[dict[str, Any], ...] = ({"subfolder": "absent"}, {"revision": "v1"})
    for options in refused:
        with pytest.raises(HubError):
            resolve("ada/tiny", **options)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\nb",
        "nul\0",
        "../x",
        "a/b/c",
        "/absent/folder",
        "./absent",
        "ada/../tiny",
        "ada/t..y",
        "ada/tiny.git",
        "-ada/tiny",
        "ada/",
        "ada/ti ny",
        "ada/tıny",
        "ada\\tiny",
        "http://x/y",
        "ada/" + "x" * 97,
        "ada/tiny@",
        "ada/tiny@../main",
        "ada/tiny@a b",
        "ada/tiny@/etc",
        "ada/tiny@" + "x" * 300,
    ],
)
def test_malformed_names_are_refused_before_any_request(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder that exists beside the caller would be taken as it is
    monkeypatch.setattr(socket, "socket", _NoSocket)
    with pytest.raises(HubError):
        resolve(name)


def test_an_address_of_the_hub_says_the_name_to_pass() -> None:
    for address in ("https://huggingface.co/ada/tiny", "http://hf.co/ada/tiny/tree/main/sub"):
        with pytest.raises(HubError, match=r"an address; expected .*; pass 'ada/tiny'"):
            resolve(address)


@pytest.mark.parametrize("name", ["modèle", "a+b", ".hidden", "v1.git", "deep/er"])
@pytest.mark.parametrize("form", ["{}", "{}/", "./{}"])
def test_local_subfolders_have_any_name(name: str, form: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    found = resolve(tmp_path, subfolder=form.format(name)).folder
    assert found.samefile(tmp_path / name)


@pytest.mark.parametrize("call", [load, lambda name: finetune(name, train=[{"text": "a", "label": n} for n in (0, 1)])])
def test_an_empty_name_is_not_the_current_folder(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError) as caught:
        call("")
    assert caught.value.name == ""


@pytest.mark.parametrize("subfolder", ["..", "a/../b", "/etc", "a//b", "a\\b", "a\0", ".git", "a/"])
def test_malformed_subfolders_are_refused(subfolder: str, tmp_path: Path) -> None:
    with pytest.raises(HubError):
        resolve(tmp_path, subfolder=subfolder)


def test_the_usual_environment_variables_are_honoured(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_env"
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_env",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    environment.pop("HF_HUB_CACHE", None)
    code = "from flodl_hf.checkpoints.hub.download import resolve; print(resolve('ada/tiny').folder)"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_relative_to(tmp_path / "home" / "hub")
    environment.update(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    offline = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert offline.stdout == run.stdout


def test_a_local_folder_does_not_import_huggingface_hub(tmp_path: Path) -> None:
    code = "import sys; from flodl_hf.checkpoints.hub.download import resolve; resolve(sys.argv[1]); sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=900).returncode == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("revision", ["main", "commit"])
def test_a_damaged_file_of_the_cache_is_not_used_offline(hub: Hub, tmp_path: Path, name: str, revision: str) -> None:
    found = resolve("ada/tiny", cache_dir=tmp_path)
    revision = str(found.commit) if revision == "commit" else revision
    offline: dict[str, Any] = {"cache_dir": tmp_path, "revision": revision, "local_files_only": True}
    assert resolve("ada/tiny", **offline).folder == found.folder
    blob = (found.folder / name).resolve()
    data = blob.read_bytes()
    blob.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(HubError) as caught:
        resolve("ada/tiny", **offline)
    assert (caught.value.file, caught.value.damaged) == (name, str(blob))
    if revision != "main":  # with a network it is fetched again
        assert resolve("ada/tiny", cache_dir=tmp_path, revision=revision).folder == found.folder
        assert (found.folder / name).read_bytes() == data
        resolve("ada/tiny", **offline)


def test_files_of_the_cache_are_read_once(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flodl_hf.checkpoints.hub import choosing as verified

    read: list[str] = []
    real = verified.digest_of
    monkeypatch.setattr(verified, "digest_of", lambda path, **how: read.append(path.name) or real(path, **how))
    found = resolve("ada/tiny", cache_dir=tmp_path)
    for count in (len(_names(found.folder)), 0, 0):
        read.clear()
        resolve("ada/tiny", cache_dir=tmp_path, local_files_only=True)
        assert len(read) == count
    blob = (found.folder / "config.json").resolve()
    os.utime(blob, (1, 1))
    resolve("ada/tiny", cache_dir=tmp_path, local_files_only=True)
    assert read == [blob.name]
