"""The table of options is the API, the command line and the recipe at once, and refuses what it does not know."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from finetune_tables import labelled

from flodl.data import LengthGroupedBatches
from flodl.errors import ConfigError
from flodl_hf.models.adapters import IA3, Lora, Prefix, Prompt
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import FinetuneOptions, Options, make_options

pytest.importorskip("typer")
from typer.testing import CliRunner


def test_every_option_has_a_description() -> None:
    assert all(row.metadata["help"].endswith(".") for row in fields(Options))
    assert [row.name for row in fields(Options)] == list(FinetuneOptions.__annotations__)


def finetune_help(*words: str) -> str:
    from flodl_hf.cli.app import app

    shown = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, ["finetune", *words])
    assert shown.exit_code == 0
    return shown.output


def test_help_has_the_most_needed_options_at_80_columns_and_help_all_has_all() -> None:
    short, whole = (
        set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", finetune_help(word), re.MULTILINE))
        for word in ("--help", "--help-all")
    )
    assert max(map(len, finetune_help("--help").splitlines())) <= 80
    assert {"--epochs", "--lr", "--lora", "--eval", "--help-all"} <= short < whole
    assert len(short) <= 25
    assert 60 < len(whole) <= 75
    flags = {"--" + row.name.replace("_", "-") for row in fields(Options) if row.metadata["cli"]}
    assert flags <= whole


def test_the_command_sets_every_option_by_its_name() -> None:
    from flodl_hf.cli.finetune import _set_values

    assert _set_values(["beta1=0.8", "adapter={type: ia3}", "resume=[seed]"]) == {
        "beta1": 0.8, "adapter": {"type": "ia3"}, "resume": ["seed"],
    }  # fmt: skip
    with pytest.raises(ConfigError):
        _set_values(["beta1"])


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("--beta1", "--set beta1="),
    ],
)
def test_an_option_without_a_flag_names_its_replacement(word: str, instead: str) -> None:
    from flodl_hf.cli.app import app

    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["finetune", "m", "--train", "t.csv", word, "1"])
    assert done.exit_code == 2
    assert instead in done.output


def test_recipes_describe_the_adapter() -> None:
    recorded: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({"lora": 4}, Lora(4)),
        ({"adapter": {"type": "lora", "rank": 4, "alpha": 8.0, "dora": True}}, Lora(4, 8.0, dora=True)),
        ({"adapter": {"type": "ia3", "targets": ["key"]}}, IA3(("key",))),
        ({"adapter": {"type": "prompt", "tokens": 3, "text": "a"}}, Prompt(3, "a")),
        ({"adapter": Prefix(3)}, Prefix(3)),
    ]
    for values, adapter in recorded:
        options = make_options(values)
        assert options.adapter == adapter
        assert make_options({k: v for k, v in options.to_dict().items() if v is not None}) == options
    with pytest.raises(ConfigError, match="expected only one adapter"):
        make_options({"lora": 4, "adapter": IA3()})


def test_recipes_of_earlier_versions_may_have_former_options_with_their_defaults() -> None:
    former = {"fused": True, "capture": True, "log_every": 20, "watch": [], "eval_delay": 0, "lora_dropout": 0.0}
    assert make_options({**former, "long_texts": "cut", "epochs": 2}) == make_options({"epochs": 2})
    assert make_options({"vector_loss": "DenoisingAutoEncoderLoss", "fused": False}).vector_loss
    for name, value in (("fused", False), ("log_every", 5), ("lora_dropout", 0.1)):
        with pytest.raises(ConfigError, match=name):
            make_options({name: value})


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
        ("precision", "bfloat16", "bf16"),
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
        make_options({"epoch": 3, "precision": "bf61", "lr": "x"}, source="run.yaml")
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
