"""What the user brings to `finetune`: a loss, figures, callbacks, sets of held-out data; the same in every cut."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import TABLES, labelled, lines
from torch import Tensor
from torch.nn import functional as F

from flodl.distributed import Ranks, launch
from flodl.errors import ConfigError, TrainError
from flodl.train import Callback, Loss
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl_hf import load
from flodl_hf.training import finetune
from flodl_hf.training.evaluate_model import evaluate
from flodl_hf.training.evaluation import Own
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.run import train_job

torch.set_num_threads(1)
QUICK: dict[str, Any] = {
    "batch_size": 8, "max_steps": 3, "lr": 0.05, "max_length": 32, "stride": 8, "dropout": 0.0, "group_by_length": False,
    "optimizer": "sgd",  # which does not make steps of rounding errors, as Adam does
}  # fmt: skip
CUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 3},
    {"batch_size": 4, "accumulate": 2},
    {"layout": "packed"},
    {"layout": "packed", "micro_batch_size": 3},
]


def focal_each(scores: Tensor, labels: Tensor) -> Tensor:
    """A value for each item; -100 has to be heeded by nobody but us."""
    each = F.cross_entropy(scores, labels.clamp(min=0), reduction="none")
    return (1 - torch.exp(-each)) ** 2 * each


def focal_mean(scores: Tensor, labels: Tensor) -> Tensor:
    kept = labels != -100
    return focal_each(scores, labels)[kept].mean()


def focal_pair(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    kept = labels != -100
    return focal_each(scores, labels)[kept].sum(), kept.sum()


def focal_loss(scores: Tensor, labels: Tensor) -> Loss:
    return Loss(*focal_pair(scores, labels))


def absolute(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.squeeze(-1) - labels).abs()


def ends(scores: Tensor, labels: Tensor) -> Tensor:
    """Spans: scores ``(rows, tokens, 2)``, labels ``(rows, 2)``; padding would be a place, so windows are of one width."""
    return F.cross_entropy(scores.transpose(1, 2).flatten(0, 1), labels.flatten(), reduction="none").view(-1, 2)


def numbers(count: int) -> list[dict[str, Any]]:
    return [{**row, "label": 0.1 * len(row["text"])} for row in TABLES["sequence_classification"](count)]


def weights(base: Path, rows: Any, **options: Any) -> dict[str, Tensor]:
    loss = options.pop("loss", None)
    job = plan_job(base, rows, None, make_options({**QUICK, **options}), own=Own(loss))
    with ExitStack() as stack:
        return {k: v.clone() for k, v in train_job(job, lambda event: None, stack).graph.state_dict().items()}


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-4, atol=2e-6) for name in a)


LOSSES = [
    ("sequence_classification", focal_each),
    ("sequence_classification", focal_mean),
    ("token_classification", focal_each),
    ("token_classification", focal_mean),
    ("token_classification", focal_pair),
    ("token_classification", focal_loss),
    ("masked_lm", focal_each),
    ("numbers", absolute),
]


@pytest.mark.parametrize(("task", "loss"), LOSSES)
def test_an_own_loss_is_the_same_however_a_step_is_cut(task: str, loss: Any, base: Path) -> None:
    rows = numbers(21) if task == "numbers" else TABLES[task](21)
    whole = weights(base, rows, loss=loss)
    assert not close(whole, weights(base, rows))
    for cut in CUTS:
        assert close(whole, weights(base, rows, loss=loss, **cut)), cut


@pytest.mark.slow
@pytest.mark.parametrize(("task", "loss"), LOSSES)
def test_an_own_loss_is_the_same_on_two_devices(task: str, loss: Any, base: Path) -> None:
    rows = numbers(21) if task == "numbers" else TABLES[task](21)
    both = weights(base, rows, loss=loss, devices=["cpu", "cpu"], policy="sync")
    assert close(both, weights(base, rows, loss=loss))


def test_the_loss_of_answers_may_be_an_own_one(base: Path) -> None:
    rows = TABLES["question_answering"](16)
    assert close(weights(base, rows, loss=ends, layout="packed"), weights(base, rows))
    assert close(
        weights(base, rows, loss=ends, layout="packed"), weights(base, rows, loss=ends, micro_batch_size=3)
    )  # fmt: skip


def test_the_task_s_own_loss_brought_along_is_the_same_to_the_bit(base: Path) -> None:
    rows = labelled(16)
    mine = weights(base, rows, loss=F.cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(mine.values(), weights(base, rows).values(), strict=True))


def test_evaluation_is_by_the_own_loss(base: Path) -> None:
    job = plan_job(base, labelled(8), labelled(40)[8:], make_options(QUICK), own=Own(focal_each))
    assert job.evaluation is not None
    found = job.evaluation(job.model.eval())
    usual = plan_job(base, labelled(8), labelled(40)[8:], make_options(QUICK)).evaluation(job.model)  # type: ignore[misc]
    assert found["eval_loss"] < usual["eval_loss"]
    assert found["accuracy"] == usual["accuracy"]


@pytest.mark.parametrize(
    ("own", "options", "says"),
    [
        ({"loss": 3}, {}, "expected a function of scores and labels"),
        ({"loss": focal_each}, {"class_weights": "balanced"}, "expected one of both"),
        ({"loss": focal_each}, {"label_smoothing": 0.1}, "expected one of both"),
        ({"metrics": {"a": 3}}, {}, "metrics: expected a function"),
        ({"metrics": len}, {"task": "mlm"}, "too large to be kept"),
    ],
)
def test_what_has_no_place_is_refused_before_training(
    own: dict[str, Any], options: dict[str, Any], says: str, base: Path
) -> None:
    rows = lines(8) if options.get("task") else labelled(8)
    with pytest.raises(ConfigError, match=says):
        finetune(base, train=rows, eval=rows, **own, **options)


def test_a_loss_that_gives_something_else_is_named(base: Path) -> None:
    for wrong in (lambda scores, labels: "low", lambda scores, labels: scores[:2]):
        with pytest.raises(TrainError, match="expected a mean, a value for each"):
            finetune(base, train=labelled(8), max_steps=1, loss=wrong)


# ---- figures --------------------------------------------------------------------------------------------


def errors(predictions: Any, truth: Any) -> dict[str, float]:
    return {"wrong": float((np.asarray(predictions).argmax(-1) != truth).sum()), "items": len(truth)}


def tags_right(predictions: Any, truth: Any) -> float:
    pairs = [(p, t) for line, wanted in zip(predictions, truth, strict=True) for p, t in zip(line, wanted, strict=True)]
    return sum(p == t for p, t in pairs) / len(pairs)


def exact(predictions: Any, truth: Any) -> float:
    return 100 * sum(p in accepted for p, accepted in zip(predictions, truth, strict=True)) / len(truth)


OWN_FIGURES: dict[str, tuple[Any, str, Any]] = {
    "sequence_classification": (errors, "wrong", lambda f: round((1 - f["accuracy"]) * f["items"])),
    "token_classification": ({"right": tags_right}, "right", lambda f: f["accuracy"]),
    "question_answering": ({"exactly": exact}, "exactly", None),
}


def on_ranks(ranks: Ranks, job: Any) -> dict[str, float]:
    return job.evaluation.on_ranks(job.model.eval(), ranks, (1.0, 1.0))


@pytest.mark.parametrize("task", OWN_FIGURES)
def test_own_figures_are_of_all_examples_and_those_of_two_ranks(task: str, base: Path) -> None:
    own, name, same_as = OWN_FIGURES[task]
    rows = TABLES[task](33)
    job = plan_job(base, rows, rows, make_options({**QUICK, "batch_size": 5}), own=Own(metrics=own))
    assert job.evaluation is not None
    alone = job.evaluation(job.model.eval())
    assert name in alone
    if same_as is not None:
        assert alone[name] == pytest.approx(same_as(alone))
    first, second = launch(on_ranks, (job,), ranks=2, start="fork").wait()
    assert first == second == pytest.approx(alone, rel=1e-12)


def test_regression_figures_get_numbers(base: Path) -> None:
    def worst(predictions: Any, truth: Any) -> float:
        assert truth.dtype == np.float32
        return float(np.abs(predictions.squeeze(-1) - truth.reshape(len(predictions))).max())

    result = finetune(base, train=numbers(8), eval=numbers(12), metrics={"worst": worst}, metric="-worst", max_steps=2)
    assert result.metrics["worst"] > 0


def test_the_best_model_is_by_an_own_figure_and_an_unknown_one_is_named(base: Path) -> None:
    rows = labelled(40)
    result = finetune(base, train=rows[:24], eval=rows[24:], metrics=errors, metric="-wrong", epochs=2, lr=1e-3)
    assert result.metrics["wrong"] == min(entry["wrong"] for entry in result.history)
    with pytest.raises((ConfigError, TrainError), match="did you mean 'wrong'"):
        finetune(base, train=rows[:24], eval=rows[24:], metrics=errors, metric="-wrongs", max_steps=1)
    with pytest.raises((ConfigError, TrainError), match="did you mean 'wrong'"):
        finetune(base, train=rows[:24], eval=rows[24:], metrics={"wrong": len}, metric="-wrongs", max_steps=1)
    with pytest.raises(TrainError, match="expected a mapping of metrics"):
        finetune(base, train=rows[:24], eval=rows[24:], metrics=lambda said, truth: 0.5, max_steps=1)


# ---- held-out data --------------------------------------------------------------------------------------


def test_several_sets_are_judged_and_the_first_decides(base: Path, tmp_path: Path) -> None:
    rows = labelled(48)
    sets = {"dev": rows[24:40], "hard": rows[40:]}
    result = finetune(base, train=rows[:24], eval=sets, out=tmp_path / "out", epochs=2, lr=1e-3, batch_size=8)
    assert {"dev/accuracy", "hard/accuracy", "dev/eval_loss", "hard/eval_loss"} <= result.metrics.keys()
    assert result.metrics["dev/accuracy"] == max(entry["dev/accuracy"] for entry in result.history)
    alone = finetune(base, train=rows[:24], eval=rows[40:], epochs=2, lr=1e-3, batch_size=8)
    step = result.best_step
    pick = next(entry for entry in alone.history if entry["step"] == step)
    assert pick["accuracy"] == result.metrics["hard/accuracy"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| eval dev | list in memory | 16 |" in card
    other = finetune(base, train=rows[:24], eval=sets, metric="hard/eval_loss", epochs=2, lr=1e-3, batch_size=8)
    assert other.metrics["hard/eval_loss"] == min(entry["hard/eval_loss"] for entry in other.history)
    with pytest.raises(ConfigError, match="accuracy"):
        finetune(base, train=rows[:24], eval=sets, metric="hard/acuracy")


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("eval_hard_accuracy", "hard/accuracy"),
        ("hard_accuracy", "hard/accuracy"),
        ("eval_hard_loss", "-hard/eval_loss"),
        ("eval_accuracy", "easy/accuracy"),
        ("eval_very_hard_accuracy", "very_hard/accuracy"),
        ("-hard_accuracy", "-hard/accuracy"),
    ],
)
def test_a_figure_of_a_set_is_named_as_transformers_names_it(metric: str, expected: str, base: Path) -> None:
    rows = labelled(40)
    sets = {"easy": rows[24:32], "hard": rows[32:36], "very_hard": rows[36:]}
    options = {"metric_for_best_model": metric, "load_best_model_at_end": True, **QUICK}
    if metric.startswith("-"):
        options = {"metric": metric, **QUICK}
    assert plan_job(base, rows[:24], sets, make_options(options)).metric == expected


def report(predictions: Any, truth: Any) -> dict[str, Any]:
    """Return what sklearn's ``confusion_matrix`` and ``classification_report(output_dict=True)`` return."""
    said = predictions.argmax(1)
    matrix = np.array([[((truth == i) & (said == j)).sum() for j in (0, 1)] for i in (0, 1)])
    table = {"complaint": {"support": int((truth == 0).sum())}, "accuracy": float((said == truth).mean())}
    return {"matrix": matrix, "report": table, "wrong": [int(i) for i in np.flatnonzero(said != truth)]}


@pytest.mark.parametrize("by_name", [False, True])
def test_lists_and_tables_of_own_metrics_are_kept_beside_the_figures(by_name: bool, base: Path, tmp_path: Path) -> None:
    rows = labelled(32)
    parts = ("matrix", "report", "wrong")
    own: Any = {name: partial(lambda name, *given: report(*given)[name], name) for name in parts} if by_name else report
    result = finetune(base, train=rows[:24], eval=rows[24:], metrics=own, out=tmp_path / "out", epochs=2, batch_size=8)
    assert result.metrics["report/accuracy"] == result.metrics["accuracy"]
    assert result.metrics["report/complaint/support"] == 4.0
    assert not {"matrix", "wrong", "details"} & set(result.metrics)
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    for row in facts["history"]:
        matrix = np.array(row["details"]["matrix"])
        assert matrix.sum() == 8
        assert np.trace(matrix) == round(8 * row["accuracy"])
        assert len(row["details"]["wrong"]) == 8 - np.trace(matrix)
    found = evaluate(tmp_path / "out", rows[24:], metrics=own)
    assert (
        found.details == facts["history"][[row["step"] for row in facts["history"]].index(result.best_step)]["details"]
    )


def test_early_stopping_counts_the_evaluations_that_were_requested(base: Path) -> None:
    """As transformers 5.23: 6 steps an epoch, evaluations after 4, 8, 12, 16; no improvement after the first."""
    scores = iter([0.9, 0.5, 0.5, 0.5, 0.5])
    result = finetune(
        base, train=labelled(48), eval=labelled(8), metrics={"own": lambda *_: next(scores)}, metric="own",
        eval_strategy="steps", eval_steps=4, early_stopping_patience=3, epochs=10, batch_size=8,
    )  # fmt: skip
    assert [row["step"] for row in result.history] == [4, 8, 12, 16]
    assert (result.steps, result.best_step) == (16, 4)


def test_columns_by_name_are_one_set(base: Path) -> None:
    rows = labelled(16)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert "accuracy" in finetune(base, train=rows, eval=columns, max_steps=1).metrics


@pytest.mark.parametrize(("share", "count"), [(0.25, 10), (7, 7)])
def test_a_share_of_the_training_rows_is_held_out(share: float, count: int, base: Path, tmp_path: Path) -> None:
    rows = labelled(40)
    runs = [finetune(base, train=rows, eval=share, out=tmp_path / name, max_steps=1) for name in ("a", "b")]
    first, second = runs
    assert first.metrics == second.metrics
    assert first.recipe["eval"] == share
    card = (tmp_path / "a" / "README.md").read_text()
    assert f"| eval | list in memory, {count} rows split off | {count} |" in card
    assert f"| train | list in memory | {40 - count} |" in card
    job = plan_job(base, rows, share, make_options({}))
    (held,) = job.tables.evals.values()
    assert len(held) == count
    texts = [row["text"] for row in rows]
    assert sorted(texts) == sorted(row["text"] for row in [*held, *job.tables.train])
    other = plan_job(base, rows, share, make_options({"seed": 1})).tables.evals[""]
    assert held != other


@pytest.mark.parametrize("share", [0, 1.5, 40, -0.1, 0.001])
def test_a_share_that_leaves_nothing_is_refused(share: float, base: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"eval: found {share!r} of 40")):
        finetune(base, train=labelled(40), eval=share)


# ---- callbacks, averages, checkpoints, progress -----------------------------------------------------------


class Counts(Callback):
    def __init__(self) -> None:
        self.steps = self.backwards = 0

    def after_backward(self, trainer: Any) -> None:
        self.backwards += 1

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.steps += 1
        if self.steps == 2:
            trainer.stop()


def test_callbacks_take_part(base: Path) -> None:
    counts = Counts()
    result = finetune(base, train=labelled(40), batch_size=8, micro_batch_size=4, callbacks=[counts])
    assert (counts.steps, counts.backwards, result.steps) == (3, 6, 3) or (counts.steps, result.steps) == (2, 2)


def test_the_average_is_what_is_returned_judged_and_written(base: Path, tmp_path: Path) -> None:
    rows = labelled(40)
    given: dict[str, Any] = {
        "train": rows[:32],
        "eval": rows[32:],
        "batch_size": 8,
        "epochs": 3,
        "lr": 1e-3,
        "ema": 0.8,
    }
    result = finetune(base, out=tmp_path / "out", keep_checkpoints=True, keep_last=3, **given)
    kept = list_checkpoints(tmp_path / "out.checkpoints")
    assert len(kept) >= 2
    saved = {read_checkpoint(path).step: read_checkpoint(path) for path in kept}
    best = saved[result.best_step]
    held = dict(result.model.named_parameters())
    assert all(torch.equal(held[name], tensor) for name, tensor in best.tensors["ema"].items())
    assert not all(torch.equal(held[name], best.tensors["model"][name]) for name in held)
    job = plan_job(base, rows[:32], rows[32:], make_options({}))
    assert job.evaluation is not None
    assert job.evaluation(load(tmp_path / "out").eval())["eval_loss"] == pytest.approx(result.metrics["eval_loss"])


def test_only_as_many_checkpoints_stay_as_are_asked_for(base: Path, tmp_path: Path) -> None:
    finetune(base, train=labelled(32), batch_size=8, out=tmp_path / "out", keep_checkpoints=True, keep_last=2)
    assert len(list_checkpoints(tmp_path / "out.checkpoints")) == 2


@pytest.mark.parametrize(("options", "total"), [({}, 12), ({"max_steps": 5}, 5), ({"tokens_per_batch": 60}, None)])
def test_progress_is_shown_with_a_total_that_is_true(
    options: dict[str, Any], total: int | None, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = finetune(base, train=labelled(32), batch_size=8, progress=True, **options)
    said = capfd.readouterr().err.splitlines()
    total = result.steps if total is None else total
    assert said[0].startswith("task sequence_classification from text 'text', label 'label'; 2 labels")
    few = [] if "max_steps" in options else [f"{total} optimiser steps are few for a new head"]
    assert [line.partition(":")[0] for line in said[1 : 2 + len(few)]] == [*few, "training"]
    assert f"training: 3 epochs, {total} steps" in said
    assert said[-1].startswith(f"training: {total} of {total} steps (100 %)")


def test_no_progress_is_shown_where_it_is_not_wanted(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finetune(base, train=labelled(16), max_steps=1, progress=False)
    assert capfd.readouterr().err == ""


def test_a_resume_without_a_checkpoint_is_reported(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finetune(base, train=labelled(16), max_steps=1, progress=True, out=tmp_path / "first")
    assert "no checkpoint" not in capfd.readouterr().err
    finetune(base, train=labelled(16), max_steps=1, progress=True, out=tmp_path / "other", resume=True)
    assert "other.checkpoints contains no checkpoint" in capfd.readouterr().err
