"""The head of the model card: what the Hub reads, and nothing that was not stated or measured."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from finetune_tables import TABLES, labelled

from flodl_hf.checkpoints.hub.request import front_matter, hub_name
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.training import finetune


def card_of(base: Path, out: Path, **given: Any) -> tuple[dict[str, Any], str]:
    finetune(base, out=out, max_steps=2, batch_size=8, **given)
    text = (out / "README.md").read_text("utf-8")
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1]), text


@pytest.fixture
def stated(base: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "stated"
    shutil.copytree(base, folder)
    head = "license: apache-2.0\nlanguage:\n- en\nbase_model: google-bert/bert-base-uncased\nmodel-index: []\n"
    (folder / "README.md").write_text(f"---\n{head}---\n# A model\n")
    return folder


@pytest.mark.parametrize("task", TABLES)
def test_figures_are_evaluation_results(task: str, base: Path, tmp_path: Path) -> None:
    rows = TABLES[task](24)
    head, _ = card_of(base, tmp_path / "out", train=rows[:16], eval=rows[16:])
    assert head["pipeline_tag"] == task_named(task).hub_tag
    assert "license" not in head
    assert "base_model" not in head
    (index,) = head["model-index"]
    (entry,) = index["results"]
    assert entry["task"] == {"type": task_named(task).hub_tag}
    assert entry["dataset"] == {"name": "list in memory", "type": "held-out"}
    assert {metric["type"] for metric in entry["metrics"]} == set(head["metrics"])
    assert "loss" in head["metrics"]


def test_sets_have_results_of_their_own_and_single_labels_none(base: Path, tmp_path: Path) -> None:
    rows = TABLES["token_classification"](24)
    head, _ = card_of(base, tmp_path / "out", train=rows[:12], eval={"dev": rows[12:18], "hard": rows[18:]})
    results = head["model-index"][0]["results"]
    assert [entry["dataset"]["type"] for entry in results] == ["dev", "hard"]
    assert all("/" not in metric["name"] for entry in results for metric in entry["metrics"])


def test_licence_language_and_base_are_those_that_the_folder_states(stated: Path, tmp_path: Path) -> None:
    head, _ = card_of(stated, tmp_path / "out", train=labelled(16))
    assert head["license"] == "apache-2.0"
    assert head["language"] == ["en"]
    assert head["base_model"] == "google-bert/bert-base-uncased"
    assert "model-index" not in head  # nothing was measured


def test_functions_that_were_given_are_told(base: Path, tmp_path: Path) -> None:
    def each(scores: Any, labels: Any) -> Any:
        return (scores.sum(-1) - labels).square()

    _, text = card_of(base, tmp_path / "out", train=labelled(16), loss=each)
    assert "Given as functions, and no part of the recipe: loss." in text
    assert "loss was given in memory" in (tmp_path / "out" / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    "text",
    ["", "# no head", "---\nnever closed", "---\n- a list\n---\n", "---\na: [\n---\n", "---\n1: 2\n---\n", "\x00\x01"],
)
def test_cards_that_state_nothing_or_are_broken_are_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert dict(front_matter(tmp_path)) == {}
    (tmp_path / "README.md").write_bytes(b"---\n\xff\xfe: 1\n---\n")
    assert dict(front_matter(tmp_path)) == {}


@pytest.mark.parametrize(
    ("name", "repository"),
    [("a/b", "a/b"), ("a/b@main", "a/b"), ("bert", None), ("./a", None), ("/a/b", None), ("a/b/c", None)],
)
def test_names_of_the_hub_are_told_from_folders(name: str, repository: str | None) -> None:
    assert hub_name(name) == repository


def test_the_hub_client_reads_the_card(stated: Path, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    rows = labelled(24)
    card_of(stated, tmp_path / "out", train=rows[:16], eval=rows[16:])
    data = hub.ModelCard((tmp_path / "out" / "README.md").read_text()).data
    assert data.license == "apache-2.0"
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert 0 <= found["accuracy"] <= 1
