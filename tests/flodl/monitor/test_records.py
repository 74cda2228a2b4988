"""Curves, lanes and records stay bounded, and one form of them serves the file, the page and the archive."""

from __future__ import annotations

import gc
import json
import math
import random

import pytest

from flodl.errors import CheckpointError, TrainError
from flodl.monitor.journal import Journal, JournalReader, read_record
from flodl.monitor.record import (
    FIRST_LINES,
    MAX_BINS,
    MAX_EPOCHS,
    MAX_LINES,
    MAX_MEETINGS,
    MAX_SERIES,
    Lanes,
    RunRecord,
)
from flodl.monitor.recorder import FIRST_POINTS, MAX_POINTS_A_DELTA, Recorder
from flodl.monitor.series import Series


def test_a_curve_of_any_length_keeps_its_mean_and_range():
    series, rng = Series(100), random.Random(0)
    values = [rng.random() for _ in range(5000)]
    for step, value in enumerate(values, 1):
        series.add([step, step / 100, step * 0.1, value])
    assert 50 <= len(series) <= 100
    assert sum(point[6] for point in series.points) == 5000
    mean = math.fsum(point[3] * point[6] for point in series.points) / 5000
    assert mean == pytest.approx(math.fsum(values) / 5000)
    assert min(point[4] for point in series.points) == min(values)
    assert max(point[5] for point in series.points) == max(values)
    assert series.points[-1][0] == 5000
    assert [point[0] for point in series.points] == sorted(point[0] for point in series.points)


def test_values_that_are_not_finite_leave_gaps_and_spoil_no_neighbour():
    series = Series(4)
    for step, value in enumerate([1.0, None, 3.0, None, None], 1):
        series.add([step, 0.0, 0.0, value])
    assert len(series) == 3
    assert [point[3] for point in series.points] == [1.0, 3.0, None]


def test_a_curve_goes_on_from_what_was_sent_as_if_it_had_all():
    whole, first = Series(50), Series(50)
    for step in range(1, 700):
        point = [step, 0.0, 0.0, math.sin(step)]
        whole.add(point)
        if step < 500:
            first.add(point)
    again = Series(50, stride=first.stride)
    for point in json.loads(json.dumps(first.packed(12))):
        again.add(point)
    for step in range(500, 700):
        again.add([step, 0.0, 0.0, math.sin(step)])
    assert [p[0] for p in again.points] == [p[0] for p in whole.points]
    assert [p[3] for p in again.points] == pytest.approx([p[3] for p in whole.points])


def test_steps_never_fall():
    series = Series()
    for step in (1, 5, 4, 6):
        series.add([step, 0.0, 0.0, float(step)])
    assert [point[0] for point in series.points] == [1, 5, 5, 6]


def filled() -> RunRecord:
    record = RunRecord()
    record.fold({"id": "a", "name": "first", "began": 100.0, "t": 0.0, "facts": {"recipe": {"lr": 0.1}}})
    for step in range(1, 5001):
        record.fold(
            {"t": step * 0.1, "p": {"train/loss": [[step, 0.0, step * 0.1, 1 / step]]}, "state": {"step": step}}
        )
    record.fold({"log": [[1.0, 1, "warning", "careful"]], "epochs": [{"epoch": 1, "step": 5000, "loss": 0.1}]})
    record.fold(
        {"lanes": {"0": {"spans": [["compute", 0.0, 3.0]], "share": 1.0}}, "heat": {"time": {"of": {"a": 1.0}}}}
    )
    return record


def test_a_snapshot_makes_the_same_record_from_nothing():
    record, again = filled(), RunRecord()
    again.fold(record.snapshot())
    assert again.snapshot() == record.snapshot()
    assert (again.id, again.name, again.state["step"], again.t) == ("a", "first", 5000, 500.0)
    for one in (record, again):
        one.fold({"p": {"train/loss": [[5001, 0.0, 500.1, 7.0]]}})
    assert again.series["train/loss"].packed() == record.series["train/loss"].packed()


def test_records_are_bounded_whatever_comes():
    record = RunRecord()
    for i in range(MAX_SERIES + 50):
        record.fold({"p": {f"train/{i}": [[1, 0.0, 0.0, 1.0]]}})
    for i in range(MAX_LINES * 2):
        record.fold({"log": [[0.0, i, "info", "x" * 10_000]]})
    record.fold({"epochs": [{"epoch": i} for i in range(MAX_EPOCHS + 5)]})
    assert (len(record.series), len(record.log), len(record.epochs)) == (MAX_SERIES, MAX_LINES, MAX_EPOCHS)
    assert [line[1] for line in record.log][:FIRST_LINES] == list(range(FIRST_LINES))
    assert record.log[-1][1] == MAX_LINES * 2 - 1
    assert record.lines_left_out == MAX_LINES
    assert max(len(line[3]) for line in record.log) == 4000


def test_a_long_run_with_many_curves_is_sent_in_little():
    """A hundred thousand epochs of twenty figures: what a page begins with stays below five megabytes."""
    record = RunRecord("long")
    series = [Series() for _ in range(20)]
    for step in range(100_000):
        for one in series[:1]:
            one.add([step, float(step), step * 1.0, math.sin(step) if step % 7 else None])
    record.series = {f"train/{i}": series[0] for i in range(20)}
    assert len(record.snapshot_text()) < 5_000_000


@pytest.mark.parametrize(
    "delta",
    [
        {"p": {"a": [["x", 0, 0, 1]]}},
        {"p": {"a": [[1, 0, 0, 1, 2]]}},
        {"p": {"a": [[1, 0, math.nan, 1.0]]}},
        {"p": {"a": 3}},
        {"p": [1]},
        {"log": [1, [2], [0, 0, 3, 4]]},
        {"epochs": "x", "state": 3, "facts": {"a": 1}, "lanes": 3, "heat": 4, "t": "x", "session": [1]},
        {"unknown": 1},
    ],
)
def test_deltas_that_are_none_are_passed_over(delta):
    record = RunRecord("a")
    record.fold(delta)
    assert not any(len(series) for series in record.series.values())
    json.loads(record.snapshot_text())


def test_the_first_steps_are_all_told_however_quickly_they_came():
    recorder, told = Recorder(0.0), []
    for burst in (100, 100, 100, 100):
        for _ in range(burst):
            recorder.points("", {"a": 0.5}, 1)
        told.append(len(recorder.delta()["p"]["a"]))
    assert told[:2] == [100, 100]
    assert (FIRST_POINTS - 200) // 2 <= told[2] <= FIRST_POINTS - 200
    assert told[3] <= MAX_POINTS_A_DELTA


def test_a_run_that_is_taken_up_again_forgets_what_it_does_anew():
    record = filled()
    record.fold({"session": {"step": 3000}})
    assert record.series["train/loss"].points[-1][0] <= 3000
    assert record.epochs == []


def test_lanes_are_bounded_and_keep_their_sums():
    lanes = Lanes()
    for i in range(3000):
        lanes.fold({"0": {"spans": [["compute", i * 2.0, i * 2.0 + 1.0]]}, "all": {"meetings": [i * 2.0]}})
    lane = lanes.ranks["0"]
    assert len(lane["bins"]) <= MAX_BINS
    assert sum(bin_[0] for bin_ in lane["bins"]) == pytest.approx(3000, rel=1e-3)
    assert len(lanes.meetings) <= MAX_MEETINGS
    again = Lanes()
    again.fold(json.loads(json.dumps(lanes.to_dict())))
    assert again.to_dict() == lanes.to_dict()


# ---- the file --------------------------------------------------------------------------------------------


def test_a_record_on_disk_survives_a_line_cut_off(tmp_path):
    journal = Journal(tmp_path)
    journal.add({"flodl_run": 1, "id": "a", "name": "first"})
    journal.add({"p": {"train/loss": [[1, 0, 0, 0.5]]}})
    journal.close()
    with open(journal.path, "ab") as file:
        file.write(b'{"p": {"train/lo')  # the process ended here
    again = Journal(tmp_path)
    assert again.record is not None
    again.add({"p": {"train/loss": [[2, 0, 0, 0.25]]}})
    again.close()
    record = read_record(tmp_path)
    assert [point[3] for point in record.series["train/loss"].points] == [0.5, 0.25]
    assert record.name == "first"


def test_a_record_that_is_dropped_is_closed(tmp_path):
    journal = Journal(tmp_path)
    journal.add({"flodl_run": 1, "id": "a"})
    journal.itself = journal  # freed by the garbage collector only
    del journal
    gc.collect()
    assert read_record(tmp_path).id == "a"


def test_a_record_is_read_as_it_grows(tmp_path):
    journal = Journal(tmp_path)
    reader = JournalReader(journal.path)
    assert list(reader.new_deltas()) == []
    journal.add({"flodl_run": 1, "id": "a"})
    journal.add({"t": 1})
    assert [delta.get("t") for delta in reader.new_deltas()] == [None, 1]
    journal.add({"t": 2})
    assert list(reader.new_deltas()) == [{"t": 2}]
    journal.close()
    journal.path.write_bytes(b'{"flodl_run":1}\n')  # written anew
    assert list(reader.new_deltas()) == [{"flodl_run": 1}]


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"a": 1}\n', b"[1]\n", b"[" * 100_000 + b"\n", b"\xff\xfe\n"])
def test_what_is_no_record_is_refused(tmp_path, content):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(TrainError) as fault:
        read_record(path)
    assert fault.value.path == str(path)


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        read_record(tmp_path)
