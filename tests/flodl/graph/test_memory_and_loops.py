"""Values kept from call to call, loops, traces, gates, switches and maps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flodl import (
    ArgmaxSelector,
    FixedSelector,
    FlowBuilder,
    Graph,
    GraphError,
    LearnedHalt,
    SigmoidRouter,
    SoftmaxRouter,
    StateAdd,
    ThresholdHalt,
    TraceEmit,
    forward_via_step,
)
from flodl.graph.control import Gate, MapRows, MapSlices

W = 4


def lin() -> nn.Linear:
    return nn.Linear(W, W)


class Adds(nn.Module):
    """Adds one, and any references."""

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        return x + 1 + sum(references.values())


class Publishes(nn.Module):
    """A loop body that publishes its state at every step and a note at every second one."""

    def __init__(self, name: str = "state") -> None:
        super().__init__()
        self.name = name
        self.calls = 0

    def step(self, x: Tensor, emit: TraceEmit, **references: Tensor) -> Tensor:
        x = x + 1 + sum(references.values())
        emit.publish(self.name, x)
        if self.calls % 2:
            emit.publish("note", x * 10)
        self.calls += 1
        return x

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        return forward_via_step(self, x, **references)


def recurrent() -> Graph:
    return (
        FlowBuilder(lin(), name="read")
        .through(StateAdd())
        .using("memory")
        .through(lin(), name="write")
        .tag("memory")
        .build()
    )


# memory


def test_the_first_call_reads_zeros_and_the_next_the_last_value() -> None:
    graph = recurrent()
    x = torch.randn(2, W)
    graph.eval()
    first = graph(x)
    assert torch.equal(first, graph.write(graph.read(x)))
    assert torch.equal(graph(x), graph.write(graph.read(x) + first))
    graph.reset_state()
    assert torch.equal(graph(x), first)
    assert graph.has_state()
    assert not FlowBuilder(lin()).build().has_state()


def test_gradients_flow_through_three_calls_and_detach_cuts_them() -> None:
    graph = recurrent()
    xs = [torch.randn(2, W, requires_grad=True) for _ in range(3)]
    for x in xs:
        last = graph(x)
    last.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in xs)
    graph.reset_state()
    a, b = (torch.randn(2, W, requires_grad=True) for _ in range(2))
    graph(a)
    graph.detach_state()
    graph(b).sum().backward()
    assert a.grad is None
    assert b.grad is not None


def test_a_second_backward_without_detach_is_refused_by_torch_and_end_step_mends_it() -> None:
    graph = recurrent()
    x = torch.randn(2, W)
    graph(x).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        graph(x).sum().backward()
    graph.reset_state()
    for _ in range(3):
        graph(x).sum().backward()
        graph.end_step()
    assert graph.step_count() == 3
    graph.reset_state()
    assert torch.equal(graph(x), graph.write(graph.read(x)))


def test_several_readers_share_one_writer_and_read_the_same_value() -> None:
    graph = FlowBuilder(Adds()).using("m").through(Adds()).using("m").tag("m").build()
    x = torch.zeros(1, 1)
    assert [graph(x).item() for _ in range(3)] == [2, 6, 14]


def test_a_reader_behind_the_writer_still_reads_the_previous_value() -> None:
    graph = FlowBuilder(Adds()).fork(StateAdd()).using("m").tag("side").tag("m").build()
    sides = [graph(torch.full((1, 1), float(i)), outputs=["side"])[1]["side"].item() for i in range(3)]
    assert sides == [1.0, 3.0, 5.0]


def test_a_failed_call_leaves_the_memory_as_it_was() -> None:
    class Fails(nn.Module):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            if Fails.fail:
                raise ValueError("as asked")
            return x

    graph = FlowBuilder(Adds()).using("m").tag("m").through(Fails()).build()
    x = torch.zeros(1, 1)
    graph(x)
    Fails.fail = True
    with pytest.raises(ValueError, match="as asked"):
        graph(x)
    Fails.fail = False
    assert graph(x).item() == 2


def test_parents_reset_and_detach_what_lies_inside() -> None:
    inner = recurrent()
    graph = FlowBuilder(lin()).through(nn.Sequential(inner)).build()
    x = torch.randn(2, W)
    first = graph(x)
    assert not torch.equal(graph(x), first)
    graph.detach_state()
    assert not inner._memory[0].requires_grad
    graph.reset_state()
    assert torch.equal(graph(x), first)


def test_a_copy_keeps_the_memory_without_its_history() -> None:
    graph = recurrent()
    x = torch.randn(2, W)
    graph(x)
    clone = copy.deepcopy(graph)
    assert torch.equal(graph(x), clone(x))


def test_memory_survives_compilation() -> None:
    torch.compiler.reset()
    graph, x = recurrent(), torch.randn(2, W)
    with torch.no_grad():
        expected = [graph(x) for _ in range(3)]
        graph.reset_state()
        compiled = torch.compile(graph, backend="eager", fullgraph=True)
        for value in expected:
            torch.testing.assert_close(compiled(x), value)


# loops


@pytest.mark.parametrize(
    ("condition", "kind", "most", "ran"),
    [
        (ThresholdHalt(-1), "while_cond", 5, 0),
        (ThresholdHalt(2.5), "while_cond", 5, 3),
        (ThresholdHalt(100), "while_cond", 5, 5),
        (ThresholdHalt(-1), "until_cond", 5, 1),
        (ThresholdHalt(2.5), "until_cond", 5, 3),
        (ThresholdHalt(100), "until_cond", 5, 5),
    ],
)
def test_a_condition_decides_how_often_the_body_runs(condition: nn.Module, kind: str, most: int, ran: int) -> None:
    graph = getattr(FlowBuilder().loop_body(Adds()), kind)(condition, most).build()
    assert graph(torch.zeros(1, 1)).item() == ran


def test_until_does_not_ask_after_the_last_permitted_iteration() -> None:
    asked: list[float] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            asked.append(x.item())
            return x - 100

    FlowBuilder().loop_body(Adds()).until_cond(Asks(), 3).build()(torch.zeros(1, 1))
    assert asked == [1, 2]


def test_a_learned_halt_looks_at_the_first_row() -> None:
    halt = LearnedHalt(1)
    with torch.no_grad():
        halt.read.weight.fill_(1)
        halt.read.bias.fill_(-1.5)
    graph = FlowBuilder().loop_body(Adds()).until_cond(halt, 9).build()
    assert graph(torch.tensor([[0.0], [50.0]]))[0].item() == 2


def test_references_are_given_at_every_iteration() -> None:
    graph = FlowBuilder(Adds()).tag("a").loop_body(Adds()).for_n(3).using("a").build()
    assert graph(torch.zeros(1, 1)).item() == 1 + 3 * (1 + 1)
    graph = FlowBuilder(Adds()).tag("a").loop_body(Publishes()).for_n(3).using("a").tag("l").build()
    assert graph(torch.zeros(1, 1)).item() == 7
    assert [t.item() for t in graph.traces("state")] == [3, 5, 7]


def test_published_traces_may_skip_iterations_and_begin_anew_each_run() -> None:
    graph = FlowBuilder().loop_body(Publishes()).for_n(4).build()
    for _ in range(2):
        graph(torch.zeros(1, 1))
        assert [t.item() for t in graph.traces("state")] == [1, 2, 3, 4]
        assert [t.item() for t in graph.traces("note")] == [20, 40]
    with pytest.raises(GraphError) as caught:
        graph.traces("statt")
    assert caught.value.known == ["note", "state"]
    graph.reset_state()
    assert graph.traces("state") == []


def test_traces_keep_their_history_until_detached() -> None:
    graph = FlowBuilder(lin()).loop_body(Publishes()).for_n(2).build()
    graph(torch.zeros(1, W))
    assert graph.traces("state")[0].requires_grad
    copy.deepcopy(graph)
    graph.detach_state()
    assert not graph.traces("state")[0].requires_grad


def test_publishing_twice_in_one_step_raises() -> None:
    class Twice(Publishes):
        def step(self, x: Tensor, emit: TraceEmit, **references: Tensor) -> Tensor:
            emit.publish("a", x)
            emit.publish("a", x)
            return x

    with pytest.raises(GraphError) as caught:
        FlowBuilder().loop_body(Twice()).for_n(2).build()(torch.zeros(1, 1))
    assert caught.value.trace == "a"
    assert "iteration 1" in caught.value.__notes__[0]
    assert Publishes()(torch.zeros(1, 1)).item() == 1


@pytest.mark.parametrize("kind", ["for_n", "while_cond", "until_cond"])
def test_an_error_has_a_note_with_its_iteration(kind: str) -> None:
    class Fails(Adds):
        def forward(self, x: Tensor, **references: Tensor) -> Tensor:
            if x.item() == 2:
                raise ValueError("two")
            return super().forward(x)

    loop = FlowBuilder().loop_body(Fails())
    graph = (loop.for_n(5) if kind == "for_n" else getattr(loop, kind)(ThresholdHalt(99), 5)).build()
    with pytest.raises(ValueError) as caught:
        graph(torch.zeros(1, 1))
    assert any("iteration 3" in note for note in caught.value.__notes__)


def test_unknown_traces_are_refused() -> None:
    with pytest.raises(GraphError):
        FlowBuilder(lin()).build().traces("a")


def test_names_that_collide_raise_even_when_they_were_read_before() -> None:
    second = Publishes("other")
    graph = FlowBuilder().loop_body(Publishes()).for_n(2).loop_body(second).for_n(2).build()
    graph(torch.zeros(1, 1))
    assert len(graph.traces("state")) == 2
    second.name = "state"
    graph(torch.zeros(1, 1))
    with pytest.raises(GraphError, match="loop_2 and loop_3"):
        graph.traces("state")


def test_a_body_is_reset_before_every_run_and_may_remember_between_iterations() -> None:
    body = FlowBuilder(Adds()).using("m").tag("m").build()
    graph = FlowBuilder().loop_body(body).for_n(3).build()
    assert [graph(torch.zeros(1, 1)).item() for _ in range(2)] == [7, 7]


# gates, switches, maps


def test_a_gate_is_the_weighted_sum_of_its_experts() -> None:
    router, experts = SoftmaxRouter(W, 3), [lin() for _ in range(3)]
    graph = FlowBuilder().gate(router, experts).build()
    x = torch.randn(5, W)
    stacked = torch.stack([e(x) for e in experts], dim=-1)
    torch.testing.assert_close(graph(x), (stacked * router(x).unsqueeze(-2)).sum(-1))
    graph(x).sum().backward()
    assert all(p.grad is not None for p in graph.parameters())


def test_weights_for_each_row_stretch_over_all_its_features() -> None:
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, None, None].expand(-1, -1, 2, 2)

    router = SigmoidRouter(W, 2)
    x = torch.randn(3, W)
    weights = router(x)
    expected = x[:, :, None, None].expand(-1, -1, 2, 2) * weights.sum(-1)[:, None, None, None]
    torch.testing.assert_close(Gate(router, [Spread(), Spread()])(x), expected)


def test_a_router_with_the_wrong_number_of_weights_is_refused() -> None:
    with pytest.raises(GraphError, match="3 weights for 2 experts"):
        FlowBuilder().gate(SoftmaxRouter(W, 3), lin(), lin()).build()(torch.zeros(1, W))


def test_using_feeds_only_the_router() -> None:
    router = SoftmaxRouter(W, 2)
    graph = FlowBuilder().input("c").gate(router, lin(), lin(), name="g").using("c").build()
    x, c = torch.randn(2, W), torch.randn(2, W)
    weights = router(x + c)
    expected = sum(weights[:, k : k + 1] * graph.g.experts[k](x) for k in range(2))
    torch.testing.assert_close(graph(x, c), expected)


def test_only_the_chosen_branch_runs() -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("not chosen")

    graph = FlowBuilder().switch(FixedSelector(1), Never(), Adds()).build()
    assert graph(torch.zeros(1, 1)).item() == 1


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_an_argmax_selector_always_names_a_branch(rows: int) -> None:
    selector = ArgmaxSelector(W, 3)
    x = torch.randn(rows, 2, W)
    index = selector(x)
    assert index.shape == (1,)
    assert index.item() == selector.linear(x).mean((0, 1)).argmax().item()
    assert selector(x[:1, :1]).item() == selector.linear(x[0, 0]).argmax().item()


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_without_a_branch_is_refused(index: int) -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor(index)

    with pytest.raises(GraphError) as caught:
        FlowBuilder().switch(Picks(), lin(), lin()).build()(torch.zeros(1, W))
    assert (caught.value.index, caught.value.branches) == (index, 2)


def test_a_router_that_decides_for_every_row_is_refused() -> None:
    with pytest.raises(GraphError, match="one index") as caught:
        FlowBuilder().switch(lin(), lin(), lin()).build()(torch.zeros(2, W))
    assert caught.value.shape == (2, W)
    with pytest.raises(GraphError, match="-1"):
        FixedSelector(-1)


def test_maps_go_over_rows_and_slices() -> None:
    body, x = lin(), torch.randn(3, W)
    torch.testing.assert_close(MapRows(body)(x), body(x))
    empty = torch.zeros(0, W)
    assert MapRows(body)(empty) is empty
    narrow = nn.Linear(2, 3)
    expected = torch.cat([narrow(x[:, :2]), narrow(x[:, 2:])], dim=1)
    torch.testing.assert_close(MapSlices(narrow, 2)(x), expected)
    torch.testing.assert_close(MapSlices(narrow, 2)(x[None]), expected[None])


def test_map_rows_are_batches_of_one() -> None:
    seen: list[tuple[int, ...]] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor, **references: Any) -> Tensor:
            seen.append(tuple(x.shape))
            return x + sum(references.values())

    graph = FlowBuilder().input("c").map(Looks()).each().using("c").build()
    assert torch.equal(graph(torch.zeros(3, 2), torch.ones(1, 2)), torch.ones(3, 2))
    assert seen == [(1, 2)] * 3


@pytest.mark.parametrize("shape", [(4,), (2, 5)])
def test_slices_that_do_not_divide_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(GraphError, match=r"slices\(2\)") as caught:
        FlowBuilder().map(lin()).slices(2).build()(torch.zeros(shape))
    assert caught.value.shape == shape
