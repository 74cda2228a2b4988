"""Choices, pairs, pre-training pairs and replaced tokens: learned as transformers' own losses have it, judged, gone on
with, and what their tables must look like.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import finetune_with, sentences

from flodl.data import Batch, Where
from flodl.errors import ConfigError, DataError
from flodl.train import Warned
from flodl_hf import load
from flodl_hf.training import batching, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "finetune_parity.py"
Rows = list[dict[str, Any]]
FIXED: dict[str, Any] = {"epochs": 9, "batch_size": 8, "lr": 1e-3, "max_length": 40}


def choices(count: int = 32) -> Rows:
    texts, rows = sentences(), []
    for i in range(count):
        first, *rest = texts[i].split(" ", 2)
        others = [texts[(5 * i + k) % 90].split(" ", 2)[-1] for k in range(1, 3 - i % 2)]
        rows.append({"question": first, "choices": [rest[-1], *others], "label": 0})
        place = i % (1 + len(others))
        rows[-1]["choices"].insert(place, rows[-1]["choices"].pop(0))
        rows[-1]["label"] = place
    return rows


def pairs(count: int = 32) -> Rows:
    texts = sentences()
    return [{"sentence_a": texts[i], "sentence_b": texts[i + 1]} for i in range(count)]


def lines(count: int = 32) -> Rows:
    return [{"text": text} for text in sentences()[:count]]


TABLES = {"multiple_choice": choices, "next_sentence": pairs, "pretraining": pairs, "replaced_tokens": lines}
STARTS = {
    "multiple_choice": ("bert", "electra"), "next_sentence": ("bert",), "pretraining": ("bert", "albert"),
    "replaced_tokens": ("electra",),
}  # fmt: skip
CELLS = [(family, task) for task, families in STARTS.items() for family in families]


def planned(start: Any, task: str, rows: Rows, layout: str = "padded", **more: Any) -> Any:
    before = batching._layout
    batching._layout = lambda options: layout  # type: ignore[assignment]
    try:
        return plan_job(start, rows, rows[:11], make_options({**FIXED, "task": task, **more}))
    finally:
        batching._layout = before


@pytest.mark.transformers
@pytest.mark.parametrize(("family", "task"), CELLS)
def test_steps_equal_a_plain_transformers_loop_to_the_bit(
    family: str, task: str, starts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    if not BENCHMARK.is_file():
        pytest.skip("the benchmarks are not here")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = importlib.util.spec_from_file_location("finetune_parity", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["finetune_parity"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = TABLES[task](24)
    if task == "multiple_choice":  # transformers knows no prompts with fewer choices than others
        rows = [{**row, "choices": [*row["choices"][:2]], "label": row["label"] % 2} for row in rows]
    found = module.compare(starts[family], rows, 5, {**FIXED, "task": task})
    assert len(found.ours) == 5
    assert found.ours == found.theirs
    assert found.different_weights == []
    assert found.ours[0] != found.ours[-1]


@pytest.mark.parametrize(("family", "task"), CELLS)
def test_loss_and_figures_are_the_same_however_rows_lie(family: str, task: str, starts: dict[str, Path]) -> None:
    losses, figures = [], []
    for layout in ("padded", "packed", "bucketed"):
        job = planned(starts[family], task, TABLES[task](16), layout)
        job.model.eval()
        which = (3, 0, 9, 7, 12)
        loss = job.objective(job.model, batch_of(job, which))
        assert float(loss.count) == (5 if task != "replaced_tokens" else sum(job.rows.lengths[list(which)]))
        losses.append(float(loss.as_mean().detach()))
        figures.append(job.evaluation(job.model))
        assert job.evaluation.check_metric(job.task.main_metric)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    for other in figures[1:]:
        assert other == pytest.approx(figures[0], rel=1e-4)


def batch_of(job: Any, which: tuple[int, ...]) -> Batch:
    return Batch(job.collate(job.rows.__getitems__(which), Where(1, 0, 0, which)), len(which))


@pytest.mark.parametrize(("family", "task"), [cell for cell in CELLS if cell[1] != "pretraining"])
@torch.no_grad()
def test_losses_of_parts_of_a_batch_add_up(family: str, task: str, starts: dict[str, Path]) -> None:
    job = planned(starts[family], task, TABLES[task](16))
    job.model.eval()
    whole, *parts = (job.objective(job.model, batch_of(job, which)) for which in ((3, 0, 9, 7, 12), (3, 0), (9, 7, 12)))
    total, count = sum(float(part.as_sum()) for part in parts), sum(float(part.count) for part in parts)
    assert total / count == pytest.approx(float(whole.as_mean()), rel=1e-5)


@torch.no_grad()
def test_prompts_with_fewer_choices_than_others_are_told_apart_from_their_own_alone(starts: dict[str, Path]) -> None:
    rows = choices(6)
    assert {len(row["choices"]) for row in rows} == {2, 3}
    job = planned(starts["bert"], "choice", rows)
    job.model.eval()
    each = []
    for i, row in enumerate(rows):
        scores = job.objective.score(job.model, batch_of(job, (i,)))[0, : len(row["choices"])]
        each.append(-scores.log_softmax(0)[row["label"]])
    loss = job.objective(job.model, batch_of(job, tuple(range(6))))
    assert float(loss.as_mean()) == pytest.approx(float(torch.stack(each).mean()), rel=1e-5)


@pytest.mark.parametrize(("family", "task"), CELLS[1:])
def test_a_run_that_was_ended_goes_on_and_its_best_model_is_written(
    family: str, task: str, starts: dict[str, Path], tmp_path: Path
) -> None:
    rows = TABLES[task](20)
    given: Any = {"train": rows[:16], "eval": rows[16:], "task": task, **FIXED, "epochs": 2, "save_every": 1}
    whole = finetune(starts[family], **given)

    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(starts[family], out=tmp_path / "out", on_event=stop, **given)
    rest = finetune(starts[family], out=tmp_path / "out", resume=True, **given)
    assert (rest.losses, rest.history, rest.metrics) == (whole.losses, whole.history, whole.metrics)
    assert whole.task == task
    again = load(tmp_path / "out", head=task)
    assert not again.untrained
    assert all(
        torch.equal(tensor, again.graph.state_dict()[name]) for name, tensor in whole.model.graph.state_dict().items()
    )


def test_what_is_learned_of_choices_and_pairs_is_what_is_predicted(starts: dict[str, Path]) -> None:
    rows = choices(24)
    options: Any = {**FIXED, "epochs": 4}
    result = finetune(starts["bert"], train=rows, eval=rows, **options)  # the columns say the task
    model: Any = result.model
    asked = [(row["question"], row["choices"]) for row in rows]
    right = sum(found[0].index == row["label"] for found, row in zip(model.predict(asked), rows, strict=True))
    assert result.metrics["accuracy"] == right / 24 > 0
    labelled = [
        {"text": row["question"], "text_pair": text, "label": "follows" if k == row["label"] else "other"}
        for row in rows
        for k, text in enumerate(row["choices"])
    ]
    told = finetune(starts["bert"], train=labelled, eval=labelled, task="nsp", **options)
    model = told.model
    said = model.predict([(row["text"], row["text_pair"]) for row in labelled])
    right = sum(found[0].label == row["label"] for found, row in zip(said, labelled, strict=True))
    assert told.metrics["accuracy"] == right / len(labelled) > 0


def test_half_of_pairs_without_labels_are_spoilt_by_another_text_or_by_their_order(starts: dict[str, Path]) -> None:
    rows = pairs(64)
    for family in ("bert", "albert"):
        task = planned(starts[family], "pretrain", rows).task
        found, labels = task._pairs(rows, "train")
        assert 20 < sum(labels) < 44
        for (first, second), label, row in zip(found, labels, rows, strict=True):
            own = (row["sentence_a"], row["sentence_b"])
            if not label:
                assert (first, second) == own
            elif family == "albert":
                assert (second, first) == own
            else:
                assert first == own[0]
                assert second != own[1]
                assert second in {other["sentence_b"] for other in rows}


def test_tokens_are_replaced_anew_in_each_epoch_and_as_tags_say(starts: dict[str, Path]) -> None:
    job = planned(starts["electra"], "replaced", lines(4))
    row = job.rows.get(1)

    def drawn(epoch: int) -> tuple[list[int], list[int]]:
        parts = job.collate([row], Where(42, epoch, 0, (1,)))
        return parts["input_ids"][0].tolist(), parts["labels"][0].tolist()

    own = row["input_ids"].tolist()
    assert drawn(0) == drawn(0) != drawn(1)
    for ids, labels in (drawn(0), drawn(1)):
        assert [a != b for a, b in zip(ids, own, strict=True)] == [bool(label) for label in labels]
        assert 0 < sum(labels) < len(own) / 2
        assert labels[0] == labels[-1] == 0
    words = sentences()[0].rstrip(".").split()
    tags = [int(k == 1) for k in range(len(words))]
    tagged = planned(starts["electra"], "replaced", [{"words": words, "tags": tags}] * 12).rows.get(0)
    whole = job.model.tokenizer.encode_rows([words], words=True)[0][0]
    assert tagged["labels"].tolist() == [int(word == 1) for word in whole.word_ids]
    assert tagged["input_ids"].tolist() == list(whole.ids)


SWAG = {"video-id": "x", "sent1": "A boy runs.", "sent2": "He", "ending0": "sings.", "ending1": "falls.", "label": 1}
ARC = {"question": "Which?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"}
RACE = {"article": "Some text.", "question": "What is it?", "options": ["a", "b", "c"], "answer": "C"}


@pytest.mark.parametrize(
    ("row", "prompt", "texts", "right"),
    [
        (SWAG, "A boy runs.", ("He sings.", "He falls."), 1),
        (ARC, "Which?", ("one", "two"), 1),
        (RACE, "Some text.", ("What is it? a", "What is it? b", "What is it? c"), 2),
        ({"goal": "open", "sol1": "push", "sol2": "pull", "label": 0}, "open", ("push", "pull"), 0),
        ({"prompt": "2 + 2", "choices": ["3", "4"], "answer": "4"}, "2 + 2", ("3", "4"), 1),
        ({"ctx": "He", "endings": ["ran.", "sat."], "label": "1"}, "He", ("ran.", "sat."), 1),
    ],
)
def test_tables_of_choices_are_understood(row: Any, prompt: str, texts: Any, right: int) -> None:
    from flodl_hf.training.choices import ChoiceTask, choice_columns

    columns = choice_columns(row)
    assert columns is not None
    one, label = ChoiceTask(columns)._read(row)
    assert (one.question, one.texts, label) == (prompt, texts, right)


@pytest.mark.parametrize(
    ("family", "rows", "options", "error", "says"),
    [
        ("bert", [{**SWAG, "label": 2}], {}, DataError, "label 2 for 2 choices"),
        ("bert", [SWAG, {**SWAG, "ending1": None}], {}, DataError, r"2 choices: \['str', 'NoneType'\]"),
        ("bert", [{**ARC, "choices": {"text": ["one"], "label": ["A"]}}], {"task": "choice"}, DataError, "no choices among"),
        ("bert", [SWAG], {"labels": ["a"]}, ConfigError, "multiple_choice takes none"),
        ("bert", [SWAG], {"label_smoothing": 0.1}, ConfigError, "multiple_choice takes none"),
        ("bert", [SWAG], {"columns": {"promt": "sent1"}, "task": "choice"}, ConfigError, "did you mean 'prompt'"),
        ("bert", [SWAG], {"long_texts": "windows"}, ConfigError, "expected 'truncate'"),
        ("bert", lines(3), {"task": "nsp"}, DataError, "two texts is not clear"),
        ("bert", pairs(1), {"task": "nsp"}, DataError, "expected more rows"),
        ("bert", [{**pairs(1)[0], "label": "maybe"}], {"task": "nsp"}, DataError, "'maybe'"),
        ("bert", pairs(3), {"task": "nsp", "columns": {"text": "other"}}, DataError, "text='other'"),
        ("albert", pairs(3), {"task": "nsp"}, ConfigError, "albert has no next_sentence head"),
        ("bert", pairs(3), {"task": "pretraining", "class_weights": "balanced"}, ConfigError, "pretraining takes none"),
        ("bert", lines(3), {"task": "replaced"}, ConfigError, "bert has no replaced_tokens head"),
        ("electra", [{"words": ["a", "b"], "tags": [0]}], {"task": "replaced"}, DataError, "1 tags for 2 words"),
        ("electra", [{"words": ["a"], "tags": ["B-PER"]}], {"task": "replaced"}, DataError, "'B-PER'"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused(
    family: str, rows: Rows, options: Any, error: Any, says: str, starts: dict[str, Path]
) -> None:
    with pytest.raises(error, match=says):
        plan_job(starts[family], rows, None, make_options(options))


def test_a_loss_beside_that_of_choices_is_refused(starts: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="no other loss than its own"):
        finetune(starts["bert"], train=choices(4), loss=lambda scores, labels: scores.sum())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize(("family", "task"), CELLS)
def test_on_a_gpu_steps_are_recorded_and_give_the_bits_of_ordinary_ones(
    family: str, task: str, starts: dict[str, Path]
) -> None:
    options: Any = {**FIXED, "max_steps": 24, "precision": "bf16", "task": task}
    found = []
    for capture in (True, False):
        told: list[str] = []

        def note(event: Any, told: list[str] = told) -> None:
            if isinstance(event, Warned):
                told.append(event.message)

        result = finetune_with(starts[family], train=TABLES[task](48), on_event=note, capture=capture, **options)
        found.append((result.losses, {k: v.clone() for k, v in result.model.graph.state_dict().items()}, told))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())
    assert found[0][2] == []
