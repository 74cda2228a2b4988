"""What is absent on this machine, or cannot be written, is told before torch is imported or a model is opened."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from flodl_hf.cli.app import app_for
from flodl_hf.cli.shared import FILE, FOLDER, MODEL, PLACES, ROWS, TEXTS

# A command line of each command, with a word for each parameter of `PLACES`.
LINES = {
    "prediction": "predict model --in source --out out.jsonl",
    "encode": "encode model --in source --out out.npy",
    "search": "search model query --in corpus --vectors vectors",
    "mine": "mine model --in source --corpus corpus --out out.jsonl",
    "training": "finetune model --train train --eval eval --out out",
    "evaluation": "evaluate model --data data",
    "inspect": "inspect model",
    "export": "export model --out out",
    "convert": "convert model --out out",
    "merge": "merge base adapter --out out",
}
CASES = [(command, name, kind) for command, places in PLACES.items() for name, kind in places.items()
         if kind != TEXTS]  # fmt: skip
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from flodl_hf.cli import main; main()"


def line(command: str, absent: str, there: Path) -> list[str]:
    """Return a command line whose places are all there but one."""
    words = LINES[command].split()
    for name, kind in PLACES[command].items():
        if kind == TEXTS:
            continue
        place = next(i for i, word in enumerate(words) if i and word.partition(".")[0] == name)
        if kind in (MODEL, ROWS):
            path = there / name if name != absent else there / "absent" / name
            words[place] = str(path)
            if name != absent and kind == MODEL:
                path.mkdir()
            elif name != absent:
                path.write_text("a text\n")
        else:
            words[place] = str(there / ("absent" if name == absent and kind == FILE else "") / words[place])
    return words


@pytest.mark.parametrize(("command", "name", "kind"), [case for case in CASES if case[2] != FOLDER])
def test_what_is_absent_is_told_without_torch(command: str, name: str, kind: str, tmp_path: Path) -> None:
    words = line(command, name, tmp_path)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, check=False)
    said = {MODEL: "no such folder", ROWS: "no such file", FILE: "its folder does not exist"}[kind]
    assert done.returncode == 1
    assert done.stderr.startswith(f"{'HubError' if kind == MODEL else 'DataError'}: {tmp_path}/absent/{name}")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1  # and no device before it


def test_a_model_to_serve_that_is_absent_is_told_without_torch(tmp_path: Path) -> None:
    words = ["serve", f"films={tmp_path / 'absent'}"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"HubError: {tmp_path / 'absent'}: no such folder" in done.stderr


@pytest.mark.parametrize(("command", "name"), [case[:2] for case in CASES if case[2] in (FILE, FOLDER)])
def test_an_output_that_cannot_be_written_is_told_before_a_model_is_opened(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = line(command, "", tmp_path)  # whose model is an empty folder

    def refused(*_: Any, dir: str, **__: Any) -> Any:
        assert dir == str(tmp_path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    told = CliRunner().invoke(app_for(words), words)
    assert told.exit_code == 1
    assert f"cannot write in {tmp_path} (Permission denied)" in told.stderr
    assert "finished parts" not in told.stderr
    assert not list(tmp_path.glob(f"{name}*"))


@pytest.mark.parametrize("command", ["predict", "encode", "search"])
def test_a_file_without_rows_is_said_to_have_none(command: str, demo_model: Path, tmp_path: Path) -> None:
    empty, out = tmp_path / "empty.txt", tmp_path / "out.jsonl"
    empty.write_text("")
    given = ["a query", "--in", str(empty)] if command == "search" else ["--in", str(empty), "--out", str(out)]
    told = CliRunner().invoke(app_for([command]), [command, str(demo_model), *given])
    assert f"{empty}: has no rows" in told.stderr
    # A file of answers to no rows has none; in no rows nothing can be searched.
    assert (told.exit_code, out.exists()) == ((1, False) if command == "search" else (0, True))


@pytest.mark.parametrize("words", [["predict", "model"], ["search", "model", "--in", "in.csv"]])
@pytest.mark.parametrize("name", ["in.csv", "./in.csv"])
def test_a_text_that_is_the_name_of_a_file_is_refused(
    words: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text("text\na cat\n")
    Path("model").mkdir()
    found = CliRunner().invoke(app_for(words), [*words, "a text", name])
    assert found.exit_code == 1
    assert found.output.startswith(f"DataError: '{name}': found the name of a file")
    assert f"--in {name}" in found.output
