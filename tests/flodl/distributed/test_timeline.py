"""Timelines: samples beside spans, what they come to, and the page."""

import csv
import json
import threading
import time
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from flodl.distributed.timeline import Timeline
from flodl.train import Trainer, sgd

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
    timeline = made()
    summary = timeline.summary()
    assert (summary["total_ms"], summary["spans"], summary["samples"], summary["syncs"]) == (10000.0, 16, 20, 1)
    assert summary["mean_sync_ms"] == 100.0
    assert summary["means"]["system/cpu"] == pytest.approx(59.5)
    assert summary["most"]["system/cpu"] == 69.0
    assert summary["idle"] == {"gpu0/util": 0.25}
    assert timeline.device_gaps("gpu0/util") == [{"begin_ms": 4000.0, "length_ms": 2000.0}]
    assert timeline.device_gaps("gpu0/util", min_ms=2001) == []
    assert timeline.device_gaps("gpu1/util") == []
    assert [(gap["rank"], gap["length_ms"]) for gap in timeline.gaps()] == [(1, 2000.0), (1, 900.0)]


def test_an_idle_time_that_lasts_to_the_end_is_one_too():
    timeline = Timeline()
    timeline.samples = [{"rank": 0, "at_ms": 300.0 * i, "gpu0/util": 90.0 if i < 2 else 0.0} for i in range(6)]
    assert timeline.device_gaps("gpu0/util") == [{"begin_ms": 600.0, "length_ms": 900.0}]


class Reads(HTMLParser):
    """Notes elements, texts of titles, and whatever would ask for something from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.titles, self.outside = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.outside += [value for name, value in attrs if name in ("src", "href", "style") or name.startswith("on")]
        if tag not in ("meta", "rect", "line", "polyline", "li"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("rect", "polyline"):
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def test_the_page_shows_lanes_curves_and_tables_and_asks_for_nothing(tmp_path):
    paths = made().write(tmp_path / "runs" / "timeline")
    assert [path.name for path in paths] == ["timeline.json", "timeline.csv", "timeline.samples.csv", "timeline.html"]
    page = paths[3].read_text()
    reads = Reads()
    reads.feed(page)
    assert reads.open == []
    assert reads.outside == []
    assert "script" not in {tag for tag, _ in reads.elements}
    policy = next(attrs["content"] for tag, attrs in reads.elements if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    kinds = [attrs["class"] for tag, attrs in reads.elements if tag == "rect" and attrs.get("y")]
    assert kinds.count("step") == 12
    assert kinds.count("sync") == 2
    assert sum(tag == "polyline" for tag, _ in reads.elements) == 3
    assert "sync, step 10: 9.90 s to 10.00 s, 40 ms of it waiting" in reads.titles
    for text in ("10.00 s, 2 ranks, 1 meeting<", "rank 1", "gpu0/util", "1.00 GiB", "25 % of samples", "unexplained"):
        assert text in page
    with open(paths[2], newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    assert rows[0].keys() == {"at_ms", "rank", "gpu0/memory", "gpu0/util", "system/cpu"}
    assert json.loads(paths[0].read_text())["summary"]["syncs"] == 1


def test_many_short_steps_are_drawn_together_and_names_are_text(tmp_path):
    timeline = Timeline.merge(
        [
            {
                "rank": 0,
                "spans": [span(0, "step", 2.0 * i, 2.0 * i + 1.9, step=i) for i in range(50_000)],
                "samples": [{"rank": 0, "at_ms": 10.0 * i, "<script>alert(1)</script>": 1.0} for i in range(9000)],
            }
        ]
    )
    page = timeline.write(tmp_path / "t")[3].read_text()
    assert page.count('class="step"') < 3000
    assert len(page) < 500_000
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_timeline_of_nothing_is_a_page_too(tmp_path):
    page = Timeline.merge([{"rank": 0, "spans": []}]).write(tmp_path / "t")[3].read_text()
    assert "0 ranks" in page


def test_samples_are_taken_until_it_is_stopped_and_what_cannot_be_read_ends_them():
    taken = threading.Semaphore(0)
    timeline = Timeline(3, read=lambda: taken.release() or {"system/cpu": 7}, every_s=0.01)
    timeline.start()
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
    made.run().join()
    body = json.loads((tmp_path / "t.json").read_text())
    assert {one["rank"] for one in body["samples"]} == {0}
    assert {one["rank"] for one in body["spans"]} == set(range(ranks))
    assert all(len(sample) > 2 for sample in body["samples"])  # something of this machine can be read
    assert (tmp_path / "t.html").stat().st_size > 3000


def test_a_run_that_fails_takes_no_more_samples(tmp_path):
    made = run(timeline=str(tmp_path / "t")).epoch_fn(lambda epoch, trainer: 1 / 0 if epoch else None)
    with pytest.raises(ZeroDivisionError):
        made.run()
    assert not [thread for thread in threading.enumerate() if thread.name == "flodl-timeline"]
