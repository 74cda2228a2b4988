"""Evaluation of a model without training: the metrics of fine-tuning for every task, label tables, errors, command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import labelled, lines, questions, sentences, spanned, tagged
from typer import testing as typer_testing

from flodl.errors import ConfigError, DataError
from flodl_hf import evaluate, finetune, load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.sentence.steps import Dense
from flodl_hf.cli.app import app
from flodl_hf.errors import PredictError
from flodl_hf.heads.auto import head_named
from flodl_hf.inference.evaluation_result import EvaluationResult
from flodl_hf.training import demo
from flodl_hf.training.evaluators import similarity_figures
from flodl_hf.training.report.figures import label_table

Rows = list[dict[str, Any]]
TEXTS = sentences()
PAIRS: Rows = [{"anchor": TEXTS[i], "positive": TEXTS[i + 1]} for i in range(0, 32, 2)]
TRIPLETS: Rows = [{**row, "negative": TEXTS[7 * i % 90]} for i, row in enumerate(PAIRS)]
SCORED: Rows = [{"sentence1": TEXTS[i], "sentence2": TEXTS[i + 1], "score": i % 5 / 4 + 0.01} for i in range(16)]
NUMBERS: Rows = [{**row, "label": 0.1 * len(row["text"]) + 0.03} for row in labelled(16)]
SEVERAL: Rows = [{**row, "label": [row["label"], *["odd"] * (i % 2)]} for i, row in enumerate(labelled(16))]
RANKED: Rows = [
    {"query": TEXTS[i // 3], "passage": TEXTS[i + 5], "label": float(i % 3 == 0)} for i in range(18)
]  # fmt: skip
LISTED: Rows = [{"query": TEXTS[i], "docs": TEXTS[i + 1 : i + 4], "labels": [1, 0, 0]} for i in range(12)]
CHOICES: Rows = [{"question": TEXTS[i], "choices": TEXTS[i + 1 : i + 3], "label": i % 2} for i in range(12)]
FOLLOWING: Rows = [{"sentence_a": TEXTS[i], "sentence_b": TEXTS[i + 1]} for i in range(12)]
CASES: dict[str, tuple[str, Rows, dict[str, Any]]] = {
    "one label": ("base", labelled(20), {}),
    "windows of long texts": ("base", labelled(12), {"max_length": 8, "long_texts": "windows", "stride": 2}),
    "several labels": ("base", SEVERAL, {}),
    "numbers": ("base", NUMBERS, {}),
    "adapter": ("base", labelled(12), {"lora": 4}),
    "tags": ("base", tagged(16), {}),
    "spans": ("base", spanned(16), {}),
    "answers": ("base", questions(12), {}),
    "masked words": ("base", lines(16), {"seed": 7, "mask_probability": 0.3}),
    "choices": ("bert", CHOICES, {}),
    "next sentence": ("bert", FOLLOWING, {"task": "nsp"}),
    "pretraining": ("bert", FOLLOWING, {"task": "pretrain"}),
    "replaced tokens": ("electra", lines(12), {"task": "replaced"}),
    "pairs": ("base", PAIRS, {"batch_size": 5}),
    "matryoshka": ("base", PAIRS, {"matryoshka": [16, 32]}),
    "triplets": ("base", TRIPLETS, {}),
    "similarity": ("base", SCORED, {"task": "embedding", "loss_options": {"scale": 10}}),
    "classes of texts": ("base", labelled(12), {"task": "embedding"}),
    "ranked pairs": ("base", RANKED, {"task": "rank"}),
    "ranked lists": ("base", LISTED, {"task": "rank", "loss": "LambdaLoss"}),
    "sparse": ("bert", PAIRS, {"task": "sparse"}),
    "multi-vector": ("base", PAIRS, {"task": "multivector"}),
}


@pytest.fixture(scope="module")
def starts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained two-layer encoders."""
    tokenizer, found = demo.learn_vocabulary(), {"base": base}
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 64,
    }  # fmt: skip
    for family, head in (("bert", "pretraining"), ("electra", "replaced_tokens")):
        torch.manual_seed(3)
        model = head_named(head).model.from_config(ModelConfig.for_model(family, **sizes))
        model.tokenizer = tokenizer
        found[family] = model.save_pretrained(tmp_path_factory.mktemp("starts") / family)
    return found


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_that_finetune_reports_for_the_same_weights(
    name: str, starts: dict[str, Path], tmp_path: Path
) -> None:
    start, rows, options = CASES[name]
    options = {"epochs": 1, "batch_size": 8, "lr": 1e-3, "max_length": 40, "keep_best": False, **options}
    held_out, out = rows[2:], tmp_path / "out"
    tuned = finetune(starts[start], train=rows, eval=held_out, out=out, report=False, progress=False, **options)
    files = sorted(path.name for path in tmp_path.rglob("*"))
    recipe, training = tuned.model.sentence_recipe, tuned.model.training
    again = load(out, head=tuned.model.head)
    # of an adapter the model in memory is that of another folder than the recipe's
    more: Any = {"batch_size": 8, "max_length": 40} if name == "adapter" else {}
    for found in (evaluate(out, held_out), tuned.model.evaluate(held_out), again.evaluate(held_out, **more)):
        assert repr(found.metrics) == repr(tuned.metrics)
        assert (found.task, found.examples) == (tuned.task, len(held_out))
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["task"] == tuned.task
        assert "eval_loss" in str(found)
    assert (tuned.model.sentence_recipe, tuned.model.training, tuned.model.beside) == (recipe, training, None)
    assert sorted(path.name for path in tmp_path.rglob("*")) == files


def test_the_confusion_matrix_and_the_table_are_those_of_the_predictions(demo_model: Path) -> None:
    model: Any = load(demo_model)
    rows = [{**row, "label": "praise"} if i % 4 == 0 else row for i, row in enumerate(labelled(24))]
    found = model.evaluate(rows)
    predicted = [answer.label for answer in model.predict([row["text"] for row in rows])]
    truth = [row["label"] for row in rows]
    pairs = [(a, b) for a in found.labels for b in found.labels]
    counted = [sum(pair == both for both in zip(truth, predicted, strict=True)) for pair in pairs]
    assert np.asarray(found.confusion).ravel().tolist() == counted
    assert found.metrics["accuracy"] == sum(a == b for a, b in zip(truth, predicted, strict=True)) / 24 < 1
    assert found.per_label is not None
    assert [row["support"] for row in found.per_label.values()] == [truth.count(name) for name in found.labels]
    assert found.per_label["praise"]["f1"] == pytest.approx(found.metrics["f1"])
    own = model.evaluate(rows, metrics=lambda scores, labels: {"rows": float(len(scores) + len(labels))})
    assert own.metrics == {**found.metrics, "rows": 48.0}


# Values of scikit-learn 1.7 (confusion_matrix, multilabel_confusion_matrix, precision_recall_fscore_support with
# zero_division=0) and of seqeval 1.2 (classification_report).
TAGS = (
    [["B-PER", "I-PER", "O", "O"], ["B-LOC", "O", "B-LOC", "I-LOC"]],
    [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "O", "B-LOC", "I-LOC"]],
)
TABLES: dict[str, tuple[Any, ...]] = {
    "single_label": (
        np.eye(4)[[0, 1, 1, 2, 0, 2, 1, 0]], [0, 0, 1, 2, 2, 2, 1, 0], "abcd",
        [[2, 1, 0, 0], [0, 2, 0, 0], [1, 0, 2, 0], [0, 0, 0, 0]],
        {"a": (2 / 3, 2 / 3, 2 / 3, 3), "b": (2 / 3, 1, 0.8, 2), "c": (1, 2 / 3, 0.8, 3), "d": (0, 0, 0, 0)},
    ),
    "multi_label": (
        2 * np.asarray([[1, 0, 0], [1, 0, 1], [1, 1, 0], [0, 0, 1]]) - 1,
        [[1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 0, 1]], "abc",
        [[[1, 1], [0, 2]], [[3, 1], [0, 0]], [[1, 0], [1, 2]]],
        {"a": (2 / 3, 1, 0.8, 2), "b": (0, 0, 0, 0), "c": (1, 2 / 3, 0.8, 3)},
    ),
    "tokens": (
        *TAGS, ["O", "B-LOC", "I-LOC", "B-ORG", "B-PER", "I-PER"],
        [[2, 0, 0, 1], [1, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2]],
        {"LOC": (0.5, 0.5, 0.5, 2), "ORG": (0, 0, 0, 1), "PER": (1, 1, 1, 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_labels_equal_those_of_other_libraries(kind: str) -> None:
    predictions, truth, names, confusion, rows = TABLES[kind]
    found = label_table(kind, predictions, truth, tuple(names))
    assert found is not None
    assert found.confusion == confusion
    assert found.rows.keys() == rows.keys()
    for name, row in rows.items():
        assert tuple(found.rows[name].values()) == pytest.approx(row)


def test_several_devices_and_several_sets_give_the_results_of_one(demo_model: Path) -> None:
    rows = labelled(20)
    one = evaluate(demo_model, rows)
    sets = {"first": rows[:8], "all": rows}
    two = evaluate(demo_model, sets, devices=["cpu", "cpu"])
    assert two.metrics == {f"{name}/{k}": v for name in sets for k, v in two.sets[name].metrics.items()}
    assert two.sets["all"].metrics == one.metrics
    assert (two.sets["all"].confusion, two.sets["all"].per_label) == (one.confusion, one.per_label)
    assert (two.examples, two.confusion) == (28, None)


def test_dense_layers_of_a_folder_are_part_of_its_embeddings(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    finetune(base, train=SCORED, task="embedding", max_steps=1, normalize=False, out=folder, progress=False)
    layer = Dense(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), None, "Tanh")
    for name, data in layer.files("2_Dense").items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    model: Any = load(folder, head="base")
    first, second = (torch.as_tensor(model.encode([row[k] for row in SCORED])) for k in ("sentence1", "sentence2"))
    assert first.shape == (16, 8)
    wanted = similarity_figures(first, second, np.asarray([row["score"] for row in SCORED]), measure="cosine")
    found = evaluate(folder, SCORED).metrics
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)


class Declared(list[dict[str, Any]]):
    """Rows with features as `datasets` has them, which number the classes in another order than the model."""

    features: dict[str, Any] = {  # noqa: RUF012
        "label": {"_type": "ClassLabel", "names": demo.LABELS[::-1]}
    }


def test_labels_by_number_name_and_order_are_those_of_the_model(demo_model: Path) -> None:
    rows = labelled(12)
    named = evaluate(demo_model, rows)
    numbered = [{**row, "label": demo.LABELS.index(row["label"])} for row in rows]
    some = evaluate(demo_model, [row for row in rows if row["label"] == demo.LABELS[1]])
    assert evaluate(demo_model, numbered).metrics == named.metrics
    swapped = [{**row, "label": 1 - row["label"]} for row in numbered]
    declared = Declared([*swapped, {"text": "no gold label", "label": -1}])
    with pytest.warns(UserWarning, match="1 of 13 rows of eval"):
        assert evaluate(demo_model, declared).metrics == named.metrics
    declared = Declared(swapped)
    declared.features = {"label": {"_type": "ClassLabel", "names": ("neutral", demo.LABELS[0])}}
    with pytest.raises(DataError) as fault:
        evaluate(demo_model, declared)
    assert fault.value.details["labels"] == ["neutral"]
    flags = [{"text": row["text"], **{label: int(label == row["label"]) for label in demo.LABELS}} for row in rows]
    with pytest.raises(DataError):
        evaluate(demo_model, flags, columns={"label": "+".join(demo.LABELS)})
    assert some.labels == list(demo.LABELS)
    assert some.confusion is not None
    assert sum(some.confusion[0]) == 0


@pytest.mark.parametrize(
    ("kind", "rows", "options", "found"),
    [
        (DataError, [{"text": "fine", "label": "neutral"}, {"text": "good", "label": "praise"}], {}, ["neutral"]),
        (DataError, NUMBERS, {}, None),
        (DataError, SEVERAL, {}, None),
        (ConfigError, labelled(4), {"lr": 1e-3}, None),
        (ConfigError, labelled(4), {"device": "cpu", "devices": 2}, ["device", "devices"]),
        (ConfigError, None, {}, ["data"]),
        (ConfigError, 0.2, {}, ["data"]),
        (PredictError, tagged(4), {"task": "ner"}, None),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    kind: type[Exception], rows: Any, options: dict[str, Any], found: list[str] | None, demo_model: Path
) -> None:
    with pytest.raises(kind) as fault:
        evaluate(demo_model, rows, **options)
    details: Any = fault.value
    if found is not None:
        assert (details.labels if kind is DataError else details.problems) == found


def test_several_labels_are_printed_with_four_counts_each() -> None:
    result = EvaluationResult("sequence_classification", {}, 8, 1.0, ["a", "b"], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    head, *rows = str(result).splitlines()[-3:]
    assert re.split(" {2,}", head) == [
        "label",
        "true negatives",
        "false positives",
        "false negatives",
        "true positives",
    ]
    assert [row.split() for row in rows] == [["a", "1", "2", "3", "4"], ["b", "5", "6", "7", "8"]]


def test_the_command_prints_tables_or_one_document(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in labelled(8)), "utf-8")
    runner = typer_testing.CliRunner()
    shown = runner.invoke(app, ["evaluate", str(demo_model), "--data", str(file), "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    assert "accuracy" in shown.stdout
    assert "support" in shown.stdout
    told = runner.invoke(app, ["evaluate", str(demo_model), str(file), "--json", "--batch-size", "3"])
    whole = evaluate(demo_model, file, batch_size=3).to_dict()
    assert {**json.loads(told.stdout), "seconds": 0} == {**whole, "seconds": 0}
    assert runner.invoke(app, ["evaluate", str(demo_model)]).exit_code == 1
    assert runner.invoke(app, ["evaluate", str(demo_model), str(tmp_path / "absent.csv")]).exit_code == 1


def test_words_with_tags_and_texts_with_spans_have_equal_metrics(base: Path) -> None:
    words = [{"words": [name, "left", "Rome"], "tags": ["B-PER", "O", "B-LOC"]} for name in ("Ada", "Bob")]
    model = finetune(base, train=words, max_steps=2, progress=False).model
    ends = [{"start": 0, "end": 3, "label": "PER"}, {"start": 9, "end": 13, "label": "LOC"}]
    spans = [{"text": " ".join(row["words"]), "spans": ends} for row in words]
    assert evaluate(model, spans).metrics == evaluate(model, words).metrics
    longer = [{"text": "Ada Bob left", "spans": [{"start": 0, "end": 7, "label": "PER"}]}]
    with pytest.raises(DataError, match="I-PER"):  # which the model does not have
        evaluate(model, longer)
