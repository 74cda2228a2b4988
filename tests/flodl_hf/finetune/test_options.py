"""The table of options is the API, the command line and the recipe at once, and refuses what it does not know."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from finetune_tables import labelled

from flodl.data import LengthGroupedBatches
from flodl.errors import ConfigError
from flodl_hf.training import plan_job
from flodl_hf.training.keywords import FinetuneOptions
from flodl_hf.training.options import Options, make_options


def test_the_keywords_for_type_checkers_are_the_fields_of_the_table() -> None:
    assert get_type_hints(FinetuneOptions) == get_type_hints(Options)
    assert list(get_type_hints(FinetuneOptions)) == [f.name for f in fields(Options)]


def test_every_option_says_what_it_is() -> None:
    assert all(f.metadata["help"].endswith(".") for f in fields(Options))


def test_the_command_has_one_flag_for_each_option_with_its_default_in_the_help() -> None:
    typer = pytest.importorskip("typer")
    from flodl_hf.cli.app import app

    command = typer.main.get_command(app).commands["finetune"]
    flags = {parameter.name: parameter for parameter in command.params}
    for row in fields(Options):
        assert "--" + row.name.replace("_", "-") in flags[row.name].opts
        assert row.metadata["help"] in flags[row.name].help
    assert "(default 5e-05)" in flags["lr"].help


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("lr", "5e-5", 5e-5),  # YAML reads it as a text
        ("lr", 1, 1.0),
        ("epochs", 3.0, 3),
        ("freeze", "embeddings", ("embeddings",)),
        ("labels", ["a", 1], ("a", "1")),
        ("max_steps", None, None),
        ("columns", {"text": "headline"}, {"text": "headline"}),
    ],
)
def test_values_are_brought_to_their_type(name: str, value: Any, kept: Any) -> None:
    found = getattr(make_options({name: value}), name)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0), ("epochs", 1.5), ("epochs", True), ("epochs", None), ("lr", "fast"), ("lr", float("nan")),
        ("lr", -1.0), ("precision", "fp8"), ("schedule", "lienar"), ("schedule", 3), ("group_by_length", "yes"),
        ("freeze", 3), ("columns", ["text"]), ("label_smoothing", 1.0), ("dropout", 1.0), ("warmup", 2.5),
        ("policy", "Sync"), ("mask_probability", 0.0), ("task", 4),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make_options({name: value})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{name}: ")


def test_all_faults_come_at_once_and_near_names_are_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        make_options({"epoch": 3, "precision": "bf61", "lr": "x"}, where="run.yaml")
    assert len(caught.value.problems) == 3
    assert "did you mean 'epochs'?" in str(caught.value)
    assert "did you mean 'bf16'?" in str(caught.value)
    assert str(caught.value).startswith("run.yaml")


@pytest.mark.parametrize(
    ("count", "options", "grouped"),
    [
        (64, {}, False),
        (256 * 2, {"batch_size": 2}, True),
        (256 * 2, {"batch_size": 2, "layout": "packed"}, False),
        (256 * 2, {"batch_size": 2, "group_by_length": False}, False),
        (64, {"group_by_length": True}, True),
    ],
)
def test_rows_of_a_length_come_together_in_long_padded_runs_or_where_asked(
    count: int, options: dict[str, Any], grouped: bool, base: Path
) -> None:
    rows = (labelled(64) * 8)[:count]
    job = plan_job(base, rows, None, make_options(options))
    assert isinstance(job.batches, LengthGroupedBatches) == grouped


def test_grouping_of_packed_rows_is_said_to_do_nothing(base: Path) -> None:
    with pytest.warns(UserWarning, match="rows are packed"):
        plan_job(base, labelled(16), None, make_options({"layout": "packed", "group_by_length": True}))
