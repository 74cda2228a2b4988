"""Held-out data judged by several ranks: every window once, the figures of one rank."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import TABLES

from flodl.distributed import Ranks, launch
from flodl_hf.training import finetune
from flodl_hf.training.evaluation import Evaluation, collect_predictions
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options

SMALL: dict[str, Any] = {"batch_size": 5, "max_length": 16, "stride": 4, "epochs": 1}


def on_ranks(ranks: Ranks, job: Any, speeds: tuple[float, ...]) -> dict[str, float]:
    return job.evaluation.on_ranks(job.model.eval(), ranks, speeds)


def numbers(count: int) -> list[dict[str, Any]]:
    return [{**row, "label": 0.1 * len(row["text"])} for row in TABLES["sequence_classification"](count)]


@pytest.mark.parametrize("name", [*TABLES, "regression"])
def test_two_ranks_find_the_figures_of_one(name: str, base: Path) -> None:
    rows = (numbers if name == "regression" else TABLES[name])(33)
    torch.set_num_threads(1)
    job = plan_job(base, rows, rows, make_options(SMALL))
    assert job.evaluation is not None
    alone = job.evaluation(job.model.eval())
    for speeds in ((1.0, 1.0), (3.0, 1.0)):
        first, second = launch(on_ranks, (job, speeds), ranks=2, start="fork").wait()
        assert first == second
        assert first["eval_loss"] == alone["eval_loss"]
        assert first.keys() == alone.keys()
        for figure, value in alone.items():
            assert first[figure] == pytest.approx(value, rel=1e-12, nan_ok=True), figure


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_batches_have_every_window_once_and_units_share_no_example(batch_size: int, base: Path) -> None:
    rows = TABLES["question_answering"](33)
    job = plan_job(base, rows, rows, make_options({**SMALL, "batch_size": batch_size}))
    assert job.evaluation is not None
    one = job.evaluation.sets[""]
    units, owners = one.units(), one.prepared.rows.owners
    assert np.bincount(owners).max() > 1
    batches = [batch for unit in units for _, batch in unit]
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(owners)))
    assert [number for unit in units for number, _ in unit] == list(range(len(batches)))
    assert max(len(batch) for batch in batches) <= batch_size
    examples = [{int(owners[i]) for _, batch in unit for i in batch} for unit in units]
    assert sum(map(len, examples)) == len(set().union(*examples))


@pytest.mark.parametrize("name", ["sequence_classification", "token_classification"])
def test_a_label_that_was_held_out_whole_is_a_label(name: str, base: Path) -> None:
    rows = TABLES[name](20)
    held_out = set(np.random.default_rng(42).permutation(20)[:4].tolist())
    rare = min(held_out)
    rows[rare] = {**rows[rare], **({"label": "rare"} if "label" in rows[rare] else {"tags": ["B-RARE"] * 20})}
    rows[rare] |= {} if "label" in rows[rare] else {"words": ["the"] * 20}
    job = plan_job(base, rows, 0.2, make_options(SMALL))
    assert job.task.labels is not None
    assert any("rare" in label.lower() for label in job.task.labels)
    assert job.evaluation is not None
    assert job.evaluation(job.model.eval())
    notes = [note for note in job.notes if "no training row has the label 'rare'" in note]
    assert len(notes) == (name == "sequence_classification")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["sequence_classification", "token_classification", "question_answering"])
def test_what_the_last_evaluation_saw_is_not_judged_again(
    name: str, several: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, judged, found = TABLES[name](12), [], []
    inner, judge = Evaluation._evaluate, collect_predictions

    def counted(self: Evaluation, *args: Any) -> Any:
        judged.append(self)
        return inner(self, *args)

    def kept(model: Any, evaluation: Any, figures: Any, best: Any) -> Any:
        found.append((judge(model, evaluation, figures, best), len(judged), judge(model, evaluation)))
        return found[-1][0]

    monkeypatch.setattr(Evaluation, "_evaluate", counted)
    monkeypatch.setattr("flodl_hf.training.run.collect_predictions", kept)
    held = {"a": rows[:7], "b": rows[5:]} if several else rows[:7]
    options: dict[str, Any] = {**SMALL, "keep_best": False}
    finetune(base, train=rows, eval=held, out=tmp_path / "out", **options)
    [(first, count, again)] = found
    assert count == (2 if several else 1), "one evaluation of each set"
    assert len(judged) == count + 1, "without figures it is judged anew"
    assert first is not None
    assert again is not None
    assert first is not again
    assert first.name == again.name == ("a" if several else "")
    assert np.array_equal(np.asarray(first.predictions, object), np.asarray(again.predictions, object))
    assert np.array_equal(np.asarray(first.truth, object), np.asarray(again.truth, object))


def test_the_best_model_is_neither_evaluated_again_nor_read_back(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, evaluated = TABLES["sequence_classification"](24), []
    inner = Evaluation._evaluate

    def counted(self: Evaluation, *args: Any) -> Any:
        evaluated.append(self)
        return inner(self, *args)

    def worse(predictions: Any, truth: Any) -> dict[str, float]:
        return {"rank": -float(len(evaluated))}  # the first evaluation is the best

    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "eval_every": 1, "metric": "rank", "metrics": worse}
    read = finetune(base, train=rows, eval=rows[:8], out=tmp_path / "read", checkpoints=str(tmp_path / "c"), **options)
    assert read.best_step == 1
    evaluated.clear()
    monkeypatch.setattr(Evaluation, "_evaluate", counted)
    monkeypatch.setattr("flodl_hf.training.training.read_checkpoint", lambda *_, **__: pytest.fail("read back"))
    monkeypatch.setattr("tempfile.TemporaryDirectory", lambda *_, **__: pytest.fail("no folder is needed"))
    kept = finetune(base, train=rows, eval=rows[:8], **options)
    assert len(evaluated) == len(kept.history) == 9
    assert kept.best_step == 1
    written = finetune(base, train=rows, eval=rows[:8], out=tmp_path / "out", **options)
    assert written.best_step == 1
    names = ("read", "out")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in names)
    assert first == second


@pytest.mark.parametrize("reverse", [False, True])
def test_the_loss_of_an_evaluation_is_summed_in_the_order_of_its_batches(reverse: bool, base: Path) -> None:
    rows = TABLES["sequence_classification"](12)
    job = plan_job(base, rows, rows, make_options(SMALL))
    assert job.evaluation is not None
    # Ranks contribute their losses in any order; these values have other sums in other orders.
    losses = [(0, 1e16, 1.0), (1, 1.0, 1.0), (2, -1e16, 1.0), (3, 1.0, 1.0)]
    one = job.evaluation.sets[""]
    figures = one._figures(losses[::-1] if reverse else losses, one.scorer())
    assert figures["eval_loss"] == 0.25


def test_a_fine_tune_on_one_device_imports_no_compiler(base: Path, tmp_path: Path) -> None:
    absent = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.fsdp", "pandas", "pyarrow", "triton")
    (tmp_path / "t.csv").write_text("text,label\n" + "a good one,a\na bad one,b\n" * 8)
    code = (
        "import sys; from flodl_hf.cli import main\n"
        f"sys.argv = ['flodl-hf', 'finetune', {str(base)!r}, '--train', 't.csv', '--eval', '0.5', '--epochs', '1']\n"
        "try: main()\nexcept SystemExit as done: assert not done.code\n"
        f"print('loaded', [name for name in {absent} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "loaded []" in done.stdout


def test_what_was_seen_of_other_weights_is_judged_again(base: Path) -> None:
    rows = TABLES["sequence_classification"](12)
    job = plan_job(base, rows, rows, make_options(SMALL))
    model = job.model.eval()
    assert job.evaluation is not None
    figures = job.evaluation(model)
    seen = collect_predictions(model, job.evaluation, figures)
    assert seen is job.evaluation.sets[""].seen
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    other = job.evaluation(model)
    assert other != figures
    again = collect_predictions(model, job.evaluation, figures)
    assert again is not seen


@pytest.mark.parametrize(("ranks", "report", "seen"), [(1, True, True), (1, False, False), (2, True, True)])
def test_predictions_are_kept_for_a_report(ranks: int, report: bool, seen: bool, base: Path) -> None:
    rows = TABLES["sequence_classification"](12)
    job = plan_job(base, rows, rows, make_options({**SMALL, "report": report, "devices": ["cpu"] * ranks}))
    assert job.evaluation is not None
    assert (job.evaluation.sets[""].seen is not None) == seen


def test_runs_that_keep_the_best_model_end_their_threads(base: Path) -> None:
    rows, before, values = TABLES["sequence_classification"](24), set(threading.enumerate()), [1.0, 2.0, 3.0, 4.0]

    def rising(predictions: Any, truth: Any) -> dict[str, float]:
        return {"rank": values.pop(0)}

    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "metric": "rank", "metrics": rising}
    result = finetune(base, train=rows, eval=rows[:8], **options)
    assert result.best_step == result.steps
    with pytest.raises(IndexError) as failed:
        finetune(base, train=rows, eval=rows[:8], **options)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), (thread, failed)
