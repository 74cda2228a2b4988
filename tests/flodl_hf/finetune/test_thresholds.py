"""Thresholds chosen on held-out data are kept with the model, told of, and used where they are asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetune_tables import TABLES, labelled, sentences

from flodl.errors import ConfigError
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.errors import PredictError
from flodl_hf.heads.sequence_classification import SequenceClassifier
from flodl_hf.inference.classes import Classification, decide
from flodl_hf.training import FinetuneResult, finetune
from flodl_hf.training.evaluation import EvalPredictions
from flodl_hf.training.report.figures import tune_thresholds


def several(count: int = 64) -> list[dict[str, Any]]:
    texts = sentences()[:count]
    return [{"text": t, "label": [w for w in ("long", "wide", "odd") if len(t) % (2 + len(w)) < 2]} for t in texts]


MADE = {"two labels": labelled, "several labels": several}
OPTIONS: dict[str, Any] = {"max_steps": 6, "batch_size": 16, "lr": 3e-3, "tune_thresholds": True}


@pytest.fixture(scope="module", params=MADE)
def tuned(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> FinetuneResult:
    rows = MADE[request.param](64)
    out = tmp_path_factory.mktemp("tuned") / "model"
    return finetune(base, train=rows[:40], eval=rows[40:], out=out, **OPTIONS)


def f1(said: Any, there: Any) -> float:
    total = said.sum() + there.sum()
    return 2 * (said & there).sum() / total if total else 0.0


def test_they_are_the_best_on_the_held_out_examples(tuned: FinetuneResult) -> None:
    found, model = tuned.tuned, tuned.model
    assert found is not None
    labels = model.config.labels
    rows = MADE["two labels" if len(labels) == 2 else "several labels"](64)[40:]
    scores = [{one.label: one.score for one in answer} for answer in model.predict([row["text"] for row in rows])]
    assert list(found.thresholds) == list(labels)
    assert found.examples == len(rows)
    for label in found.tuned:
        values = np.array([one[label] for one in scores])
        there = np.array([label in row["label"] if len(labels) > 2 else label == row["label"] for row in rows])
        assert found.usual[label] == pytest.approx(f1(values >= 0.5, there))
        assert found.tuned[label] == pytest.approx(f1(values >= found.thresholds[label], there))
        assert found.tuned[label] == pytest.approx(max(f1(values >= at, there) for at in (*values, 0.5)))
    if len(labels) == 2:
        assert list(found.tuned) == [labels[1]]
        assert sum(found.thresholds.values()) == pytest.approx(1)


def test_predict_uses_them_where_asked(tuned: FinetuneResult) -> None:
    assert tuned.folder is not None
    again = SequenceClassifier.from_pretrained(tuned.folder)
    kept = again.config.label_thresholds
    assert tuned.tuned is not None
    assert kept == tuned.tuned.thresholds
    texts = [*sentences()[40:50], ""]
    every, held = again.predict(texts), again.predict(texts, threshold="tuned")
    plain = SequenceClassifier.from_pretrained(tuned.folder)
    plain.config = plain.config.changed(label_thresholds={})
    assert every == plain.predict(texts), "what the model keeps changes nothing by itself"
    for answers, all_answers in zip(held, every, strict=True):
        if again.config.problem_type == "multi_label_classification":
            assert list(answers) == [one for one in all_answers if one.score >= kept[one.label]]
        elif all_answers:
            (one,) = answers
            second = next(other for other in all_answers if other.label == again.config.labels[1])
            assert (one.label == second.label) == (second.score >= kept[second.label])
    with pytest.raises(PredictError, match="function_to_apply") as fault:
        again.predict("x", threshold="tuned", function_to_apply="none")
    assert fault.value.function_to_apply == "none"
    with pytest.raises(PredictError, match="expected a number"):
        again.predict("x", threshold="best")


def test_the_folder_says_so(tuned: FinetuneResult) -> None:
    assert tuned.folder is not None
    assert tuned.tuned is not None
    stored = json.loads((tuned.folder / "config.json").read_text("utf-8"))
    assert stored["label_thresholds"] == tuned.tuned.thresholds
    card = (tuned.folder / "README.md").read_text("utf-8")
    for label, value in tuned.tuned.thresholds.items():
        assert re.search(rf"^\| {label} \| {value:.4f} \|", card, re.M)
    assert 'predict(threshold="tuned")' in card
    assert "with the model" in (tuned.folder / "report.html").read_text("utf-8") or "Stored threshold" in (
        tuned.folder / "report.html"
    ).read_text("utf-8")
    facts = json.loads((tuned.folder / "training.json").read_text("utf-8"))
    assert facts["tuned"] == tuned.to_dict()["tuned"] == tuned.tuned.to_dict()
    assert "tune_thresholds: true" in (tuned.folder / "recipe.yaml").read_text("utf-8")


def test_export_keeps_them_and_another_training_does_not(tuned: FinetuneResult, tmp_path: Path) -> None:
    assert tuned.folder is not None
    again = SequenceClassifier.from_pretrained(tuned.folder)
    copy = again.save_pretrained(tmp_path / "copy")
    assert (copy / "config.json").read_bytes() == (tuned.folder / "config.json").read_bytes()
    rows = MADE["two labels" if again.num_labels == 2 else "several labels"](32)
    later = finetune(tuned.folder, train=rows, out=tmp_path / "later", max_steps=1, batch_size=8)
    assert later.tuned is None
    assert later.model.config.label_thresholds is None
    assert "label_thresholds" not in (tmp_path / "later" / "config.json").read_text("utf-8")
    with pytest.raises(PredictError, match="tuned"):
        later.model.predict("x", threshold="tuned")


@pytest.mark.transformers
def test_transformers_passes_the_key_over(tuned: FinetuneResult) -> None:
    transformers = pytest.importorskip("transformers")
    from flodl_hf.export.verify import verify_export

    assert tuned.folder is not None
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tuned.folder)
    assert model.config.label_thresholds == tuned.model.config.label_thresholds
    checked = verify_export(tuned.folder)
    assert [check.name for check in checked.checks if check.status == "fail"] == []


def test_the_command_line_and_files(tuned: FinetuneResult, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    assert tuned.folder is not None
    texts = sentences()[40:44]
    expected = [[one.label for one in answer] for answer in tuned.model.predict(texts, threshold="tuned")]
    done = CliRunner().invoke(app, ["predict", str(tuned.folder), *texts, "--threshold", "tuned", "--json"])
    assert done.exit_code == 0, done.output
    found = [json.loads(line)["result"] for line in done.stdout.splitlines()]
    assert [[one["label"] for one in row] for row in found] == expected
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    given = ["--in", str(tmp_path / "in.txt"), "--out", str(out), "--threshold", "tuned"]
    done = CliRunner().invoke(app, ["predict", str(tuned.folder), *given])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    # One label in a column where one of two holds, else a list.
    listed = [[row["label"]] if "label" in row else [one["label"] for one in row["labels"]] for row in rows]
    assert listed == expected
    done = CliRunner().invoke(app, ["predict", str(tuned.folder), "x", "--threshold", "best"])
    assert done.exit_code == 1
    assert "expected a number" in done.output


REFUSED = {
    "three classes": (lambda: [{"text": t, "label": str(i % 3)} for i, t in enumerate(sentences()[:24])], {}),
    "numbers": (lambda: [{"text": t, "label": len(t) / 7} for t in sentences()[:24]], {}),
    "tags": (lambda: TABLES["token_classification"](24), {}),
    "words": (lambda: TABLES["masked_lm"](24), {}),
    "nothing held out": (lambda: labelled(24), {"eval": None}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_threshold_is_refused_before_training(case: str, base: Path) -> None:
    make, more = REFUSED[case]
    rows = make()
    with pytest.raises(ConfigError) as fault:
        finetune(base, train=rows[:16], **{"eval": rows[16:], **OPTIONS, **more})
    assert [problem.partition(":")[0] for problem in fault.value.problems] == ["tune_thresholds"]


def test_labels_without_examples_stay_at_a_half() -> None:
    logits = np.array([[-2.0, 1.0], [-1.0, 1.0], [-0.5, 2.0]])
    found = tune_thresholds(EvalPredictions("dev", logits, np.array([[0, 0], [0, 0], [1, 0]])), ("a", "b"))
    # Halfway between the two highest scores of the first label: all are told apart.
    ends = 1 / (1 + np.exp(-logits[1:, 0]))
    assert found.thresholds == {"a": pytest.approx(ends.mean(), abs=1e-6), "b": 0.5}
    assert (found.usual["a"], found.tuned["a"], found.where) == (0.0, 1.0, "dev")


def test_one_of_two_is_decided_by_the_second() -> None:
    found = [Classification("no", 0.6), Classification("yes", 0.4)]
    assert decide(found, {"no": 0.7, "yes": 0.3}) == [found[1]]
    assert decide(found, {"no": 0.6, "yes": 0.4}) == [found[1]]
    assert decide(found, {"no": 0.5, "yes": 0.5}) == [found[0]]
    assert decide([], {"no": 0.5, "yes": 0.5}) == []


@pytest.mark.parametrize("value", [3, {"LABEL_0": 0.5}, {"LABEL_0": 2, "LABEL_1": 0.1}, {"a": 0.1, "b": 0.2}, "x"])
def test_what_others_keep_under_the_key_stops_no_load(value: Any) -> None:
    config = ModelConfig.for_model(
        "bert", vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, type_vocab_size=2,
        label_thresholds=value,
    )  # fmt: skip
    assert config.label_thresholds is None
    assert any("label_thresholds" in note for note in config.notes)
    assert config.to_dict()["label_thresholds"] == value
