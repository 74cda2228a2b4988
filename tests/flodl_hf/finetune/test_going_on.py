"""A fine-tune that was ended and is gone on with: the model, the recipe and the history of one left alone."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import labelled, questions, tagged

from flodl.errors import TrainError, TrainInterrupted
from flodl.train.optim.ema import averaged_state
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl_hf import load
from flodl_hf.errors import ExportError
from flodl_hf.models.adapters import IA3, Lora, Prefix, Prompt
from flodl_hf.models.adapters.settings import recorded_adapter
from flodl_hf.training import evaluate, finetune
from flodl_hf.training.evaluation import Evaluation
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import Options, make_options
from flodl_hf.training.result import FinetuneResult
from flodl_hf.training.training import BY_HASH, BY_THE_TRAINER, CHANGES_NO_NUMBER, fingerprint_of

ROWS = labelled(48)
SWAPPED_LABELS = {"complaint": "praise", "praise": "complaint"}
BASIC: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 2e-3, "max_length": 24}


class Stopped(BaseException):
    """What ends a run from outside in these tests."""


def broken_off(at: int, base: Any, out: Path, rows: Any = ROWS[:40], held_out: Any = ROWS[40:], **options: Any) -> None:
    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == at:
            raise Stopped

    with pytest.raises(Stopped):
        finetune(base, train=rows, eval=held_out, out=out, on_event=stop, save_every=1, **{**BASIC, **options})


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("out", [True, False])
def test_ctrl_c_in_python_keeps_what_was_trained(out: bool, ranks: int, base: Path, tmp_path: Path) -> None:
    def press(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == 3:
            signal.raise_signal(signal.SIGINT)

    given: dict[str, Any] = {"train": ROWS[:40], **BASIC, **({"out": tmp_path / "out"} if out else {})}
    if ranks > 1:
        given["devices"] = ["cpu"] * ranks
    with pytest.raises(KeyboardInterrupt) as caught:
        finetune(base, on_event=press, **given)
    assert isinstance(caught.value, TrainInterrupted)
    result = caught.value.result
    assert isinstance(result, FinetuneResult)
    assert result.steps == len(result.losses) == caught.value.step < 10
    trained = caught.value.trained.parameters
    assert trained
    assert all(torch.equal(p.cpu(), trained[name]) for name, p in result.model.named_parameters() if name in trained)
    assert len(result.model.predict(["a text"])) == 1
    assert (caught.value.folder is not None) == out
    if out and ranks == 1:
        rest = finetune(base, resume=True, **given)
        whole = finetune(base, train=ROWS[:40], **BASIC)
        assert rest.losses == whole.losses
        assert rest.losses[: result.steps] == result.losses


@pytest.mark.parametrize("own_folder", [False, True])
def test_a_resume_of_a_finished_run_says_that_it_is_finished(own_folder: bool, base: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"train": ROWS[:16], "out": tmp_path / "out", **BASIC}
    given |= {"checkpoints": tmp_path / "kept"} if own_folder else {}
    first = finetune(base, **given)
    with pytest.raises(ExportError, match="finished run"):
        finetune(base, resume=True, **given)
    with pytest.raises(ExportError, match="overwrite=True"):
        finetune(base, **given)
    assert finetune(base, resume=True, overwrite=True, **given).losses == first.losses


@pytest.mark.parametrize(("save", "judge"), [(7, 5), (5, 7), (3, 2), (None, 3)])
def test_the_model_is_the_one_that_the_figures_are_of(save: int | None, judge: int, base: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**BASIC, "lr": 2e-2, "schedule": "constant", "metric": "eval_loss"}
    result = finetune(
        base, train=ROWS[:40], eval=ROWS[40:], out=tmp_path / "out", save_every=save, eval_every=judge, **options
    )
    best = min(result.history, key=lambda row: (row["eval_loss"], row["step"]))
    assert best["step"] == result.best_step
    assert best["eval_loss"] == result.metrics["eval_loss"]
    job = plan_job(tmp_path / "out", ROWS[:40], ROWS[40:], make_options(BASIC))
    assert job.evaluation is not None
    assert job.evaluation(job.model.eval())["eval_loss"] == result.metrics["eval_loss"]


def test_all_of_a_run_is_told_however_often_it_was_ended(base: Path, tmp_path: Path) -> None:
    whole = finetune(base, train=ROWS[:40], eval=ROWS[40:], **BASIC)
    broken_off(3, base, tmp_path / "out")
    broken_off(6, base, tmp_path / "out", resume=True)
    rest = finetune(base, train=ROWS[:40], eval=ROWS[40:], out=tmp_path / "out", save_every=1, resume=True, **BASIC)
    assert rest.losses == whole.losses
    assert rest.history == whole.history
    assert (rest.best_step, rest.metrics) == (whole.best_step, whole.metrics)
    assert not rest.changes
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    assert facts["losses"] == whole.losses
    assert facts["history"] == whole.history
    a, b = whole.model.graph.state_dict(), rest.model.graph.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("more", [{}, {"ema": 0.9}])
@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
def test_the_best_weights_and_predictions_come_from_memory(
    devices: list[str] | None, more: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**BASIC, "epochs": 3, "lr": 2e-2, "metric": "eval_loss", "devices": devices, **more}
    held_out = [{**row, "label": SWAPPED_LABELS[row["label"]]} for row in ROWS[:8]]
    if devices:  # this process evaluates nothing, the ranks do
        monkeypatch.setattr(Evaluation, "__call__", None)
    saved = finetune(base, train=ROWS, eval=held_out, out=tmp_path / "saved", keep_checkpoints=True, **options)
    assert saved.best_step < saved.steps
    kept = max(
        list_checkpoints(tmp_path / "saved.checkpoints"), key=lambda path: path.name == step_name(saved.best_step)
    )
    state = averaged_state(read_checkpoint(kept, weights_only=True).tensors)
    assert kept.name == step_name(saved.best_step)
    whole = saved.model.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in state.items() if name in whole)
    assert sum(name in whole for name in state) > 10
    for row in saved.history:
        if row["step"] == saved.best_step:
            assert saved.metrics["eval_loss"] == row["eval_loss"]
    facts = json.loads((tmp_path / "saved" / "training.json").read_text())
    assert facts["best_step"] == saved.best_step
    monkeypatch.undo()
    again = evaluate(tmp_path / "saved", held_out, batch_size=8)
    assert again.metrics["eval_loss"] == pytest.approx(saved.metrics["eval_loss"], rel=1e-6)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


@pytest.mark.parametrize("at", [4, 5, 8])
def test_a_signal_at_an_epochs_end_changes_no_choice(at: int, base: Path, tmp_path: Path) -> None:
    # six steps an epoch; a signal in the handler of step 5 is noticed at step 6, before that epoch is judged
    options: dict[str, Any] = {**BASIC, "batch_size": 8, "lr": 2e-2, "metric": "eval_loss"}
    data: dict[str, Any] = {"train": ROWS, "eval": [{**row, "label": SWAPPED_LABELS[row["label"]]} for row in ROWS[:8]]}
    whole = finetune(base, **data, **options)
    assert (whole.steps, whole.best_step) == (12, 6)

    def end(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        finetune(base, **data, out=tmp_path / "out", on_event=end, **options)
    assert left.value.code == 143
    rest = finetune(base, **data, out=tmp_path / "out", resume=True, **options)
    assert (rest.best_step, rest.metrics, rest.history) == (whole.best_step, whole.metrics, whole.history)
    a, b = whole.model.graph.state_dict(), rest.model.graph.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


SWAPPED = [ROWS[k] for k in (1, 0, *range(2, 40))]
CHANGES: dict[str, dict[str, Any]] = {
    "optimizer.weight_decay": {"weight_decay": 0.1},
    "optimizer.betas": {"beta2": 0.99},
    "label_smoothing": {"label_smoothing": 0.1},
    "dropout": {"dropout": 0.3},
    "class_weights": {"class_weights": [1.0, 2.0]},
    "schedule": {"lr": 1e-3},
    "data.order.batch_size": {"batch_size": 4},
    "freeze": {"freeze": ["embeddings"]},
    "train rows": {"rows": SWAPPED},
    "eval rows": {"held_out": ROWS[39:47]},
    "metric": {"metric": "eval_loss"},
    "max_grad_norm": {"max_grad_norm": 0.0},
    "attention": {"attention": "eager"},
}


@pytest.fixture(scope="module")
def ended(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    broken_off(3, base, folder / "out")
    return folder / "out.checkpoints"


@pytest.mark.parametrize("named", CHANGES)
def test_what_changes_numbers_is_refused_by_name_and_taken_by_the_option(named: str, base: Path, ended: Path) -> None:
    change = dict(CHANGES[named])
    rows, held_out = change.pop("rows", ROWS[:40]), change.pop("held_out", ROWS[40:])
    options = {**BASIC, **change, "checkpoints": str(ended), "resume": True, "save_every": 1}
    before = list_checkpoints(ended)
    with pytest.raises(TrainError) as caught:
        finetune(base, train=rows, eval=held_out, **options)
    assert named in caught.value.names
    assert len(caught.value.names) <= 3
    assert "resume=[" in str(caught.value)
    assert list_checkpoints(ended) == before


def test_what_was_changed_stands_in_the_papers(base: Path, tmp_path: Path) -> None:
    broken_off(3, base, tmp_path / "out")
    rest = finetune(
        base, train=ROWS[:40], eval=ROWS[40:], out=tmp_path / "out", save_every=1,
        resume=["optimizer.weight_decay"], weight_decay=0.1, **BASIC,
    )  # fmt: skip
    [change] = rest.changes
    assert (change["name"], change["was"], change["is"]) == ("optimizer.weight_decay", [0.0, 0.0], [0.1, 0.0])
    assert (
        f"# Until step {change['step']} the run had optimizer.weight_decay: [0.0, 0.0]"
        in (tmp_path / "out" / "recipe.yaml").read_text()
    )
    assert json.loads((tmp_path / "out" / "training.json").read_text())["changes"] == [dict(change)]


def test_every_option_is_compared_unless_a_table_says_why_not() -> None:
    names = {row.name for row in fields(Options)}
    assert {*BY_THE_TRAINER, *BY_HASH, *CHANGES_NO_NUMBER} <= names


def test_what_changes_no_number_is_no_other_run(base: Path, ended: Path, tmp_path: Path) -> None:
    job = plan_job(base, ROWS[:40], ROWS[40:], make_options(BASIC))
    other = {"epochs": 7, "eval_batch_size": 3, "gradient_checkpointing": True, "save_every": 4}
    again = plan_job(base, ROWS[:40], ROWS[40:], make_options({**BASIC, **other}))
    assert fingerprint_of(job) == fingerprint_of(again)
    assert json.loads(json.dumps(fingerprint_of(job)))


@pytest.mark.parametrize(
    ("adapter", "recorded"),
    [
        (None, {}),
        (Lora(4), {"lora": 4}),
        (Lora(4, 8.0, dora=True, targets="all-linear"),
         {"lora": 4, "lora_alpha": 8.0, "lora_kinds": ["dora"], "lora_targets": ["all-linear"]}),
        (Lora(dropout=0.1, bias="all"), {"lora": 8, "lora_dropout": 0.1, "adapter": {"bias": "all"}}),
        (IA3(), {"ia3": ["usual"]}),
        (IA3(("query",), ()), {"ia3": ["query"], "adapter": {"inputs": []}}),
        (Prompt(3, "a"), {"prompt_tokens": 3, "prompt_text": "a"}),
        (Prompt(encoder=16, kind="lstm"),
         {"prompt_tokens": 20, "prompt_encoder": 16, "prompt_encoder_kind": "lstm"}),
        (Prefix(3, encoder=16), {"prefix_tokens": 3, "prefix_encoder": 16}),
    ],
)  # fmt: skip
def test_checkpoints_of_earlier_versions_contain_an_equal_adapter(adapter: Any, recorded: Any) -> None:
    usual = {"lora_dropout": 0.0, "lora_targets": [], "lora_kinds": [], "ia3": [], "prompt_encoder_kind": "mlp"}
    found = json.loads(json.dumps(recorded_adapter(adapter)))
    assert {name: value for name, value in found.items() if value is not None} == {**usual, **recorded}


def test_checkpoints_of_earlier_versions_are_of_the_same_run(base: Path) -> None:
    found = fingerprint_of(plan_job(base, ROWS[:16], None, make_options({**BASIC, "lora": 4})))
    recorded = {"lora": 4, "adaptive_layers": False, "eval_delay": 0, "long_texts": "cut", "prompt_encoder_kind": "mlp"}
    assert recorded.items() <= found.items()


@pytest.mark.parametrize("table", [tagged, questions])
def test_texts_of_the_same_length_are_other_data(table: Any, base: Path) -> None:
    rows = table(24)
    other = [dict(row) for row in rows]
    if table is tagged:
        other[3] = {"words": rows[3]["words"], "tags": rows[3]["tags"][::-1]}
    else:
        other[3] = {**rows[3], "answers": {"text": ["it"], "answer_start": [0]}, "context": "it" + rows[3]["context"]}
    options = make_options({"max_length": 24, "stride": 4})
    first, second = (fingerprint_of(plan_job(base, rows[:20], part, options)) for part in (rows[:8], other[:8]))
    assert [name for name in first if first[name] != second[name]] == ["eval rows"]


def test_another_start_is_another_run_and_another_place_is_not(base: Path, tmp_path: Path) -> None:
    model = load(base, head="sequence_classification")
    moved = tmp_path / "moved"
    model.save_pretrained(moved)
    with torch.no_grad():
        next(iter(model.graph.parameters())).add_(0.5)
    model.save_pretrained(tmp_path / "other")
    first, second, third = (
        fingerprint_of(plan_job(where, ROWS[:16], None, make_options({})))
        for where in (base, moved, tmp_path / "other")
    )
    assert first == second
    assert first["model"] != third["model"]


def test_a_lost_best_is_told_at_the_end(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flodl_hf.training.run.available_memory", lambda: 1)  # so it is only in a checkpoint
    figures: list[float] = []
    out = tmp_path / "out"

    def lose(event: Any) -> None:
        if type(event).__name__ == "EvalDone":
            figures.append(event.metrics["eval_loss"])
        if type(event).__name__ == "RunDone":
            for path in list_checkpoints(f"{out}.checkpoints"):
                if json.loads((path / "manifest.json").read_bytes())["metrics"].get("eval_loss") == min(figures):
                    (path / "manifest.json").write_bytes(bytes(300))

    options: dict[str, Any] = {**BASIC, "lr": 0.2, "schedule": "constant", "epochs": 3}
    with pytest.warns(RuntimeWarning, match="the best evaluation was that of step"):
        result = finetune(base, train=ROWS[:40], eval=ROWS[40:], out=out, on_event=lose, metric="eval_loss", **options)
    assert result.metrics["eval_loss"] in figures
    assert result.metrics["eval_loss"] != min(figures)
