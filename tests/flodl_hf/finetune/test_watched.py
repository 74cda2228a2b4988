"""Fine-tuning on the monitor's page: facts, tokens, records beside the result; folders of runs."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled

from flodl.errors import ConfigError, TrainError
from flodl.monitor import Monitor, read_record
from flodl.monitor.folder import RunFolder
from flodl.monitor.recorder import Throughput
from flodl_hf.training import finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.observation import StepTokens, _parameters, flops_of_encoder, peak_of
from flodl_hf.training.options import make_options

torch.set_num_threads(1)
QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 8, "devices": "cpu", "progress": False}


def test_a_fine_tune_is_told_with_its_recipe_data_and_model(base: Path, tmp_path: Path) -> None:
    rows = labelled(40)
    with Monitor(quiet=True, resources_s=0) as monitor:
        result = finetune(base, train=rows[:32], eval=rows[32:], out=tmp_path / "out", monitor=monitor, **QUICK)
    record = read_record(tmp_path / "out.logs")
    assert record.name == "out"
    assert record.state["status"] == "finished"
    assert record.log
    assert not [line for line in record.log if "Predictions" in str(line)]
    assert [point[3] for point in record.series["train/loss"].points] == pytest.approx(result.losses, rel=1e-5)
    facts = record.facts
    assert facts["recipe"]["batch_size"] == 8
    assert facts["data"]["rows"] == 32
    assert facts["data"]["evaluation"] == 8
    assert sum(facts["data"]["labels"].values()) == 32
    assert facts["model"]["layers"] == 2
    assert facts["model"]["parameters"] == sum(p.numel() for p in result.model.parameters())
    assert record.model["parameters"] == facts["model"]["parameters"]
    assert record.heat["time"]["of"]
    page = (tmp_path / "out.logs" / "run.html").read_text()
    island = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert island["runs"][0]["state"]["status"] == "finished"
    assert str(tmp_path) not in (tmp_path / "out" / "recipe.yaml").read_text()


@pytest.mark.parametrize("task", TABLES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_tokens_of_steps_are_those_of_their_rows(base: Path, task: str, accumulate: int) -> None:
    options = make_options({"epochs": 2, "batch_size": 4, "accumulate": accumulate})
    job = plan_job(base, TABLES[task](30), None, options)
    tokens = StepTokens(job)
    expected = []
    for epoch in range(2):
        batches = [float(job.rows.lengths[part].sum()) for part in job.batches.plan(epoch)]
        expected += [sum(batches[i : i + accumulate]) for i in range(0, len(batches), accumulate)]
    assert [tokens(step) for step in range(1, job.steps + 1)] == expected
    assert (tokens(0), tokens(job.steps + 1)) == (None, None)
    assert [tokens(job.steps), tokens(1)] == [expected[-1], expected[0]]


def test_speeds_are_counted_in_tokens_and_of_the_peak(base: Path) -> None:
    job = plan_job(base, labelled(20), None, make_options({}))
    learned, frozen = _parameters(job.model)
    looked_up = sum(m.weight.numel() for m in job.model.modules() if isinstance(m, torch.nn.Embedding))
    assert learned + looked_up == sum(p.numel() for p in job.model.parameters())
    assert frozen == 0
    asked = flops_of_encoder(10, 5.0, learned=7, frozen=3, layers=2, hidden_size=4)
    assert asked == 10 * (6 * 7 + 2 * 3 + 12 * 5 * 4 * 2)
    assert peak_of("cuda:0 (NVIDIA H200)", "bf16") == 989.4e12
    assert peak_of("NVIDIA H100 PCIe", "fp32") is None
    assert peak_of("cpu (2 threads)", "fp32") is None
    with Monitor(quiet=True, resources_s=0) as monitor:
        recorder = monitor._run().recorder
        recorder.throughput = Throughput(tokens=lambda step: 100.0, flops=lambda n: n * 6e6, peak=1e12)
        recorder.throughput.begin(0, 100, 0.0)
        for step in range(1, 42):
            recorder.throughput.step_done(step * 0.1, step, 8)
        speeds = recorder.throughput.rates(4.1)
    assert speeds["speed/tokens_s"] == pytest.approx(1000)
    assert speeds["speed/rows_s"] == pytest.approx(80)
    assert speeds["speed/peak_share"] == pytest.approx(1000 * 6e6 / 1e12)


def test_the_time_left_follows_the_speed_of_late() -> None:
    pace = Throughput()
    pace.begin(0, 1000, 0.0)
    assert pace.seconds_left(0.0) is None
    t = 0.0
    for step in range(1, 401):
        t += 1.0
        pace.step_done(t, step, 1)
        pace.rates(t)
    assert pace.seconds_left(t) == pytest.approx(600, rel=0.02)
    for step in range(401, 501):  # twice as fast from here on
        t += 0.5
        pace.step_done(t, step, 1)
        pace.rates(t)
    plain = t / 500 * 500
    assert pace.seconds_left(t) < 0.8 * plain
    assert pace.seconds_left(t + 300) > pace.seconds_left(t)  # nothing moves
    pace.end(500)
    assert pace.seconds_left(t) is None


@pytest.mark.parametrize("wrong", ["yes", 70_000, -1])
def test_other_monitors_are_refused(base: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="monitor"):
        finetune(base, train=labelled(8), monitor=wrong, **QUICK)


def test_every_rank_of_a_job_has_a_lane(base: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "flodl" / "distributed"))
    from test_runs_in_one_job import job

    def run(rank: int) -> bool:
        torch.set_num_threads(1)
        with Monitor(quiet=True, resources_s=0) as monitor:
            finetune(base, train=labelled(40), out=tmp_path / "out", monitor=monitor, **QUICK)
        return True

    assert job(run) == [True, True]
    record = read_record(tmp_path / "out.logs")
    assert set(record.lanes.ranks) == {"0", "1"}
    assert all(sum(bin_[0] for bin_ in lane["bins"]) > 0 for lane in record.lanes.ranks.values())
    assert record.state["status"] == "finished"


# ---- a folder of runs --------------------------------------------------------------------------------------


def finished(folder: Path, name: str, losses: list[float]) -> None:
    with Monitor(len(losses), quiet=True, resources_s=0, folder=folder, name=name) as monitor:
        for epoch, loss in enumerate(losses):
            monitor.log(epoch, 1.0, {"loss": loss})
        monitor.finish()


def test_runs_of_a_folder_stand_side_by_side_and_grow(tmp_path: Path) -> None:
    finished(tmp_path / "a", "first", [1.0, 0.5])
    finished(tmp_path / "deep" / "b", "second", [0.9])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.jsonl").write_text("no record\n")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with RunFolder(tmp_path, every_s=0.02) as runs:
        url = runs.serve(0)
        with urllib.request.urlopen(url + "api/runs", timeout=120) as answer:
            said = json.loads(answer.read())
        assert said["kind"] == "folder"
        assert sorted(run["name"] for run in said["runs"]) == ["first", "second"]
        assert list(runs.problems) == [str(tmp_path / "c" / "run.jsonl")]
        with (tmp_path / "a" / "run.jsonl").open("a") as file:
            file.write('{"p": {"train/loss": [[3, 3.0, 9.0, 0.25]]}}\n')
        [first] = [record for record in runs.store.records.values() if record.name == "first"]
        runs.refresh()
        assert first.series["train/loss"].latest == 0.25
    with pytest.raises(TrainError):
        RunFolder(tmp_path / "nothing")


def test_a_run_that_does_not_say_how_it_ended_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {
            "flodl_run": 1,
            "id": "x",
            "name": "gone",
            "began": time.time() - 500,
            "t": 1.0,
            "state": {"status": "running"},
        }
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    with RunFolder(tmp_path) as runs:
        [record] = runs.store.records.values()
        assert record.state["status"] == "silent"
        with (tmp_path / "run.jsonl").open("a") as file:
            file.write('{"t": 500, "p": {"train/loss": [[1, 0, 500, 1]]}}\n')
        runs.refresh()
        assert record.state["status"] == "running"


# ---- the command line --------------------------------------------------------------------------------------


def cli(*args: Any, code: int = 0) -> Any:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("port", [None, "0"])
def test_the_command_shows_the_run(base: Path, tmp_path: Path, port: str | None) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("\n".join(json.dumps(row) for row in labelled(16)))
    shown = ["--dashboard"] + ([port] if port else [])
    said = cli(
        "finetune", base, *shown, "--dashboard-control", "--train", train, "--out", tmp_path / "out", "--epochs", "1",
        "--batch-size", "16", "--device", "cpu",
    )  # fmt: skip
    assert "watch this run at http://127.0.0.1:" in said.stderr
    assert "#token=" in said.stderr
    assert read_record(tmp_path / "out.logs").state["status"] == "finished"
    listed = cli("runs", "list", tmp_path, "--json").stdout
    [row] = json.loads(listed)
    assert (row["name"], row["status"], row["step"]) == ("out", "finished", 1)
    assert "out" in cli("runs", "list", tmp_path).stdout
    assert [row["step"] for row in json.loads(cli("runs", "list", tmp_path / "out", "--json").stdout)] == [1]
    cli("runs", "save", tmp_path, "--out", tmp_path / "all.html")
    assert '"kind":"folder"' in (tmp_path / "all.html").read_text()


def test_control_needs_a_page(base: Path, tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("\n".join(json.dumps(row) for row in labelled(16)))
    assert "--dashboard" in cli("finetune", base, "--dashboard-control", "--train", train, code=1).stderr


def test_runs_serve_serves_until_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "a", "first", [1.0])
    seen: list[bytes] = []

    def look(runs: RunFolder, until: Any = None) -> None:
        assert runs._server is not None
        with urllib.request.urlopen(runs._server.url + "api/runs", timeout=120) as answer:
            seen.append(answer.read())

    monkeypatch.setattr(RunFolder, "wait", look)
    assert "http://127.0.0.1:" in cli("runs", "serve", tmp_path, "--port", "0").stdout
    assert b'"first"' in seen[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "flodl-runs"]
