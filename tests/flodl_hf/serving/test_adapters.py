"""Adapters by name: each answers as it does in Python, on one base, with a head of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_models import TEXTS, write

from flodl.errors import ConfigError
from flodl_hf.heads.auto import load
from flodl_hf.models.adapters import IA3, Lora, Prefix
from flodl_hf.serving.metrics import Log
from flodl_hf.serving.request import WorkerRequest
from flodl_hf.serving.running import running
from flodl_hf.serving.settings import Served, Settings
from flodl_hf.serving.worker import Worker
from flodl_hf.serving.workers import find_adapters

LABELS = {"mood": ["sad", "glad"], "same": ["sad", "glad"], "topic": ["a", "b", "c", "d"]}


def adapter(base: Path, folder: Path, seed: int, head: str, settings: Any = None, **labels: Any) -> None:
    """Write an adapter that is as if trained, with a head of its own."""
    model: Any = load(base, head=head, **labels)
    model.add_adapter(settings or Lora(rank=3, targets="all-linear"))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model._held_adapters.known["default"].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    model.save_adapter(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("base"), "embed")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, labels) in enumerate(LABELS.items()):
        adapter(base, root / name, seed, "sequence_classification", labels=labels)
    adapter(base, root / "scaled", 7, "sequence_classification", IA3(), labels=LABELS["mood"])
    adapter(base, root / "names", 8, "token_classification", labels=["O", "B-PER", "B-LOC"])
    adapter(base, root / "vectors", 9, "base")
    (root / "README.md").write_text("files are passed over")
    (root / ".git").mkdir()
    return root


class Records(logging.Handler):
    """What the server's log is told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


RECORDS = Records()


@pytest.fixture(scope="module")
def asked(base: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    import httpx

    more = tmp_path_factory.mktemp("more")
    adapter(base, more / "led", 10, "base", Prefix(3))
    settings = Settings(models=(Served("base", str(base)),), devices=("cpu",), adapters=(str(adapters), str(more)))
    log = logging.getLogger("flodl_hf.serving")
    log.addHandler(RECORDS)
    try:
        with running(settings) as (url, app), httpx.Client(base_url=url, timeout=60) as client:
            yield client, app
    finally:
        log.removeHandler(RECORDS)


def test_a_warning_of_a_worker_is_a_line_of_the_log(asked: tuple[Any, Any]) -> None:
    assert asked[0].get("/health").status_code == 200
    (warned,) = [record for record in RECORDS.kept if "more slowly" in record.getMessage()]
    assert warned.getMessage().startswith("prediction: 2 layers run on torch's own operations")
    line = json.loads(Log().format(warned))
    assert (line["level"], line["what"], line["device"]) == ("warning", warned.getMessage(), "cpu")


def in_python(base: Path, folder: Path) -> Any:
    return load(base, adapter=folder)


@pytest.mark.parametrize("name", [*LABELS, "scaled"])
def test_each_answers_as_in_python(asked: tuple[Any, Any], base: Path, adapters: Path, name: str) -> None:
    model, client = in_python(base, adapters / name), asked[0]
    for path, body in (("/v1/classify", {"model": name}), (f"/models/{name}/-/v1/classify", {})):
        answer = client.post(path, json={"inputs": TEXTS, **body}).json()
        found = [{one["label"]: one["score"] for one in result["labels"]} for result in answer["results"]]
        expected = [{one.label: one.score for one in row} for row in model.predict(TEXTS)]
        assert [list(row) for row in found] == [list(row) for row in expected]
        assert torch.equal(
            torch.tensor([list(row.values()) for row in found]), torch.tensor([list(row.values()) for row in expected])
        )
        assert answer["model"] == name


@pytest.mark.filterwarnings("ignore:.*truncated")
def test_heads_of_other_tasks(asked: tuple[Any, Any], base: Path, adapters: Path) -> None:
    client = asked[0]
    answer = client.post("/v1/entities", json={"inputs": TEXTS}).json()
    assert answer["model"] == "names"
    expected = in_python(base, adapters / "names").predict(TEXTS)
    assert [result["entities"] for result in answer["results"]] == [one.to_rows() for one in expected]
    assert any(one.to_rows() for one in expected)
    models: dict[str, Any] = {"vectors": in_python(base, adapters / "vectors"), "base": load(base)}
    for name, model in models.items():
        vectors = client.post("/v1/embeddings", json={"input": TEXTS, "model": name, "truncate": True}).json()["data"]
        assert torch.equal(torch.tensor([one["embedding"] for one in vectors]), model.embed(TEXTS))
    refused = client.post("/v1/classify", json={"inputs": "a", "model": "moods"})
    assert refused.status_code == 404
    assert "'mood'" in refused.json()["error"]
    several = client.post("/v1/classify", json={"inputs": "a"})
    assert several.status_code == 404
    assert "mood, same, scaled, topic" in several.json()["error"]


def test_what_is_told_of_them(asked: tuple[Any, Any]) -> None:
    client = asked[0]
    listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
    assert list(listed) == ["base", "mood", "names", "same", "scaled", "topic", "vectors", "led"]
    assert {one["parent"] for name, one in listed.items() if name != "base"} == {"base"}
    assert listed["base"]["parent"] is None
    assert listed["topic"]["labels"] == LABELS["topic"]
    assert client.get("/info").json()["models"]["names"]["head"] == "token_classification"
    for _ in range(3):
        client.post("/v1/classify", json={"inputs": ["a", "b"], "model": "topic"})
    client.post("/v1/entities", json={"inputs": "a", "top": 1, "model": "names"})
    told = client.get("/metrics").text
    counted = int(told.split('flodl_requests_total{model="topic",status="200"} ')[1].split()[0])
    assert counted >= 3
    assert 'flodl_request_seconds_count{model="topic"}' in told
    assert 'flodl_texts_total{model="topic"}' in told
    assert 'flodl_tokens_total{model="topic"}' in told


@pytest.mark.slow
def test_a_reload_takes_up_new_ones_and_lets_go_of_old(asked: tuple[Any, Any], base: Path, adapters: Path) -> None:
    client, app = asked
    processes = app.state.processes
    loop = processes.here[0].listening.get_loop()

    def reload() -> None:
        asyncio.run_coroutine_threadsafe(processes.load(), loop).result(60)

    broken = adapters / "broken"
    broken.mkdir()
    with pytest.raises(ConfigError, match="broken is not an adapter"):
        reload()
    assert client.post("/v1/classify", json={"inputs": "a", "model": "topic"}).status_code == 200
    broken.rmdir()
    adapter(base, adapters / "later", 20, "sequence_classification", labels=["x", "y"])
    aside = shutil.move(adapters / "same", adapters.parent / "aside")
    try:
        reload()
        found = client.post("/v1/classify", json={"inputs": TEXTS[0], "model": "later"}).json()["results"][0]["labels"]
        (expected,) = in_python(base, adapters / "later").predict([TEXTS[0]])
        assert [(one["label"], one["score"]) for one in found] == [(one.label, one.score) for one in expected]
        assert client.post("/v1/classify", json={"inputs": "a", "model": "same"}).status_code == 404
    finally:
        shutil.move(aside, adapters / "same")
        shutil.rmtree(adapters / "later")


def worker(base: Path, adapters: Path, **given: Any) -> Worker:
    settings = Settings(models=(Served("base", str(base)),), adapters=(str(adapters),), **given)
    return Worker(settings.for_worker("cpu", find_adapters(settings)))


def test_they_have_the_memory_of_their_base(base: Path, adapters: Path) -> None:
    models = worker(base, adapters).models
    places = {
        name: model.graph.get_parameter("encoder.embeddings.word.weight").data_ptr() for name, model in models.items()
    }
    assert len(set(places.values())) == 1


def test_mixed_they_share_batches(base: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = worker(base, adapters, mix_adapters=True)
    assert {name: mixed.describe(name)["together"] for name in adapters_of(adapters)} == {
        "mood": ["mood", "same"], "same": ["mood", "same"], "topic": [], "names": [], "vectors": [], "scaled": [],
    }  # fmt: skip
    together = mixed.together["mood"][0]
    ran: list[list[int]] = []
    started = together.start

    def start(table: Any, work: Any, places: Any) -> Any:
        ran.append([number for (number,) in places])
        return started(table, work, places)

    monkeypatch.setattr(together, "start", start)
    batcher, asked = mixed.batcher, {}
    with batcher._changed:  # nothing starts before all of it waits
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(2)
        for name in ("mood", "same"):
            message = {"model": name, "task": "classify", "items": TEXTS}
            asked[name] = pool.submit(mixed.answer, message, WorkerRequest(key=name))
    with pool:
        answers = {name: one.result(60)[0] for name, one in asked.items()}
    for name, rows in answers.items():
        expected = in_python(base, adapters / name).predict(TEXTS)
        for row, right in zip(rows, expected, strict=True):
            assert {one["label"]: one["score"] for one in row} == pytest.approx(
                {one.label: one.score for one in right}, abs=1e-5
            )
    assert answers["mood"] != answers["same"]
    assert {number for numbers in ran for number in numbers} == {0, 1}


def adapters_of(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if (path / "adapter_config.json").exists())


def test_what_is_no_adapter_is_named(base: Path, adapters: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def settings(*given: str, models: tuple[str, ...] = ("base",), **more: Any) -> Settings:
        return Settings(models=tuple(Served(name, str(base)) for name in models), adapters=given, **more)

    (tmp_path / "plain").mkdir()
    shutil.copytree(adapters / "mood", tmp_path / "base")
    with pytest.raises(ConfigError) as caught:
        find_adapters(settings(str(tmp_path), str(tmp_path / "nowhere")))
    assert len(caught.value.details["problems"]) == 3
    assert "plain is not an adapter" in str(caught.value)
    assert "the name 'base' is already used by the model base" in str(caught.value)
    shutil.rmtree(tmp_path / "plain")
    shutil.move(tmp_path / "base", tmp_path / "mood")
    # Two models from one folder: which of them is the base has to be said.
    with pytest.raises(ConfigError, match="which 2 of the served models are"):
        find_adapters(settings(str(tmp_path), models=("one", "two")))
    assert [one["base"] for one in find_adapters(settings(f"two={tmp_path}", models=("one", "two")))] == ["two"]
    with pytest.raises(ConfigError, match="no model 'three'"):
        find_adapters(settings(f"three={tmp_path}", models=("one", "two")))
    with pytest.raises(ConfigError, match="mix_adapters"):
        settings(str(tmp_path), mix_adapters=True, batch_invariant=True)
    # One whose head was left out, on a base that has none.
    tensors = load_file(tmp_path / "mood" / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "classifier" not in name}
    save_file(kept, tmp_path / "mood" / "adapter_model.safetensors")
    told = json.loads((tmp_path / "mood" / "adapter_config.json").read_text())
    (tmp_path / "mood" / "adapter_config.json").write_text(json.dumps({**told, "modules_to_save": None}))
    with pytest.raises(ConfigError, match=r"mood: .*") as fault:
        worker(base, tmp_path)
    assert "no head: head.classifier" in str(fault.value)
