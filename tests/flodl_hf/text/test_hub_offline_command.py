"""A Hub name that is not there, without a network: one clear message, and a status that is not 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

testing = pytest.importorskip("typer.testing")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    from flodl_hf.cli.app import app

    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def invoke(*args: str, stdin: str | None = None) -> Any:
        return testing.CliRunner().invoke(app, ["predict", "nobody/nothing", *args], input=stdin)

    return invoke


@pytest.mark.parametrize("args", [["x"], [], ["--json", "x"], ["--local-files-only", "x"]])
def test_a_name_that_is_not_cached(args: list[str], run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--local-files-only" not in args:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = run(*args, stdin="x\n")
    assert done.exit_code == 1
    assert "HubError: nobody/nothing: not in the cache" in done.stderr
    assert "hf download nobody/nothing" in done.stderr
    if "--json" in args:
        assert json.loads(done.stdout)["error"] == "HubError"
    else:
        assert done.stdout == ""


def test_a_file_of_texts_is_left_alone(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source, out = tmp_path / "in.jsonl", tmp_path / "out.csv"
    source.write_text('{"text": "x"}\n')
    done = run("--in", str(source), "--out", str(out), "--local-files-only")
    assert done.exit_code == 1
    assert "not in the cache" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["in.jsonl"]
