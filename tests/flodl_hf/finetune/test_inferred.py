"""What a table is taken for is said, and a table whose labels were lost trains no masked words in silence."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled, sentences

from flodl.errors import ConfigError, DataError
from flodl_hf.training import demo, finetune
from flodl_hf.training.data import read_tables
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.task import Known, LengthLimits
from flodl_hf.training.task_choice import choose_task, task_line

TEXTS = sentences()[:12]
LIMITS = LengthLimits(64, None, True)
ALONE = [{"text": text} for text in TEXTS]


def chosen(rows: Any, head: str | None = None, **options: Any) -> Any:
    tables = read_tables(rows, None)
    return choose_task(tables, make_options(options), Known(head))[0]


def with_column(name: str, among: Any = "ab") -> list[dict[str, Any]]:
    return [{"text": text, name: among[i % len(among)]} for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize(
    ("rows", "near"),
    [
        (with_column("labl"), "labl: text, did you mean 'label'?"),
        (with_column("Lable", (0, 1)), "Lable: number, did you mean 'label'?"),
        (with_column("entitys", ([],)), "entitys: list of text, did you mean 'entities'?"),
        ([{"question": "a?", "contxt": "b", "answers": ["b"]}] * 4, "contxt: text, did you mean 'context'?"),
    ],
)
def test_a_misspelt_column_is_named_with_what_it_may_be(rows: list[dict[str, Any]], near: str) -> None:
    with pytest.raises(DataError, match="what these columns are for is not clear") as caught:
        chosen(rows)
    assert near in str(caught.value)


def test_a_misspelt_role_of_a_named_column_too() -> None:
    with pytest.raises(DataError, match="label='labl', did you mean 'label'"):
        chosen(labelled(8), columns={"label": "labl"})
    held_out = [{"text": text, "labl": "a"} for text in TEXTS]
    tables = read_tables(labelled(8), held_out)
    with pytest.raises(DataError, match="eval: no column 'label', did you mean 'labl'"):
        choose_task(tables, make_options({}), Known())


@pytest.mark.parametrize(
    ("rows", "head", "kind", "says"),
    [
        (ALONE, "sequence_classification", ConfigError, "for a model with the head sequence_classification"),
        (ALONE, "token_classification", ConfigError, "for a model with the head token_classification"),
        ([*(ALONE * 20), {"text": "a", "label": "b"}], None, DataError, r"'label' \(1 of 241 rows\)"),
        ([{"text,label": f"{text},a"} for text in TEXTS], None, DataError, "divided by commas"),
        ([{"text": f"{text}\t1"} for text in TEXTS], None, DataError, "divided by tabs"),
        ([{"text": f"__label__a {text}"} for text in TEXTS], None, DataError, "as labels do for fastText"),
    ],
)
def test_texts_that_may_have_lost_their_labels_train_no_masked_words_unasked(
    rows: list[dict[str, Any]], head: str | None, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        chosen(rows, head)
    assert "task='masked_lm'" in str(caught.value)
    assert chosen(rows, head, task="mlm").head == "masked_lm"


def test_numbers_have_the_names_of_a_start_that_was_trained_for_as_many() -> None:
    tables = read_tables(with_column("label", (0, 1)), None)
    known = Known("sequence_classification", ("complaint", "praise"))
    assert choose_task(tables, make_options({}), known)[0].labels == ("complaint", "praise")


def test_a_label_that_the_first_row_lacks_is_a_label() -> None:
    rows = labelled(8)
    with pytest.raises(DataError, match="labels: found none in 1 of 8 rows, first in row 0"):
        chosen([{"text": rows[0]["text"]}, *rows[1:]])


@pytest.mark.parametrize("beside", ["labl", "id", "source"])
def test_masked_words_are_learned_of_any_text_where_that_is_said(beside: str) -> None:
    task = chosen(with_column(beside, (3, 4)), task="mlm")
    assert (task.head, task.columns.text) == ("masked_lm", "text")
    assert chosen([{"id": 1, "zzz": text} for text in TEXTS], task="mlm").columns.text == "zzz"
    with pytest.raises(DataError, match="not clear"):
        chosen([{"one": text, "other": text} for text in TEXTS], task="mlm")


def test_splits_of_a_data_set_are_no_tables_to_learn_from_together() -> None:
    with pytest.raises(ConfigError, match=r"found the splits train, test .* eval=data\['validation'\]"):
        read_tables({"train": labelled(8), "test": labelled(8)}, None)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("sequence_classification", "from text 'text', label 'label'; 2 labels: complaint, praise; 12 rows"),
        ("token_classification", "from words 'words', tags 'tags'; 2 labels: O, B-LONG; 12 rows"),
        ("question_answering", "from question 'question', context 'context', answers 'answers'; 12 rows"),
        ("masked_lm", "from text 'text'; the words behind masks are learned, no label; 12 rows"),
    ],
)
def test_what_is_learned_is_said_in_a_line_with_its_columns(task: str, said: str, base: Path) -> None:
    rows = TABLES[task](12)
    lines: list[str] = []
    plan_job(base, rows, None, make_options({}), tell=lines.append)
    few = [
        "batch_size: 4 (12 rows: 9 steps in place of 3; batch_size=32 to overrule)",
        "9 optimiser steps are few for a new head: use more epochs or more rows",
    ]
    learned = f"task {task} {said} (inferred from the columns; task= selects another)"
    assert lines == [learned, *(few if task != "masked_lm" else [])]
    lines.clear()
    for enough in ({"epochs": 2000}, {"max_steps": 1}):
        plan_job(base, rows, None, make_options(enough), tell=lines.append)
    assert lines == [learned, learned]
    assert task_line(chosen(rows, task=task), rows, task) == f"task {task} {said}"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": text, "label": i / 7} for i, text in enumerate(TEXTS)], "a number for each text"),
        (
            [{"text": text, "labels": ["a", "b"][: 1 + i % 2]} for i, text in enumerate(TEXTS)],
            "2 labels, any number per text: a, b",
        ),
        ([{"text": text, "label": f"c{i // 2:x}"} for i, text in enumerate(TEXTS * 2)], "c7, and 4 more"),
        (
            [{"anchor": text, "positive": text} for text in TEXTS],
            "embedding from text 'anchor', text pair 'positive'; pairs of 'anchor', 'positive'; ",
        ),
        (
            [{"anchor": text, "positive": text, "negative": text} for text in TEXTS],
            "triplets of 'anchor', 'positive', 'negative'; ",
        ),
        (
            [{"prompt": text, "choice0": "a", "choice1": "b", "label": 0} for text in TEXTS],
            "multiple_choice from prompt 'prompt', choices 'choice0', 'choice1', label 'label'",
        ),
    ],
)
def test_labels_of_every_kind_are_said(rows: list[dict[str, Any]], said: str) -> None:
    assert said in task_line(chosen(rows), rows, None)


def test_several_tables_for_a_classifier_have_a_note_about_its_head(demo_model: Path, base: Path) -> None:
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(sentences()[:16])]
    notes = [
        [note for note in plan_job(model, {"a": rows, "b": rows}, None, make_options(options)).notes if "task=" in note]
        for model, options in ((demo_model, {}), (base, {}), (demo_model, {"task": "embedding"}))
    ]
    assert [len(found) for found in notes] == [1, 0, 0]


def test_a_trained_head_is_not_called_new(base: Path, tmp_path: Path) -> None:
    rows = TABLES["sequence_classification"](12)
    finetune(base, train=rows, max_steps=1, out=tmp_path / "trained")
    for options, count in (({}, 2), ({"new_head": True}, 3)):  # the task, the batch size, and few steps
        lines: list[str] = []
        plan_job(tmp_path / "trained", rows, None, make_options(options), tell=lines.append)
        assert len(lines) == count


def test_the_line_of_a_ranker_names_a_score_and_no_labels() -> None:
    rows = [{"query": text, "passage": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    line = task_line(chosen(rows, task="rank"), rows, "rank")
    assert "a score for each pair of texts" in line
    assert "LABEL_0" not in line


# ---- values that cannot be ----------------------------------------------------------------------------

WORDS = [{"words": ["a", "b"], "tags": ["O", "B-X"]}, {"words": ["c"], "tags": ["O"]}]
ASKED = {"question": "which?", "context": "a b", "answers": {"text": ["a"], "answer_start": [0]}}


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([*WORDS, {"words": ["d"], "tags": None}], {}, "column 'tags' has values that are no lists of tags:\n  row 2: None"),
        ([*WORDS, {"words": ["d"]}], {}, "row 2: NoneType"),
        ([{"words": ["a", "b"], "tags": ["O", None]}], {}, "'tags' contains lists of several kinds of values"),
        ([{"tokens": ["a"], "ner_tag": ["O"]}], {}, "'ner_tag', did you mean 'ner_tags'"),
        ([{"tokens": "a b", "tags": "O O"}] * 4, {}, "Words and tags are lists"),
        ([{"question": "a?", "context": "b", "title": "c"}] * 4, {}, "no column with answers among"),
        ([{"sentence1": text, "sentence2": text} for text in TEXTS], {}, "train vectors: task='embedding'"),
        ([{"anchor": text, "postive": text} for text in TEXTS], {}, "'postive', did you mean 'positive'"),
        (with_column("label", ("a", 1)), {}, "label: number and text"),
        (with_column("label", ("a", " ")), {}, "labels: found none in 6 of 12 rows, first in row 1"),
        (with_column("label"), {"labels": ["a", "a", "b"]}, r"found \['a'\] twice"),
        (with_column("label", ("a,b", "a")), {"problem_type": "multi_label_classification"}, "several labels in one text"),
        (
            [{"I love this": text, "good": ("good", "bad")[i % 2]} for i, text in enumerate(TEXTS)],
            {},
            "first line of the file seems to be a row of data",
        ),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_told_before_a_model_is_opened(
    rows: list[dict[str, Any]], options: dict[str, Any], says: str
) -> None:
    with pytest.raises((DataError, ConfigError), match=says):
        chosen(rows, **options)


def test_a_start_that_is_no_number_and_held_out_tags_that_are_missing_are_told(base: Path) -> None:
    wrong = {**ASKED, "answers": {"text": ["a"], "answer_start": ["x"]}}
    with pytest.raises(DataError, match="row 1: the answer's start 'x' is no integer"):
        plan_job(base, [ASKED, wrong], None, make_options({}))
    with pytest.raises(DataError, match="row 1: found NoneType; expected a list of tags"):
        plan_job(base, WORDS, [WORDS[0], {"words": ["d"]}], make_options({}))


def test_a_sentence_without_words_hides_no_tags() -> None:
    assert chosen([{"tokens": ["a"], "ner_tags": [1]}, {"tokens": [], "ner_tags": []}]).labels == ("0", "1")


@pytest.mark.parametrize("scheme", ["BILU", "BIES", "BIIB"])
def test_neighbouring_entities_count_one_by_one_in_every_scheme(scheme: str) -> None:
    begin, _, end, single = scheme
    tags = [f"{begin}-X", f"{end}-X"] * 2 + [f"{single}-X", "O"] * 2
    rows = [{"words": list("abcdefgh"), "tags": tags}]
    task = chosen(rows)
    prepared = task.prepare(rows, demo.learn_vocabulary(), LIMITS, training=False)
    scorer = prepared.scorer()
    said = [0, *(task.labels.index(tag) for tag in tags), 0]
    scorer.update(0, [torch.eye(len(task.labels))[said]])
    assert scorer.compute()["f1"] == 1.0
    assert scorer.metrics()[0].compute()["count"] == 4.0


@pytest.mark.parametrize("value", [int, str, float, bool])
def test_labels_in_a_column_each_are_labels_of_one_text(value: Any, base: Path) -> None:
    rows = [{"text": text, "rude": value(i % 2), "late": value(i % 3 == 0)} for i, text in enumerate(TEXTS)]
    if value is not bool and value is not str:
        with pytest.raises(DataError, match=r"named together: columns=\{'label': 'rude\+late'\}"):
            chosen(rows)
    if value is str:
        rows = [{**row, "rude": str(i % 2), "late": "01"[i % 3 == 0]} for i, row in enumerate(rows)]
    job = plan_job(base, rows[:8], rows[8:], make_options({"columns": {"text": "text", "label": "rude+late"}}))
    assert (job.task.labels, job.options.problem_type) == (("rude", "late"), "multi_label_classification")
    assert job.rows.values["labels"].tolist() == [[float(i % 2), float(i % 3 == 0)] for i in range(8)]
    assert job.evaluation is not None
    odd = [*rows[:4], {**rows[4], "late": "perhaps"}]
    with pytest.raises(DataError, match="row 4: late is 'perhaps'"):
        plan_job(base, odd, None, make_options({"columns": {"text": "text", "label": "rude+late"}}))
    with pytest.raises(DataError, match="no column 'lat', did you mean 'late'"):
        plan_job(base, rows, None, make_options({"columns": {"text": "text", "label": "rude+lat"}}))


# ---- from files, by the command ----------------------------------------------------------------------


def cells(path: Path, rows: list[list[str]], sign: str) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=sign, quoting=csv.QUOTE_MINIMAL).writerows(rows)
    return path


@pytest.mark.parametrize(
    ("name", "sign", "task"),
    [
        ("a.csv", ",", "sequence_classification"),
        ("a.csv", ";", "sequence_classification"),
        ("a.csv", "|", "sequence_classification"),
        ("a.csv", "\t", "sequence_classification"),
        ("a.tsv", "\t", "sequence_classification"),
        ("a.tsv", "|", None),
        ("a.txt", "\t", None),
    ],
)
def test_cells_that_are_divided_by_another_sign_are_read_or_refused(
    name: str, sign: str, task: str | None, tmp_path: Path
) -> None:
    rows = [["text", "label"], *([row["text"], row["label"]] for row in labelled(12))]
    path = cells(tmp_path / name, rows, sign)
    if task is not None:
        assert chosen(path).head == task
        return
    with pytest.raises(DataError, match="looks like several, divided by"):
        chosen(path)


def test_the_command_says_what_it_learns_before_the_model_is_opened(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS))
    table = tmp_path / "table.jsonl"
    table.write_text("\n".join(json.dumps(row) for row in with_column("labl")))
    call = ["finetune", str(base), "--max-steps", "1", "--train"]
    said = CliRunner().invoke(app, [*call, str(lines), "--eval", "3", "--metric", "perplexed"])
    assert said.exit_code == 1
    told = said.stderr.splitlines()
    [at] = [i for i, line in enumerate(told) if line.startswith("task ")]
    assert "masked_lm from text 'text'; the words behind masks are learned, no label; 9 rows" in told[at]
    assert told[at + 1].startswith("ConfigError: --metric: found 'perplexed', did you mean 'perplexity'?")
    refused = CliRunner().invoke(app, [*call, str(table)])
    assert refused.exit_code == 1
    assert "did you mean 'label'?" in refused.stderr
    assert "--task masked_lm" in refused.stderr
