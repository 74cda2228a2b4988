"""Values are collected step by step, averaged epoch by epoch, and found along the tree."""

from __future__ import annotations

import copy
import csv
import json
import math
import re

import pytest
import torch
from torch import nn

from flodl.errors import GraphError, GraphPathError
from flodl.graph import FlowBuilder
from flodl.monitor.collect import Reduce
from flodl.monitor.export import metric_text
from flodl.monitor.observer import Observer


class Constant(nn.Module):
    """Gives back what it was told, whatever comes in."""

    def __init__(self, value) -> None:
        super().__init__()
        self.value = torch.as_tensor(value, dtype=torch.float32)

    def forward(self, x):
        return self.value.clone()


@pytest.fixture
def tree():
    child = FlowBuilder(nn.Linear(2, 2)).tag("mid").through(nn.Linear(2, 2)).tag("_secret").label("enc").build()
    return (
        FlowBuilder(nn.Linear(2, 2))
        .tag("first")
        .through(child)
        .split([nn.Linear(2, 1), nn.Linear(2, 1)])
        .tag_group("head")
        .merge("add")
        .tag("sum")
        .build()
    )


def scalar_graph(value):
    return FlowBuilder(Constant(value)).tag("out").build()


def test_a_flush_moves_the_mean_once():
    graph = scalar_graph(0.0)
    observer = graph.observe
    observer.record("loss", [1.0, 2.0])
    observer.record_scalar("loss", torch.tensor([[6.0]], requires_grad=True))
    observer.record_scalar("lr", 0.5)
    assert observer.collected("loss") == [1, 2, 6]
    observer.flush()
    observer.flush()
    assert observer.collected("loss") == []
    assert observer.trend("loss").values() == [3]
    assert observer.latest_metrics() == [("loss", 3), ("lr", 0.5)]


def test_a_recorded_tensor_may_be_overwritten_afterwards():
    observer = scalar_graph(0.0).observe
    value = torch.tensor(1.0)
    observer.record_scalar("a", value)
    value.fill_(9)
    assert observer.collected("a") == [1]


def test_named_flushes_leave_the_others_alone():
    observer = scalar_graph(0.0).observe
    observer.record("a", [1])
    observer.record("b", [2])
    observer.flush("a")
    assert (observer.trend("a").values(), observer.trend("b").values()) == ([1], [])
    assert observer.collected("b") == [2]
    observer.flush(["b"])
    assert observer.trend("b").by_epoch() == {0: 2}


def test_a_metric_absent_in_an_epoch_leaves_a_gap_there(tmp_path):
    observer = scalar_graph(0.0).observe
    for epoch in range(3):
        observer.record_scalar("always", epoch)
        if epoch == 1:
            observer.record_scalar("once", 7)
        if epoch == 2:
            observer.record_scalar("bad", math.nan)
        observer.flush()
    observer.export_trends(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == (
        "epoch,always,once,bad\n1,0.00000000,,\n2,1.00000000,7.00000000,\n3,2.00000000,,\n"
    )


def test_metrics_that_take_turns_keep_their_epochs():
    observer = scalar_graph(0.0).observe
    for name in "abab":
        observer.record_scalar(name, 1)
        observer.flush()
    assert list(observer.trend("a").by_epoch()) == [0, 2]
    assert list(observer.trend("b").by_epoch()) == [1, 3]


def test_collect_takes_scalars_and_advises_for_the_rest():
    graph = scalar_graph(2.5).watch("out")
    graph(torch.zeros(1))
    graph.observe.collect("out")
    assert graph.observe.collected("out") == [2.5]
    wide = scalar_graph([1.0, 2.0]).watch("out")
    wide(torch.zeros(1))
    with pytest.raises(GraphError, match="collect_with"):
        wide.observe.collect(["out"])


def test_collect_passes_over_what_was_not_computed_and_watches_it():
    graph = scalar_graph(1.0)
    graph(torch.zeros(1))
    graph.observe.collect("out")
    assert graph.observe.collected("out") == []
    graph(torch.zeros(1))
    graph.observe.collect("out")
    assert graph.observe.collected("out") == [1]


def test_unknown_tags_are_refused_with_the_nearest():
    with pytest.raises(GraphError, match="'out'"):
        scalar_graph(1.0).observe.collect("outt")


@pytest.mark.parametrize(
    ("how", "value"), [("mean", -0.5), ("sum", -1), ("max", 3), ("min", -4), ("norm", 5), (Reduce.NORM, 5)]
)
def test_reductions(how, value):
    graph = scalar_graph([3.0, -4.0]).watch("out")
    graph(torch.zeros(1))
    graph.observe.collect_with("out", reduce=how)
    graph.observe.collect_with(["out"], reduce=Reduce(how))
    assert graph.observe.collected("out") == [value, value]


def test_reductions_of_half_precision_and_integers_do_not_overflow():
    graph = scalar_graph(0.0)
    for value, expected in ((torch.full((2000,), 100.0, dtype=torch.float16), 200_000), (torch.arange(4), 6)):
        graph.watch("out")._captured["out"] = value
        graph.observe.collect_with("out", reduce=Reduce.SUM)
        assert graph.observe.collected("out")[-1] == expected


def test_reductions_that_cannot_be():
    graph = scalar_graph([]).watch("out")
    graph(torch.zeros(1))
    with pytest.raises(GraphError):
        graph.observe.collect_with("out", reduce=Reduce.MEAN)
    with pytest.raises(GraphError, match="'mean'"):
        graph.observe.collect_with("out", reduce="meen")


def test_groups_stand_for_their_members(tree):
    tree.watch("head")
    tree(torch.ones(1, 2))
    tree.observe.collect_with("head", reduce=Reduce.MEAN)
    tree.flush("head")
    assert [trend.name for trend in tree.trends("head")] == ["head_0", "head_1"]
    assert all(len(trend) == 1 for trend in tree.trends("head"))


def test_metrics_along_the_tree(tree):
    tree.observe.record_at("enc.accuracy", 0.25)
    tree.observe.record_at("loss", 2.0)
    tree.subgraph("enc").watch("mid")
    tree(torch.ones(1, 2))
    with pytest.raises(GraphError, match="collect_with"):
        tree.observe.collect_at("enc.mid")
    tree.flush()
    tree.subgraph("enc").flush()
    assert tree.latest_metrics() == [("loss", 2), ("enc.accuracy", 0.25)]
    assert tree.trend_at("enc.accuracy").values() == [0.25]
    assert tree.trend_at("loss").values() == [2]
    tree.observe.record_at("enc.accuracy", 1)
    tree.observe.record_at("loss", 1)
    tree.observe.flush_own()
    assert len(tree.trend_at("enc.accuracy")) == 1
    assert len(tree.trend("loss")) == 2


@pytest.mark.parametrize("path", ["enc._secret", "enc.absent", "nothing.mid", "enc", ""])
def test_paths_that_lead_to_no_tag_are_refused(tree, path):
    with pytest.raises(GraphPathError):
        tree.observe.collect_at(path)


@pytest.mark.parametrize("path", ["first.loss", "nothing.loss", "enc.", ""])
def test_metrics_of_what_is_no_graph_are_refused(tree, path):
    with pytest.raises(GraphPathError):
        tree.observe.record_at(path, 1.0)


def test_collect_at_feeds_the_owner():
    child = FlowBuilder(Constant(4.0)).tag("four").label("c").build()
    graph = FlowBuilder(nn.Identity()).through(child).build()
    child.watch("four")
    graph(torch.zeros(1))
    graph.collect_at("c.four")
    graph.flush()
    assert child.trend("four").values() == [4]


def test_copies_start_without_observations(tree):
    tree.record_scalar("loss", 1.0)
    twin = copy.deepcopy(tree)
    assert twin.observe.collected("loss") == []
    assert tree.observe.collected("loss") == [1]


def test_nothing_to_write_is_an_error_and_writes_nothing(tmp_path):
    observer = scalar_graph(0.0).observe
    for write in (observer.export_trends, observer.plot_html, lambda p: observer.write_log(p, 3)):
        with pytest.raises(GraphError):
            write(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_the_log_has_one_line_an_epoch(tmp_path, monkeypatch):
    from flodl.monitor import observer as module

    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    observer = scalar_graph(0.0).observe
    for loss in (0.5, 0.00012):
        observer.record_scalar("loss", loss)
        now[0] += 65
        observer.flush()
    observer.write_log(tmp_path / "log", 2)
    assert (tmp_path / "log").read_text() == (
        "  epoch 1/2  loss=0.5000  [1m 05s  ETA 1m 05s]\n  epoch 2/2  loss=1.20e-4  [1m 05s]\n"
    )
    observer.write_log(tmp_path / "short", 1)
    assert (tmp_path / "short").read_text() == (tmp_path / "log").read_text()


def test_the_page_contains_any_name_as_text(tmp_path):
    observer = scalar_graph(0.0).observe
    name = '</script><script>alert("x")</script>&<!--'
    for value in (1.0, math.inf):
        observer.record_scalar(name, value)
        observer.flush()
    observer.plot_html(tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert page.count("<script") == page.count("</script") == 2
    island = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    [run] = json.loads(island.group(1))["runs"]
    assert [[point[0], point[3]] for point in run["p"][f"train/{name}"]] == [[1, 1.0], [2, None]]
    assert "default-src 'none'" in page


def test_csv_quotes_names(tmp_path):
    observer = scalar_graph(0.0).observe
    name = 'a,"b"\nc'
    observer.record_scalar(name, 1)
    observer.flush()
    observer.export_trends(tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="") as file:
        assert list(csv.reader(file)) == [["epoch", name], ["1", "1.00000000"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1e-4, "1.00e-4"),
        (-2.5e-12, "-2.50e-12"),
        (0.001, "0.0010"),
        (99.5, "99.5000"),
        (100, "100.00"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_metrics(value, text):
    assert metric_text(value) == text


def test_a_graph_has_one_observer(tree):
    assert isinstance(tree.observe, Observer)
    assert tree.observe is tree.observe
