"""`flodl-hf run`: commands and presets of flodl-hf.yaml; `flodl-hf schema`: options for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flodl_hf.cli.app import app_for
from flodl_hf.cli.schema import schema_of
from flodl_hf.training.options import Options

PROJECT = """\
commands:
  greet:
    run: echo hello
    help: Say hello.
  quick:
    command: finetune
    options: {recipe: recipe.yaml, max-steps: 2, epochs: 1, new_head: true, resume: true}
    arguments: [start]
"""


def call(*words: str) -> Any:
    return CliRunner().invoke(app_for(list(words)), list(words))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "flodl-hf.yaml").write_text(PROJECT)
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    return tmp_path


@pytest.mark.usefixtures("project")
def test_the_commands_are_listed_with_their_help() -> None:
    lines = call("run").stdout.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [["greet", "Say hello."], ["quick", "flodl-hf finetune"]]
    assert json.loads(call("run", "--json").stdout) == yaml.safe_load(PROJECT)["commands"]


def test_a_shell_command_runs_in_the_project_with_the_users_arguments(project: Path, capfd: Any) -> None:
    (project / "flodl-hf.yaml").write_text("commands: {where: {run: 'pwd; printf \"%s|\"'}, fail: {run: exit 7}}")
    assert call("run", "where", "a b", "--flag").exit_code == 0
    assert capfd.readouterr().out == f"{project}\na b|--flag|"
    assert call("run", "fail").exit_code == 7


@pytest.mark.parametrize(
    ("given", "line", "by_user"),
    [
        ([], "--recipe recipe.yaml --max-steps 2 --epochs 1 --set new_head=true --resume start", []),
        (["--epochs", "3"], "--recipe recipe.yaml --max-steps 2 --set new_head=true --resume start --epochs 3", ["--epochs"]),
        (["-e=3"], "--recipe recipe.yaml --max-steps 2 --set new_head=true --resume start -e=3", ["--epochs"]),
        (["--", "--no-resume"], "--recipe recipe.yaml --max-steps 2 --epochs 1 --set new_head=true start --no-resume",
         ["--resume"]),
    ],
)  # fmt: skip
def test_the_users_options_replace_those_of_a_preset(
    project: Path, given: list[str], line: str, by_user: list[str]
) -> None:
    found = json.loads(call("run", "--json", "quick", *given).stdout)
    assert found["command"].replace("'", "") == f"flodl-hf finetune {line}"
    assert found["folder"] == str(project)
    assert [name for name, origin in found["origins"].items() if origin == "command line"] == by_user
    assert found["origins"]["--recipe"].endswith("flodl-hf.yaml:7")


def test_an_overlay_changes_a_preset(project: Path) -> None:
    (project / "flodl-hf.ci.yaml").write_text("commands: {quick: {options: {epochs: null, max-steps: 1}}}")
    found = json.loads(call("run", "--env", "ci", "--json", "quick").stdout)
    assert "--max-steps 1" in found["command"]
    assert "--epochs" not in found["command"]
    assert found["origins"]["--max-steps"].endswith("flodl-hf.ci.yaml:1")


def test_a_preset_runs_its_command(project: Path) -> None:
    (project / "r.yaml").write_text("epochs: 7\n")
    (project / "flodl-hf.yaml").write_text("commands: {look: {command: schema, arguments: [search]}}")
    assert json.loads(call("run", "look").stdout)["title"] == "flodl-hf search"


@pytest.mark.parametrize(
    ("text", "words", "fault"),
    [
        (PROJECT, ["quik"], "quik"),
        ("commands: {a: {command: finetune, options: {epoch: 1}}}", ["a"], "epoch"),
        ("commands: {a: {command: fine}}", ["a"], "command"),
        ("commands: {a: {command: finetune, run: ls}}", ["a"], "a"),
        ("commands: {a: {run: ls, cwd: x}}", ["a"], "cwd"),
        ("commands: {a: {run: [1, 2]}}", ["a"], "run"),
        ("commands: {a: {command: [finetune]}}", ["a"], "command"),
        ("commands: {a: {command: finetune, options: [1]}}", ["a"], "options"),
        ("commands: {a: {command: finetune, arguments: abc}}", ["a"], "arguments"),
        ("commands: {a: {command: run, arguments: [a]}}", ["a"], "command"),
        ("commands: {a: {command: runs}}", ["a"], "command"),
        ("presets: {}", ["a"], "commands"),
    ],
)
def test_a_wrong_project_file_is_refused(project: Path, text: str, words: list[str], fault: str) -> None:
    from flodl.errors import ConfigError
    from flodl_hf.cli.run import command

    (project / "flodl-hf.yaml").write_text(text)
    with pytest.raises(ConfigError) as no:
        command.__wrapped__((words or [None])[0], None, None, False, False)  # type: ignore[attr-defined]
    assert no.value.problems == [fault]
    assert "expected a str" not in str(no.value)
    assert call("run", *words).exit_code == 1


def test_without_a_project_file_the_message_contains_an_example(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found = call("run", "train")
    assert found.exit_code == 1
    assert "commands:" in found.stderr


def test_the_schema_of_a_recipe_has_every_option() -> None:
    schema = schema_of("finetune")
    keys = set(schema["properties"])
    assert keys == {*Options().to_dict(), "inherit-from", "model", "train", "eval", "out", "overwrite"}
    assert schema["additionalProperties"] is False
    assert schema["properties"]["max_steps"]["type"] == ["integer", "null"]
    assert all(entry.get("description") for entry in schema["properties"].values())


def test_a_recipe_of_new_is_valid(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from flodl_hf.cli.new import new_project

    new_project(tmp_path / "mine", task="ner")
    recipe = yaml.safe_load((tmp_path / "mine" / "recipe.yaml").read_text())
    jsonschema.validate(recipe, schema_of("finetune"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(recipe | {"epoch": 1}, schema_of("finetune"))


def test_the_schema_of_another_command_has_its_options() -> None:
    schema = json.loads(call("schema", "search").stdout)
    assert schema["properties"]["top_k"] == {
        "type": "integer", "default": 5, "description": schema["properties"]["top_k"]["description"]
    }  # fmt: skip
    assert schema["properties"]["precision"]["enum"][0] == "exact"
    assert call("schema", "serch").exit_code == 1
