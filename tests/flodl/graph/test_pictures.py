"""What pictures fold, open and colour; Graphviz where it is installed, our own rows where not."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from flodl.errors import GraphError
from flodl.graph import FlowBuilder, Heat
from flodl.graph.draw import dot, svg
from flodl.graph.drawing import drawing_of
from flodl.graph.heat import bytes_in_words
from flodl.graph.repeats import runs_of
from flodl.monitor import look_at


def linear(width=8):
    return nn.Linear(width, width)


def layers(count, tags=True, width=8):
    """Blocks of a residual connection and a norm, behind a first linear."""
    flow = FlowBuilder(linear(width)).tag("first")
    for i in range(count):
        flow.also(nn.Sequential(linear(width), nn.GELU())).through(nn.LayerNorm(width))
        if tags:
            flow.tag(f"layer_{i}")
    return flow


def tagged(tags):
    flow = FlowBuilder(nn.GELU())
    for tag in tags:
        flow.through(linear()).tag(tag)
    return flow


def head():
    return FlowBuilder(linear()).through(nn.GELU()).label("head").build()


FOLDS = {
    "a row of equals": (lambda: FlowBuilder(nn.GELU()).through(linear()).through(linear()).through(linear()), [(3, 1)]),
    "equals of another width": (lambda: FlowBuilder(linear()).through(nn.Linear(8, 4)).through(nn.Linear(4, 8)), []),
    "blocks of three nodes": (lambda: layers(4), [(4, 3)]),
    "blocks that read one value from outside": (
        lambda: FlowBuilder(Add()).tag("c").through(Add()).using("c").through(Add()).using("c"),
        [(2, 1)],
    ),
    "a middle one that is read later": (lambda: tagged("ab").through(Add()).using("a"), []),
    "all but the last, which are read later": (lambda: tagged("abc").through(Add()).using("b"), [(2, 1)]),
    "side by side is not in a row": (
        lambda: FlowBuilder(linear()).split([nn.GELU(), nn.GELU()]).merge("mean"),
        [],
    ),
    "memory of the call before": (
        lambda: FlowBuilder(Add()).using("m").tag("m").through(Add()).using("n").tag("n"),
        [],
    ),
}


class Add(nn.Module):
    def forward(self, x, a=None, b=None, c=None, m=None, n=None):
        return x + sum(v for v in (a, b, c, m, n) if v is not None)


@pytest.mark.parametrize("name", FOLDS)
def test_equal_neighbours_are_found(name):
    make, expected = FOLDS[name]
    graph = make().build()
    assert [(len(run.blocks), len(run.blocks[0])) for run in runs_of(graph)] == expected
    whole, folded = (drawing_of(graph, fold=fold, heat=None) for fold in (False, True))
    calls = sorted(node.name for node in graph.plan.calls)
    # No node is lost and none is drawn twice, folded or not.
    for drawing in (whole, folded):
        assert sorted(path for shape in drawing.closed() for path in shape.paths) == calls
    assert whole.plain
    assert folded.plain is not bool(expected)
    rows = {shape.index: shape.level for shape in folded.shapes}
    assert all(rows[line.source] < rows[line.target] for line in folded.lines if line.kind != "state")


def texts(picture):
    root = ElementTree.fromstring(picture.encode())
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_folded_layer_says_how_often_it_comes():
    graph = layers(12).through(linear()).build()
    shown = texts(svg(graph, layout="own"))
    assert "×12" in shown
    assert "#layer_0 … #layer_11" in shown
    assert shown.count("layernorm") == 1
    assert texts(svg(graph, layout="own", fold=False)).count("layernorm") == 12
    row = FlowBuilder(nn.GELU()).through(linear()).through(linear()).build()
    assert "linear  ×2" in texts(svg(row, layout="own"))
    stack = FlowBuilder(nn.Sequential(*(linear() for _ in range(5)))).build()
    assert "5 × linear" in texts(svg(stack, layout="own"))


def test_parts_are_opened_by_their_path():
    graph = layers(2).through(head(), name="head").through(linear(), name="end").build()
    closed, opened = (texts(svg(graph, layout="own", open=o)) for o in ((), ["head"]))
    assert "graph head" in closed
    assert "gelu" not in closed
    assert opened.count("gelu") == 1
    assert "gelu" in texts(svg(graph, layout="own", open=True))
    # A part of one of several layers takes all of them apart.
    inner = next(name for name, _ in graph.named_children() if name.startswith("sequential"))
    drawing = drawing_of(graph, open=[inner])
    (shape,) = [one for one in drawing.shapes if one.inside is not None]
    assert [one.paths for one in shape.inside.shapes] == [(f"{inner}.0",), (f"{inner}.1",)]
    with pytest.raises(GraphError, match="did you mean 'head'") as fault:
        graph.svg(open=["haed"], layout="own")
    assert fault.value.path == "haed"


@pytest.mark.parametrize("options", [{}, {"open": True}, {"fold": False}, {"open": ["head"]}], ids=str)
def test_lines_of_dot_join_what_is_there(options):
    graph = layers(3).through(head(), name="head").through(linear()).build()
    text = dot(graph, **options)
    nodes = set(re.findall(r"^ *(n[0-9a-z_]+) \[label=", text, re.M))
    groups = set(re.findall(r"subgraph (cluster_\w+) \{", text))
    lines = re.findall(r"^ *(n\w+) -> (n\w+)", text, re.M)
    assert lines
    assert {end for line in lines for end in line} <= nodes
    assert set(re.findall(r"l(?:head|tail)=(\w+)", text)) <= groups
    assert text.count("{") == text.count("}")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("options", [{}, {"open": True}, {"fold": False}], ids=str)
def test_graphviz_draws_it(options):
    graph = layers(3).through(head()).through(linear()).build()
    picture = svg(graph, layout="graphviz", **options)
    assert picture.startswith("<svg")
    assert "layernorm" in texts(picture)


def program(folder, body):
    place = folder / "dot"
    place.write_text(f"#!{sys.executable}\n{body}")
    place.chmod(place.stat().st_mode | stat.S_IXUSR)


@pytest.mark.skipif(os.name == "nt", reason="a script is no program there")
def test_graphviz_is_asked_where_it_is_installed(tmp_path, monkeypatch):
    graph = layers(2).build()
    own = svg(graph, layout="own")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert svg(graph) == own, "not installed"
    with pytest.raises(GraphError, match="not installed"):
        svg(graph, layout="graphviz")
    said = "import sys; text = sys.stdin.read(); assert sys.argv[1:] == ['-Tsvg'] and text.startswith('digraph {')\n"
    program(tmp_path, said + "print('<?xml?><!-- x -->\\n<svg>' + str(text.count('->')) + '</svg>')")
    assert svg(graph) == graph.svg(layout="graphviz") == f"<svg>{dot(graph).count('->')}</svg>\n"
    program(tmp_path, "import sys; sys.exit('no memory left')")
    assert svg(graph) == own, "it failed"
    with pytest.raises(GraphError, match="no memory left"):
        svg(graph, layout="graphviz")
    with pytest.raises(GraphError, match="auto, graphviz or own"):
        svg(graph, layout="dot")


# heat


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


def test_looking_changes_no_number_and_gradients_are_those_of_backward():
    torch.manual_seed(0)
    graph = layers(3).through(linear()).build()
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


@pytest.mark.parametrize(
    ("kind", "together", "word", "legend"),
    [
        ("time", 0.007, "7.00 ms", "Forward"),
        ("memory", 7 * 1024 * 1024, "7.0 MB", "Memory that stays until backward"),
        ("gradient", 5.0, "5", "Gradient norm"),
        ("sparsity", 0.7, "0.7", "sparsity"),
    ],
)
def test_figures_of_a_folded_box_are_those_of_all(kind, together, word, legend):
    graph = FlowBuilder(nn.GELU(), name="g").through(linear(), name="a").through(linear(), name="b").build()
    unit = {"time": 1e-3, "memory": 1024 * 1024, "gradient": 1.0, "sparsity": 0.1}[kind]
    heat = Heat(kind, {"g": 0.0, "a": 3 * unit, "b": 4 * unit})
    (box,) = [shape for shape in drawing_of(graph, heat=heat).shapes if len(shape.paths) == 2]
    assert box.value == pytest.approx(together)
    shown = texts(svg(graph, heat=heat, layout="own"))
    assert word in shown
    assert legend in shown
    for text in (svg(graph, heat=heat, layout="own"), dot(graph, heat=heat)):
        assert "#e74c3c" in text
        assert legend in text
    assert "heat" not in svg(graph, layout="own")


def test_one_picture_has_one_colour_a_box():
    graph = layers(1).build()
    graph.observe.enable_profiling()
    graph(torch.randn(2, 8))
    assert "Forward: " in graph.svg(profiled=True, layout="own")
    with pytest.raises(GraphError, match="one of them"):
        graph.svg(profiled=True, heat=Heat("memory", {}), layout="own")


def test_bytes_in_words():
    assert [bytes_in_words(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KB",
        "3.0 MB",
        "5.0 GB",
    ]
