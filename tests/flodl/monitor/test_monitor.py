"""The monitor prints an epoch as it should read, keeps it, and writes it by name."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
import torch
from torch import nn

from flodl.errors import TrainError
from flodl.graph import FlowBuilder
from flodl.monitor import Monitor, look_at
from flodl.monitor.export import console_line, duration_text
from flodl.train import EpochMetrics


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.4209, "420ms"),
        (1.0, "1s"),
        (1.29, "1.2s"),
        (12.5, "12.5s"),
        (59.99, "59.9s"),
        (60, "1m 00s"),
        (272, "4m 32s"),
        (3600, "1h 00m"),
        (11520, "3h 12m"),
        (-1, "—"),
        (math.nan, "—"),
        (math.inf, "—"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_the_line_of_an_epoch():
    line = console_line(4, 100, {"loss": 0.12345, "lr": 0.0001, "acc": 0}, 1.23, 272, "RAM 0.3 GB, 40 %")
    assert line == "  epoch   5/100  loss=0.1235  lr=1.00e-4  acc=0  [1.2s  ETA 4m 32s]  RAM 0.3 GB, 40 %"
    assert console_line(9, 10, {}, 2, None) == "  epoch 10/10  [2s]"


def test_a_hostile_name_stays_on_its_line():
    line = console_line(0, 1, {"a\n\x1b[2Jb": 1.0}, 1.0, None)
    assert "\n" not in line
    assert "\x1b" not in line


def test_the_line_shows_memory_and_load(capsys):
    with Monitor(1) as monitor:
        monitor.log(0, 1, {"x": 1})
    line = capsys.readouterr().out
    assert re.fullmatch(r"  epoch 1/1  x=1\.0000  \[1s\]  (RAM|GPU) \d+\.\d GB, \d+ %\n", line)


def test_epoch_metrics_and_nested_mappings_are_logged():
    event = EpochMetrics(
        epoch=1, step=20, loss=0.5, metrics={"accuracy": 0.75}, samples=8, epoch_ms=2500.0, share=(1.0,),
        throughput=(1.0,), eval={"f1": 0.25}, by_rank=(),
    )  # fmt: skip
    with Monitor(3, quiet=True, resources_s=0) as monitor:
        monitor.log(event)
        monitor.log(2, 1.0, {"loss": torch.tensor(0.25), "dev": {"f1": 0.5}})
        first, second = monitor.history()
    assert first == {"epoch": 2, "duration_s": 2.5, "loss": 0.5, "accuracy": 0.75, "f1": 0.25}
    assert second == {"epoch": 3, "duration_s": 1.0, "loss": 0.25, "dev/f1": 0.5}


def test_recent_epochs_weigh_more():
    monitor = Monitor(10, quiet=True, resources_s=0)
    for epoch in range(5):
        monitor.log(epoch, 10, {})
    assert monitor.eta() == pytest.approx(50)
    monitor.log(5, 20, {})
    monitor.log(6, 20, {})
    plain_average = (5 * 10 + 2 * 20) / 7 * 3
    assert plain_average < monitor.eta() < 60
    monitor.log(9, 10, {})
    assert monitor.eta() is None


def test_metrics_come_as_table_pairs_or_graph():
    out = io.StringIO()
    monitor = Monitor(3, stream=out, resources_s=0)
    graph = FlowBuilder(nn.Linear(1, 1)).build()
    graph.record_scalar("loss", 2.0)
    monitor.log(0, 0.5, graph)
    graph.flush()
    monitor.log(1, 0.5, graph)
    monitor.log(2, 0.5, [("b", 1), ("a", 2)])
    timed = [{"epoch": epoch, "duration_s": 0.5} for epoch in (1, 2, 3)]
    assert monitor.history() == [timed[0], {**timed[1], "loss": 2.0}, {**timed[2], "b": 1.0, "a": 2.0}]
    monitor.finish()
    lines = out.getvalue().splitlines()
    assert lines[0] == "  epoch 1/3  [500ms  ETA 1s]"
    assert lines[2] == "  epoch 3/3  b=1.0000  a=2.0000  [500ms]"
    assert re.fullmatch(r"training complete in \d+ms  \| b: 1\.0000, a: 2\.0000", lines[3])


def test_standard_output_is_the_default_and_quiet_is_quiet(capsys):
    Monitor(1, resources_s=0).log(0, 1, {"x": 1})
    assert capsys.readouterr().out == "  epoch 1/1  x=1.0000  [1s]\n"
    monitor = Monitor(1, quiet=True)
    monitor.log(0, 1, {"x": 1})
    monitor.finish()
    assert capsys.readouterr().out == ""


def test_work_between_epochs_counts_for_the_pace(monkeypatch):
    import flodl.monitor.monitor as module

    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monitor = Monitor(3, quiet=True)
    now[0] = 1000.0
    monitor.log(0, 10, {})
    assert monitor.eta() == 20, "set-up before the first epoch is not its pace"
    now[0] += 15
    monitor.log(1, 10, {})
    assert 10 < monitor.eta() < 15


def test_the_csv_is_keyed_by_name(tmp_path):
    monitor = Monitor(3, quiet=True)
    monitor.export_csv(tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists()
    monitor.log(0, 1.5, {"loss": 1.0})
    monitor.log(1, 1.5, {"acc": 0.5, "loss": 0.25})
    monitor.log(2, 1.5, {"acc": math.nan})
    monitor.export_csv(tmp_path / "m.csv")
    assert (tmp_path / "m.csv").read_text() == (
        "epoch,duration_s,loss,acc\n1,1.500,1.00000000,\n2,1.500,0.25000000,0.50000000\n3,1.500,,\n"
    )


def test_the_page_is_written_at_the_end_and_holds_everything(tmp_path):
    monitor = Monitor(2, quiet=True)
    monitor.save_html(tmp_path / "run.html")
    monitor.log(0, 1, {"</script>": 1.0})
    assert not (tmp_path / "run.html").exists()
    monitor.log(1, 1, {"</script>": math.nan, "late": 3.0})
    monitor.finish()
    page = (tmp_path / "run.html").read_text()
    island = re.search(r'id="data">(.*?)</script>', page, re.S)
    [run] = json.loads(island.group(1))["runs"]
    curves = {name: [point[3] for point in points] for name, points in run["p"].items() if name.startswith("train/")}
    assert curves == {"train/</script>": [1.0, None], "train/late": [3.0]}
    assert [row["seconds"] for row in run["epochs"]] == [1, 1]
    assert run["state"]["status"] == "finished"


def test_a_loop_of_ones_own_shows_where_time_and_memory_go():
    graph = FlowBuilder(nn.Linear(4, 4), name="first").through(nn.Linear(4, 2), name="last").build()
    with look_at(graph) as look:
        graph(torch.randn(8, 4)).sum().backward()
    with Monitor(1, quiet=True) as monitor:
        monitor.watch(graph, look)
        monitor.finish()
        record = monitor.record
    assert [part["path"] for part in record.model["parts"]] == ["first", "last"]
    assert record.heat["memory"]["of"] == {"first": 8 * 4 * 4, "last": 8 * 4 * 4}
    assert list(record.heat) == ["time", "gradient", "memory"]
    assert all(set(heat["of"]) == {"first", "last"} for heat in record.heat.values())


@pytest.mark.parametrize(("epoch", "seconds"), [(-1, 1.0), (0, -1.0), (0, math.nan)])
def test_impossible_epochs_are_refused(epoch, seconds):
    with pytest.raises(TrainError):
        Monitor(1, quiet=True).log(epoch, seconds, {})
