"""Figures of a run kept elsewhere: in files, and by the real packages, offline; runs that go on, in place."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_tools import builder, judge, tensors

from flodl.data import TensorRows
from flodl.errors import TrainError
from flodl.train import StepDone, Tracker, Trainer, adamw
from flodl.train.trackers import TRACKERS, WandbTracker, figures_of, make_tracker

torch.set_num_threads(1)
RULES = ("freeze 0 when after_epochs(1)", "stop when no_better(loss, 50)")
Figures = dict[tuple[int, str], float]


def run(tmp_path: Path, *trackers: Any, **settings: Any) -> Any:
    made = builder(**{"num_epochs": 3, "watch": ("2",), "rules": RULES, "progress": False, **settings})
    made.evaluate(judge, TensorRows(tensors())).checkpoints(str(tmp_path / "run"), every=2)
    return made.set(trackers=trackers, tracker_folder=str(tmp_path / "kept"))


def wanted(tmp_path: Path) -> Figures:
    """Return the figures that a tracker has to have of the whole run, as one of our own is told them."""
    kept: Figures = {}

    class Keeps(Tracker):
        def write(self, step: int, figures: Any) -> None:
            kept.update({(step, name): value for name, value in figures.items()})

    run(tmp_path / "whole", Keeps()).run()
    assert {step for step, name in kept if name == "train/loss"} == set(range(1, 16))
    assert {name.partition("/")[0] for _, name in kept} == {"train", "watched", "epoch", "eval"}
    assert {(5, "eval/accuracy"), (10, "epoch/loss"), (15, "watched/2")} <= kept.keys()
    return kept


def same(found: Figures, expected: Figures, accuracy: float = 1e-6) -> None:
    measured = ("epoch/seconds", "epoch/samples_per_s")  # by a clock
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key[1] not in measured:
            assert found[key] == pytest.approx(value, rel=accuracy, nan_ok=True)


# ---- readers, one for each -------------------------------------------------------------------------------


def read_csv(folder: Path) -> Figures:
    with open(folder / "figures.csv", newline="", encoding="utf-8") as file:
        rows = [(int(row["step"]), row["figure"], float(row["value"])) for row in csv.DictReader(file)]
    assert len({row[:2] for row in rows}) == len(rows)
    return {row[:2]: row[2] for row in rows}


def read_jsonl(folder: Path) -> Figures:
    from flodl.train import events
    from flodl.train.trackers import figures_of

    kept: Figures = {}
    for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        kind = getattr(events, told.pop("event"))
        if kind in (events.StepDone, events.Observed, events.EpochMetrics, events.EvalDone):
            found = {(told["step"], name): value for name, value in figures_of(kind(**told)).items()}
            assert not found.keys() & kept.keys()
            kept |= found
    return kept


def read_tensorboard(folder: Path) -> Figures:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    rows = [(s.step, name, s.value) for name in read.Tags()["scalars"] for s in read.Scalars(name)]
    assert len({row[:2] for row in rows}) == len(rows)  # what was done again is shown once
    return {row[:2]: row[2] for row in rows}


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run: a header of 7 bytes, then a log of LevelDB's form."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def read_wandb(folder: Path) -> Figures:
    kept: Figures = {}
    names = set()
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                names.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                kept |= {
                    (row["step"], name): float(value)
                    for name, value in row.items()
                    if "/" in name and not name.startswith("_")
                }
    assert names == {json.loads((folder / "trackers.json").read_text())["wandb"]}
    return kept


def read_mlflow(folder: Path) -> Figures:
    import mlflow

    client = mlflow.MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert [one.info.run_id for one in found] == [json.loads((folder / "trackers.json").read_text())["mlflow"]]
    data = found[0].data
    assert data.params["num_epochs"] == "3"
    kept: Figures = {}
    for name in data.metrics:
        for one in sorted(client.get_metric_history(found[0].info.run_id, name), key=lambda m: m.timestamp):
            kept[one.step, name] = one.value
    return kept


READ = {
    "csv": read_csv,
    "jsonl": read_jsonl,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have the packages write to folders, and nobody called."""
    (tmp_path / "kept").mkdir()
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_X_DISABLE_STATS": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)


def present(name: str) -> None:
    package = TRACKERS[name].package  # type: ignore[attr-defined]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def end_of_process() -> None:
    """Have Weights & Biases do what it does then: a run that is finished is still being written, by a process of theirs."""
    import wandb

    wandb.teardown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the packages
@pytest.mark.parametrize("name", READ)
def test_every_figure_is_kept_and_a_run_that_goes_on_is_gone_on_with_in_place(
    name: str, tmp_path: Path, offline: None
) -> None:
    present(name)
    expected = wanted(tmp_path)
    run(tmp_path, name, max_steps=4).run()  # saved after step 4
    if name == "wandb":
        end_of_process()
        time.sleep(1.1)  # folders of theirs are named by the second
    run(tmp_path, name).run()
    if name == "wandb":
        end_of_process()
    found = READ[name](tmp_path / "kept")
    assert found.pop((4, "eval/accuracy")) >= 0  # the first part judged its last model
    same(found, expected)


class Broken(Exception):
    pass


@pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard"])
def test_steps_that_were_done_again_after_a_crash_are_there_once(name: str, tmp_path: Path, offline: None) -> None:
    present(name)
    expected = wanted(tmp_path)

    def breaking(model: Any, batch: Any) -> Any:
        breaking.calls += 1  # type: ignore[attr-defined]
        if breaking.calls == 8:  # type: ignore[attr-defined]
            raise Broken
        return builder()._plan.train_step(model, batch)

    breaking.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(Broken):
        run(tmp_path, name, train_step=breaking, log_every=1).run()  # step 7 was told, step 6 is saved
    if name == "csv":
        with open(tmp_path / "kept" / "figures.csv", "a") as file:
            file.write("7,train/lo")  # a line that was cut off
    run(tmp_path, name).run()
    same(READ[name](tmp_path / "kept"), expected)


def test_another_run_begins_its_files_anew(tmp_path: Path) -> None:
    run(tmp_path / "a", "csv", "jsonl", num_epochs=3, rules=()).set(tracker_folder=str(tmp_path)).run()
    run(tmp_path / "b", "csv", "jsonl", num_epochs=1, rules=()).set(tracker_folder=str(tmp_path)).run()
    assert {step for step, _ in read_csv(tmp_path)} == set(range(1, 6))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines].count("RunStarted") == 1
    assert lines[0]["config"]["num_epochs"] == 1
    assert lines[-1]["event"] == "RunDone"


def test_numbers_that_are_not_finite_are_json_too(tmp_path: Path) -> None:
    tracker = make_tracker("jsonl", tmp_path)
    run(tmp_path, tracker, on_nan="skip", rules=()).eval_fn(lambda model: {"score": math.nan, "far": math.inf}).run()
    tracker.end()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    evaluated = next(line for line in found if line["event"] == "EvalDone")
    assert evaluated["metrics"]["score"] is None
    assert evaluated["metrics"]["far"] is None


def test_ranks_are_told_of_by_the_first_and_every_step_of_it(tmp_path: Path) -> None:
    made = run(tmp_path, "csv", rules=()).devices(2, start="fork").policy("sync")
    made.run()
    assert {step for step, name in read_csv(tmp_path / "kept") if name == "train/loss"} == set(range(1, 16))


def test_a_loop_of_ones_own_has_trackers_too(tmp_path: Path) -> None:
    model = builder()._plan.model_factory("cpu")
    settings: dict[str, Any] = {
        "trackers": ["csv"],
        "tracker_folder": str(tmp_path),
        "progress": False,
        "batch_size": 12,
    }
    trainer = Trainer.setup(model, optimizer=adamw(1e-2), **settings)
    for _ in trainer.epochs(1):
        for batch in trainer.batches(TensorRows(tensors())):
            trainer.backward(builder()._plan.train_step(model, batch))
            trainer.step()
    assert {step for step, _ in read_csv(tmp_path)} == set(range(1, 6))


def test_a_tracker_that_fails_is_told_of_once_and_training_goes_on(tmp_path: Path) -> None:
    class Fails(Tracker):
        def write(self, step: int, figures: Any) -> None:
            raise OSError("disk full")

    seen: list[int] = []
    made = run(tmp_path, Fails()).subscribe(lambda event: seen.append(event.step), StepDone)
    with pytest.warns(RuntimeWarning, match="disk full"):
        made.run()
    assert seen == list(range(1, 16))


class Calls:
    """Stands for a package: notes what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))

        return call


def test_a_run_of_theirs_that_is_open_is_used_and_left_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = Calls()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=theirs))  # type: ignore[arg-type]
    run(tmp_path, make_tracker("wandb", tmp_path), max_steps=1, rules=()).run()
    assert {call for call, _, _ in theirs.calls} == {"log"}


@pytest.mark.parametrize("name", sorted(name for name in TRACKERS if TRACKERS[name].package))  # type: ignore[attr-defined]
def test_a_package_that_is_not_installed_is_named_before_training(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrainError, match=f"pip install {name}"):
        run(tmp_path, name).run()
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="expected one of csv, jsonl, mlflow, tensorboard, wandb"):
        run(tmp_path, "comet").run()
    assert Tracker(tmp_path)(None) is None


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_wandb_writes_where_its_variable_says(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def init(**options: Any) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(id="1", define_metric=lambda *args, **more: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None, init=init))
    if folder is None:
        monkeypatch.delenv("WANDB_DIR", raising=False)
    else:
        monkeypatch.setenv("WANDB_DIR", folder)
    tracker = WandbTracker(tmp_path)
    tracker.begin(SimpleNamespace(resumed_from=None, step=0))  # pyright: ignore[reportArgumentType]
    assert given["dir"] == (folder or str(tmp_path))


def test_figures_of_an_event() -> None:
    assert figures_of(SimpleNamespace()) == {}
