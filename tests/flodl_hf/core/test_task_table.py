"""Every name of every task means the same in all entry points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from flodl.errors import ConfigError
from flodl_hf import evaluate, load, pipeline
from flodl_hf.cli.new import DATA, new_project
from flodl_hf.cli.options import task_word
from flodl_hf.errors import ExportError, UnknownTaskError
from flodl_hf.families.schema.tasks import HEADS, TASKS, WORDS, task_named
from flodl_hf.heads.base import BaseModel
from flodl_hf.parity.matrix import select_cells
from flodl_hf.training import dry_run

SPELLINGS = [spelt for word in WORDS for spelt in dict.fromkeys((word, word.replace("_", "-"), word.upper()))]
WRONG = ["text_clasification", "tokcl", "nerr", "nothing", "zero-shoot"]


LOADED = ("base", "sequence_classification", "token_classification", "question_answering", "masked_lm")


@pytest.fixture(scope="module")
def folders(make: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of models by head."""
    place = tmp_path_factory.mktemp("models")
    return {head: make("bert", head).save_pretrained(place / head) for head in LOADED}


def test_names_are_those_of_one_task() -> None:
    for task in TASKS:
        assert task.words, f"{task.name} cannot be named"
        assert task_named(task.name) is task
        assert task_named(task.head) in HEADS
        assert task_named(task.training).training == task.training
        assert hasattr(task.model, "from_pretrained")
        assert all(hasattr(task.model, method) for method in task.methods)


def test_names_that_other_libraries_use_are_known() -> None:
    heads = {
        "text-classification": "sequence_classification", "sentiment-analysis": "sequence_classification",
        "ner": "token_classification", "fill_mask": "masked_lm", "rerank": "sequence_classification",
        "zero-shot-classification": "sequence_classification", "regression": "sequence_classification",
        "cross-encoder": "sequence_classification", "feature-extraction": "base", "splade": "masked_lm",
        "colbert": "base", "ForTokenClassification": "token_classification", "MLM": "masked_lm",
    }  # fmt: skip
    assert {word: task_named(word).head for word in heads} == heads
    learned = {"feature-extraction": "embedding", "cross-encoder": "rank", "regression": "sequence_classification"}
    assert {word: task_named(word).training for word in learned} == learned


@pytest.mark.parametrize("word", SPELLINGS)
def test_a_name_means_the_same_everywhere(word: str, folders: dict[str, Path], tmp_path: Path) -> None:
    task = task_named(word)
    assert task_word(word) == word
    if task.head in folders:
        model = load(folders[task.head], head=word)
        assert model.head == task.head
    if task.head in folders and task.pipeline is not None:
        assert pipeline(word, model).task == task.pipeline
    else:
        with pytest.raises(UnknownTaskError):
            pipeline(word, BaseModel)
    if task.training in DATA:
        assert new_project(tmp_path / "new", task=word)
    else:
        with pytest.raises(ExportError):
            new_project(tmp_path / "new", task=word)
    assert {cell.head for cell in select_cells(heads=[word])} == {task.head}


@pytest.mark.parametrize("word", ["text-classification", "zero_shot", "REGRESSION", "seqcls"])
def test_fine_tuning_and_evaluation_take_the_same_names(word: str, folders: dict[str, Path]) -> None:
    rows = [{"text": f"number {i}", "label": float(i % 3)} for i in range(12)]
    found = dry_run(folders["sequence_classification"], train=rows, task=word, max_steps=1, new_head=True)
    assert found.task == "sequence_classification"
    assert found.labels == (("LABEL_0",) if word == "REGRESSION" else ("0", "1", "2"))
    figures = evaluate(folders["sequence_classification"], [{"text": "a", "label": "LABEL_0"}], task=word)
    assert figures.task == "sequence_classification"


@pytest.mark.parametrize("word", WRONG)
def test_unknown_names_are_refused_alike(word: str, folders: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x"}]
    calls = [
        lambda: load(folders["base"], head=word),
        lambda: dry_run(folders["base"], train=rows, task=word),
        lambda: evaluate(folders["base"], rows, task=word),
        lambda: pipeline(word, folders["base"]),
        lambda: new_project(tmp_path / "new", task=word),
        lambda: select_cells(heads=[word]),
    ]
    for call in calls:
        with pytest.raises((ConfigError, ExportError)):
            call()
    with pytest.raises(typer.BadParameter):
        task_word(word)


@pytest.mark.parametrize(
    ("word", "nearest"), [("text_clasification", "text_classification"), ("tokcl", "tokcls"), ("nerr", "ner")]
)
def test_the_nearest_name_is_suggested(word: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'"):
        task_named(word)
