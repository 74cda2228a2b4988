"""Kernels of prediction: rotations to the bit, gates, scores with what distances add, and families run by them.

Kernels run on a CUDA device, or anywhere in Triton's interpreter (``TRITON_INTERPRET=1``); those tests are skipped
elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_one_layer import batch, real
from test_training_kernels import DEVICE, DTYPES, NEAREST, distance, runs, tables
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import explain
from flodl_hf.inference.explain import explain_graph
from flodl_hf.inference.prepared_graph import shadow
from flodl_hf.nn.attention import attend
from flodl_hf.nn.backends import choose, self_tests
from flodl_hf.nn.backends.choose import arrange_cuda, layers_of
from flodl_hf.nn.backends.cuda import CudaTable, walks
from flodl_hf.nn.backends.cuda_training import trains_walking
from flodl_hf.nn.backends.self_tests import LayerSizes, Turns
from flodl_hf.nn.buckets import Buffer, bucket_of
from flodl_hf.nn.kernels import self_test as trust
from flodl_hf.nn.layers import EncoderLayer
from flodl_hf.nn.layout import Packed
from flodl_hf.nn.positions import DistanceBias, PairedRotary, RelativeBias, Rotary, SlopedBias
from flodl_hf.parity.cell import settings_of
from flodl_hf.training.start import checkpoint_layers, set_dropout

LENGTHS = (33, 5, 1, 40, 12)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def packed(lengths: tuple[int, ...] = LENGTHS) -> Packed:
    buffer = Buffer(bucket_of(lengths))
    buffer.write(np.zeros(sum(lengths), np.int64), None, np.array(lengths))
    return buffer.on(buffer.packed.to(DEVICE))[2]


def rotary_of(way: Turns, width: int) -> Rotary:
    """Return what turns; neighbours by a table that is no longer of sines and cosines."""
    if way in ("wide", "stepwise"):
        return Rotary(width, 1000.0, widened=way == "wide")
    rotary = PairedRotary(width, 160, values=way != "neighbours", held=True)
    assert rotary.table is not None
    rotary.take(rotary.table + torch.randn(160, width) * 0.1)
    return rotary.to(DEVICE)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["wide", "stepwise", "neighbours", "neighbours, values too"])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(3, 3, 16), (4, 2, 64), (2, 1, 10), (1, 1, 2), (5, 5, 80)])
def test_rotations_are_the_reference_to_the_bit(
    dtype: torch.dtype, way: Turns, heads: int, kv_heads: int, width: int
) -> None:
    from flodl_hf.nn.kernels.operations import turn, turned

    layout, rotary = packed(), rotary_of(way, width)
    tokens, both = layout.num_tokens, heads + kv_heads * (1 + rotary.values)
    wide = heads + kv_heads + kv_heads
    given = torch.randn(tokens, wide * width).to(DEVICE, dtype)
    right = given.clone().requires_grad_()
    query, key, value = right.split([heads * width, kv_heads * width, kv_heads * width], -1)
    last = rotary(value, layout, kv_heads) if rotary.values else value
    expected = torch.cat([rotary(query, layout, heads), rotary(key, layout, kv_heads), last], -1)
    cos, sin = rotary.angles(given, layout)
    about: dict[str, Any] = {"heads": both, "width": width, "wide": rotary.widened, "halves": rotary.halves}
    mine = given.clone().requires_grad_()
    found = turned(mine, cos, sin, **about)
    assert torch.equal(found, expected)
    direction = torch.randn(found.shape).to(DEVICE, dtype)
    (back,) = torch.autograd.grad(found, mine, direction)
    (wanted,) = torch.autograd.grad(expected, right, direction)
    assert torch.equal(back, wanted)
    turn(given, cos, sin, **about)
    assert torch.equal(given, expected)
    exact = turned(mine, cos.float(), sin.float(), **about)
    assert distance(exact, expected) < NEAREST[dtype]
    assert not torch.equal(exact[:, : both * width], mine[:, : both * width])


@runs
@pytest.mark.parametrize("way", ["wide", "stepwise", "neighbours"])
def test_what_computes_in_float32_is_turned_in_float32(way: Turns) -> None:
    from flodl_hf.nn.kernels.operations import turn

    layout, rotary = packed(), rotary_of(way, 64)
    given = torch.randn(layout.num_tokens, 5 * 64).to(DEVICE)
    right = torch.cat([rotary(given[:, : 4 * 64], layout, 4), given[:, 4 * 64 :]], -1)
    turn(given, *rotary.angles(given, layout), heads=4, width=64, wide=rotary.widened, halves=rotary.halves)
    assert torch.equal(given, right)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["wide", "stepwise", "neighbours"])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(2, 2, None), (4, 2, 9)])
def test_attention_turns_what_it_reads(
    dtype: torch.dtype, way: Turns, width: int, heads: int, kv_heads: int, window: int | None
) -> None:
    from flodl_hf.nn.kernels.operations import mix

    lengths = (150, 7, 64)
    layout, rotary = packed(lengths), rotary_of(way, width)
    query, key, value = (torch.randn(layout.num_tokens, n * width) for n in (heads, kv_heads, kv_heads))
    query, key, value = (x.to(DEVICE, dtype) for x in (query, key, value))
    assert layout.places is not None
    about: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "window": window}
    angles = rotary.angles(query, layout)
    found = mix(
        query, key, value, layout.places, layout.segment_ends(), angles=angles, wide=rotary.widened,
        halves=rotary.halves, **about,
    )  # fmt: skip
    turned = rotary(query, layout, heads), rotary(key, layout, kv_heads)
    right = mix(*turned, value, layout.places, layout.segment_ends(), **about)
    assert distance(found, right) < {torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
    plain = Packed.of(lengths, DEVICE)
    parts = (x[: sum(lengths)].float() for x in (*turned, value))
    whole = attend(*parts, plain, num_heads=heads, kv_heads=kv_heads, window=window, implementation="eager")  # type: ignore[call-arg]
    assert distance(found[: sum(lengths)], whole) < NEAREST[dtype]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "tanh"), [("gelu", False), ("gelu", True), ("silu", False)])
@pytest.mark.parametrize("width", [96, 200])
def test_gates_are_opened_by_one_kernel(dtype: torch.dtype, activation: str, tanh: bool, width: int) -> None:
    from flodl_hf.nn.kernels.operations import gated

    x = torch.randn(70, 2 * width).to(DEVICE, dtype) * 3
    opened, raised = x.chunk(2, -1)
    wide = opened.float()
    curve = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh" if tanh else "none")
    found = gated(x, activation=activation, tanh=tanh)
    right = curve.to(dtype) * raised
    assert distance(found, right) < 1e-4
    assert float((found != right).float().mean()) < 0.1  # a last bit, where curves round otherwise


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("way", ["none", "relative", "sloped"])
@pytest.mark.parametrize("lengths", [LENGTHS, (150, 7, 64)])
def test_distances_are_added_within_the_kernel(
    dtype: torch.dtype, heads: int, kv_heads: int, way: str, lengths: tuple[int, ...]
) -> None:
    from flodl_hf.nn.kernels.operations import mix

    layout, width = packed(lengths), 16
    bias: Any = None
    if way != "none":
        maker = RelativeBias(heads) if way == "relative" else SlopedBias(heads)
        bias = maker.to(DEVICE)(torch.empty(0, device=DEVICE), layout)
    tokens, inside = layout.num_tokens, sum(lengths)
    query, key, value = (torch.randn(tokens, n * width).to(DEVICE, dtype) for n in (heads, kv_heads, kv_heads))
    assert layout.places is not None
    with torch.no_grad():
        table = None if bias is None else bias.along(layout.max_length, DEVICE)
        found = mix(query, key, value, layout.places, layout.segment_ends(), heads=heads, kv_heads=kv_heads, bias=table)
        plain = Packed.of(lengths, DEVICE)
        parts = (x[:inside].float() for x in (query, key, value))
        right = attend(*parts, plain, num_heads=heads, kv_heads=kv_heads, bias=bias, implementation="eager")  # type: ignore[call-arg]
    assert distance(found[:inside], right) < NEAREST[dtype]


def test_distances_are_read_from_one_table() -> None:
    for maker in (RelativeBias(3), SlopedBias(3)):
        bias = maker(torch.empty(0), Packed.of([9]))
        with torch.no_grad():
            whole, along = bias(1, 9, torch.float32, torch.device("cpu"))[0], bias.along(9, torch.device("cpu"))
        assert along.shape == (3, 17)
        for i in range(9):
            assert torch.equal(along[:, 8 - i : 17 - i], whole[:, i])
        assert bias.along(9, torch.device("cpu")) is along


TURNING = ("modernbert", "nomic_bert", "gte", "eurobert", "jina_embeddings_v3", "esm", "roformer")
ADDING = ("mpnet",)


def made(model_type: str, width: int = 16, variant: str = "base") -> Any:
    """Return a small model whose heads are as wide as our kernels take them."""
    family = next(f for f in FAMILIES if f.model_type == model_type)
    sizes = {row.field: row.key for row in family.rows}
    settings = settings_of(family, "tiny", variant) | {
        "num_labels": 3,
        sizes["hidden_size"]: 4 * width,
        sizes["num_heads"]: 4,
    }
    if model_type == "eurobert":
        settings |= {"num_key_value_heads": 2}
    head = "tokcls" if "token_classification" in family.heads else "mlm"
    model = head_named(head).model.from_config(ModelConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for module in model.modules():
            if isinstance(module, PairedRotary) and module.table is not None:
                module.take(module.table + torch.randn_like(module.table) * 0.1)
    return model.eval()


@pytest.mark.parametrize("kind", ["padded", "packed", "bucketed"])
@pytest.mark.parametrize("model_type", ["mpnet", "modernbert"])
def test_layers_that_are_run_again_find_what_all_share(model_type: str, kind: str) -> None:
    model = made(model_type).train()
    set_dropout(model, 0.0)
    found: list[dict[str, Tensor]] = []
    for again in (False, True):
        ids, layout = batch(kind)
        if again:
            checkpoint_layers(model)
        model.zero_grad(set_to_none=True)
        model.graph(ids, layout=layout).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any("relative" in name for name in found[0]) == (model_type == "mpnet")
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("model_type", "width", "variant"),
    [
        *((name, 16, "base") for name in (*TURNING, *ADDING)),
        *((name, 32, "base") for name in ("modernbert", "eurobert", "roformer")),
        ("roformer", 32, "values too"),
    ],
)
def test_families_are_run_by_them(
    model_type: str, width: int, variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "trusted", lambda *_: True)
    model = made(model_type, width, variant).to(DEVICE)
    graph = shadow(model.graph)
    for module in graph.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
    assert arrange_cuda(graph) == {}
    assert set(tables(graph)) == {"cuda"}
    from flodl_hf.nn.kernels import operations

    called: list[str] = []
    for name in ("turn", "mix", "gated"):
        kernel = getattr(operations, name)

        def counted(*args: Any, kernel: Any = kernel, name: str = name, **options: Any) -> Any:
            called.append(name + "+" * (options.get("bias") is not None) + "*" * (options.get("angles") is not None))
            return kernel(*args, **options)

        monkeypatch.setattr(operations, name, counted)
    ids, layout = batch("bucketed", DEVICE)
    with torch.inference_mode():
        found = real(graph(ids, layout=layout), "bucketed", "token_classification")
        right = real(model.graph(ids, layout=batch("bucketed", DEVICE)[1]), "bucketed", "token_classification")
    assert distance(found, right) < {torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    depth = len(list(layers_of(graph)))
    before = width == 16 or variant == "values too"
    assert called.count("turn") == (depth if model_type in TURNING and before else 0)
    assert called.count("mix*") == (depth if model_type in TURNING and not before else 0)
    assert called.count("mix+") == (depth if model_type in ADDING else 0)
    assert called.count("mix") == (depth if model_type in TURNING and before else 0)
    assert called.count("gated") == (0 if model_type in ("mpnet", "jina_embeddings_v3", "esm", "roformer") else depth)


def test_a_norm_is_kept_for_the_layer_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [self_tests.small_layer(torch.device("cpu"), LayerSizes(order="pre")) for _ in range(3)]
    layers: list[EncoderLayer] = [layer.eval() for layer, *_ in parts]
    _, states, layout, _ = parts[-1]
    table = CudaTable(kernels=True)
    summed: list[bool] = []

    def stand_in(
        self: Any, branch: Any, residual: Tensor, kind: Any, layout: Any, *, pre: bool
    ) -> tuple[Tensor, Tensor]:
        weight, bias, eps, _ = kind
        total = residual + branch.linear(branch.states)
        summed.append(pre)
        return total, F.layer_norm(total, total.shape[-1:], weight, bias, eps)

    monkeypatch.setattr(CudaTable, "_summed", stand_in)
    monkeypatch.setattr(CudaTable, "_serves", lambda *_: False)
    where = layout()
    with torch.inference_mode():
        right = states
        for layer in layers:
            right = layer(right, layout=where)
        for layer in layers:
            table.join(layer)
            layer.table = table
        table.follow(layers)
        monkeypatch.setattr(CudaTable, "_fuses_gelu", lambda *_: False)
        found = states
        for at, layer in enumerate(layers):
            found = layer(found, layout=where)
            assert ("normed" in where.memo) == (at < 2)
        # What was kept is for these states alone.
        layers[0](states, layout=where)
        other = layers[1](states, layout=where)
        plain = layout()
        assert torch.equal(other, layers[1](states, layout=plain))
    torch.testing.assert_close(found, right)
    assert len(summed) == 3 + 2 + 2 + 2 + 2


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_long_texts_have_gradients(dtype: torch.dtype, window: int | None) -> None:
    from flodl_hf.nn.kernels.operations import mixed

    lengths, heads, width = (200, 7, 90), 2, 16
    layout, inside = packed(lengths), sum(lengths)
    assert layout.places is not None
    qkv = torch.randn(layout.num_tokens, 3 * heads * width).to(DEVICE, dtype).requires_grad_()
    seed = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found = mixed(qkv, layout.places, layout.segment_ends(), seed, heads=heads, p=0.0, stream=0, window=window)
    parts = qkv[:inside].float().chunk(3, -1)
    plain = Packed.of(lengths, DEVICE)
    right = attend(*parts, plain, num_heads=heads, window=window, implementation="eager")  # type: ignore[call-arg]
    assert distance(found[:inside], right) < NEAREST[dtype]
    direction = torch.randn(inside, heads * width).to(DEVICE)
    (mine,) = torch.autograd.grad(found[:inside], qkv, direction.to(dtype))
    (theirs,) = torch.autograd.grad(right, qkv, direction)
    for a, b in zip(mine[:inside].chunk(3, -1), theirs[:inside].chunk(3, -1), strict=True):
        assert distance(a, b) < NEAREST[dtype]


def test_texts_within_windows_are_walked_however_long() -> None:
    long, short = packed((150, 7)), packed((60, 7))
    assert walks(short, None)
    assert not walks(long, None)
    assert walks(long, 64)
    assert not walks(long, 200)
    assert not walks(Packed.of([5]), 64)


def test_training_walks_among_longer_texts_unless_all_are_long() -> None:
    assert trains_walking(packed((60, 7)), None)
    assert trains_walking(packed((500, 7, 30)), None)
    assert not trains_walking(packed((500, 510)), None)
    assert trains_walking(packed((500, 510)), 64)
    assert not trains_walking(packed((600, 7, 30, 8, 9)), None)
    assert not trains_walking(Packed.of([5]), None)


@pytest.mark.parametrize("model_type", ["modernbert", "mpnet", "bert"])
def test_kernels_that_are_not_trusted_are_not_named(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(explain, "check_precision", lambda *_: None)
    monkeypatch.setattr(explain, "trusted", lambda *_: False)
    graph = made(model_type).graph
    said = explain_graph(graph, torch.device("cuda"), torch.bfloat16, "bf16").kernels
    assert said == ("our kernels: not trusted on this device, torch's own are launched instead",)


def test_a_bias_serves_calls_of_several_dtypes() -> None:
    bias = SlopedBias(2)(torch.empty(0), Packed.of([3]))
    for dtype in (torch.float32, torch.float16):
        assert bias(1, 3, dtype, torch.device("cpu")).dtype == dtype


@pytest.mark.parametrize("model_type", ["modernbert", "mpnet", "bert", "roformer"])
def test_what_runs_is_explained(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    graph = made(model_type).graph
    said = "\n".join(explain_graph(graph, torch.device("cuda"), torch.bfloat16, "bf16").kernels)
    assert ("rotary positions: in the kernel" in said) == (model_type in ("modernbert", "roformer"))
    assert ("gates: one product" in said) == (model_type == "modernbert")
    assert ("what distances add" in said) == (model_type == "mpnet")
    assert ("one kernel among texts up to 128" in said) == (model_type != "mpnet")
    for _, layer in layers_of(graph):
        attention: Any = layer.attention
        attention.num_heads = attention.kv_heads = 8  # eight wide
    said = "\n".join(explain_graph(graph, torch.device("cuda"), torch.bfloat16, "bf16").kernels)
    assert "torch's own, since heads of 8 features are none of 16, 32, 64, 128" in said


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device without the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["wide", "stepwise", "neighbours", "neighbours, values too"])
@pytest.mark.parametrize("width", [10, 64, 80, 128])
def test_a_device_turns_to_the_bit(way: Turns, width: int, dtype: torch.dtype) -> None:
    test_rotations_are_the_reference_to_the_bit(dtype, way, 4, 2, width)
    test_rotations_are_the_reference_to_the_bit(dtype, way, 12, 12, width)
    test_what_computes_in_float32_is_turned_in_float32(way)
    if width in (64, 128) and way != "neighbours, values too":
        test_attention_turns_what_it_reads(dtype, way, width, 4, 2, 9)
        test_attention_turns_what_it_reads(dtype, way, width, 2, 2, None)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device without the interpreter")
@pytest.mark.parametrize("model_type", ["modernbert", "eurobert", "mpnet", "roformer"])
def test_a_device_is_asked_once_and_runs_them(model_type: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLODL_HF_CACHE", str(tmp_path))
    trust.forget()
    model = made(model_type).to(DEVICE)
    graph = shadow(model.graph).to(torch.bfloat16)
    assert arrange_cuda(graph) == {}
    table: Any = next(layer.table for _, layer in layers_of(graph))
    assert table.kernels
    assert table.distances == (model_type == "mpnet")
    assert isinstance(RelativeBias(2)(torch.empty(0), Packed.of([1])), DistanceBias)
    trust.forget()
