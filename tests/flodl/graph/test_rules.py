"""The meaning of each verb depending on its position in the chain, and all faults of `build()`."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flodl import FixedSelector, FlowBuilder, GraphBuildError, GraphError, SoftmaxRouter, StateAdd, ThresholdHalt

W = 4


def lin() -> nn.Linear:
    return nn.Linear(W, W)


class Takes(nn.Module):
    """Adds every reference it accepts, scaled, so that each of them shows in the result."""

    def forward(self, x: Tensor, a: Tensor | float = 0.0, b: Tensor | float = 0.0) -> Tensor:
        return x + 10 * a + 100 * b


class Times(nn.Module):
    """Multiplies by a fixed number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Needs(nn.Module):
    """Cannot be called without its second argument."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


def of_two(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def of_three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b * c


def one(value: float = 1.0) -> Tensor:
    return torch.full((1, 1), value)


# the order of calls


def test_using_after_also_feeds_the_module_and_tag_names_the_sum() -> None:
    graph = FlowBuilder(Times(2)).tag("a").also(Takes()).using("a").tag("sum").build()
    result, values = graph(one(), outputs=["sum"])
    assert result.item() == 2 + (2 + 10 * 2)
    assert values["sum"] is result


def test_a_fork_leaves_the_stream_alone() -> None:
    graph = FlowBuilder(Times(2)).tag("a").fork(Takes()).using("a").tag("side").through(Times(3)).build()
    result, values = graph(one(), outputs=["side"])
    assert result.item() == 6
    assert values["side"].item() == 22


@pytest.mark.parametrize(
    "then",
    [
        lambda f: f.through(Times(3)),
        lambda f: f.also(Times(2)),
        lambda f: f.also_with(Times(1), Times(2)),
        lambda f: f.split(Times(1), Times(2)).merge(),
        lambda f: f.map(Times(3)).each(),
        lambda f: f.loop_body(Times(3)).for_n(1),
        lambda f: f.switch(FixedSelector(0), Times(3), Times(4)),
    ],
)
def test_a_fork_that_was_not_tagged_at_once_gets_no_later_tag(then: Callable[[FlowBuilder], FlowBuilder]) -> None:
    graph = then(FlowBuilder(Times(1)).fork(Times(50))).tag("x").build()
    assert graph(one(), outputs=["x"])[1]["x"].item() == 3


def test_a_second_tag_after_a_fork_names_the_stream() -> None:
    graph = FlowBuilder(Times(2)).fork(Times(3)).tag("side").tag("main").build()
    values = graph(one(), outputs=["side", "main"])[1]
    assert (values["side"].item(), values["main"].item()) == (6, 2)


def test_using_after_split_feeds_every_branch() -> None:
    graph = FlowBuilder(Times(1)).tag("a").split(Takes(), Takes()).using("a").tag_group("h").merge("add").build()
    result, values = graph(one(), outputs=["h_0", "h_1"])
    assert (values["h_0"].item(), values["h_1"].item(), result.item()) == (11, 11, 22)
    assert graph.plan.groups == {"h": ("h_0", "h_1")}


@pytest.mark.parametrize(("how", "expected"), [("add", 9.0), ("mean", 3.0)])
def test_merge(how: str, expected: float) -> None:
    graph = FlowBuilder().split(Times(2), Times(3), Times(4)).merge(how).build()  # pyright: ignore[reportArgumentType]
    assert graph(one()).item() == pytest.approx(expected)


def test_using_after_an_input_still_feeds_the_module_before_it() -> None:
    graph = FlowBuilder(Takes()).input("a").using("a").input("b").using("b").build()
    assert graph(one(), one(2), one(3)).item() == 1 + 20 + 300


def test_an_input_may_be_read_before_it_is_declared() -> None:
    graph = FlowBuilder(Takes()).using("a").input("a").build()
    assert not graph.has_state()
    assert [graph(one(), one(v)).item() for v in (2, 3)] == [21, 31]


def test_references_can_be_renamed_and_given_as_a_list() -> None:
    graph = FlowBuilder(Times(2)).tag("u").through(Times(2)).tag("v").through(Takes()).using(a="u", b="v").build()
    assert graph(one()).item() == 4 + 20 + 400
    graph = FlowBuilder().input(["a", "b"]).through(Takes()).using(["a", "b"]).using().build()
    assert graph(one(), one(), one()).item() == 111


def test_several_tags_may_name_one_value() -> None:
    graph = FlowBuilder(Times(2)).tag("u").tag("v").through(Takes()).using(a="u", b="v").build()
    assert graph(one()).item() == 2 + 20 + 200
    assert [n for n, _ in graph.named_children()] == ["u", "takes_2"]


def test_one_module_may_stand_in_two_places() -> None:
    shared = lin()
    graph = FlowBuilder(shared).through(shared).build()
    x = torch.randn(2, W)
    assert torch.equal(graph(x), shared(shared(x)))
    assert len(list(graph.parameters())) == 2


def test_ids_count_every_node_of_the_builder() -> None:
    graph = (
        FlowBuilder(lin())
        .also(lin())
        .input("c")
        .split(lin(), lin())
        .merge()
        .through(Takes())
        .using(a="late")
        .tag("late")
        .build()
    )
    assert [n.id for n in graph.plan.nodes] == [
        "input", "linear_1", "linear_2", "add_3", "input_c_4", "linear_5", "linear_6", "merge_7", "takes_8", "state_read_late_9",
    ]  # fmt: skip


def test_a_module_can_choose_the_prefix_of_its_ids() -> None:
    class Odd(nn.Identity):
        flodl_name = "even"

    assert next(n for n, _ in FlowBuilder(Odd()).build().named_children()) == "even_1"


@pytest.mark.parametrize(
    "kind", ["Identity", "Add", "Merge", "Input", "Entry", "State_Read", "Loop", "Gate", "Switch", "Map"]
)
def test_a_module_may_be_called_like_a_step(kind: str) -> None:
    odd = type(kind, (nn.Module,), {"forward": lambda self, x: x * 3})()
    graph = FlowBuilder(odd).also(odd).tag("sum").build()
    calls: list[int] = []
    odd.register_forward_hook(lambda *_: calls.append(1))
    assert graph(one(), outputs=["sum"])[1]["sum"].item() == 12
    assert len(calls) == 2
    identity = nn.Identity()
    identity.register_forward_hook(lambda *_: calls.append(1))
    FlowBuilder(identity).build()(one())
    assert len(calls) == 3


def test_levels_follow_the_longest_way_from_the_inputs() -> None:
    plan = FlowBuilder(lin()).split(lin(), lin()).merge().build().plan
    levels = {node.id: node.level for node in plan.nodes}
    assert levels == {"input": 0, "linear_1": 1, "linear_2": 2, "linear_3": 2, "merge_4": 3}


# faults

FAULTS: list[tuple[str, Callable[[], FlowBuilder], list[tuple[str, tuple[str, ...]]]]] = [
    ("open streams at the end", lambda: FlowBuilder(lin()).split(lin(), lin()), [("split", ("2 open streams", "merge"))]),
    ("open streams before through", lambda: FlowBuilder(lin()).split(lin(), lin()).through(lin()), [("through", ("2 streams", "merge"))]),
    ("open streams before map", lambda: FlowBuilder(lin()).split(lin(), lin()).map(lin()).each(), [("each", ("2 streams",))]),
    ("duplicate tag", lambda: FlowBuilder(lin()).tag("a").through(lin()).tag("a"), [("tag", ("'a'", "already"))]),
    ("tag on open streams", lambda: FlowBuilder(lin()).split(lin(), lin()).tag("a").merge(), [("tag", ("tag_group", "merge"))]),
    ("tag with a dot", lambda: FlowBuilder(lin()).tag("a.b"), [("tag", ("'a.b'", "dots"))]),
    ("empty tag", lambda: FlowBuilder(lin()).tag(""), [("tag", ("non-empty",))]),
    ("unresolved references", lambda: FlowBuilder(StateAdd()).using("ghost", "spook").tag("ghots"), [("using", ("'ghost'", "'ghots'")), ("using", ("'spook'",))]),
    ("merge without split", lambda: FlowBuilder(lin()).merge(), [("merge", ("one stream",))]),
    ("unknown merge", lambda: FlowBuilder().split(lin(), lin()).merge("max"), [("merge", ("'max'", "mean"))]),  # pyright: ignore[reportArgumentType]
    ("merge by nothing", lambda: FlowBuilder().split(lin(), lin()).merge(None), [("merge", ("None", "'concat'"))]),  # pyright: ignore[reportArgumentType]
    ("merge by a class", lambda: FlowBuilder().split(lin(), lin()).merge(nn.Bilinear), [("merge", ("class Bilinear",))]),
    ("merge by a module of one", lambda: FlowBuilder().split(lin(), lin()).merge(lin()), [("merge", ("Linear", "(x, x)"))]),
    ("merge by a function of three", lambda: FlowBuilder().split(lin(), lin()).merge(of_three), [("merge", ("of_three", "(x, x)"))]),
    ("merge by a keyword", lambda: FlowBuilder(lin()).tag("t").split(lin(), lin()).merge(of_two).using("t"), [("merge", ("of_two", "'t'"))]),
    ("concat along a text", lambda: FlowBuilder().split(lin(), lin()).merge("concat", dim="last"), [("merge", ("dim='last'", "int"))]),  # pyright: ignore[reportArgumentType]
    ("a sum along a dimension", lambda: FlowBuilder().split(lin(), lin()).merge("add", dim=0), [("merge", ("dim=0", "'concat'"))]),
    ("a sum with a name", lambda: FlowBuilder().split(lin(), lin()).merge("add", name="sum"), [("merge", ("name='sum'",))]),
    ("a function of nothing", lambda: FlowBuilder(lin()).through(lambda: 1), [("through", ("lambda",))]),
    ("no function", lambda: FlowBuilder(lin()).through(5), [("through", ("int", "function"))]),  # pyright: ignore[reportArgumentType]
    ("an open loop", lambda: FlowBuilder(lin()).loop_body(lin()).through(lin()), [("loop_body", ("never ended",))]),
    ("an open map", lambda: FlowBuilder(lin()).map(lin()).batched().tag("a"), [("map", ("never ended",))]),
    ("names of a split that are none", lambda: FlowBuilder(lin()).split(lin(), lin(), names=5).merge(), [("split", ("5",))]),  # pyright: ignore[reportArgumentType]
    ("an entry that is no text", lambda: FlowBuilder(lin(), entry=5), [("from", ("5",))]),  # pyright: ignore[reportArgumentType]
    ("split of one", lambda: FlowBuilder(lin()).split(lin()), [("split", ("1 modules",))]),
    ("split names", lambda: FlowBuilder().split(lin(), lin(), names=["a"]).merge(), [("split", ("1 names", "2 modules"))]),
    ("using after nothing", lambda: FlowBuilder().input("a").using("a"), [("using", ("nothing to feed",))]),
    ("using after merge", lambda: FlowBuilder().tag("a").split(lin(), lin()).merge().using("a"), [("using", ("takes no references",))]),
    ("keyword not taken", lambda: FlowBuilder(lin()).tag("ctx").through(lin()).using("ctx"), [("through", ("Linear", "'ctx'"))]),
    ("keyword taken twice", lambda: FlowBuilder(Takes()).input("a", "b").using("a", a="b"), [("using", ("'a'", "twice"))]),
    ("keyword is the stream", lambda: FlowBuilder(Takes()).input("c").using(x="c"), [("from", ("multiple values", "Takes"))]),
    ("keyword missing", lambda: FlowBuilder(Needs()), [("from", ("'mask'", "Needs"))]),
    ("keyword is no word", lambda: FlowBuilder(StateAdd()).input("a").tag("no-word").through(StateAdd()).using("no-word"), [("through", ("'no-word'", "rename"))]),
    ("router without keywords", lambda: FlowBuilder(lin()).tag("c").gate(lin(), lin(), lin()).using("c"), [("gate", ("router", "'c'"))]),
    ("selector without keywords", lambda: FlowBuilder(lin()).tag("c").switch(FixedSelector(0), lin(), lin()).using("c"), [("switch", ("router", "'c'"))]),
    ("loop body without keywords", lambda: FlowBuilder(lin()).tag("c").loop_body(lin()).for_n(2).using("c"), [("for_n", ("'c'", "Linear"))]),
    ("expert that needs more", lambda: FlowBuilder(lin()).gate(SoftmaxRouter(W, 2), lin(), Needs()), [("gate", ("'mask'",))]),
    ("nested graph input not fed", lambda: FlowBuilder(FlowBuilder(lin()).input("c").build(), name="n").input("d").using("d"), [("from", ("'d'",))]),
    ("circle", lambda: FlowBuilder(Takes()).tag("a").using("a"), [("from", ("'a'", "before tag"))]),
    ("circle through a sum", lambda: FlowBuilder(lin()).also(Takes()).tag("a").using("a"), [("also", ("previous call",))]),
    ("gate of one", lambda: FlowBuilder(lin()).gate(SoftmaxRouter(W, 1), lin()), [("gate", ("1 experts",))]),
    ("switch of none", lambda: FlowBuilder(lin()).switch(FixedSelector(0)), [("switch", ("0 branches",))]),
    ("no iterations", lambda: FlowBuilder(lin()).loop_body(lin()).for_n(0), [("for_n", ("0", "at least 1"))]),
    ("no iterations while", lambda: FlowBuilder(lin()).loop_body(lin()).while_cond(ThresholdHalt(1), 0), [("while_cond", ("at least 1",))]),
    ("no iterations until", lambda: FlowBuilder(lin()).loop_body(lin()).until_cond(ThresholdHalt(1), -1), [("until_cond", ("-1",))]),
    ("no slices", lambda: FlowBuilder(lin()).map(lin()).slices(0), [("slices", ("at least 1",))]),
    ("over an unknown tag", lambda: FlowBuilder(lin()).tag("hers").map(lin()).over("herz"), [("over", ("'herz'", "'hers'"))]),
    ("over a later tag", lambda: FlowBuilder(lin()).map(lin()).over("late").tag("late"), [("over", ("'late'", "earlier"))]),
    ("input clashes with a tag", lambda: FlowBuilder(lin()).tag("a").input("a"), [("input", ("'a'", "already"))]),
    ("input clashes with the entry", lambda: FlowBuilder(lin(), entry="x").input("x"), [("input", ("'x'", "taken"))]),
    ("input of a strange name", lambda: FlowBuilder(lin()).input("a b"), [("input", ("'a b'",))]),
    ("input of a reserved name", lambda: FlowBuilder(lin()).input("outputs"), [("input", ("'outputs'",))]),
    ("default that is no constant", lambda: FlowBuilder(lin()).input("a", default=[]), [("input", ("[]", "None"))]),
    ("group of one stream", lambda: FlowBuilder(lin()).tag_group("g"), [("tag_group", ("tag('g')",))]),
    ("duplicate group", lambda: FlowBuilder().split(lin(), lin()).tag_group("g").tag_group("g").merge(), [("tag_group", ("'g'", "already"))]),
    ("group named as a tag", lambda: FlowBuilder(lin()).tag("g").split(lin(), lin()).tag_group("g").merge(), [("tag_group", ("'g'", "already"))]),
    ("member named as a tag", lambda: FlowBuilder(lin()).tag("g_1").split(lin(), lin()).tag_group("g").merge(), [("tag_group", ("'g_1'", "already"))]),
    ("a class for a module", lambda: FlowBuilder(lin()).through(nn.GELU), [("through", ("class GELU", "GELU("))]),  # pyright: ignore[reportArgumentType]
    ("a text for an expert", lambda: FlowBuilder(lin()).gate(SoftmaxRouter(W, 2), lin(), "no"), [("gate", ("expert 1", "str"))]),  # pyright: ignore[reportArgumentType]
    ("duplicate name", lambda: FlowBuilder(lin(), name="a").through(lin(), name="a"), [("through", ("'a'", "linear_1"))]),
    ("name that is another's tag", lambda: FlowBuilder(lin()).also(lin(), name="s").tag("s"), [("also", ("'s'", "add_3"))]),
    ("name of an attribute", lambda: FlowBuilder(lin(), name="forward"), [("from", ("'forward'", "name="))]),
    ("tag of an attribute", lambda: FlowBuilder(lin()).tag("half"), [("from", ("'half'", "name="))]),
    ("name that is a word of Python", lambda: FlowBuilder(lin(), name="in"), [("from", ("'in'",))]),
    ("loop never ended", lambda: _left_open("loop_body"), [("loop_body", ("for_n", "never ended"))]),
    ("map never ended", lambda: _left_open("map"), [("map", ("slices", "never ended"))]),
    ("internal of nothing", lambda: FlowBuilder(lin()).tag("abc").internal("abd"), [("internal", ("'abd'", "'abc'"))]),
    ("empty label", lambda: FlowBuilder(lin()).label(""), [("label", ("non-empty",))]),
    ("label with a dot", lambda: FlowBuilder(_labelled("a.b")), [("from", ("'a.b'", "dot"))]),
    ("two equal labels", lambda: FlowBuilder(_labelled("a")).through(_labelled("a")), [("through", ("'a'", "graph_1"))]),
    ("label equal to a tag", lambda: FlowBuilder(lin()).tag("a").through(_labelled("a")), [("through", ("'a'", "linear_1"))]),
]  # fmt: skip


def _labelled(label: str) -> nn.Module:
    return FlowBuilder(lin()).label(label).build()


def _left_open(verb: str) -> FlowBuilder:
    flow = FlowBuilder(lin())
    getattr(flow, verb)(lin())
    return flow.through(lin())


@pytest.mark.parametrize(("make", "expected"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_fault(make: Callable[[], FlowBuilder], expected: list[tuple[str, tuple[str, ...]]]) -> None:
    flow = make()
    with pytest.raises(GraphBuildError) as caught:
        flow.build()
    faults = caught.value.faults
    assert [fault.verb for fault in faults] == [verb for verb, _ in expected], faults
    for fault, (_, words) in zip(faults, expected, strict=True):
        assert fault.position >= 1
        for word in words:
            assert word in str(fault)
        assert str(fault) in str(caught.value)


def test_all_faults_are_reported_together_in_the_order_of_their_steps() -> None:
    flow = FlowBuilder(lin()).merge().tag("a").tag("a").through(lin()).using("nobody").gate(lin(), lin())
    with pytest.raises(GraphBuildError) as caught:
        flow.build()
    faults = caught.value.faults
    assert [(f.position, f.verb) for f in faults] == [
        (2, "merge"),
        (4, "tag"),
        (5, "through"),
        (6, "using"),
        (7, "gate"),
    ]
    assert faults[2].node == "linear_3"
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.faults == faults


def test_one_child_used_twice_is_one_child() -> None:
    child = _labelled("a")
    graph = FlowBuilder(child).through(child).build()
    assert list(graph.tree_children()) == ["a"]


# the call


def test_missing_and_surplus_inputs_are_named() -> None:
    graph = FlowBuilder(Takes()).input("a", "b").using("a", "b").build()
    with pytest.raises(GraphError, match="'b'") as caught:
        graph(one(), one())
    assert caught.value.missing == ["b"]
    with pytest.raises(GraphError) as caught:
        graph()
    assert caught.value.missing == ["input", "a", "b"]
    with pytest.raises(TypeError, match="c"):
        graph(one(), one(), one(), c=one())


@pytest.mark.parametrize("default", [None, True, 3, 2.5, "text"])
def test_a_default_is_used_when_the_input_is_left_out(default: object) -> None:
    seen: list[object] = []

    class Reads(nn.Module):
        def forward(self, x: Tensor, a: object) -> Tensor:
            seen.append(a)
            return x

    graph = FlowBuilder(Reads()).input("a", default=default).using("a").build()
    graph(one())
    graph(one(), a="other")
    assert seen == [default, "other"]


def test_a_graph_is_made_only_by_a_builder() -> None:
    from flodl import Graph

    with pytest.raises(GraphError, match="FlowBuilder"):
        Graph()


def test_the_traceback_shows_the_step_that_failed() -> None:
    import traceback

    graph = FlowBuilder(lin(), name="first").through(nn.Linear(9, 9), name="second").build()
    with pytest.raises(RuntimeError) as caught:
        graph(torch.zeros(1, W))
    assert "x = second(x)" in "".join(traceback.format_exception(caught.value))


def test_values_are_released_after_their_last_use() -> None:
    import gc
    import weakref

    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    class Watches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(sum(ref() is not None for ref in alive))
            y = x + 1
            alive.append(weakref.ref(y))
            return y

    flow = FlowBuilder(Watches())
    for _ in range(5):
        flow.through(Watches())
    gc.disable()
    try:
        with torch.no_grad():
            flow.build()(one())
    finally:
        gc.enable()
    assert max(counts) == 1


def test_a_step_releases_all_values_that_it_uses_last() -> None:
    import weakref

    class Looks(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            alive.append([number for number, value in made.items() if value() is not None])
            out = x + 1
            made[self.number] = weakref.ref(out)
            return out

    alive: list[list[int]] = []
    made: dict[int, weakref.ref[Tensor]] = {}
    flow = FlowBuilder(Looks(0)).through(Looks(1)).tag("used").through(Looks(2)).through(Looks(3))
    graph = flow.through(StateAdd()).using("used").through(Looks(4)).build()
    with torch.no_grad():
        graph(one())
    # The current input and values with a later use are alive; a sum releases both operands.
    assert alive == [[], [0], [1], [1, 2], []]


# functions


def test_merges_give_the_values_that_they_name() -> None:
    a, b = Times(2), Times(3)
    x = torch.tensor([[1.0, -1.0]])
    expected = {
        "concat": torch.tensor([[2.0, -2.0, 3.0, -3.0]]),
        of_two: torch.tensor([[6.0, 6.0]]),
        torch.maximum: torch.tensor([[3.0, -2.0]]),
    }
    for how, value in expected.items():
        assert torch.equal(FlowBuilder().split(a, b).merge(how).build()(x), value)  # pyright: ignore[reportArgumentType]
    assert FlowBuilder().split(a, b).merge("concat", dim=0).build()(x).shape == (2, 2)
    with pytest.raises(RuntimeError, match="same number of dimensions"):
        FlowBuilder().split(a, nn.Flatten(0)).merge("concat").build()(torch.ones(2, 2))


def test_the_structural_hash_tells_functions_and_merges_apart() -> None:
    def local(x: Tensor) -> Tensor:
        return x + 1

    chains: list[Callable[[], FlowBuilder]] = [
        lambda: FlowBuilder(lin()).through(torch.relu),
        lambda: FlowBuilder(lin()).through(torch.tanh),
        lambda: FlowBuilder(lin()).through(local),
        lambda: FlowBuilder(lin()).through(lambda x: x + 1),
        lambda: FlowBuilder(lin()).through(lambda x: x + 2),
        lambda: FlowBuilder(lin()).through(lambda x: x * 2),
        *(
            (lambda how=how, dim=dim: FlowBuilder(lin()).split(lin(), lin()).merge(how, dim=dim))  # pyright: ignore
            for how, dim in (("add", -1), ("mean", -1), ("concat", -1), ("concat", 0), (torch.add, -1), (of_two, -1))
        ),
    ]
    hashes = [make().build().structural_hash() for make in chains]
    assert len(set(hashes)) == len(chains)
    assert hashes == [make().build().structural_hash() for make in chains]


@pytest.mark.parametrize("value", [None, 5, 2.5, "", "a.b", [], ["a"], {"a": 1}, object(), nn.Linear], ids=repr)
def test_no_argument_makes_a_verb_raise(value: object) -> None:
    given: Any = value
    for use in (
        lambda f: FlowBuilder(given), lambda f: FlowBuilder(lin(), entry=given), lambda f: f.through(given),
        lambda f: f.through(lin(), name=given), lambda f: f.fork(given), lambda f: f.also(given),
        lambda f: f.also_with(given, lin()), lambda f: f.split(given, given).merge(), lambda f: f.tag(given),
        lambda f: f.split(lin(), lin(), names=given).merge(), lambda f: f.split(lin(), lin()).merge(given),
        lambda f: f.split(lin(), lin()).merge("concat", dim=given), lambda f: f.split(lin(), lin()).tag_group(given),
        lambda f: f.input(given), lambda f: f.input("a", default=given), lambda f: f.using(given),
        lambda f: f.using(a=given), lambda f: f.loop_body(given).for_n(given),
        lambda f: f.loop_body(lin()).while_cond(given, 2), lambda f: f.gate(given, lin(), given),
        lambda f: f.switch(lin(), given), lambda f: f.map(given).over(given), lambda f: f.map(lin()).slices(given),
        lambda f: f.label(given), lambda f: f.internal(given),
    ):  # fmt: skip
        flow = use(FlowBuilder(lin()))
        with contextlib.suppress(GraphBuildError):
            flow.build()
