"""Profiling tells where the time of the last call went, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flodl.graph import FlowBuilder

now = [0.0]


def seconds(profile, key):
    return next(node.seconds for node in profile.nodes if node.key == key)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that goes on when a module of these tests runs, so that a busy machine changes no figure."""
    monkeypatch.setattr("flodl.monitor.profiler.perf_counter", lambda: now[0])


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        now[0] += self.seconds
        return x


@pytest.fixture
def graph():
    return (
        FlowBuilder(Sleep(0.001))
        .split([Sleep(0.02), Sleep(0.01)])
        .tag_group("branch")
        .merge("add")
        .through(Sleep(0.005))
        .tag("last")
        .build()
    )


def test_nodes_and_levels_take_what_they_take(graph):
    graph.observe.enable_profiling()
    assert graph.observe.profiling()
    assert graph.observe.profile() is None
    graph(torch.zeros(1))
    profile = graph.observe.profile()
    assert [node.key for node in profile.nodes] == ["sleep_1", "branch_0", "branch_1", "last"]
    assert seconds(profile, "branch_0") == pytest.approx(0.02)
    assert seconds(profile, "branch_0") > seconds(profile, "branch_1") > seconds(profile, "sleep_1")
    assert profile.total_s == pytest.approx(sum(node.seconds for node in profile.nodes))


def test_only_the_last_call_counts(graph):
    graph.observe.enable_profiling()
    for _ in range(3):
        graph(torch.zeros(1))
    assert seconds(graph.observe.profile(), "last") == pytest.approx(0.005)


def test_timings_become_trends(graph):
    graph.observe.enable_profiling()
    for _ in range(2):
        graph(torch.zeros(1))
        graph.end_step()
        graph.end_epoch()
    assert len(graph.observe.timing_trend("total")) == 2
    assert len(graph.observe.timing_trend("branch_0")) == 2


def test_disabling_takes_every_hook_away(graph):
    graph.observe.enable_profiling()
    graph.observe.enable_profiling()
    graph(torch.zeros(1))
    graph.observe.disable_profiling()
    graph.observe.disable_profiling()
    assert not graph.observe.profiling()
    assert graph.observe.profile() is None
    for module in graph.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_module_in_two_nodes_has_its_whole_time_in_both():
    shared = Sleep(0.01)
    graph = FlowBuilder(shared).through(shared).build()
    graph.observe.enable_profiling()
    graph(torch.zeros(1))
    seconds = [node.seconds for node in graph.observe.profile().nodes]
    assert seconds == pytest.approx([0.02, 0.02])


def test_calls_of_a_node_without_its_graph_are_not_measured():
    node = Sleep(0.01)
    graph = FlowBuilder(node).through(Sleep(0.01)).build()
    graph.observe.enable_profiling()
    node(torch.zeros(1))
    assert graph.observe.profile() is None
    graph(torch.zeros(1))
    before = graph.observe.profile()
    node(torch.zeros(1))
    assert graph.observe.profile() == before


def test_a_failed_call_has_no_profile_and_the_next_one_has():
    class Fails(nn.Module):
        broken = False

        def forward(self, x):
            if self.broken:
                raise ValueError("no")
            return x

    module = Fails()
    graph = FlowBuilder(Sleep(0.001)).through(module).build()
    graph.observe.enable_profiling()
    module.broken = True
    with pytest.raises(ValueError, match="no"):
        graph(torch.zeros(1))
    assert graph.observe.profile() is None
    module.broken = False
    graph(torch.zeros(1))
    assert len(graph.observe.profile().nodes) == 2


def test_profiling_does_not_change_results():
    torch.manual_seed(0)
    graph = FlowBuilder(nn.Linear(3, 3)).also(nn.Linear(3, 3)).build()
    x = torch.randn(2, 3)
    plain = graph(x)
    graph.observe.enable_profiling()
    assert torch.equal(graph(x), plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_time_is_measured_by_events():
    graph = FlowBuilder(nn.Linear(4096, 4096)).through(nn.Identity()).tag("small").build().cuda()
    x = torch.randn(8192, 4096, device="cuda")
    graph(x)
    graph.observe.enable_profiling()
    graph(x)
    profile = graph.observe.profile()
    assert profile.nodes[0].seconds > 5 * seconds(profile, "small")
