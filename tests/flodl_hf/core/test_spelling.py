"""What a person at a shell is told: messages in options, hints that can be pasted, faults of files as one line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

typer_testing = pytest.importorskip("typer.testing")

from flodl_hf.cli import export, finetune, predict  # noqa: E402
from flodl_hf.cli.app import app  # noqa: E402
from flodl_hf.cli.command import (  # noqa: E402
    in_options,
    names_given,
    option_names,
)

SPELLED = [
    (predict, "keep other columns (keep=text), or", "keep other columns (--keep text), or"),
    (predict, "not clear; name it: text_column=. The", "not clear; name it: --text-column. The"),
    (predict, "a column 'keep=3' of transformers' files", "a column 'keep=3' of transformers' files"),
    (predict, "start over with --overwrite (overwrite=True), which", "start over with --overwrite, which"),
    (predict, "batch_invariant=False has no opposite", "batch_invariant=False has no opposite"),
    (predict, "format='tsv' is read", "--format tsv is read"),
    (finetune, "(new_head=False would keep it)", "(--set new_head=false would keep it)"),
    (finetune, "columns={'text': 'my text', 'label': ...}", "--columns 'text=my text,label=...'"),
    (finetune, "lr=3e-05.", "--lr 3e-05."),
    (finetune, "unknown=3", "unknown=3"),
    (export, "or allow it: overwrite=True", "or allow it: --overwrite"),
    (export, "give it with like= (--like FOLDER)", "give it with --like FOLDER"),
]


@pytest.mark.parametrize(("module", "said", "shown"), SPELLED)
def test_messages_name_options_as_the_command_line_does(module: Any, said: str, shown: str) -> None:
    command = module.command.__wrapped__
    assert in_options(said, option_names(command)) == shown


def run(*arguments: Any, code: int, **more: Any) -> Any:
    done = typer_testing.CliRunner().invoke(app, [str(a) for a in arguments], **more)
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def folder(saved: Callable[..., Path]) -> Path:
    return saved("bert", "sequence_classification", labels=["bad", "good"])


def test_a_labelled_file_is_told_which_option_keeps_the_rest(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a b.csv").write_text("text,label\nthe cat,good\n")
    files = ["--in", tmp_path / "a b.csv", "--out", tmp_path / "out.csv", "--keep", "text,label"]
    assert "(--keep text)" in run("predict", folder, *files, code=1).stderr
    told = json.loads(run("predict", folder, *files, "--json", code=1).stdout)
    assert told["error"] == "DataError"
    assert "--keep text" in told["message"]
    assert "out.csv: 1 row in" in run("predict", folder, *files, "--keep", "text", code=0).stdout
    onto = run("predict", folder, "--in", tmp_path / "a b.csv", "--out", "-", "--keep", "text", code=0).stderr
    assert "standard output: 1 row in" in onto
    assert ".jsonl" not in onto


def test_hints_can_be_pasted_where_paths_have_spaces(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "my export"
    hint = run("export", folder, "--out", out, code=0).stderr.strip().rpartition("check it with: ")[2]
    assert shlex.split(hint) == ["flodl-hf", "verify-export", str(out), "--source", str(folder)]
    assert "--overwrite" in run("export", folder, "--out", out, code=1).stderr


def test_a_hint_after_a_cast_asks_for_no_equal_bytes(folder: Path, tmp_path: Path) -> None:
    hint = run("export", folder, "--out", tmp_path / "half", "--dtype", "float16", code=0).stderr
    assert hint.strip().endswith("half --no-source")


def test_what_has_no_use_is_said(folder: Path, tmp_path: Path) -> None:
    assert "has no use for --question" in run("predict", folder, "the cat", "--question", "who?", code=1).stderr
    assert "from Python, pass untrained=True" in run("predict", folder, "a", "--head", "ner", code=1).stderr
    (tmp_path / "in.txt").write_text("the cat\n")
    assert f"--in {tmp_path}/in.txt --out -" in run("predict", folder, "--in", tmp_path / "in.txt", code=2).stderr
    assert "--out needs --in" in run("predict", folder, "--out", "-", code=2).stderr
    absent = tmp_path / "absent" / "out.csv"
    done = run("predict", folder, "--in", tmp_path / "in.txt", "--out", absent, code=1)
    assert f"{absent}: its folder does not exist; make it first" in done.stderr
    near = folder.with_name(folder.name + "s")
    assert f"did you mean '{folder.name}'?" in run("predict", near, "the cat", code=1).stderr


def test_vectors_are_told_to_the_last_bit(saved: Callable[..., Path]) -> None:
    from flodl_hf import AutoModel

    encoder = saved("bert", "base")
    line = json.loads(run("predict", encoder, "the cat", "--json", code=0).stdout)
    said = torch.tensor(line["result"], dtype=torch.float32)
    assert torch.equal(said, AutoModel.from_pretrained(encoder).embed(["the cat"])[0])


def test_standard_input_is_utf_8(folder: Path) -> None:
    assert "no texts were given" in run("predict", folder, input=b"", code=0).stderr
    done = run("predict", folder, "--json", input="\ufeffthe cat\r\nGrüße\n".encode(), code=0)
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["the cat", "Grüße"]
    wrong = run("predict", folder, input=b"the cat\nGr\xfc\xdfe\n", code=1).stderr
    assert "standard input, line 2: byte 0xfc at position 3; expected UTF-8" in wrong


def test_a_place_that_cannot_be_written_is_one_line(folder: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "page.html"
    assert "its folder does not exist" in run("predict", folder, "the cat", "--html", absent, code=1).stderr
    (tmp_path / "runs").mkdir()
    done = run("runs", "save", tmp_path / "runs", "--out", absent, code=1)
    assert done.stderr.startswith("OSError: ")
    assert str(absent.parent) in done.stderr


def test_mining_needs_pairs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "the cat", "label": "good"}\n')
    done = run("mine", folder, "--in", tmp_path / "texts.jsonl", "--out", tmp_path / "out.jsonl", code=1)
    assert "expected pairs" in done.stderr
    assert "--columns anchor=...,positive=..." in done.stderr


def test_a_search_for_nothing_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("the cat\na dog\n")
    done = run("search", folder, "--in", tmp_path / "texts.txt", "--json", input=b"\n", code=0)
    assert json.loads(done.stdout) == []
    assert "no query was given" in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--devices", "2", "--device", "cpu"],
            "--devices 2 and --device cpu are aliases (Number or names of",
        ),
        (["-b", "4", "--batch-size=8"], "-b 4 and --batch-size 8 are aliases (Rows in a batch"),
    ],
)
def test_one_option_under_two_names_is_told_with_both(given: list[str], said: str) -> None:
    words = " ".join(run("finetune", "base", "--train", "rows.csv", *given, code=2).stderr.replace("│", " ").split())
    assert said in words
    assert "pass only one" in words


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], []),
        (["-b"], [("-b", "")]),
        (["x", "-b", "4"], [("-b", "4")]),
        (["-b", "4", "--batch-size=8"], [("-b", "4"), ("--batch-size", "8")]),
        (["--", "-b", "4"], []),
    ],
    ids=str,
)
def test_names_are_found_in_arguments_of_any_length(args: list[str], said: list[tuple[str, str]]) -> None:
    option = SimpleNamespace(is_flag=False, count=False, opts=["-b", "--batch-size"])
    assert names_given(option, args) == said


def test_one_option_under_two_names_with_one_value_is_taken(tmp_path: Path) -> None:
    done = run("finetune", "base", "--train", tmp_path / "absent.csv", "-b", "4", "--batch-size", "4", code=1)
    assert "absent.csv: no such file" in done.stderr


@pytest.mark.parametrize("more", [["--train", "b.csv"], ["-t", "b.csv"], ["-tb.csv"], ["--train=b.csv"]])
def test_a_second_file_of_training_data_is_not_dropped(more: list[str]) -> None:
    said = " ".join(run("finetune", "base", "--train", "a.csv", *more, code=2).stderr.replace("│", " ").split())
    assert "a.csv" in said
    assert "b.csv" in said


def test_an_option_with_another_value_in_set_is_refused() -> None:
    said = run("finetune", "base", "--train", "a.csv", "--epochs", "2", "--set", "epochs=5", code=1).stderr
    assert "epochs also as an option" in said
    twice = run("finetune", "base", "--train", "a.csv", "--set", "seed=5", "--set", "seed=6", code=1).stderr
    assert "several values for seed" in twice


@pytest.mark.parametrize(
    "words",
    [
        ["--epochs", "2", "--set", "epochs=2"], ["--lr", "1e-4", "--set", "lr=1e-4"],
        ["--precision", "bf16", "--set", "precision=bfloat16"], ["--resume", "--set", "resume=[label_smoothing]"],
    ],
)  # fmt: skip
def test_an_option_with_the_same_value_in_set_is_taken(words: list[str]) -> None:
    assert "absent.csv" in run("finetune", "base", "--train", "absent.csv", *words, code=1).stderr


def test_a_recipe_with_a_misspelt_name_is_told_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("modle: base\ntrain: rows.csv\n")
    said = run("finetune", "--recipe", tmp_path / "a.yaml", code=1).stderr
    assert "found no model; the recipe has 'modle', did you mean 'model'?; give MODEL" in said
