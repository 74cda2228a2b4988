"""A new project trains as it was written, for every task, and nothing that was there is lost."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from flodl_hf import finetune
from flodl_hf.cli.app import app
from flodl_hf.cli.new import DATA, new_project
from flodl_hf.errors import ExportError
from flodl_hf.training.demo import demo_model, learn_vocabulary
from flodl_hf.training.recipe import load_recipe


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(demo_model(learn_vocabulary()).save_pretrained(tmp_path_factory.mktemp("small") / "model"))


@pytest.mark.parametrize("head", DATA)
def test_a_project_trains(head: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    files = new_project(folder, task=DATA[head].task)
    assert all(path.is_file() for path in files)
    monkeypatch.chdir(folder)
    values: dict[str, Any] = load_recipe(folder / "recipe.yaml", "ci").values
    assert values.pop("model") == "distilbert/distilbert-base-uncased"
    values |= {"out": tmp_path / "tuned", "new_head": True}
    result = finetune(small, **values)
    assert result.steps == 2
    assert result.task == head
    assert result.metrics


def test_the_test_of_a_project_is_valid(tmp_path: Path) -> None:
    new_project(tmp_path / "mine")
    found = runpy.run_path(str(tmp_path / "mine" / "test_recipe.py"))
    assert [name for name in found if name.startswith("test_")] == [
        "test_the_recipe_trains",
        "test_the_folder_is_complete",
    ]


def test_rows_do_not_stand_in_both_files(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    new_project(folder)
    lines = [(folder / "data" / f"{name}.csv").read_text().splitlines()[1:] for name in ("train", "held_out")]
    assert [len(part) for part in lines] == [48, 16]
    assert not set(lines[0]) & set(lines[1])


def test_what_is_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="new or empty"):
        new_project(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (folder / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ExportError, match="did you mean"):
        new_project(tmp_path / "other", task="seqclas")
    assert not (tmp_path / "other").exists()


def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", str(tmp_path / "mine"), "--task", "qa", "--model", "a/b", "--json"])
    assert result.exit_code == 0
    assert "data/train.jsonl" in json.loads(result.stdout)["files"]
    assert load_recipe(tmp_path / "mine" / "recipe.yaml").values["model"] == "a/b"
    assert CliRunner().invoke(app, ["new", str(tmp_path / "mine")]).exit_code == 1
