"""What every command owes its user: numbers out of range are wrong usage, and nothing is begun that cannot end well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
import typer
from typer.testing import CliRunner

from flodl_hf.cli import shared
from flodl_hf.cli.app import app
from flodl_hf.training.options import Options


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands(typer.main.get_command(app)))
OUT_OF_RANGE = [
    (path, option.opts[0], option.min - 1 if option.min is not None else option.max + 1)
    for path, command in ALL.items()
    for option in command.params
    if getattr(option, "min", None) is not None or getattr(option, "max", None) is not None
]


@pytest.mark.parametrize(("path", "option", "value"), OUT_OF_RANGE, ids=lambda part: str(part))
def test_a_number_out_of_range_is_wrong_usage_that_names_the_option(
    path: tuple[str, ...], option: str, value: float
) -> None:
    done = CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [*path, f"{option}={value}"])
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{option}'" in done.stderr


def test_every_bound_of_a_choice_of_a_run_is_one_of_its_option() -> None:
    options = {option.name: option for option in ALL["finetune",].params}
    checked = 0
    for name, row in Options.__dataclass_fields__.items():
        least = row.metadata.get("least")
        if least is None or not row.metadata["cli"] or "str" in str(row.type):
            continue
        assert options[name].min == least, name
        checked += 1
    assert checked > 15


@pytest.mark.parametrize("words", [["--help"], ["finetune", "--help"], ["--version"]], ids=" ".join)
def test_help_to_a_reader_that_has_gone_ends_quietly(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    there = {**os.environ, "PYTHONPATH": str(Path(shared.__file__).parents[2])}
    command = [sys.executable, "-m", "flodl_hf", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=there, timeout=900, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("words", [["predict", "MODEL", "a text"], ["predict", "MODEL", "--in", "IN", "--out", "OUT.csv"], ["encode", "MODEL", "--in", "IN", "--out", "OUT.npy"]], ids=lambda w: " ".join(w[:3]))  # fmt: skip
def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(
    words: list[str], demo_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "MODEL"
    folder.mkdir()
    (folder / "config.json").write_bytes((demo_model / "config.json").read_bytes())  # and no weights at all
    (tmp_path / "IN").write_text("a text\n")
    given = [str(tmp_path / word) if word.isupper() or "." in word else word for word in words]
    given += ["--format", "text"] if "--in" in words else []
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 1
    assert "the model has no tokenizer, because its folder holds none" in done.stderr


def test_predict_says_which_columns_it_read(demo_model: Path, tmp_path: Path) -> None:
    rows = [{"id": 1, "body": "good", "text": "a film"}, {"id": 2, "body": "bad", "text": "a cat"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["predict", str(demo_model), "--in", str(tmp_path / "in.jsonl"), "--out"]
    done = CliRunner().invoke(app, [*given, str(tmp_path / "one.jsonl")])
    assert done.stderr.count("read: column 'text'\n") == 1
    done = CliRunner().invoke(app, [*given, str(tmp_path / "two.jsonl"), "--text-column", "body", "--json"])
    assert json.loads(done.stdout)["columns"] == ["body"]


def test_comments_of_a_file_of_api_keys_are_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flodl_hf import serving

    asked: dict[str, Any] = {}
    monkeypatch.setattr(serving, "serve", lambda models, **options: asked.update(options))
    monkeypatch.setenv("FLODL_HF_API_KEYS", "second")
    keys = tmp_path / "keys.txt"
    keys.write_text("# clients\nfirst\n\n  # of the tests\n")
    done = CliRunner().invoke(app, ["serve", "model", "--api-key-file", str(keys)])
    assert done.exit_code == 0, done.stderr
    assert sorted(asked["api_keys"]) == ["first", "second"]
