"""Timelines: spans, samples, and their files."""

import json
import re
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from flodl.monitor import Timeline
from flodl.train import Callback, Trainer, sgd

torch.set_num_threads(1)


def span(rank, kind, begin, end, step=1, epoch=0, **more):
    return {"rank": rank, "kind": kind, "begin_ms": begin, "end_ms": end, "step": step, "epoch": epoch, **more}


def made():
    """Two ranks, 10 s: a meeting, a gap of 2 s on rank 1, and a GPU that idles from 4 to 6 s."""
    spans = [span(0, "step", 1000.0 * i, 1000.0 * i + 900, step=i + 1) for i in range(10)]
    spans += [span(1, "step", 0, 3000), span(1, "step", 5000, 9000, step=2)]
    spans += [span(r, "sync", 9900, 10000, step=10, wait_ms=40.0, divergence=0.1) for r in (0, 1)]
    spans += [span(0, "save", 3000, 3500), span(0, "decision", 4000, 4000)]
    samples = [
        {"at_ms": 500.0 * i, "system/cpu": 50.0 + i, "gpu0/util": 2.0 if 8 <= i <= 12 else 80.0, "gpu0/memory": 2.0**30}
        for i in range(20)
    ]
    parts = [
        {
            "rank": r,
            "spans": [s for s in spans if s["rank"] == r],
            "samples": [{"rank": 0, **s} for s in samples] * (r == 0),
        }
        for r in (0, 1)
    ]
    shifted = json.loads(json.dumps(parts))
    for part in shifted:  # the clock of a host begins anywhere
        for one in part["spans"]:
            one["begin_ms"] += 5e6
            one["end_ms"] += 5e6
        for one in part["samples"]:
            one["at_ms"] += 5e6
    return Timeline.merge(shifted)


def test_what_it_comes_to():
    idle = pytest.importorskip("benchmarks.ddp.idle")
    timeline = made()
    summary = idle.summary(timeline)
    assert (summary["total_ms"], summary["spans"], summary["samples"], summary["syncs"]) == (10000.0, 16, 20, 1)
    assert summary["mean_sync_ms"] == 100.0
    assert summary["means"]["system/cpu"] == pytest.approx(59.5)
    assert [(gap["rank"], gap["length_ms"]) for gap in idle.gaps(timeline)] == [(1, 2000.0), (1, 900.0)]


def test_idle_time_is_reported_by_cause():
    idle = pytest.importorskip("benchmarks.ddp.idle")
    shares = idle.idle_shares(made())
    assert shares[1]["unexplained"] == pytest.approx(0.2)
    assert shares[1]["sync"] == pytest.approx(0.094)
    assert shares[0]["unexplained"] + shares[0]["save"] == pytest.approx(0.09)
    assert idle.summary(made())["idle_shares"] == shares


def test_the_files_contain_spans_samples_and_a_page(tmp_path):
    paths = made().write(tmp_path / "runs" / "timeline")
    assert [path.name for path in paths] == ["timeline.json", "timeline.csv", "timeline.html"]
    body = json.loads(paths[0].read_text())
    assert set(body) == {"spans", "samples"}
    assert paths[1].read_text().splitlines()[0] == "rank,kind,begin_ms,end_ms,step,epoch,wait_ms,divergence"
    assert len(body["samples"]) == 20
    assert body["samples"][0].keys() == {"at_ms", "rank", "gpu0/memory", "gpu0/util", "system/cpu"}
    page = paths[2].read_text()
    [run] = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["runs"]
    lanes = run["lanes"]["ranks"]
    sums = {rank: [sum(column) for column in zip(*lanes[rank]["bins"], strict=True)] for rank in lanes}
    assert sums["0"] == pytest.approx([9.0, 0.06, 0.04, 0.0], abs=0.02)
    assert sums["1"] == pytest.approx([7.0, 0.06, 0.04, 0.0], abs=0.02)
    assert run["lanes"]["meetings"] == [10.0]
    assert [line[3] for line in run["log"]] == ["save", "decision"]
    assert len(run["p"]["gpu0/util"]) == 20


def test_a_page_of_many_spans_stays_small_and_names_stay_text(tmp_path):
    timeline = Timeline.merge(
        [
            {
                "rank": 0,
                "spans": [span(0, "step", 2.0 * i, 2.0 * i + 1.9, step=i) for i in range(4_000)],
                "samples": [{"rank": 0, "at_ms": 10.0 * i, "<script>alert(1)</script>": 1.0} for i in range(3000)],
            }
        ]
    )
    page = timeline.write(tmp_path / "t")[2].read_text()
    assert len(page) < 500_000
    assert "<script>alert" not in page


def test_a_timeline_of_nothing_is_a_page_too(tmp_path):
    assert Timeline.merge([{"rank": 0, "spans": []}]).write(tmp_path / "t")[2].stat().st_size > 3000


def test_own_events_are_recorded_and_reported_at_once():
    timeline, seen = Timeline(2), []
    end = timeline.subscribe(seen.append)
    timeline.add("download", 1.0, 3.5, files=4)
    timeline.add("mark", 4.0)
    end()
    timeline.add("mark", 5.0)
    assert [(s["kind"], s["begin_ms"], s["end_ms"]) for s in seen] == [
        ("download", 1000.0, 3500.0),
        ("mark", 4000.0, 4000.0),
    ]
    assert seen[0]["files"] == 4
    assert len(timeline.spans) == 3


class Marks(Callback):
    def on_epoch_begin(self, trainer, epoch):
        if trainer.timeline is not None:
            trainer.timeline.add("mark", time.monotonic(), epoch=epoch)


def test_callbacks_of_a_run_add_their_own_events(tmp_path):
    run(timeline=str(tmp_path / "t"), callbacks=[Marks()]).run()
    spans = json.loads((tmp_path / "t.json").read_text())["spans"]
    assert [one["epoch"] for one in spans if one["kind"] == "mark"] == [0, 1, 2]


def test_samples_are_taken_until_it_is_stopped_and_what_cannot_be_read_ends_them():
    taken = threading.Semaphore(0)
    timeline = Timeline(3, read=lambda: taken.release() or {"system/cpu": 7}, every_s=0.01)
    timeline.start()
    assert all(taken.acquire(timeout=60) for _ in range(3))  # two of which stand among the samples by then
    timeline.stop()
    timeline.stop()
    count = len(timeline.samples)
    assert count >= 2
    time.sleep(0.05)
    assert len(timeline.samples) == count
    assert timeline.samples[0].keys() == {"rank", "at_ms", "system/cpu"}
    assert timeline.samples[0]["rank"] == 3
    broken = Timeline(read=lambda: 1 / 0)
    broken.start()
    broken.stop()
    assert broken.samples == []


def run(**settings):
    torch.manual_seed(0)
    data = {"x": torch.randn(24, 3), "y": torch.randn(24, 1)}

    def step(model, batch):
        time.sleep(0.02)
        return mse_loss(model(batch["x"]), batch["y"])

    made = Trainer.builder(nn.Linear(3, 1), sgd(0.1), step).dataset(data).batch_size(4).num_epochs(3)
    return made.set(progress=False, **settings)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_has_samples_of_the_first_rank(ranks, tmp_path):
    made = run(timeline=str(tmp_path / "t"))
    if ranks > 1:
        made.devices(ranks, start="fork").policy("sync")
    made.run()
    body = json.loads((tmp_path / "t.json").read_text())
    assert {one["rank"] for one in body["samples"]} == {0}
    assert {one["rank"] for one in body["spans"]} == set(range(ranks))
    syncs = [one for one in body["spans"] if one["kind"] == "sync" and one["rank"] == 0]
    assert len(syncs) == (18 if ranks > 1 else 0)  # one for each step under Sync
    assert any(one["end_ms"] > one["begin_ms"] for one in syncs) == (ranks > 1)
    assert all(len(sample) > 2 for sample in body["samples"])  # something of this machine can be read
    assert (tmp_path / "t.html").stat().st_size > 3000


def test_a_run_that_fails_takes_no_more_samples(tmp_path):
    made = run(timeline=str(tmp_path / "t")).epoch_fn(lambda epoch, trainer: 1 / 0 if epoch else None)
    with pytest.raises(ZeroDivisionError):
        made.run()
    assert not [thread for thread in threading.enumerate() if thread.name == "flodl-timeline"]
