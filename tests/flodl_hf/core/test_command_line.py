"""How commands look: groups, choices, colours where they are wanted, and nothing that moves a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

typer_testing = pytest.importorskip("typer.testing")

from flodl_hf.checkpoints.weights import checkpoint as checkpoint_folder  # noqa: E402
from flodl_hf.cli import options as choices  # noqa: E402
from flodl_hf.cli import shared  # noqa: E402
from flodl_hf.cli.app import NAMES, app, app_for  # noqa: E402


def run(*arguments: Any, code: int = 0, **more: Any) -> Any:
    done = typer_testing.CliRunner().invoke(app, [str(a) for a in arguments], **more)
    assert done.exit_code == code, done.output
    return done


def commands() -> dict[str, Any]:
    import typer

    from docs.generate import commands_of

    return dict(commands_of(typer.main.get_command(app)))


@pytest.fixture
def folder(saved: Callable[..., Path]) -> Path:
    return saved("bert", "sequence_classification", labels=["bad", "good"])


def test_words_of_options_are_those_of_the_tables() -> None:
    from docs.generate import words_of
    from flodl_hf.inference import Precision
    from flodl_hf.inference.entities import Aggregation
    from flodl_hf.models.saving import DTYPE_NAMES
    from flodl_hf.training.options import SCHEDULES, Options

    assert get_args(choices.PRECISIONS) == get_args(Precision)
    assert set(get_args(choices.AGGREGATIONS)) == set(get_args(Aggregation))
    assert set(get_args(choices.DTYPES)) == set(DTYPE_NAMES.values())
    options = {p.name: p for p in commands()["finetune"].params}
    for name, field in Options.__dataclass_fields__.items():
        if "among" in field.metadata and field.metadata["cli"]:
            assert set(words_of(options[name])) == set(field.metadata["among"]), name
    assert set(words_of(options["schedule"])) == set(SCHEDULES)


def test_options_come_in_groups() -> None:
    from flodl_hf.cli.finetune import GROUPS
    from flodl_hf.training.options import Options

    shown = [name for name, field in Options.__dataclass_fields__.items() if field.metadata["cli"]]
    assert set(GROUPS) <= set(Options.__dataclass_fields__)
    panels = {p.name: getattr(p, "rich_help_panel", None) for p in commands()["finetune"].params}
    assert all(panels[name] for name in shown)
    expected = {
        "Task and data": ("task", "columns", "labels"),
        "Steps and batches": ("max_length", "long_texts", "batch_size", "layout", "epochs"),
        "Learning": ("lr", "warmup", "neftune"),
        "Arithmetic and speed": ("precision", "seed", "gradient_checkpointing", "compile"),
        "Evaluation": ("eval_every", "early_stopping"),
        "Masked words and answers": ("concatenate", "generator"),
        "Vectors": ("vector_loss", "normalize", "guide", "prompts"),
        "Trackers and traces": ("trackers", "report"),
        "Checkpoints": ("checkpoints", "keep_last", "resume"),
        "Devices": ("devices", "shard"),
        "The Hub": ("revision", "local_files_only"),
    }
    assert list(dict.fromkeys(panels[name] for name in panels if name in shown)) == list(expected)
    assert {name: panels[name] for names in expected.values() for name in names} == {
        name: group for group, names in expected.items() for name in names
    }
    assert "Steps and batches:" in run("evaluate", "--help").output.splitlines()
    lines = run("predict", "--help").output.splitlines()
    assert {"Options:", "Answers:", "How it runs:", "A file of texts:"} <= set(lines)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("config", "runs")])
def test_help_cuts_no_option_at_80_columns(name: str) -> None:
    text = run(name, "--help-all" if name in ("finetune", "predict") else "--help", env={"COLUMNS": "80"}).output
    assert max(map(len, text.splitlines())) <= 80
    for option in commands()[name].params:
        if option.param_type_name == "option" and not option.hidden:
            assert re.search(rf"{option.opts[0]}(?![\w-])", text), option.opts


def test_the_list_of_commands_cuts_no_description() -> None:
    text = run("--help", env={"COLUMNS": "80"}).output
    assert [name for name, summary in NAMES.items() if f"{name} " not in text or summary not in text] == []


@pytest.mark.parametrize("words", [["-v", "predict"], ["config"], ["verify-export"]])
def test_a_command_alone_looks_as_it_does_among_all(words: list[str]) -> None:
    runner = typer_testing.CliRunner()
    alone = runner.invoke(app_for([*words, "--help"]), [*words, "--help"])
    assert alone.exit_code == 0
    assert alone.output == run(*words, "--help").output
    assert runner.invoke(app_for(words), ["doctor"]).exit_code == 2


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["--version"], ["--help", "predict"], ["predcit"], ["--show-completion", "predict"]]
)
def test_all_commands_are_there_where_none_is_named(words: list[str]) -> None:
    assert typer_testing.CliRunner().invoke(app_for(words), ["merge", "--help"]).exit_code == 0


def test_shells_are_told_of_all_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FLODL_HF_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "flodl-hf ")
    monkeypatch.setenv("COMP_CWORD", "1")
    offered = typer_testing.CliRunner().invoke(app_for(["predict"]), [], prog_name="flodl-hf").output.split()
    assert [name for name in offered if name in NAMES] == list(NAMES)


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_an_export_shows_the_files_that_it_writes_again(
    dtype: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is only written again takes no memory of its own, whatever its size."""
    read: list[bool] = []
    usual = checkpoint_folder.Checkpoint.read_all

    def noted(self: Any, names: Any = None, *, mapped: bool = False) -> Any:
        read.append(mapped)
        return usual(self, names, mapped=mapped)

    monkeypatch.setattr(checkpoint_folder.Checkpoint, "read_all", noted)
    run("export", folder, "--out", tmp_path / "out", *(() if dtype is None else ("--dtype", dtype)))
    assert read
    assert all(read)
    before, after = (place / "model.safetensors" for place in (folder, tmp_path / "out"))
    assert (before.read_bytes() == after.read_bytes()) is (dtype is None)


def test_a_word_that_is_none_is_wrong_usage(folder: Path) -> None:
    for command in (
        ["predict", folder, "x", "--head", "sequence"],
        ["predict", folder, "x", "--aggregation", "last"],
        ["export", folder, "--out", "x", "--dtype", "float8"],
        ["finetune", folder, "--train", "x", "--optimizer", "adam"],
        ["inspect", folder, "--precision", "bf61"],
    ):
        assert command[-1] in run(*command, code=2).output


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("flodl-hf predict x --precision b", ["bf16"]),
        ("flodl-hf finetune x --schedule co", ["cosine", "cosine_with_restarts", "constant"]),
        ("flodl-hf export x --dtype f", ["float32", "float16", "float64"]),
        ("flodl-hf predict x --prec", ["--precision"]),
    ],
)
def test_shells_complete_words(words: str, offered: list[str]) -> None:
    env = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_FLODL_HF_COMPLETE": "complete_bash"}
    done = typer_testing.CliRunner().invoke(app, [], prog_name="flodl-hf", env=env)
    assert done.stdout.split() == offered


def test_the_version_is_said() -> None:
    from flodl_hf.checkpoints.system import own_version

    assert run("--version").stdout == run("-V").stdout == f"{own_version()}\n"


def test_a_file_is_answered_onto_standard_output(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the cat\na dog\n")
    run("predict", folder, "--in", tmp_path / "in.txt", "--out", tmp_path / "out.jsonl", "--device", "cpu")
    done = run("predict", folder, "--in", tmp_path / "in.txt", "--out", "-", "--device", "cpu")
    assert done.stdout == (tmp_path / "out.jsonl").read_text()
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["the cat", "a dog"]
    assert "2 rows" in done.stderr
    assert run("predict", folder, "--in", tmp_path / "none.txt", "--out", "-", code=1).stdout == ""


ESCAPE = "\x1b[31m\x9b2J\x07\u202e"


def test_nothing_that_a_file_says_moves_the_terminal(saved: Callable[..., Path]) -> None:
    folder = saved("bert", "sequence_classification", labels=[f"bad{ESCAPE}", "good"])
    for command in (["predict", folder, f"the cat{ESCAPE}"], ["inspect", folder], ["predict", f"owner/{ESCAPE}", "x"]):
        for rest in ([], ["--json"]):
            done = run(*command, *rest, code=int("owner" in str(command[1])))
            assert not set(done.stdout + done.stderr) & set("\x1b\x9b\x07\u202e"), (command, rest)
    found = json.loads(run("predict", folder, f"the cat{ESCAPE}", "--json").stdout)
    assert found["text"] == f"the cat{ESCAPE}", "JSON keeps what was there, escaped"
    assert f"bad{ESCAPE}" in [answer["label"] for answer in found["result"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shared.painted("x", Terminal(), fg="red") == "\x1b[31mx\x1b[0m"
    assert shared.painted("x", Terminal()) == shared.painted("x", io.StringIO(), fg="red") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shared.painted("x", Terminal(), fg="red") == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert shared.painted("x", Terminal(), fg="red") == "x"


def test_a_warning_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    @shared.reporting
    def command() -> None:
        warnings.warn("layers run more slowly", stacklevel=1)

    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        command()
    assert capsys.readouterr().err == "warning: layers run more slowly\n"
    assert warnings.showwarning is before
    assert sys.stderr
