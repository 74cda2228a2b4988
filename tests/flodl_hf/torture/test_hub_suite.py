"""A Hub that lies: the suite's own cases, the server's ways, and what a damaged cache may cost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from flodl_hf.checkpoints.hub.request import arrived, time_for, within
from flodl_hf.errors import HubError
from tests.torture import hub as suite
from tests.torture.loopback import COMMIT, REPOSITORY, Hub
from tests.torture.runner import run_cases

huggingface_hub = pytest.importorskip("huggingface_hub")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
QUICK = ("undamaged", "body", "listing", "listing-bytes", "head", "redirect", "cache", "asked")


@forks
@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_hub_at_fault_gives_the_model_or_is_refused(count: int) -> None:
    found: dict[str, list[Any]] = {kind: [] for kind in QUICK}
    for case in suite.cases(7, 102 * count):
        if case.kind in found and len(found[case.kind]) < count:
            found[case.kind].append(case)
    cases = [case for some in found.values() for case in some]
    bad = [(case.line, verdict.grade, verdict.text) for case, verdict in run_cases(suite, cases) if not verdict.good]
    assert bad == []
    assert len(cases) >= len(QUICK)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub({"config.json": b"{}", "model.safetensors": b"w" * 4000, "tokenizer.json": b"{}"})
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield server
    server.take({})
    huggingface_hub.close_session()
    for one in (server.server, server.other):
        one.shutdown()
        one.server_close()


def resolved(cache: Path) -> Path:
    from flodl_hf.checkpoints.hub.download import resolve

    return resolve(REPOSITORY, cache_dir=cache).folder


@pytest.mark.parametrize(
    ("name", "value"),
    [("ETag", '"../../../outside/evil"'), ("ETag", "/outside/evil"), ("ETag", '".."'), ("X-Repo-Commit", "../../x"),
     ("X-Repo-Commit", "f" * 40)],
)  # fmt: skip
def test_a_server_names_no_files_outside_of_the_cache(hub: Hub, tmp_path: Path, name: str, value: str) -> None:
    hub.take({"at": "tokenizer.json", "headers": {name: value}})
    with pytest.raises(
        HubError, match=rf"tokenizer.json: the server answered with {'ETag' if name == 'ETag' else 'commit'}"
    ):
        resolved(tmp_path / "a" / "b" / "cache")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"cache"}
    hub.take({})
    assert (resolved(tmp_path / "a" / "b" / "cache") / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"at": "listing", "way": "drip"}, "the Hub cannot be reached"),
        ({"at": "listing", "way": "slow-head"}, "the Hub cannot be reached"),
        ({"at": "config.json", "way": "drip", "only": "GET", "part": 0}, "config.json: the server sends too slowly"),
        ({"at": "config.json", "status": 429, "headers": {"Retry-After": "100000000"}}, "config.json: "),
    ],
)
def test_an_answer_that_comes_drop_by_drop_has_an_end(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], said: str
) -> None:
    from huggingface_hub import constants

    hub.files["config.json"] = b"{" + b" " * 400 + b"}"
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.3")
    hub.take(fault)
    with pytest.raises(HubError, match=said):
        resolved(tmp_path)


def test_what_a_damaged_cache_points_to_is_not_removed(hub: Hub, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_bytes(b"not of the cache")
    link = resolved(tmp_path / "cache") / "tokenizer.json"
    link.unlink()
    link.symlink_to(mine)
    hub.take({"at": "tokenizer.json", "only": "GET", "body": "[]"})
    with pytest.raises(HubError, match=r"tokenizer.json arrived damaged"):
        resolved(tmp_path / "cache")
    assert mine.read_bytes() == b"not of the cache"
    hub.take({})
    assert (resolved(tmp_path / "cache") / "tokenizer.json").read_bytes() == b"{}"
    assert mine.read_bytes() == b"not of the cache"


@pytest.mark.parametrize(
    ("field", "value"), [("size", "7"), ("size", -1), ("lfs", {"sha256": 5, "size": 1}), ("blobId", 3)]
)
def test_what_a_listing_says_of_a_file_is_checked(hub: Hub, tmp_path: Path, field: str, value: object) -> None:
    from tests.torture.loopback import listing_of

    said = listing_of(hub.files)["siblings"]
    next(entry for entry in said if entry["rfilename"] == "model.safetensors")[field] = value
    hub.take({"at": "listing", "listing": {"siblings": said}})
    with pytest.raises(HubError, match=r"expected|no Hub answer") as caught:
        resolved(tmp_path)
    assert "ada/tiny" in str(caught.value)
    assert not list(tmp_path.rglob("blobs/*"))


def test_files_of_a_repository_are_found_among_very_many(hub: Hub, tmp_path: Path) -> None:
    from tests.torture.loopback import listing_of

    many = [{"rfilename": f"data/{place}/model.safetensors", "size": 3} for place in range(5_000)]
    hub.take({"at": "listing", "listing": {"siblings": many + listing_of(hub.files)["siblings"]}})
    assert {path.name for path in resolved(tmp_path).iterdir()} == set(hub.files)
    assert COMMIT in str(resolved(tmp_path))


def test_a_call_is_given_up_when_it_is_over_its_time(tmp_path: Path) -> None:
    assert within(lambda: 3, lambda: 60.0) == 3
    with pytest.raises(KeyError, match="mine"):
        within(lambda: {}["mine"], lambda: 60.0)
    free = threading.Event()
    with pytest.raises(TimeoutError, match="nothing whole"):
        within(free.wait, lambda: 0.05)
    free.set()

    class Late(Future[int]):
        """Its result arrives between the end of a wait and the question for it."""

        def result(self, timeout: float | None = None) -> int:
            if not self.done():
                sleep(0.05)
                raise TimeoutError
            return super().result(timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flodl_hf.checkpoints.hub.request.Future", Late)
        assert within(lambda: sleep(0.02) or 3, lambda: 60.0) == 3
    # more time while more of a file is there
    allowed = time_for(64 << 20, tmp_path, 10.0)
    first = allowed()
    with (tmp_path / "x.incomplete").open("wb") as file:
        file.truncate(16 << 20)
    assert arrived(tmp_path) == 16 << 20
    assert allowed() == first + 1024
    assert time_for(16 << 10, tmp_path, 10.0)() == 11.0
