"""Each task from its table to a folder: labels and problem inferred, judged as the model predicts, exported, verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled, lines, questions, sentences, spanned, tagged

from flodl.errors import ConfigError, DataError, TrainError
from flodl_hf import load
from flodl_hf.errors import ExportError
from flodl_hf.training import demo, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options

QUICK: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 1e-3, "max_length": 32, "stride": 8}


def job(base: Any, train: Any, held_out: Any = None, **options: Any) -> Any:
    return plan_job(base, train, held_out, make_options({"max_length": 32, "stride": 8, **options}))


@pytest.mark.transformers
@pytest.mark.parametrize("task", TABLES)
def test_a_fine_tuned_folder_verifies_and_predicts_like_the_model_that_was_returned(
    task: str, base: Path, tmp_path: Path
) -> None:
    from flodl_hf.export.verify import verify_export

    rows = TABLES[task](40)
    result = finetune(base, train=rows[:32], eval=rows[32:], out=tmp_path / "out", **QUICK)
    assert result.task == task
    assert result.steps == len(result.losses) == 2 if task != "question_answering" else result.steps > 1
    assert verify_export(tmp_path / "out", model=result.model, receipt=False).passed
    again = load(tmp_path / "out")
    assert again.head == task
    assert not again.untrained
    state = result.model.graph.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in again.graph.state_dict().items())
    figures = json.loads((tmp_path / "out" / "training.json").read_text())
    assert figures["metrics"] == result.metrics
    assert figures["losses"] == result.losses
    assert not (tmp_path / "out.checkpoints").exists()


def test_accuracy_is_that_of_the_predictions(base: Path) -> None:
    rows = labelled()
    result = finetune(base, train=rows, eval=rows[:31], **{**QUICK, "epochs": 5})
    said = [found[0].label for found in result.model.predict([row["text"] for row in rows[:31]])]
    right = sum(a == row["label"] for a, row in zip(said, rows[:31], strict=True))
    assert result.metrics["accuracy"] == right / 31
    assert result.metrics["eval_loss"] > 0


def test_span_f1_is_that_of_the_entities_that_are_predicted(base: Path) -> None:
    rows = tagged()
    result = finetune(base, train=rows, eval=rows[:24], **{**QUICK, "epochs": 10, "max_length": 12})
    model = result.model
    right = predicted = true = 0
    for row in rows[:24]:
        meant = {(i, i + 1) for i, tag in enumerate(row["tags"]) if tag != "O"}
        said = {tuple(e.words) for e in model.predict(row["words"], words=True)}
        right, predicted, true = right + len(meant & said), predicted + len(said), true + len(meant)
    assert true > 20
    assert result.metrics["f1"] == pytest.approx(2 * right / (predicted + true), abs=0.05)


def test_words_with_tags_and_spans_of_characters_teach_the_same(base: Path) -> None:
    by_words, by_spans = job(base, tagged()), job(base, spanned())
    assert by_words.task.labels == ("O", "B-LONG")
    assert by_spans.task.labels == ("O", "B-LONG", "I-LONG")
    for i in (0, 5, 9):
        text = sentences()[i]
        first, second = by_words.rows.get(i), by_spans.rows.get(i)
        # the full stop stands in the text alone
        assert second["labels"].tolist().count(1) == first["labels"].tolist().count(1) > 0, text


def test_a_long_sentence_is_learned_in_windows_each_word_once(base: Path) -> None:
    words = [w for text in sentences()[:12] for w in text.rstrip(".").split()]
    tags = ["B-LONG" if len(w) > 5 else "O" for w in words]
    rows = job(base, [{"words": words, "tags": tags}], max_length=16).rows
    assert len(rows) > 5
    assert max(rows.lengths) <= 16
    labels = [int(v) for i in range(len(rows)) for v in rows.get(i)["labels"] if v != -100]
    assert sorted(labels) == sorted(int(tag != "O") for tag in tags)


def test_exact_match_is_that_of_the_answers_that_are_given(base: Path) -> None:
    rows = questions()
    result = finetune(base, train=rows, eval=rows[:16], **{**QUICK, "epochs": 6})
    pairs = [(row["question"], row["context"]) for row in rows[:16]]
    said = result.model.answer_batch(pairs, window_tokens=32, stride=8)
    right = sum(
        a[0].text.strip(".").lower() == r["answers"]["text"][0].lower() for a, r in zip(said, rows, strict=False)
    )
    assert result.metrics["exact_match"] == pytest.approx(100 * right / 16, abs=7)


def test_the_answer_lies_in_the_window_that_points_at_it(base: Path) -> None:
    rows = questions()
    planned = job(base, rows, rows, max_length=24)
    truth = planned.evaluation.sets[""].prepared.scorer().truth
    held = 0
    for i in range(len(planned.rows)):
        row, owner = planned.rows.get(i), int(planned.rows.owners[i])
        if row["start_positions"]:
            window = truth[owner][0][i - int((planned.rows.owners < owner).sum())]
            first, last = window.offsets[row["start_positions"]][0], window.offsets[row["end_positions"]][1]
            assert rows[owner]["context"][first:last].startswith(rows[owner]["answers"]["text"][0])
            held += 1
    assert held >= len(rows)


def test_masks_change_with_the_epoch_and_not_with_the_batch(base: Path) -> None:
    from flodl.data import Where

    planned = job(base, lines(), whole_words=True)
    rows = [planned.rows.get(i) for i in (3, 4)]

    def masked(epoch: int, picked: tuple[int, ...], number: int = 0) -> list[list[int]]:
        parts = planned.collate([rows[i - 3] for i in picked], Where(42, epoch, number, picked))
        return [line[: len(rows[i - 3]["input_ids"])].tolist() for line, i in zip(parts["labels"], picked, strict=True)]

    assert masked(0, (3, 4))[1] == masked(0, (4,), number=9)[0]
    assert masked(0, (3, 4)) != masked(1, (3, 4))
    for line, row in zip(masked(0, (3, 4)), rows, strict=True):
        chosen = {int(w) for w, label in zip(row["words"], line, strict=True) if label != -100}
        assert chosen
        assert all((label != -100) == (int(w) in chosen) for w, label in zip(row["words"], line, strict=True))


@pytest.mark.parametrize("length", [5, 9, 24])
@pytest.mark.parametrize("count", [1, 64])
def test_lines_end_to_end_fill_every_row_and_lose_nothing(length: int, count: int, base: Path) -> None:
    rows = [{"text": "  "}, *lines(count), {"text": "\t"}]
    planned = job(base, rows, task="mlm", concatenate=True, max_length=length)
    tokenizer = planned.model.tokenizer
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    plain = [tokenizer.encode(row["text"], add_special_tokens=False) for row in rows]
    wanted = [token for line in plain if line for token in (*line, sep)][:-1]
    found = [planned.rows.get(i)["input_ids"].tolist() for i in range(len(planned.rows))]
    assert [len(row) for row in found[:-1]] == [length] * (len(found) - 1)
    assert 2 < len(found[-1]) <= length
    assert all((row[0], row[-1]) == (cls, sep) for row in found)
    assert [token for row in found for token in row[1:-1]] == wanted
    # Words are apart: whole words can be masked, and separators cannot.
    words = [planned.rows.get(i)["words"].tolist() for i in range(len(planned.rows))]
    for row, line in zip(found, words, strict=True):
        assert [w == -1 for w in line] == [True, *(token == sep for token in row[1:-1]), True]
    spoken = [word for line in words for word in line if word != -1]
    assert spoken == sorted(spoken)
    of_a_text = [tokenizer.encode_rows([r["text"]], add_special_tokens=False)[0][0].word_ids for r in rows]
    assert len(set(spoken)) == sum(len(set(line)) for line in of_a_text)


def test_lines_end_to_end_need_a_length_that_leaves_room(base: Path) -> None:
    from flodl_hf.tokenization.readers.columns import Columns
    from flodl_hf.training.masked import MaskedTask
    from flodl_hf.training.task import LengthLimits

    task = MaskedTask(Columns(task="masked-lm", text="text"), concatenate=True)
    tokenizer = job(base, lines()).model.tokenizer
    for bound in (None, 2):
        with pytest.raises(ConfigError, match="set max_length"):
            task.prepare(lines(), tokenizer, LengthLimits(bound, None, True), training=True)


# ---- what is read off the data ----------------------------------------------------------------------------


class FromHub(list):
    """Rows with declared features, as a Hugging Face data set has them."""

    def __init__(self, rows: Any, **features: Any) -> None:
        super().__init__(rows)
        self.features = features


class Feature:
    def __init__(self, names: Any = None, feature: Any = None) -> None:
        self.names, self.feature = names, feature


def two(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": text, "label": label} for text, label in zip(sentences(), labels, strict=False)]


@pytest.mark.parametrize(
    ("rows", "options", "problem", "labels"),
    [
        (two("b", "a", "b"), {}, "single_label_classification", ("a", "b")),
        (two(0, 1, 0), {"labels": ["no", "yes"]}, "single_label_classification", ("no", "yes")),
        (two("0", "2", "1"), {}, "single_label_classification", ("0", "1", "2")),
        (two("b", "a"), {"labels": ["b", "a", "c"]}, "single_label_classification", ("b", "a", "c")),
        (two(0.5, 2.0), {}, "regression", ("LABEL_0",)),
        (two("0.5", "2"), {}, "regression", ("LABEL_0",)),
        (two(1, 2), {"problem_type": "regression"}, "regression", ("LABEL_0",)),
        (two(["x"], ["x", "y"], []), {}, "multi_label_classification", ("x", "y")),
        (two([1, 0], [1, 1]), {"labels": ["p", "q"]}, "multi_label_classification", ("p", "q")),
        (FromHub(two(0, 1), label=Feature(["neg", "pos"])), {}, "single_label_classification", ("neg", "pos")),
        (two("praise", "complaint"), {}, "single_label_classification", demo.LABELS),
        (two(1, 0), {}, "single_label_classification", ("0", "1")),
    ],
)  # fmt: skip
def test_labels_and_their_kind_are_inferred(rows: Any, options: Any, problem: str, labels: Any, base: Path) -> None:
    found = job(base, rows, **options)
    assert found.options.problem_type == problem
    assert tuple(found.model.config.labels) == labels


def test_numbers_of_tags_get_the_names_that_a_data_set_declares(base: Path) -> None:
    rows = [{"tokens": ["Ada", "met", "Bob"], "ner_tags": [1, 0, 1]}]
    declared = FromHub(rows, ner_tags=Feature(feature=Feature(["O", "B-PER", "I-PER"])))
    assert job(base, declared).task.labels == ("O", "B-PER", "I-PER")
    assert job(base, rows).task.labels == ("0", "1")


def test_pairs_are_read_as_pairs(base: Path) -> None:
    rows = [{"sentence1": "A good film.", "sentence2": "The film was bad.", "label": k % 2} for k in range(4)]
    row = job(base, rows).rows.get(0)
    assert 0 < row["token_type_ids"].sum() < len(row["token_type_ids"])


@pytest.mark.parametrize(
    ("train", "held_out", "options", "error", "says"),
    [
        (two("a", "a"), None, {}, DataError, "at least two labels"),
        (two("a", "b"), two("a", "c"), {}, DataError, "found 'c', expected one of"),
        (two("a", "b"), [{"sentence": "x", "label": "a"}], {}, DataError, "no column 'text'"),
        (two("a", "b"), None, {"labels": ["a", "z"]}, ConfigError, r"the data has \['b'\]"),
        (two("a", "b"), None, {"early_stopping": 2}, ConfigError, "no evaluation data"),
        (two("a", "b"), two("a", "b"), {"metric": "acuracy"}, ConfigError, "did you mean 'accuracy'"),
        (two("a", "b"), None, {"class_weights": {"z": 2}}, ConfigError, r"\['z'\] are no labels"),
        (two("a", "b"), None, {"class_weights": [1.0]}, ConfigError, "a weight for each"),
        (two(0.5, 1.5), None, {"class_weights": "balanced"}, ConfigError, "takes none"),
        (two(0.5, 1.5), None, {"label_smoothing": 0.1}, ConfigError, "no single right label"),
        (two("a", "b"), None, {"freeze": ["layers.0-7"]}, ConfigError, r"no module at layers\.0-7; there are layers\.0-1\. Expected"),
        (two("a", "b"), None, {"freeze": ["encoder", "pooler", "head"]}, ConfigError, "nothing to train"),
        (two("a", "b"), None, {"task": "qa"}, ConfigError, "are for sequence-classification"),
        ([{"text": 3, "label": "a"}, {"text": "x", "label": "b"}], None, {"columns": {"text": "text", "label": "label"}}, DataError, "text"),
        (lines(4), None, {"labels": ["a"]}, ConfigError, "takes none"),
        (questions(2), None, {"labels": ["a"]}, ConfigError, "takes none"),
        ([{**questions(1)[0], "answers": {"text": ["nowhere"], "answer_start": [3]}}], None, {}, DataError, "not in the context"),
        ([{"words": ["a", "b"], "tags": ["O"]}], None, {}, DataError, "1 tags for 2 words"),
        ([{"text": "ab cd", "spans": [{"start": 0, "end": 9}]}], None, {}, DataError, "and a label"),
        ("no-such.csv", "neither.csv", {}, DataError, "(?s)no-such.csv.*neither.csv"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused_before_the_training(
    train: Any, held_out: Any, options: Any, error: Any, says: str, base: Path
) -> None:
    with pytest.raises(error, match=says):
        finetune(base, train=train, eval=held_out, on_event=lambda event: pytest.fail("trained"), **options)


def test_a_model_with_other_labels_is_refused_and_one_that_fits_is_trained_in_place(base: Path) -> None:
    model = load(base, head="sequence_classification")
    with pytest.raises(ConfigError, match="does not fit"):
        finetune(model, train=two("x", "y"))
    result = finetune(model, train=two("praise", "complaint"), **QUICK)
    assert result.model is model
    assert not model.training


def test_a_folder_in_use_is_refused_before_the_training_and_replaced_when_asked(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = finetune(base, train=labelled(16), out=out, **QUICK)
    with pytest.raises(ExportError):
        finetune(base, train=labelled(16), out=out, on_event=lambda event: pytest.fail("trained"))
    second = finetune(base, train=labelled(16), out=out, overwrite=True, **{**QUICK, "seed": 1})
    assert first.losses != second.losses
    assert json.loads((out / "training.json").read_text())["losses"] == second.losses
    (out / "diary.txt").write_text("mine")
    with pytest.raises(ExportError):
        finetune(base, train=labelled(16), out=out, overwrite=True, **QUICK)
    assert (out / "diary.txt").read_text() == "mine"
    assert (out / "recipe.yaml").is_file()


def test_a_folder_in_use_is_refused_without_a_walk_of_its_tree(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("walked"))
    with pytest.raises(ExportError):
        finetune("nobody/nothing", train=labelled(16), out=tmp_path)


def test_the_best_model_is_the_one_that_is_returned(base: Path) -> None:
    rows = labelled()
    # a rate that destroys: the first evaluation is the best, by the loss
    result = finetune(
        base,
        train=rows,
        eval=rows[:24],
        **{**QUICK, "epochs": 4, "lr": 0.5, "metric": "eval_loss", "schedule": "constant"},
    )
    losses = [entry["eval_loss"] for entry in result.history]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert result.metrics["eval_loss"] == losses[best] < max(losses)
    assert result.best_step == result.history[best]["step"]
    judged = job(base, rows, rows[:24]).evaluation(result.model)
    assert judged["eval_loss"] == pytest.approx(losses[best], rel=1e-6)


def test_early_stopping_ends_the_run_and_later_checkpoints_do_not_count(base: Path) -> None:
    rows = labelled()
    result = finetune(
        base, train=rows, eval=rows[:24], early_stopping=1, eval_every=2, metric="eval_loss",
        **{**QUICK, "epochs": 10, "lr": 0.5, "schedule": "constant"},
    )  # fmt: skip
    assert result.steps < 60
    assert result.best_step == min(result.history, key=lambda entry: entry["eval_loss"])["step"]


def test_checkpoints_of_another_run_are_not_trampled_on(base: Path, tmp_path: Path) -> None:
    rows = labelled(32)
    options: dict[str, Any] = {**QUICK, "checkpoints": str(tmp_path / "run")}
    finetune(base, train=rows, **options)
    with pytest.raises(TrainError, match="unfinished run"):
        finetune(base, train=rows, **options)


def test_sentences_without_words_and_lines_without_tokens_teach_nothing_and_break_nothing(base: Path) -> None:
    rows = [{"words": [], "tags": []}, *tagged(8), {"words": ["\u200b", "good"], "tags": ["O", "B-LONG"]}]
    result = finetune(base, train=rows, eval=rows, **QUICK)
    assert result.metrics["accuracy"] > 0
    texts = [{"text": "   "}, *lines(8), {"text": "\u200b"}]
    assert finetune(base, train=texts, eval=texts, **QUICK).metrics["perplexity"] > 1
