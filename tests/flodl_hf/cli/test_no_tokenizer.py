"""A folder without a tokenizer is refused before its weights, or any texts, are read; finetune reports all problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flodl_hf.cli.app import app_for

COMMANDS = {
    "predict": ["MODEL", "a text"],
    "encode": ["MODEL", "--in", "unread.txt", "--out", "vectors.npy"],
    "search": ["MODEL", "a query", "--in", "unread.txt"],
    "mine": ["MODEL", "--in", "unread.csv", "--out", "mined.jsonl"],
    "serve": ["MODEL"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_tokenizer_is_reported_before_anything_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = without_tokenizer([name, *COMMANDS[name]], tmp_path, monkeypatch)
    assert f"{name}: the model has no tokenizer" in told


def test_finetune_reports_a_missing_tokenizer_with_all_other_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["finetune", "MODEL", "--train", "unread.csv", "--out", "tuned"]
    told = without_tokenizer(words, tmp_path, monkeypatch)
    assert "finetune: found 2 problems" in told
    assert "the model has no tokenizer" in told
    assert "found byte 0xff" in told


def without_tokenizer(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a command writes to its error output for a model without a tokenizer and files without text."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    # Neither weights nor a whole configuration: reading either would say so first.
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}), "utf-8")
    for file in ("unread.txt", "unread.csv"):
        (tmp_path / file).write_bytes(b"\xff")  # no text, as who reads it would say
    words = [str(folder) if word == "MODEL" else word for word in words]
    told = CliRunner().invoke(app_for(words), words)
    assert told.exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "unread.csv", "unread.txt"]
    return told.stderr
