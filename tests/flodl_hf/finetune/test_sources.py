"""The same table gives the same targets and the same loss from every source: files, data frames, lists, data sets."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import sentences

from flodl.errors import ConfigError, DataError
from flodl_hf.training import finetune
from flodl_hf.training.data import read_tables
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.task import Known
from flodl_hf.training.task_choice import choose_task
from flodl_hf.training.vectors.task import EmbeddingTask

pyarrow = pytest.importorskip("pyarrow")
TEXTS = sentences()
Rows = list[dict[str, Any]]


# --- sources -------------------------------------------------------------------------------------------------


class Features:
    """A column of classes as `datasets` describes one: ``names`` of a class, ``feature`` of a list."""

    def __init__(self, names: list[str] | None = None, feature: Any = None) -> None:
        self.names, self.feature = names, feature


class DataSet:
    """Rows by number with features, as a data set of `datasets`."""

    def __init__(self, rows: Rows, **features: Any) -> None:
        self.rows, self.features = rows, features

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return [self.rows[i] for i in indices]


class Frame:
    """Columns through Arrow, as a data frame of pandas or polars."""

    def __init__(self, table: Any) -> None:
        self.__arrow_c_stream__ = table.__arrow_c_stream__


def cells(rows: Rows, path: Path, sign: str) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=sign).writerows([list(rows[0]), *(list(row.values()) for row in rows)])
    return path


def written(text: str, path: Path) -> Path:
    path.write_text(text)
    return path


def parquet(table: Any, path: Path) -> Path:
    from pyarrow import parquet as files

    files.write_table(table, path)
    return path


def feather(table: Any, path: Path) -> Path:
    from pyarrow import feather as files

    files.write_feather(table, path)
    return path


SOURCES: dict[str, Callable[[Rows, Path], Any]] = {
    "list of dicts": lambda rows, at: rows,
    "dict of lists": lambda rows, at: {name: [row[name] for row in rows] for name in rows[0]},
    "dict of arrays": lambda rows, at: {name: np.asarray([row[name] for row in rows]) for name in rows[0]},
    "data set": lambda rows, at: DataSet(rows),
    "csv": lambda rows, at: cells(rows, at / "a.csv", ","),
    "csv with row numbers": lambda rows, at: cells([{"": i, **row} for i, row in enumerate(rows)], at / "b.csv", ","),
    "tsv": lambda rows, at: cells(rows, at / "a.tsv", "\t"),
    "json": lambda rows, at: written(json.dumps(rows), at / "a.json"),
    "json lines": lambda rows, at: written("\n".join(map(json.dumps, rows)), at / "a.jsonl"),
    "parquet": lambda rows, at: parquet(pyarrow.Table.from_pylist(rows), at / "a.parquet"),
    "arrow": lambda rows, at: feather(pyarrow.Table.from_pylist(rows), at / "a.arrow"),
    "data frame": lambda rows, at: Frame(pyarrow.Table.from_pylist(rows)),
}


def learned(source: Any, held_out: Any = None, **options: Any) -> tuple[str, tuple[str, ...] | None, list[Any]]:
    """Return what is learned: the loss, the names of labels, and the target of each row."""
    tables = read_tables(source, held_out)
    made = make_options(options)
    task: Any = choose_task(tables, made, Known())[0]
    if isinstance(task, EmbeddingTask):
        (table,), (loss,) = task.tables.values(), task.losses
        loss = getattr(loss, "loss", loss)
        return type(loss).__name__, table.names, [] if table.labels is None else table.labels.tolist()
    if options.get("task") == "rank":
        from flodl_hf.training.ranking import read_lists

        return type(task.loss).__name__, task.labels, [one.grades for one in read_lists(tables.train)[0]]
    return task.kind, task.labels, [task.targets.encode(row[task.columns.label]) for row in tables.train]


def pairs(labels: list[Any]) -> Rows:
    return [{"sentence1": TEXTS[i], "sentence2": TEXTS[40 + i], "label": label} for i, label in enumerate(labels)]


def texts(labels: list[Any]) -> Rows:
    return [{"text": TEXTS[i], "label": label} for i, label in enumerate(labels)]


def scored(labels: list[Any]) -> Rows:
    part = [{"query": TEXTS[i], "positive": TEXTS[40 + i], "negative": TEXTS[80 + i]} for i in range(len(labels))]
    return [{**row, "score": label} for row, label in zip(part, labels, strict=True)]


STS = [0.0, 0.5, 1.0, 0.25]
# The rows of a table, options, and what is learned of them from every source.
LEARNED: dict[str, tuple[Rows, dict[str, Any], tuple[Any, Any, list[Any]]]] = {
    "similarity": (pairs(STS), {"task": "embedding"}, ("CoSENTLoss", (), STS)),
    "similarity in integers": (pairs([0, 5, 3, 1]), {"task": "embedding"}, ("CoSENTLoss", (), [0, 5, 3, 1])),
    "similarity in whole numbers": (pairs([0.0, 5.0, 3.0]), {"task": "embedding"}, ("CoSENTLoss", (), [0, 5, 3])),
    "alike or not": (pairs([0, 1, 1, 0]), {"task": "embedding"}, ("ContrastiveLoss", (), [0, 1, 1, 0])),
    "true or false": (pairs([True, False]), {"task": "embedding"}, ("ContrastiveLoss", (), [1, 0])),
    "named loss": (pairs(STS), {"task": "embedding", "vector_loss": "CoSENT"}, ("CoSENTLoss", (), STS)),
    "classes of pairs": (pairs(["no", "yes", "no"]), {"task": "embedding"}, ("SoftmaxLoss", ("no", "yes"), [0, 1, 0])),
    "numbers as classes": (
        pairs([0, 2, 1]), {"task": "embedding", "vector_loss": "Softmax"}, ("SoftmaxLoss", (), [0, 2, 1]),
    ),
    "classes of texts": (texts([2, 0, 1, 0]), {"task": "embedding"}, ("BatchAllTripletLoss", (), [2, 0, 1, 0])),
    "whole numbers as classes": (texts([2.0, 0.0]), {"task": "embedding"}, ("BatchAllTripletLoss", (), [2, 0])),
    "teacher": (scored([6.5, -2.0, 1.0]), {"task": "embedding"}, ("MarginMSELoss", (), [6.5, -2.0, 1.0])),
    "sparse": (pairs(STS), {"task": "sparse"}, ("CoSENTLoss", (), STS)),
    "sparse teacher": (scored([6.5, -2.0]), {"task": "sparse"}, ("MarginMSELoss", (), [6.5, -2.0])),
    "rank": (pairs([0.5, 1.0, 0.0]), {"task": "rank"}, ("NoneType", ("LABEL_0",), [(0.5,), (1.0,), (0.0,)])),
    "rank with a teacher": (
        scored([6.5, -2.0]), {"task": "rank", "vector_loss": "MarginMSE"},
        ("MarginMSELoss", ("LABEL_0",), [(0.0, -6.5), (0.0, 2.0)]),
    ),
    "names": (texts(["good", "bad"]), {}, ("single_label", ("bad", "good"), [1, 0])),
    "integers": (texts([10, 9, 10]), {}, ("single_label", ("9", "10"), [1, 0, 1])),
    "whole numbers": (texts([1.0, 2.0, 1.0]), {}, ("single_label", ("1", "2"), [0, 1, 0])),
    "truth values": (texts([True, False]), {}, ("single_label", ("False", "True"), [1, 0])),
    "numbers": (texts([0.5, 2.0, -1.0]), {}, ("regression", ("LABEL_0",), [0.5, 2.0, -1.0])),
    "numbers asked for": (texts([1, 2]), {"problem_type": "regression"}, ("regression", ("LABEL_0",), [1.0, 2.0])),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", LEARNED)
def test_every_source_of_a_table_gives_the_same_targets_and_loss(case: str, source: str, tmp_path: Path) -> None:
    rows, options, expected = LEARNED[case]
    assert learned(SOURCES[source](rows, tmp_path), **options) == expected
    assert learned(rows, SOURCES[source](rows, tmp_path), **options) == learned(rows, **options)


def test_scores_of_a_csv_file_train_and_judge_as_those_in_memory(base: Path, tmp_path: Path) -> None:
    rows = pairs([k / 10 for k in range(8)])
    path = cells(rows, tmp_path / "a.csv", ",")
    options: dict[str, Any] = {"task": "embedding", "max_steps": 1, "batch_size": 8, "report": False}
    runs = [finetune(base, train=data, eval=data, **options) for data in (rows, path)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].metrics == runs[1].metrics
    assert "spearman" in runs[1].metrics


# --- declared classes ----------------------------------------------------------------------------------------

NLI = ["entailment", "neutral", "contradiction"]
TAGS = ["O", "B-ORG", "I-ORG"]


def class_json(names: list[str], depth: int = 0) -> dict[str, Any]:
    if depth:
        return {"feature": class_json(names, depth - 1), "_type": "List"}
    return {"names": names, "_type": "ClassLabel"}


def with_metadata(rows: Rows, **features: Any) -> Any:
    described = {"info": {"features": {name: {"dtype": "string", "_type": "Value"} for name in rows[0]} | features}}
    return pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(described)})


def saved(rows: Rows, path: Path, **features: Any) -> Path:
    """Return a folder as ``save_to_disk`` of `datasets` 5.2 writes it."""
    path.mkdir()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path / "data.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (path / "dataset_info.json").write_text(json.dumps({"features": features}))
    return path


def declared(rows: Rows, at: Path, column: str, names: list[str], depth: int = 0) -> dict[str, Any]:
    """Return sources that declare the classes of a column."""
    feature = Features(names)
    for _ in range(depth):
        feature = Features(feature=feature)
    described = {column: class_json(names, depth)}
    table = with_metadata(rows, **described)
    sources: dict[str, Any] = {
        "data set": DataSet(rows, **{column: feature}),
        "parquet": parquet(table, at / "d.parquet"),
        "arrow": feather(table, at / "d.arrow"),
        "table": table,
        "folder": saved(rows, at / "saved", **described),
    }
    if not depth:
        named = [{**row, column: names[row[column]]} for row in rows if row[column] >= 0]
        plain = pyarrow.Table.from_pylist(named)
        kind = pyarrow.DictionaryArray.from_arrays([names.index(row[column]) for row in named], names)
        plain = plain.set_column(plain.schema.get_field_index(column), column, kind)
        sources |= {"categories": plain, "categories in parquet": parquet(plain, at / "c.parquet")}
    return sources


KINDS = ("data set", "parquet", "arrow", "table", "folder", "categories", "categories in parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_declared_classes_are_classes_in_their_order(kind: str, tmp_path: Path) -> None:
    nli = declared(pairs([0, 2, 1, 0]), tmp_path, "label", NLI)[kind]
    assert learned(nli, task="embedding") == ("SoftmaxLoss", tuple(NLI), [0, 2, 1, 0])
    assert learned(nli) == ("single_label", tuple(NLI), [0, 2, 1, 0])
    with pytest.raises(ConfigError) as caught:
        learned(nli, task="embedding", vector_loss="CoSENT")
    assert "pair_classes" in caught.value.problems[0]
    with pytest.raises(DataError) as refused:
        learned(nli, task="rank")
    assert refused.value.form == "pair_classes"


def test_two_declared_classes_are_numbers_for_a_loss_of_numbers(tmp_path: Path) -> None:
    data = DataSet(pairs([0, 1, 1]), label=Features(["different", "alike"]))
    assert learned(data, task="embedding")[0] == "SoftmaxLoss"
    assert learned(data, task="embedding", vector_loss="OnlineContrastive")[2] == [0, 1, 1]
    assert learned(data, task="sparse")[0] == "CoSENTLoss"


@pytest.mark.parametrize("kind", KINDS[:5])
def test_declared_tags_have_their_names(kind: str, base: Path, tmp_path: Path) -> None:
    rows = [{"tokens": ["EU", "rejects"], "ner_tags": [1, 0]}, {"tokens": ["Peter"], "ner_tags": [2]}]
    job = plan_job(base, declared(rows, tmp_path, "ner_tags", TAGS, 1)[kind], rows, make_options({}))
    assert job.task.labels == tuple(TAGS)
    assert job.task.main_metric == "f1"


def test_declared_classes_of_spans_have_their_names(tmp_path: Path) -> None:
    rows = [{"text": "Bob in Rome", "spans": [{"start": 0, "end": 3, "label": 0}, {"start": 7, "end": 11, "label": 1}]}]
    span = {"start": {"dtype": "int32", "_type": "Value"}, "label": class_json(["PER", "LOC"])}
    for feature in ([span], {"feature": span, "_type": "List"}):
        data = parquet(with_metadata(rows, spans=feature), tmp_path / "a.parquet")
        assert choose_task(read_tables(data, None), make_options({}), Known())[0].labels == (
            *("O", "B-LOC", "I-LOC", "B-PER", "I-PER"),
        )


@pytest.mark.parametrize("number", [1, 1.0, "1", "1.0"])
def test_numbers_of_pairs_may_be_texts_or_whole(number: Any, base: Path) -> None:
    job = plan_job(base, pairs([number, 0]), None, make_options({"task": "nsp"}))
    assert job.rows.values["labels"].tolist() == [1, 0]


def test_held_out_classes_are_numbered_as_in_training() -> None:
    train = DataSet(texts([0, 1, 1, 0]), label=Features(["neg", "pos"]))
    evals = {
        "reversed": DataSet(texts([1, 0]), label=Features(["pos", "neg"])),
        "named": texts(["neg", "pos"]),
        "same": DataSet(texts([0, 1]), label=Features(["neg", "pos"])),
        "numbers": texts([0, 1]),
    }
    tables = read_tables(train, evals)
    assert [[row["label"] for row in rows] for rows in tables.evals.values()] == [[0, 1]] * len(evals)
    named = read_tables(texts(["neg", "pos"]), evals["same"])
    assert [row["label"] for row in named.evals[""]] == ["neg", "pos"]


# --- rows without a label ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "options", "targets"),
    [
        (texts([0, -1, 1, -1, 2]), {}, [0, 1, 2]),
        (texts(["0", "-1", "1"]), {}, [0, 1]),
        (texts([0.0, -1.0, 1.0]), {}, [0, 1]),
        (texts([0, -1, 1]), {"task": "embedding"}, [0, 1]),
        (pairs([0, -1, 1]), {"task": "embedding", "vector_loss": "Softmax"}, [0, 1]),
    ],
)
def test_rows_with_the_label_minus_one_are_skipped_with_a_warning(
    rows: Rows, options: dict[str, Any], targets: list[int]
) -> None:
    with pytest.warns(UserWarning, match="of train and .* of eval have the label -1") as caught:
        assert learned(rows, rows, **options)[2] == targets
    assert len(caught) == 1


def test_declared_classes_leave_out_rows_without_a_label() -> None:
    data = DataSet(pairs([1, -1, 0, 2]), label=Features(NLI))
    for options in ({}, {"task": "embedding"}):
        with pytest.warns(UserWarning, match="1 of 4 rows of train have the label -1"):
            assert learned(data, **options)[2] == [1, 0, 2]
    with pytest.raises(DataError) as caught:
        learned(data, DataSet(pairs([-1, -1]), label=Features(NLI)))
    assert caught.value.column == "label"


@pytest.mark.parametrize(
    ("rows", "options", "names"),
    [
        (texts([-1, 1, 1]), {}, ("-1", "1")),
        (texts([-1, 0]), {}, ("-1", "0")),
        (texts([-1, 0, 1]), {"labels": ["-1", "0", "1"]}, ("-1", "0", "1")),
    ],
)
def test_minus_one_is_a_class_where_it_can_be_nothing_else(
    rows: Rows, options: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert learned(rows, **options)[1] == names


@pytest.mark.parametrize("empty", [None, float("nan"), "", " "])
@pytest.mark.parametrize("options", [{}, {"task": "embedding"}, {"task": "rank"}, {"task": "sparse"}], ids=str)
@pytest.mark.parametrize("labels", [["a", "b"], ["0.5", "1"], [0.5, 1.0]], ids=str)
def test_a_missing_label_is_refused_with_its_row(empty: Any, options: dict[str, Any], labels: list[Any]) -> None:
    with pytest.raises(DataError) as caught:
        learned(pairs([labels[0], empty, labels[1]]), columns={"text": "sentence1", "text_pair": "sentence2", "label": "label"} if not options else None, **options)  # fmt: skip
    assert caught.value.rows == [1]


@pytest.mark.parametrize("number", [-1, -100])
def test_a_tag_below_zero_is_refused(number: Any) -> None:
    with pytest.raises(DataError) as caught:
        learned([{"tokens": ["a", "b"], "ner_tags": [0, 1]}, {"tokens": ["c", "d"], "ner_tags": [number, 0]}])
    assert caught.value.rows == [1]


# --- negatives -----------------------------------------------------------------------------------------------


NEGATIVES: dict[str, list[Any]] = {
    "lists of different lengths": [["a", "b"], ["c"], []],
    "none": [["a"], None, ["c"]],
    "missing texts in lists": [["a", "b"], ["c", None], ["d", ""]],
    "single texts": ["a", None, "c"],
    "empty cells": ["a", "", "c"],
    "missing numbers": ["a", float("nan"), "c"],
}


@pytest.mark.parametrize("case", NEGATIVES)
def test_rows_with_fewer_negatives_keep_those_of_the_others(case: str) -> None:
    part = NEGATIVES[case]
    rows = [{"anchor": TEXTS[i], "positive": TEXTS[9 + i], "negative": negative} for i, negative in enumerate(part)]
    with pytest.raises(DataError) as caught:
        learned(rows, task="embedding", vector_loss="Triplet")
    assert caught.value.rows[-1] in (1, 2)
    lists = learned(rows, task="rank", vector_loss="RankNet")[2]
    own = [[text for text in (one if isinstance(one, list) else [one]) if text and text == text] for one in part]
    assert lists == [(1.0, *[0.0] * len(texts)) for texts in own]


def ragged(count: int = 8) -> Rows:
    negatives = [[TEXTS[60 + 3 * i + k] for k in range(i % 3)] for i in range(count)]
    return [
        {"anchor": TEXTS[i], "positive": TEXTS[20 + i], "negative_1": (one[:1] or [""])[0], "negative_2": one[1:]}
        for i, one in enumerate(negatives)
    ]


def ranking_loss(model: Any, rows: Rows) -> float:
    """Return the cross-entropy of each anchor's positive among all positives and all negatives that are there."""
    negatives = [text for row in rows for text in [row["negative_1"], *row["negative_2"]] if text]
    documents = [*(row["positive"] for row in rows), *negatives]
    anchors, found = (
        torch.nn.functional.normalize(torch.as_tensor(model.encode(texts)), dim=-1)
        for texts in ([row["anchor"] for row in rows], documents)
    )
    return torch.nn.functional.cross_entropy(20 * anchors @ found.T, torch.arange(len(rows))).item()


ONE: dict[str, Any] = {"task": "embedding", "max_steps": 1, "batch_size": 8, "dropout": 0.0, "report": False, "lr": 0.0}


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "packed"}, {"cache_tokens": 40}, {"cache_tokens": 40, "layout": "packed"}],
    ids=str,
)
def test_each_row_is_ranked_among_the_negatives_that_are_there(options: dict[str, Any], base: Path) -> None:
    rows = ragged()
    result = finetune(base, train=rows, eval=rows, **ONE, **options)
    expected = ranking_loss(result.model, rows)
    assert result.losses[0] == pytest.approx(expected, rel=1e-5)
    assert result.metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert 0 <= result.metrics["triplet_accuracy"] <= 1


def test_ranks_share_a_batch_with_different_numbers_of_negatives(base: Path) -> None:
    rows = ragged()
    both = finetune(base, train=rows, devices=["cpu", "cpu"], **ONE)
    assert both.losses[0] == pytest.approx(ranking_loss(both.model, rows), rel=1e-5)


def test_a_guide_leaves_out_negatives_that_are_not_there(base: Path) -> None:
    """Rows that have no negative are ranked as if the table had none."""
    rows = [{**row, "negative_1": "", "negative_2": []} for row in ragged()]
    rows[0]["negative_2"] = [TEXTS[100]]
    plain = [{"anchor": row["anchor"], "positive": row["positive"]} for row in rows]
    guided = {**ONE, "vector_loss": "GISTEmbed", "guide": str(base)}
    with_one, without = (finetune(base, train=data, **guided).losses[0] for data in (rows, plain))
    assert with_one == pytest.approx(without, abs=2.0)
    assert with_one >= without


def test_an_empty_cell_of_a_csv_file_is_no_negative(tmp_path: Path) -> None:
    rows = [{"anchor": TEXTS[i], "positive": TEXTS[9 + i], "negative": TEXTS[20 + i] if i else ""} for i in range(4)]
    for options in ({"task": "embedding", "vector_loss": "Triplet"}, {"task": "sparse"}, {"task": "multivector"}):
        with pytest.raises(DataError) as caught:
            learned(cells(rows, tmp_path / "a.csv", ","), **options)
        assert caught.value.rows == [0]
    assert learned(cells(rows, tmp_path / "a.csv", ","), rows, task="embedding")[0] == "MultipleNegativesRankingLoss"


# --- lists of numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "options", "expected"),
    [
        ([[0.25, 0.75], [1.0, 0.0]], {}, ("multi_label", ("0", "1"), [[0.25, 0.75], [1.0, 0.0]])),
        ([[0.25, 0.75], [1, 0]], {"labels": ["x", "y"]}, ("multi_label", ("x", "y"), [[0.25, 0.75], [1.0, 0.0]])),
        ([[0.5], [0.25]], {}, ("regression", ("LABEL_0",), [0.5, 0.25])),
        ([[0.5], [0.25]], {"problem_type": "multi_label_classification"}, ("multi_label", ("0",), [[0.5], [0.25]])),
        (
            [[3, -1], [0.5, 2]], {"problem_type": "regression"},
            ("regression", ("LABEL_0", "LABEL_1"), [[3.0, -1.0], [0.5, 2.0]]),
        ),
        (
            [[3.5, -1.0]], {"problem_type": "regression", "labels": ["joy", "arousal"]},
            ("regression", ("joy", "arousal"), [[3.5, -1.0]]),
        ),
    ],
)  # fmt: skip
def test_lists_of_numbers_are_learned_as_numbers(
    labels: list[Any], options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert learned(texts(labels), **options) == expected


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        ([[3.5, -1.0], [0.5, 2.0]], {}),
        ([[0.25, 0.75], [0.5]], {}),
        ([[1, -1, 0], [0, 1, 1]], {}),
        ([[0.25, 0.75], [0.5, 0.5]], {"problem_type": "single_label_classification"}),
        ([[0.25, 0.75], [0.5]], {"problem_type": "regression"}),
        ([["a"], ["b"]], {"problem_type": "regression"}),
        ([[0.5, float("nan")], [0.5, 0.5]], {"problem_type": "regression"}),
        ([True, 1, False], {}),
    ],
)
def test_lists_of_numbers_that_can_be_no_targets_are_refused(labels: list[Any], options: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        learned(texts(labels), **options)


def test_several_columns_are_several_numbers_of_a_text(tmp_path: Path) -> None:
    rows = [{"text": TEXTS[i], "joy": i / 4, "calm": 1 - i} for i in range(4)]
    options = make_options({"problem_type": "regression", "columns": {"label": "joy+calm"}})
    from flodl_hf.training.data import list_multilabel_columns

    for source in (rows, cells(rows, tmp_path / "a.csv", ",")):
        tables, made = list_multilabel_columns(read_tables(source, source, options), options)
        task: Any = choose_task(tables, made, Known())[0]
        assert (task.labels, task.targets.size) == (("joy", "calm"), 2)
        for part in (tables.train, tables.evals[""]):
            assert [task.targets.encode(row["joy+calm"]) for row in part] == [[i / 4, 1.0 - i] for i in range(4)]
