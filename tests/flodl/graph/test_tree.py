"""Graphs inside graphs: paths, freezing, checkpoints of parts, hashes, children that are replaced, values on request."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flodl import FlowBuilder, Graph, GraphError, GraphPathError, StateAdd
from flodl.errors import CheckpointError
from flodl.graph.tree import PathKind, parts_at

W = 4


def lin() -> nn.Linear:
    return nn.Linear(W, W)


def leaf() -> Graph:
    return (
        FlowBuilder(lin(), name="first")
        .through(nn.BatchNorm1d(W))
        .tag("norm")
        .through(lin())
        .tag("_hidden")
        .through(lin())
        .tag("plain")
        .internal("plain")
        .label("leaf")
        .build()
    )


def middle() -> Graph:
    return FlowBuilder(leaf()).through(lin()).tag("mid").label("middle").build()


def tree() -> Graph:
    return (
        FlowBuilder(lin())
        .tag("head")
        .through(middle())
        .also(lin(), name="mix")
        .tag("sum")
        .input("extra", default=None)
        .label("root")
        .build()
    )


class Layers(nn.Module):
    """Numbered graphs, like the layers of an encoder."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for i in range(count):
            self.add_module(str(i), FlowBuilder(lin(), name="attention").through(lin(), name="up").build())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def encoder(count: int = 4) -> Graph:
    return FlowBuilder(lin(), name="embed").through(Layers(count), name="layers").label("encoder").build()


# paths


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("middle", PathKind.SUBGRAPH), ("middle.leaf", PathKind.SUBGRAPH), ("middle.leaf.norm", PathKind.TAG), ("head", PathKind.TAG),
        ("sum", PathKind.TAG), ("extra", PathKind.TAG), ("mix", PathKind.MODULE), ("middle.leaf.first", PathKind.MODULE),
        ("graph_2", PathKind.SUBGRAPH), ("graph_2.leaf.norm", PathKind.TAG),
    ],
)  # fmt: skip
def test_a_path_names(path: str, kind: PathKind) -> None:
    assert tree().validate_path(path) == kind


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", ("empty",)), ("middle.", ("empty",)), ("middle..leaf", ("empty",)), ("midle", ("'midle'", "'root'", "did you mean 'middle'")),
        ("middle.leaf.nrm", ("'nrm'", "'leaf'", "middle.leaf.nrm", "'norm'")), ("middle.leaf._hidden", ("internal", "'_hidden'")),
        ("middle.leaf.plain", ("internal",)), ("head.weight", ("'weight'", "Linear")), ("sum.x", ("without a module",)),
        ("middle.leaf._hidden.x", ("internal",)),
    ],
)  # fmt: skip
def test_an_invalid_path_names_its_failing_segment(path: str, words: tuple[str, ...]) -> None:
    with pytest.raises(GraphPathError) as caught:
        tree().validate_path(path)
    assert caught.value.path == path
    for word in words:
        assert word in str(caught.value)


def test_internal_tags_are_seen_by_their_owner() -> None:
    graph = leaf()
    assert graph.validate_path("_hidden") == graph.validate_path("plain") == PathKind.TAG


def test_a_label_comes_before_a_tag() -> None:
    graph = FlowBuilder(leaf()).tag("leaf").build()
    assert graph.validate_path("leaf") == PathKind.SUBGRAPH


def test_children_by_label() -> None:
    graph = tree()
    assert list(graph.tree_children()) == ["middle"]
    assert graph.subgraph("middle.leaf") is graph.tree_children()["middle"].tree_children()["leaf"]
    for path in ("head", "mix"):
        with pytest.raises(GraphPathError) as caught:
            graph.subgraph(path)
        assert caught.value.segment == path


def test_labelled_graphs_inside_loops_and_wrappers_are_children() -> None:
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = FlowBuilder(lin()).label("wrapped").build()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    graph = FlowBuilder(Wraps()).loop_body(leaf()).for_n(2).build()
    assert list(graph.tree_children()) == ["wrapped", "leaf"]
    assert graph.subgraph("wrapped") is graph.tree_children()["wrapped"]


# freezing


def test_freeze_and_thaw() -> None:
    graph = tree()
    graph.freeze("middle.leaf", "head")
    frozen = [name for name, p in graph.named_parameters() if not p.requires_grad]
    assert {name.split(".")[0] for name in frozen} == {"head", "graph_2"}
    assert graph.is_frozen("middle.leaf")
    assert not graph.is_frozen("middle")
    graph.thaw("middle.leaf.norm")
    assert not graph.is_frozen("middle.leaf")
    assert graph.is_frozen("middle.leaf.first")
    assert not graph.is_frozen("sum")
    assert not graph.is_frozen("extra")


def test_a_wrong_path_among_several_changes_nothing() -> None:
    graph = tree()
    with pytest.raises(GraphPathError):
        graph.freeze("head", "nowhere")
    with pytest.raises(GraphPathError, match=r"also\(module, name="):
        graph.freeze("head", "sum")
    assert all(p.requires_grad for p in graph.parameters())


def test_ranges_name_numbered_children() -> None:
    graph = encoder()
    graph.freeze("embed", "layers.0-2.attention", "layers.3")
    thawed = [name for name, p in graph.named_parameters() if p.requires_grad and name.endswith("weight")]
    assert thawed == ["layers.0.up.weight", "layers.1.up.weight", "layers.2.up.weight"]
    assert len(graph.parameters_at("layers.0-1", "layers.1-2")) == 3 * 4
    up = graph.layers.get_submodule("1.up")
    assert [id(p) for p in graph.parameters_at("layers.1-2.up")[:2]] == [id(up.weight), id(up.bias)]
    for path in ("layers.0-4", "layers.2-1", "layers.0-99999999999"):
        with pytest.raises(GraphPathError):
            graph.freeze(path)
    with pytest.raises(GraphPathError):
        graph.subgraph("layers.0-1")
    assert graph.subgraph("layers.2").label is None


def test_a_tag_group_stands_for_its_members() -> None:
    graph = FlowBuilder().split(lin(), lin()).tag_group("heads").merge().build()
    graph.freeze("heads")
    assert graph.is_frozen("heads_0")
    assert graph.is_frozen("heads_1")


def test_paths_lead_into_models_with_any_number_of_graphs() -> None:
    one = nn.Sequential(nn.Sequential(lin()), middle())
    assert [part.path for part in parts_at(one, "leaf.norm")] == ["leaf.norm"]
    assert parts_at(one, "0.0")[0].module is one[0][0]
    two = nn.ModuleDict({"a": leaf(), "b": encoder()})
    assert parts_at(two, "leaf.norm")[0].owner is two["a"]
    assert [part.path for part in parts_at(two, "encoder.layers.0-1")] == ["encoder.layers.0", "encoder.layers.1"]
    assert parts_at(two, "b.embed")[0].module is two["b"].embed
    with pytest.raises(GraphPathError):
        parts_at(nn.Sequential(lin()), "1")


def test_training_mode_at_a_path_keeps_running_statistics() -> None:
    graph = tree()
    graph.set_training_at("middle.leaf", False)
    norm = graph.subgraph("middle.leaf").norm
    before = norm.running_mean.clone()
    graph(torch.randn(8, W))
    assert torch.equal(norm.running_mean, before)
    assert graph.training
    graph.set_training_at("middle.leaf", True)
    graph(torch.randn(8, W))
    assert not torch.equal(norm.running_mean, before)


# files


@pytest.mark.parametrize("ending", ["safetensors", "fdl", "fdl.gz"])
def test_a_part_trained_alone_is_loaded_into_a_tree(tmp_path: Path, ending: str) -> None:
    alone, graph = leaf(), tree()
    file = tmp_path / f"leaf.{ending}"
    alone.set_source_config('{"a": 1}')
    alone.save_checkpoint(file)
    assert (tmp_path / "leaf.config.json").read_text() == '{"a": 1}'
    report = graph.load_subgraph_checkpoint("middle.leaf", file)
    assert not report.missing
    assert not report.skipped
    inside = graph.subgraph("middle.leaf").state_dict()
    assert all(torch.equal(inside[name], value) for name, value in alone.state_dict().items())
    with pytest.raises(CheckpointError, match=r"hash|structure"):
        graph.load_subgraph_checkpoint("middle", file)
    with pytest.raises(GraphPathError):
        graph.load_subgraph_checkpoint("head", file)


def test_a_checkpoint_contains_tied_weights_once(tmp_path: Path) -> None:
    shared = lin()
    graph = FlowBuilder(shared, name="a").through(shared, name="b").build()
    graph.save_checkpoint(tmp_path / "tied.safetensors")
    before = graph.a.weight.detach().clone()
    with torch.no_grad():
        graph.a.weight.zero_()
    assert not graph.load_checkpoint(tmp_path / "tied.safetensors").missing
    assert torch.equal(graph.b.weight, before)


# hashes and summaries


def test_the_hash_is_of_the_structure_alone() -> None:
    base = tree()
    digest = base.structural_hash()
    assert len(digest) == 64
    same = [
        tree(),
        tree().double(),
        copy.deepcopy(base),
        FlowBuilder(lin())
        .tag("head")
        .through(middle())
        .also(lin(), name="mix")
        .tag("sum")
        .input("extra", default=None)
        .label("other")
        .build(),
    ]
    assert {g.structural_hash() for g in same} == {digest}
    same[0].freeze("middle")
    assert same[0].structural_hash() == digest


def test_the_hash_tells_structures_apart() -> None:
    made = [
        FlowBuilder(lin()), FlowBuilder(nn.Linear(W, W, bias=False)), FlowBuilder(lin()).tag("a"), FlowBuilder(lin()).through(nn.ReLU()),
        FlowBuilder(lin()).through(nn.GELU()), FlowBuilder(lin()).input("a"), FlowBuilder(lin()).input("a", default=None), FlowBuilder(lin()).also(lin()),
        FlowBuilder(lin()).fork(lin()), FlowBuilder(lin()).through(lin()), FlowBuilder(lin()).through(leaf()), FlowBuilder(lin()).through(middle()),
        FlowBuilder(lin()).loop_body(lin()).for_n(2), FlowBuilder(lin()).loop_body(lin()).for_n(3), FlowBuilder().split(lin(), lin()).merge(),
        FlowBuilder().split(lin(), lin()).merge("mean"), FlowBuilder(lin()).map(lin()).each(), FlowBuilder(lin()).map(lin()).batched().each(),
        FlowBuilder(lin()).map(nn.Linear(2, 2)).slices(2), FlowBuilder(lin()).through(StateAdd()).using("m").tag("m"),
        FlowBuilder(lin()).tag("m").through(StateAdd()).using("m"), FlowBuilder(lin()).tag("m").through(StateAdd()).using(n="m"),
    ]  # fmt: skip
    hashes = [flow.build().structural_hash() for flow in made]
    assert len(set(hashes)) == len(hashes)


def test_summaries_count_elements() -> None:
    graph = tree()
    graph.freeze("middle.leaf")
    text = graph.tree_summary()
    assert [line.strip().split(" ")[0] for line in text.splitlines()] == ["root", "middle", "leaf"]
    assert graph.structural_hash()[:8] in text
    rows = {line.split()[0]: line.split() for line in graph.param_summary().splitlines()[1:]}
    total = sum(p.numel() for p in graph.parameters())
    frozen = sum(p.numel() for p in graph.parameters_at("middle.leaf"))
    assert rows["total"][1:4] == [str(total), str(total - frozen), str(frozen)]
    assert rows["(own)"][1:] == ["40", "40", "0", "trainable"]
    assert rows["middle"][-2:] == ["partly", "frozen"]


# children that are replaced


@pytest.mark.parametrize("how", ["attribute", "add_module", "table", "update", "set_submodule", "delete and add"])
def test_a_replaced_child_is_called_from_then_on(how: str) -> None:
    graph = FlowBuilder(lin(), name="a").through(lin(), name="b").build()
    x, new = torch.randn(2, W), lin()
    if how == "attribute":
        graph.a = new
    elif how == "add_module":
        graph.add_module("a", new)
    elif how == "table":
        graph._modules["a"] = new
    elif how == "update":
        graph._modules.update(a=new)
    elif how == "set_submodule":
        graph.set_submodule("a", new)
    else:
        del graph.a
        with pytest.raises(GraphError, match="'a' was removed"):
            graph(x)
        graph.a = new
    assert torch.equal(graph(x), graph.b(new(x)))
    clone = copy.deepcopy(graph)
    assert torch.equal(clone(x), graph(x))
    clone.b = nn.Identity()
    assert torch.equal(clone(x), new(x))
    assert not torch.equal(graph(x), new(x))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*quantize.*:UserWarning", "ignore:.*deprecated.*:UserWarning"
)
def test_dynamic_quantization_takes_effect() -> None:
    graph = encoder(2)
    x = torch.randn(2, W)
    small = torch.ao.quantization.quantize_dynamic(graph, {nn.Linear}, dtype=torch.qint8)
    calls: list[str] = []
    for name, module in small.named_modules():
        if "dynamic" in type(module).__module__:
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    y = small(x)
    assert calls == ["embed", "layers.0.attention", "layers.0.up", "layers.1.attention", "layers.1.up"]
    assert not torch.equal(y, graph(x))


def test_hooks_and_functional_calls_work() -> None:
    graph = encoder(1)
    x = torch.randn(2, W)
    seen: list[str] = []
    graph.embed.register_forward_hook(lambda *_: seen.append("embed"))
    zeros = {name: torch.zeros_like(p) for name, p in graph.named_parameters()}
    assert torch.equal(torch.func.functional_call(graph, zeros, (x,)), torch.zeros(2, W))
    assert seen == ["embed"]


def test_a_graph_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        graph = encoder(1)
        graph(torch.zeros(1, W))
        ref = weakref.ref(graph)
        del graph
        assert ref() is None
    finally:
        gc.enable()


def test_equal_graphs_share_one_compiled_function() -> None:
    assert type(leaf()).forward is type(leaf()).forward


# values on request


def test_outputs_come_from_here_and_from_below() -> None:
    graph = tree().eval()
    x = torch.randn(2, W)
    result, values = graph(x, outputs=["sum", "middle.leaf.norm", "mix", "middle.mid"])
    assert list(values) == ["sum", "middle.leaf.norm", "mix", "middle.mid"]
    assert torch.equal(result, graph(x))
    assert values["sum"] is result
    inner = graph.subgraph("middle.leaf")
    assert torch.equal(values["middle.leaf.norm"], inner.norm(inner.first(graph.head(x))))
    assert inner.tagged("norm") is None
    assert graph.tagged("sum") is None
    result_alone, nothing = graph(x, outputs=[])
    assert torch.equal(result_alone, result)
    assert nothing == {}
    with pytest.raises(GraphError, match="did you mean 'sum'"):
        graph(x, outputs=["summ"])
    with pytest.raises(GraphPathError):
        graph(x, outputs=["middle.leaf"])


def test_watched_values_are_kept_until_unwatched() -> None:
    graph = tree()
    x = torch.randn(2, W)
    assert graph.watch("sum", "head") is graph
    assert graph.tagged("sum") is None
    result = graph(x)
    assert graph.tagged("sum") is result
    graph.detach_state()
    assert not graph.tagged("sum").requires_grad
    _, values = graph(x, outputs=["mix"])
    assert list(values) == ["mix"]
    assert graph.tagged("sum").requires_grad
    graph.unwatch("sum")
    assert graph.tagged("sum") is None
    assert graph.watched == {"head"}
    graph.unwatch()
    assert graph.tagged("head") is None
    with pytest.raises(GraphError, match="'hed'"):
        graph.watch("hed")
    with pytest.raises(GraphError, match="'hed'"):
        graph.tagged("hed")


def test_groups_are_watched_as_a_whole() -> None:
    graph = FlowBuilder().split(lin(), lin()).tag_group("g").merge().build()
    graph.watch("g")
    graph(torch.zeros(1, W))
    assert graph.watched == {"g_0", "g_1"}
    assert graph.tagged("g_1") is not None


def test_metrics_go_to_the_observer() -> None:
    graph = FlowBuilder(lin()).through(lin()).tag("out").label("net").build()
    for loss in (3.0, 1.0):
        graph(torch.randn(2, W))
        graph.record_scalar("loss", loss)
        graph.collect_with("out", reduce="mean")
        graph.end_step()
    graph.end_epoch()
    assert graph.trend("loss").values() == [2.0]
    assert graph.epoch_count() == 1
    assert [name for name, _ in graph.latest_metrics()] == ["loss", "out"]
    assert copy.deepcopy(graph).latest_metrics() == []


def test_the_source_can_be_read() -> None:
    graph = FlowBuilder(lin(), name="a").also(lin(), name="b").tag("sum").build()
    assert "x = x + b(x)" in graph.source()
    assert "captured['sum'] = x" in graph.source("sum")
    assert "inputs=(input)" in repr(graph)
