"""What a person at a shell is told of a fine-tune, in the words of the command line."""

from __future__ import annotations

import ast
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from finetune_tables import labelled

import flodl_hf
from flodl_hf.tokenization.readers import files, rows

typer_testing = pytest.importorskip("typer.testing")

from flodl_hf.cli import finetune as command_of  # noqa: E402
from flodl_hf.cli.app import app  # noqa: E402
from flodl_hf.cli.command import in_options, option_names  # noqa: E402

OPTIONS = option_names(command_of.command.__wrapped__)
QUICK = ["--epochs", "1", "--batch-size", "16", "--lr", "1e-3"]
SAID_TO_PROGRAMS = {
    **dict.fromkeys(("loss", "metrics"), "functions, which no command line holds"),
    **dict.fromkeys(("threshold",), "of calls in the card, which are Python"),
    **dict.fromkeys(("scale", "margin", "directions", "power", "decay"), "what a map of an option holds"),
    **dict.fromkeys(("size", "query_length", "document_length", "expanded", "attended", "punctuation"), "the same"),
    **dict.fromkeys(("text", "format"), "a bit of a map; taken out of what others say"),
    **dict.fromkeys(("allow_change",), "of the Trainer, replaced by resume="),
}
"""Words before ``=`` in this room that are no options, and why they may stay."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "my rows.csv"
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, ["text", "label"])
        writer.writeheader()
        writer.writerows(labelled(32))
    return file


def run(*arguments: Any, code: int = 0) -> Any:
    done = typer_testing.CliRunner().invoke(app, ["finetune", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def literals(file: Path) -> list[str]:
    """Return the texts of a module that are no docstrings."""
    tree = ast.parse(file.read_text("utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [str(node.value) for node in texts if id(node) not in said]


def test_every_keyword_in_a_message_is_an_option() -> None:
    training = Path(flodl_hf.__file__).parent / "training"
    others = ("report", "demo", "evaluators.py", "losses", "observation.py", "result.py")  # pages, other calls
    files = [file for file in training.rglob("*.py") if file.relative_to(training).parts[0] not in others]
    words = {word for file in files for text in literals(file) for word in re.findall(r"(?<![\w.-])([a-z_]+)=", text)}
    assert len(words) > 20
    assert words - OPTIONS.keys() == SAID_TO_PROGRAMS.keys()


def test_files_that_are_faulty_name_no_keyword() -> None:
    texts = [text for module in (files, rows) for text in literals(Path(module.__file__))]
    assert {word for text in texts for word in re.findall(r"\b([a-z_]+)=", text)} <= {"format"}


def test_data_may_follow_the_model(base: Path, table: Path, tmp_path: Path) -> None:
    ways = ([table, "--out", tmp_path / "a"], ["--train", table, "--out", tmp_path / "b"])
    first, second = (json.loads(run(base, *how, *QUICK, "--json").stdout) for how in ways)
    assert first["metrics"] == second["metrics"]
    assert first["steps"] == second["steps"] == 2
    assert "--train: found" in run(base, table, "--train", table, code=1).stderr
    assert "give MODEL and --train" in run(base, code=1).stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--early-stopping", "2"], "--early-stopping: found no evaluation data; set --eval"),
        (["--labels", "praise"], "--labels: the data has ['complaint'], which are not among ['praise']"),
        (["--eval", "0.9999"], "--eval: found 0.9999 of 32 training rows"),
        (["--class-weights", "a=1"], "--class-weights: ['a'] are no labels"),
        (["--task", "ner"], "--task"),
        (["--set", "projection={size: 8}"], "--set projection: sequence_classification takes none"),
    ],
)
def test_what_cannot_be_names_the_option(options: list[str], said: str, base: Path, table: Path) -> None:
    assert said in run(base, table, *options, code=1).stderr


def test_remarks_name_options(base: Path, table: Path) -> None:
    said = run(base, table, *QUICK, "--max-length", "8").stderr
    assert "(inferred from the columns; --task selects another)" in said
    assert "; --long-texts windows reads them whole" in said
    assert in_options(said, OPTIONS) == said


def test_a_file_that_is_no_table_is_told_without_keywords(base: Path, table: Path, tmp_path: Path) -> None:
    table.write_text(table.read_text() + "a,b,c\n")
    said = run(base, table, code=1).stderr
    assert "found 3 cells: 'a,b,c', expected 2" in said
    assert "=" not in said.partition("DataError")[2]
    other = table.rename(tmp_path / "rows.dat")
    assert "Rename the file.\n" in run(base, other, code=1).stderr


def test_a_held_out_row_that_cannot_be_is_told_with_its_set(base: Path, table: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.csv").write_text("text,label\nhello,other\n")
    said = run(base, table, "--eval", tmp_path / "dev.csv", code=1).stderr
    assert (
        "DataError: eval: labels in column 'label' that cannot be:\n  row 0: labels: found 'other', expected one of"
        in said
    )
    said = run(base, table, "--eval", f"easy={table},hard={tmp_path / 'dev.csv'}", code=1).stderr
    assert "DataError: eval hard: labels in column" in said


def test_a_rate_is_searched_with_the_options_of_the_run(base: Path, table: Path) -> None:
    said = run(base, table, "--eval", "0.25", "--early-stopping", "2", "--find-lr", "--batch-size", "8").stdout
    assert "steps at rates of 1.0e-07" in said
