"""Drawings show every node and line, and any text is safe in them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flodl.graph import FlowBuilder, SoftmaxRouter, StateAdd, draw, drawing
from flodl.graph.layers import Box, lay_out
from flodl.monitor import LevelTime, NodeTime, Profile

SVG = "{http://www.w3.org/2000/svg}"


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


def nodes_of(text: str) -> dict[str, dict[str, str]]:
    found = re.findall(r'^    (n\d+) \[label="((?:[^"\\]|\\.)*)", shape=(\w+), fillcolor="(#\w+)"\];$', text, re.M)
    return {label: {"id": name, "shape": shape, "fill": fill} for name, label, shape, fill in found}


def test_every_kind_has_its_shape_and_colour(graph):
    found = {label.split("\\n")[0].split(" ")[0]: v for label, v in nodes_of(draw.dot(graph)).items()}
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
    assert {k: (found[k]["shape"], found[k]["fill"]) for k in expected} == expected
    texts = nodes_of(draw.dot(graph))
    assert texts["linear\\n#out\\n[1.5K params]"]["shape"] == "house"
    assert "graph child\\n[20 params]" in texts


def test_a_node_that_is_both_ends_is_a_double_octagon(graph):
    look = drawing._look(graph.plan.nodes[0], None, True, True)
    assert draw._LOOKS[look] == ("doubleoctagon", "#a9dfbf")


def test_every_line_joins_nodes_that_are_drawn(graph):
    text = draw.dot(graph)
    drawn = {v["id"] for v in nodes_of(text).values()} | set(re.findall(r"^    (n\d+) \[", text, re.M))
    lines = re.findall(r"^  (n\d+) -> (n\d+)(.*);$", text, re.M)
    assert {end for a, b, _ in lines for end in (a, b)} <= drawn
    plan = graph.plan
    assert len(lines) == sum(len(n.inputs) + len(n.references) for n in plan.nodes) + 1
    (state,) = [(a, b) for a, b, style in lines if "dotted" in style]
    reader = next(n.index for n in plan.nodes if n.kind == "state_read")
    assert state == (f"n{plan.tags['memory']}", f"n{reader}"), "from the writer to the reader"
    assert {re.search(r'label="(\w+)"', s).group(1) for _, _, s in lines if "dashed" in s} == {"memory", "first"}


def test_levels_are_clusters(graph):
    text = draw.dot(graph)
    assert [int(n) for n in re.findall(r"subgraph cluster_(\d+)", text)] == list(range(len(graph.plan.levels)))


def test_the_heat_map_goes_from_green_to_red(graph):
    calls = graph.plan.calls
    nodes = tuple(NodeTime(n.id, n.name, n.tags, n.level, s) for n, s in zip(calls, [1e-3, 0, 5e-4], strict=False))
    profile = Profile(2e-3, nodes, (LevelTime(nodes[0].level, 1.5e-3, 1e-3, 2),))
    for text, box, legend in (
        (draw.dot(graph, profile), ' fillcolor="{}"];', ' color="{}"'),
        (draw.svg(graph, profile, layout="own"), ' fill="{}"', ' stop-color="{}"'),
    ):
        for colour in ("#e74c3c", "#27ae60", "#f39c12"):
            assert text.count(legend.format(colour)) == 1
            assert text.count(box.format(colour)) == 1 + text.count("legend_0")
        assert "Forward: 2.00 ms" in text
        assert "500 µs" in text
        assert "x1.5" in text


def test_a_graph_draws_itself(graph, tmp_path):
    assert graph.dot() == draw.dot(graph)
    assert (
        graph.svg(tmp_path / "g.svg", layout="own")
        == draw.svg(graph, layout="own")
        == (tmp_path / "g.svg").read_text(encoding="utf-8")
    )
    assert graph.dot(profiled=True) == graph.dot(), "nothing was profiled"
    graph.observe.enable_profiling()
    graph(torch.randn(3, 2), ctx=torch.randn(3, 4))
    assert "Forward: " in graph.dot(profiled=True)
    assert "Forward: " not in graph.svg()


def test_a_measured_profile_is_drawn(graph):
    graph.observe.enable_profiling()
    graph(torch.randn(3, 2), ctx=torch.randn(3, 4))
    assert "Forward: " in draw.svg(graph, graph.observe.profile(), layout="own")


def test_the_svg_shows_every_node_and_line(graph):
    root = ElementTree.fromstring(draw.svg(graph, layout="own"))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for word in ("input", "ctx", "#memory", "#h_0", "#h_1", "graph child", "[1.5K params]", "level 0"):
        assert word in texts
    paths = [p for p in root.iter(f"{SVG}path") if p.get("marker-end")]
    plan = graph.plan
    assert len(paths) == sum(len(n.inputs) + len(n.references) for n in plan.nodes) + 1
    width, height = float(root.get("width")), float(root.get("height"))
    for polygon in root.iter(f"{SVG}polygon"):
        for x, y in (point.split(",") for point in polygon.get("points").split()):
            assert -80 <= float(x) <= width - 80
            assert -30 <= float(y) <= height - 30


HOSTILE = [
    'a"b',
    "back\\slash",
    "</text><script>alert(1)</script>",
    "&amp;",
    "new\nline",
    "\x1b[2J",
    "\ud800",
    "\\n",
    "]]>",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_escaped(name):
    class Odd(nn.Identity):
        label = name

    graph = FlowBuilder(Odd()).build()
    text = draw.svg(graph, layout="own")
    root = ElementTree.fromstring(text.encode())
    assert "<script" not in text
    assert all(element.tag != f"{SVG}script" for element in root.iter())
    written = draw.dot(graph)
    written.encode()
    labels = re.findall(r'label="((?:[^"\\\n]|\\.)*)", shape=', written)
    assert len(labels) == len(graph.plan.nodes)
    assert not set(written) & {"\x1b", "\ud800"}


@st.composite
def drawings(draw_: st.DrawFn):
    levels = draw_(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    size = st.floats(5, 200)
    boxes = {i: Box(level, draw_(size), draw_(size)) for i, level in enumerate(levels)}
    pairs = [(a, b) for a in boxes for b in boxes if boxes[a].level < boxes[b].level]
    return boxes, draw_(st.lists(st.sampled_from(pairs), max_size=14)) if pairs else []


@settings(max_examples=80, deadline=None)
@given(drawings())
def test_boxes_never_overlap_and_lines_go_down(drawing):
    boxes, lines = drawing
    layout = lay_out(boxes, lines)
    placed = list(layout.boxes.values())
    for i, a in enumerate(placed):
        assert a.x - a.width / 2 >= 0
        assert a.x + a.width / 2 <= layout.width
        assert a.y - a.height / 2 >= 0
        assert a.y + a.height / 2 <= layout.height
        for b in placed[:i]:
            apart_x = abs(a.x - b.x) >= (a.width + b.width) / 2 - 1e-6
            apart_y = abs(a.y - b.y) >= (a.height + b.height) / 2 - 1e-6
            assert apart_x or apart_y
    for source, target in lines:
        ys = [y for _, y in layout.route(source, target)]
        assert ys == sorted(ys)
        for x, y in layout.passes[source, target]:
            assert not any(abs(x - b.x) < b.width / 2 and abs(y - b.y) < b.height / 2 for b in placed)
