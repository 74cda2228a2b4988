"""Pictures of graphs: boxes, lines, folded and open parts, and colours of measurements."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from flodl.errors import GraphError
from flodl.graph import FlowBuilder, Heat, SoftmaxRouter, StateAdd, dot, svg
from flodl.monitor import look_at

SVG = "{http://www.w3.org/2000/svg}"


def linear(width=8):
    return nn.Linear(width, width)


def head():
    return FlowBuilder(linear()).through(nn.GELU()).label("head").build()


class Add(nn.Module):
    def forward(self, x, a=None, b=None, c=None, m=None, n=None):
        return x + sum(v for v in (a, b, c, m, n) if v is not None)


@pytest.fixture
def graph():
    child = FlowBuilder(nn.Linear(4, 4)).label("child").build()
    return (
        FlowBuilder(nn.Linear(2, 4))
        .tag("first")
        .input("ctx")
        .split([nn.Linear(4, 4), nn.Linear(4, 4)])
        .tag_group("h")
        .merge("mean")
        .also(nn.LayerNorm(4))
        .through(child)
        .through(nn.GELU())
        .through(StateAdd())
        .using("memory")
        .tag("memory")
        .gate(SoftmaxRouter(4, 2), [nn.Linear(4, 4), nn.Linear(4, 4)])
        .using(ref="first")
        .loop_body(nn.Linear(4, 4))
        .for_n(2)
        .map(nn.Linear(2, 2))
        .slices(2)
        .through(nn.Linear(4, 300))
        .tag("out")
        .build()
    )


def boxes_of(text: str) -> dict[str, tuple[str, str]]:
    """Return shape and fill of the boxes in DOT text by label."""
    found = re.findall(r'^ *n\w+ \[label="((?:[^"\\]|\\.)*)", shape=(\w+), fillcolor="(#\w+)"\];$', text, re.M)
    return {label: (shape, fill) for label, shape, fill in found}


def texts(picture: str) -> list[str | None]:
    root = ElementTree.fromstring(picture.encode())
    return [element.text for element in root.iter(f"{SVG}text")]


def test_every_kind_has_its_shape_and_colour(graph):
    found = {label.split("\\n")[0].split(" ")[0]: style for label, style in boxes_of(graph.dot()).items()}
    expected = {
        "input": ("invhouse", "#aed6f1"),
        "ctx": ("invhouse", "#aed6f1"),
        "merge": ("circle", "#d5dbdb"),
        "add": ("circle", "#d5dbdb"),
        "layernorm": ("box", "#d5f5e3"),
        "gelu": ("ellipse", "#fdebd0"),
        "state_read_memory": ("diamond", "#f9e79f"),
        "gate": ("diamond", "#f5cba7"),
        "loop": ("box3d", "#d7bde2"),
        "map": ("parallelogram", "#a9cce3"),
        "graph": ("box", "#eaecee"),
    }
    assert {kind: found[kind] for kind in expected} == expected
    labels = boxes_of(graph.dot())
    assert labels["linear\\n#out\\n[1.5K params]"][0] == "house"
    assert "graph child\\n[20 params]" in labels


def test_every_line_joins_boxes_that_are_drawn(graph):
    text = graph.dot()
    drawn = set(re.findall(r"^  (n\d+) \[", text, re.M))
    lines = re.findall(r"^  (n\d+) -> (n\d+)(.*);$", text, re.M)
    assert {end for source, target, _ in lines for end in (source, target)} <= drawn
    plan = graph.plan
    assert len(lines) == sum(len(n.inputs) + len(n.references) for n in plan.nodes) + 1
    (state,) = [(source, target) for source, target, style in lines if "dotted" in style]
    reader = next(n.index for n in plan.nodes if n.kind == "state_read")
    assert state == (f"n{plan.tags['memory']}", f"n{reader}"), "from the writer to the reader"
    assert {re.search(r'label="(\w+)"', style).group(1) for *_, style in lines if "dashed" in style} == {
        "memory",
        "first",
    }


def test_the_svg_shows_every_node_and_line_within_its_edges(graph):
    picture = graph.svg()
    for word in ("input", "ctx", "#memory", "#h_0", "#h_1", "graph child", "[1.5K params]"):
        assert word in texts(picture)
    root = ElementTree.fromstring(picture)
    paths = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("marker-end")]
    assert len(paths) == sum(len(n.inputs) + len(n.references) for n in graph.plan.nodes) + 1
    width, height = float(root.get("width")), float(root.get("height")) - 30
    boxes = [[float(rect.get(key)) for key in ("x", "y", "width", "height")] for rect in root.iter(f"{SVG}rect")]
    for i, (x, y, w, h) in enumerate(boxes):
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        for x2, y2, w2, h2 in boxes[:i]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y, "two boxes overlap"
    lanes = [float(lane) for path in paths for lane in re.findall(r"H([\d.]+)V", path)]
    assert len(set(lanes)) == len(lanes) > 2
    assert min(lanes) > max(x + w for x, _, w, _ in boxes), "lines that skip rows cross no box"


HOSTILE = ['a"b', "back\\slash", "</text><script>alert(1)</script>", "&amp;", "new\nline", "\x1b[2J", "\ud800", "]]>"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_escaped(name):
    class Odd(nn.Identity):
        label = name

    odd = FlowBuilder(Odd()).build()
    root = ElementTree.fromstring(odd.svg().encode())
    assert all(element.tag != f"{SVG}script" for element in root.iter())
    written = odd.dot()
    written.encode()
    assert len(boxes_of(written)) == len(odd.plan.nodes)
    assert not set(written) & {"\x1b", "\ud800"}


FOLDS = {
    "a row of equals": (lambda: FlowBuilder(nn.GELU()).through(linear()).through(linear()).through(linear()), [3]),
    "equals of another width": (lambda: FlowBuilder(linear()).through(nn.Linear(8, 4)).through(nn.Linear(4, 8)), []),
    "equals that read one value": (
        lambda: FlowBuilder(Add()).input("c").through(linear()).through(Add()).using("c").through(Add()).using("c"),
        [2],
    ),
    "equals that read different values": (
        lambda: (
            FlowBuilder(Add()).input("a", "b").through(linear()).through(Add()).using("a").through(Add()).using("b")
        ),
        [],
    ),
    "a middle one that is read later": (
        lambda: FlowBuilder(nn.GELU()).through(linear()).tag("a").through(linear()).tag("b").through(Add()).using("a"),
        [],
    ),
    "side by side is not in a row": (lambda: FlowBuilder(linear()).split(linear(), linear()).merge("mean"), []),
    "memory of the call before": (
        lambda: FlowBuilder(Add()).using("m").tag("m").through(Add()).using("n").tag("n"),
        [],
    ),
}


@pytest.mark.parametrize("name", FOLDS)
def test_equal_neighbours_are_one_box(name):
    make, expected = FOLDS[name]
    graph = make().build()
    found = [int(count) for count in re.findall(r'label="\w+  ×(\d+)', graph.dot())]
    assert found == expected
    assert "×" not in graph.dot(fold=False)
    assert graph.dot(fold=False).count("fillcolor=") == len(graph.plan.nodes)
    shown = "".join(re.findall(r"<title>(.*?)</title>", graph.svg()))
    assert all(node.name in shown for node in graph.plan.calls)


def test_a_folded_layer_shows_how_often_it_comes():
    flow = FlowBuilder(nn.GELU())
    for i in range(12):
        flow.through(nn.Sequential(linear(), nn.GELU())).tag(f"layer_{i}")
    shown = texts(flow.build().svg())
    assert "sequential  ×12" in shown
    assert "#layer_0 … #layer_11" in shown


def test_modules_are_opened_by_their_path():
    graph = FlowBuilder(linear()).through(nn.Sequential(linear(), linear(), nn.GELU()), name="body")
    graph = graph.through(head(), name="head").build()
    assert "graph head" in texts(graph.svg())
    assert "gelu" not in texts(graph.svg())
    assert texts(graph.svg(open=["head"])).count("gelu") == 1
    assert texts(graph.svg(open=True)).count("gelu") == 1, "sub-graphs only"
    assert texts(graph.svg(open=["head", "body"])).count("gelu") == 2
    assert "linear  ×2" in texts(graph.svg(open="body"))
    with pytest.raises(GraphError) as fault:
        graph.svg(open=["haed"])
    assert fault.value.path == "haed"
    assert fault.value.known == ["body", "head"]


@pytest.mark.parametrize("options", [{}, {"open": True}, {"fold": False}, {"open": ["head"]}], ids=str)
def test_lines_of_dot_join_existing_boxes(options):
    graph = FlowBuilder(linear()).through(head(), name="head").through(linear()).build()
    text = graph.dot(**options)
    nodes = set(re.findall(r"^ *(n[0-9a-z_]+) \[label=", text, re.M))
    groups = set(re.findall(r"subgraph (cluster_\w+) \{", text))
    lines = re.findall(r"^ *(n\w+) -> (n\w+)", text, re.M)
    assert lines
    assert {end for line in lines for end in line} <= nodes
    assert set(re.findall(r"l(?:head|tail)=(\w+)", text)) <= groups
    assert text.count("{") == text.count("}")


def test_any_module_has_a_picture():
    model = nn.Sequential(linear(), nn.GELU())
    assert {"linear", "gelu"} <= set(texts(svg(model)))
    assert "n0 -> n1;" in dot(model)
    assert "->" not in dot(nn.ModuleDict({"a": linear(), "b": nn.GELU()})), "the order is unknown"
    assert svg(linear()).startswith("<svg")


def test_a_graph_draws_itself(graph, tmp_path):
    assert graph.dot() == dot(graph)
    assert graph.svg(tmp_path / "g.svg") == svg(graph) == (tmp_path / "g.svg").read_text(encoding="utf-8")
    assert graph.dot(profiled=True) == graph.dot(), "nothing was profiled"
    graph.observe.enable_profiling()
    graph(torch.randn(3, 2), ctx=torch.randn(3, 4))
    assert "Forward: " in graph.dot(profiled=True)
    assert "Forward: " in graph.svg(profiled=True)
    assert "Forward: " not in graph.svg()
    with pytest.raises(GraphError):
        graph.svg(profiled=True, heat=Heat("memory", {}))


# heat


@pytest.mark.parametrize(
    ("kind", "unit", "total", "legend"),
    [
        ("time", 1e-3, "7.00 ms", "Forward"),
        ("time", 1e-6, "7 µs", "Forward"),
        ("memory", 1024 * 1024, "7.0 MB", "Memory kept until backward"),
        ("memory", 1, "7 B", "Memory kept until backward"),
        ("memory", 1 << 30, "7.0 GB", "Memory kept until backward"),
        ("gradient", 1.0, "5", "Gradient norm"),
        ("sparsity", 0.1, "0.7", "sparsity"),
    ],
)
def test_measurements_colour_the_boxes_and_add_up_in_folded_ones(kind, unit, total, legend):
    graph = FlowBuilder(nn.GELU(), name="g").through(linear(), name="a").through(linear(), name="b").build()
    heat = Heat(kind, {"g": 0.0, "a": 3 * unit, "b": 4 * unit})
    shown = texts(graph.svg(heat=heat))
    assert total in shown
    (label, (_, fill)) = next(box for box in boxes_of(graph.dot(heat=heat)).items() if "×2" in box[0])
    assert total in label
    assert fill == "#e74c3c"
    for text in (graph.svg(heat=heat), graph.dot(heat=heat)):
        assert legend in text
        assert all(colour in text for colour in ("#27ae60", "#f39c12", "#e74c3c"))
    assert "legend" not in graph.dot()


def test_memory_is_what_autograd_keeps():
    graph = FlowBuilder(nn.Linear(8, 16), name="wide").through(nn.GELU(), name="act").through(
        nn.Sequential(nn.Linear(16, 4), nn.Identity()), name="end"
    ).build()  # fmt: skip
    x = torch.randn(32, 8)
    before = [*graph._forward_hooks, *graph.wide._forward_hooks]
    with look_at(graph) as look:
        graph(x).sum().backward()
    # A product keeps its input, and so does a GELU; an identity nothing. Numbers are float32.
    found = {"wide": 32 * 8 * 4, "act": 32 * 16 * 4, "end": 32 * 16 * 4, "end.0": 32 * 16 * 4, "end.1": 0}
    assert look.memory.values == found
    assert [*graph._forward_hooks, *graph.wide._forward_hooks] == before
    with look_at(graph) as look, torch.no_grad():
        graph(x)
    assert set(look.memory.values.values()) == {0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_memory_of_a_device_is_what_its_allocator_counts():
    graph = FlowBuilder(nn.Linear(1024, 1024), name="a").through(nn.GELU(), name="b").build().cuda()
    x = torch.randn(1024, 1024, device="cuda")
    graph(x).sum().backward()  # workspaces of kernels are taken once
    graph.zero_grad(set_to_none=True)
    with look_at(graph) as look:
        graph(x).sum().backward()
    # Either output stays; numbers are float32.
    assert look.memory.values == {"a": 4 << 20, "b": 4 << 20}
    assert all(seconds > 0 for seconds in look.time.values.values())
    assert set(look.gradient.values) == {"a"}


def test_measuring_changes_no_number_and_gradients_are_those_of_backward():
    torch.manual_seed(0)
    graph = FlowBuilder(linear()).also(nn.Sequential(linear(), nn.GELU())).through(nn.LayerNorm(8)).build()
    x = torch.randn(4, 8)
    graph(x).square().sum().backward()
    plain = {name: p.grad.clone() for name, p in graph.named_parameters()}
    graph.zero_grad()
    with look_at(graph) as look:
        graph(x).square().sum().backward()
    for name, p in graph.named_parameters():
        assert torch.equal(p.grad, plain[name]), name
    for path, norm in look.gradient.values.items():
        squares = [p.grad.double().square().sum() for p in graph.get_submodule(path).parameters()]
        assert norm == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-3), path
    assert set(look.time.values) == {path for path, _ in graph.named_modules() if path}
    assert all(seconds > 0 for seconds in look.time.values.values())
