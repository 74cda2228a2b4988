"""Every form a chain can take, computed from one table: it runs, trains, copies, pickles, compiles and exports."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flodl import ArgmaxSelector, FixedSelector, FlowBuilder, Graph, Reshape, SigmoidRouter, SoftmaxRouter, StateAdd
from flodl.errors import GraphError
from flodl.graph import GaussianBlur, LearnedHalt, ThresholdHalt

WIDTH = 8


def linear(out: int = WIDTH, inp: int = WIDTH) -> nn.Linear:
    return nn.Linear(inp, out)


class Blend(nn.Module):
    """Two references, one of them optional."""

    def forward(self, x: Tensor, *, ctx: Tensor, extra: Tensor | None = None) -> Tensor:
        x = x * torch.sigmoid(ctx)
        return x if extra is None else x + extra


def double(x: Tensor) -> Tensor:
    return x * 2


def weighted(a: Tensor, b: Tensor, *, by: Tensor) -> Tensor:
    return a * by + b


def block() -> Graph:
    return FlowBuilder(linear()).through(nn.GELU()).also(linear(), name="mix").build()


def inner() -> Graph:
    return (
        FlowBuilder(linear()).input("ctx").through(Blend(), name="blend").using("ctx").tag("t").label("inner").build()
    )


@dataclass(frozen=True)
class Form:
    """A chain, its inputs, and the expected result."""

    name: str
    make: Callable[[], FlowBuilder]
    shape: tuple[int, ...]
    names: tuple[str, ...]
    named: tuple[str, ...] = ()
    static: bool = True
    exports: bool = True


FORMS = [
    Form("through", lambda: FlowBuilder(linear()).through(nn.ReLU()).through(linear(3)), (4, 3), ("linear_1", "relu_2", "linear_3")),
    Form("named", lambda: FlowBuilder(linear(), name="a").through(linear()).tag("b"), (4, 8), ("a", "b")),
    Form("fork", lambda: FlowBuilder(linear()).fork(linear()).tag("side").through(Blend()).using(ctx="side"), (4, 8), ("linear_1", "side", "blend_3")),
    Form("also", lambda: FlowBuilder(linear()).also(linear()).tag("sum").through(linear()), (4, 8), ("linear_1", "linear_2", "linear_4")),
    Form("also_with", lambda: FlowBuilder(linear()).also_with(linear(5), linear(5), name="m", skip_name="s"), (4, 5), ("linear_1", "s", "m")),
    Form("split add", lambda: FlowBuilder(linear()).split(linear(), linear(), linear()).merge(), (4, 8), ("linear_1", "linear_2", "linear_3", "linear_4")),
    Form("split mean", lambda: FlowBuilder().split([linear(), linear()]).tag_group("h").merge("mean"), (4, 8), ("h_0", "h_1")),
    Form("split names", lambda: FlowBuilder().split([linear(), linear()], names=["p", "q"]).merge("mean"), (4, 8), ("p", "q")),
    Form("input", lambda: FlowBuilder(linear()).input("ctx").through(Blend()).using("ctx"), (4, 8), ("linear_1", "blend_3"), ("ctx",)),
    Form("split concat", lambda: FlowBuilder(linear()).split(linear(3), linear(5)).merge("concat"), (4, 8), ("linear_1", "linear_2", "linear_3")),
    Form("concat rows", lambda: FlowBuilder(linear()).split(linear(), torch.tanh).merge("concat", dim=0).tag("c"), (8, 8), ("linear_1", "linear_2", "tanh_3")),
    Form("merge by a function", lambda: FlowBuilder(linear()).split(linear(), linear()).merge(torch.maximum).tag("m"), (4, 8), ("linear_1", "linear_2", "linear_3", "m")),
    Form("merge by a module", lambda: FlowBuilder(linear()).split(linear(), linear()).merge(nn.Bilinear(WIDTH, WIDTH, 3), name="b"), (4, 3), ("linear_1", "linear_2", "linear_3", "b")),
    Form("merge with a reference", lambda: FlowBuilder(linear()).tag("a").split(linear(), linear()).merge(weighted).using(by="a"), (4, 8), ("a", "linear_2", "linear_3", "weighted_4")),
    Form("functions", lambda: FlowBuilder(linear()).through(nn.functional.gelu).also(partial(torch.mul, other=0.5)).through(double, name="d"), (4, 8), ("linear_1", "gelu_2", "mul_3", "d")),
    Form("inputs", lambda: FlowBuilder(linear()).through(Blend()).using("ctx", extra="more").input("ctx", "more"), (4, 8), ("linear_1", "blend_2"), ("ctx", "more")),
    Form("optional", lambda: FlowBuilder(linear()).input("ctx").input("extra", default=None).through(Blend()).using("ctx", "extra"), (4, 8), ("linear_1", "blend_4"), ("ctx",)),
    Form("nested", lambda: FlowBuilder(linear()).through(block()).also(block(), name="b"), (4, 8), ("linear_1", "graph_2", "b")),
    Form("nested input", lambda: FlowBuilder(linear()).input("ctx").through(inner(), name="into").using("ctx").through(linear()), (4, 8), ("linear_1", "into", "linear_4"), ("ctx",)),
    Form("memory", lambda: FlowBuilder(linear()).through(StateAdd()).using("m").tag("m").through(linear()), (4, 8), ("linear_1", "m", "linear_4"), exports=False),
    Form("for", lambda: FlowBuilder(linear()).loop_body(linear()).for_n(3), (4, 8), ("linear_1", "loop_2")),
    Form("for graph", lambda: FlowBuilder(linear()).loop_body(block()).for_n(2).tag("l"), (4, 8), ("linear_1", "l")),
    Form("for refs", lambda: FlowBuilder(linear()).tag("a").loop_body(inner(), name="l").for_n(2).using(ctx="a"), (4, 8), ("a", "l")),
    Form("while", lambda: FlowBuilder(linear()).loop_body(linear()).while_cond(ThresholdHalt(100.0), 3), (4, 8), ("linear_1", "loop_2"), static=False, exports=False),
    Form("until", lambda: FlowBuilder(linear()).loop_body(linear()).until_cond(LearnedHalt(WIDTH), 3), (4, 8), ("linear_1", "loop_2"), static=False, exports=False),
    Form("gate", lambda: FlowBuilder(linear()).tag("a").gate(SoftmaxRouter(WIDTH, 2), linear(), block()).using("a"), (4, 8), ("a", "gate_2")),
    Form("sigmoid gate", lambda: FlowBuilder(linear()).gate(SigmoidRouter(WIDTH, 3), [linear() for _ in range(3)], name="g"), (4, 8), ("linear_1", "g")),
    Form("switch", lambda: FlowBuilder(linear()).tag("a").switch(ArgmaxSelector(WIDTH, 2), linear(), linear()).using("a"), (4, 8), ("a", "switch_2"), static=False, exports=False),
    Form("fixed switch", lambda: FlowBuilder(linear()).switch(FixedSelector(1), [linear(), linear()]), (4, 8), ("linear_1", "switch_2"), static=False, exports=False),
    Form("map each", lambda: FlowBuilder(linear()).map(linear()).each(), (4, 8), ("linear_1", "map_2")),
    Form("map batched", lambda: FlowBuilder(linear()).map(linear(), name="rows").batched().each(), (4, 8), ("linear_1", "rows")),
    Form("map over", lambda: FlowBuilder(linear()).tag("a").through(linear(2)).map(linear(3)).over("a"), (4, 3), ("a", "linear_2", "map_3")),
    Form("map slices", lambda: FlowBuilder(linear()).map(linear(5, 2)).slices(4), (4, 20), ("linear_1", "map_2")),
    Form("reshape", lambda: FlowBuilder(linear()).through(Reshape(-1, 2)).through(Reshape([4, 8])), (4, 8), ("linear_1", "reshape_2", "reshape_3")),
]  # fmt: skip


def made(form: Form) -> tuple[Graph, Tensor, dict[str, Tensor]]:
    torch.manual_seed(3)
    graph = form.make().build()
    return graph, torch.randn(4, WIDTH), {name: torch.randn(4, WIDTH) for name in form.named}


def same(a: Graph, b: Graph, x: Tensor, named: dict[str, Tensor]) -> bool:
    a.reset_state()
    b.reset_state()
    return torch.equal(a(x, **named), b(x, **named))


def quiet(test: Callable[..., None]) -> Callable[..., None]:
    """Ignore warnings of the compiler, which reads .grad of its inputs and uses torch.jit."""
    for text in ("The .grad attribute of a Tensor that is not a leaf", ".*torch.jit.*"):
        test = pytest.mark.filterwarnings(f"ignore:{text}")(test)
    return test


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


def test_shape_and_names(form: Form) -> None:
    graph, x, named = made(form)
    assert tuple(graph(x, **named).shape) == form.shape
    assert tuple(name for name, _ in graph.named_children()) == form.names
    assert {key.split(".")[0] for key in graph.state_dict()} <= set(form.names)


def test_positional_equals_named(form: Form) -> None:
    graph, x, named = made(form)
    by_name = graph(x, **named)
    graph.reset_state()
    assert torch.equal(graph(x, *named.values()), by_name)


def test_gradients_reach_the_first_module(form: Form) -> None:
    graph, x, named = made(form)
    x.requires_grad_()
    graph(x, **named).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    used = [p for p in graph.parameters() if p.grad is not None]
    assert used


def test_copies(form: Form) -> None:
    graph, x, named = made(form)
    graph(x, **named)
    clone = copy.deepcopy(graph)
    assert same(graph, clone, x, named)
    assert not {id(p) for p in graph.parameters()} & {id(p) for p in clone.parameters()}
    with torch.no_grad():
        for p in clone.parameters():
            p.add_(1)
    assert not same(graph, clone, x, named)
    again = pickle.loads(pickle.dumps(graph))
    assert isinstance(again, Graph)
    assert same(graph, again, x, named)
    assert same(graph, copy.copy(graph), x, named)


def test_state_dict_round_trip(form: Form) -> None:
    graph, x, named = made(form)
    other = form.make().build()
    assert not same(graph, other, x, named)
    other.load_state_dict(graph.state_dict())
    assert same(graph, other, x, named)
    assert other.structural_hash() == graph.structural_hash()


@quiet
# The second takes the way of the first, and one step more.
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_compiles(form: Form, backend: str) -> None:
    torch.compiler.reset()
    graph, x, named = made(form)
    expected = graph(x, **named)
    graph.reset_state()
    compiled = torch.compile(graph, backend=backend, fullgraph=form.static)
    torch.testing.assert_close(compiled(x, **named), expected)


def test_exports(form: Form) -> None:
    graph, x, named = made(form)
    if not form.exports:
        pytest.skip("decides on the host, or keeps values between calls")
    program = torch.export.export(graph, (x,), named)
    torch.testing.assert_close(program.module()(x, **named), graph(x, **named))
    assert set(program.state_dict) == set(graph.state_dict())


@quiet
@pytest.mark.slow
def test_inductor_compiles_a_nested_graph_with_inputs() -> None:
    graph, x, named = made(next(f for f in FORMS if f.name == "nested input"))
    torch.testing.assert_close(torch.compile(graph, fullgraph=True)(x, **named), graph(x, **named))


def test_moves_and_casts(form: Form) -> None:
    graph, x, named = made(form)
    graph.double()
    result = graph(x.double(), **{name: value.double() for name, value in named.items()})
    assert result.dtype == torch.float64
    graph.eval()
    assert not any(m.training for m in graph.modules())


def test_values_that_are_no_tensors_pass_through() -> None:
    record: dict[str, Any] = {"rows": 3}
    seen: list[Any] = []

    class Reads(nn.Module):
        def forward(self, x: Any, layout: Any) -> Any:
            seen.append(layout)
            return x, layout

    graph = FlowBuilder(Reads(), entry="input_ids").input("layout").using("layout").build()
    assert graph("text", layout=record) == ("text", record)
    assert graph(input_ids="text", layout=record)[1] is record
    assert all(value is record for value in seen)


def test_gaussian_blur_is_a_convolution_with_a_normalised_gaussian() -> None:
    blur = GaussianBlur(1.5)
    assert blur.kernel_size == 11
    flat = torch.full((2, 3, 12, 13), 0.7)
    assert torch.allclose(blur(flat), flat)
    point = torch.zeros(1, 1, 25, 25)
    point[..., 12, 12] = 1
    spread = blur(point)[0, 0]
    assert spread.sum().item() == pytest.approx(1)
    ratio = (spread[12, 13] / spread[12, 12]).item()
    assert ratio == pytest.approx(math.exp(-0.5 / 1.5**2))
    assert torch.allclose(spread, spread.T)
    assert not blur.state_dict(), "a checkpoint does not contain the kernel"
    for wrong in ((0.0, None), (1.0, 4)):
        with pytest.raises(GraphError):
            GaussianBlur(*wrong)
