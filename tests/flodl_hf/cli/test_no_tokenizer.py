"""A folder without a tokenizer is refused before its weights, or any texts, are read; by each command that has texts."""

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
    "finetune": ["MODEL", "--train", "unread.csv", "--out", "tuned"],
    "serve": ["MODEL"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_tokenizer_is_told_before_anything_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    # Neither weights nor a whole configuration: reading either would say so first.
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}), "utf-8")
    for file in ("unread.txt", "unread.csv"):
        (tmp_path / file).write_bytes(b"\xff")  # no text, as who reads it would say
    words = [name, *(str(folder) if word == "MODEL" else word for word in COMMANDS[name])]
    told = CliRunner().invoke(app_for(words), words)
    assert told.exit_code == 1
    assert f"{name}: the model has no tokenizer" in told.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "unread.csv", "unread.txt"]
