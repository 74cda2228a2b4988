"""Float32 products of fp16 parts: nearly as near to float64 as float32's own, whatever the sizes of rows.

Kernels run on a CUDA device, or anywhere in Triton's interpreter (``TRITON_INTERPRET=1``); those tests are skipped
elsewhere.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from flodl_hf.inference.prepared_graph import shadow
from flodl_hf.nn.backends import choose, self_tests
from flodl_hf.nn.backends.choose import arrange_cuda, layers_of
from flodl_hf.nn.backends.cuda import CudaTable, SplitTable
from flodl_hf.nn.backends.self_tests import SPLIT_BOUND, LayerSizes
from flodl_hf.training import demo

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
runs = pytest.mark.skipif(
    not (INTERPRETED or (HAS_TRITON and DEVICE.type == "cuda")),
    reason="needs Triton and a CUDA device or its interpreter",
)

LAYERS = {
    "post": LayerSizes(width=64, inner=160),
    "long rows": LayerSizes(width=48, heads=3, inner=1200, activation="gelu_new"),
    "gated, norms first, no biases": LayerSizes(
        width=64, inner=96, gated=True, activation="silu", order="pre", bias=False, window=9
    ),
    "norms first": LayerSizes(width=64, inner=96, order="pre"),
    "not a GELU": LayerSizes(width=64, inner=96, activation="relu"),
}


@runs
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_as_near_to_float64_as_products_of_float32_are(name: str) -> None:
    distance, _ = self_tests.prediction(DEVICE, torch.float32, LAYERS[name])
    assert distance < SPLIT_BOUND / 2


ROWS: dict[str, Any] = {
    "drawn": lambda x: x,
    "zeros": lambda x: x * 0.0,
    "large": lambda x: x * 1e30,
    "small": lambda x: x * 1e-25,
    "one large number": lambda x: torch.cat([x[:, :-1], x[:, -1:] * 1e4], 1),
    "rows of all sizes": lambda x: x * torch.logspace(-20, 20, len(x), device=x.device)[:, None],
}


@runs
@pytest.mark.parametrize("kind", ROWS)
def test_products_of_rows_of_any_size(kind: str) -> None:
    from flodl_hf.nn.kernels.split_products import finished, products, split

    draw = torch.Generator().manual_seed(1)
    x = ROWS[kind](torch.randn(33, 900, generator=draw).to(DEVICE))
    w = torch.randn(40, 900, generator=draw).to(DEVICE) * torch.logspace(-3, 3, 40, device=DEVICE)[:, None]
    bias = torch.zeros(40, device=DEVICE)
    given, weight = split(x), split(w, weight=True)
    found = finished(products(given, weight), given, weight, bias)
    right = x.double() @ w.double().t()
    # Of the sum of sizes, which is what rounding goes by.
    size = (x.double().abs() @ w.double().abs().t()).clamp(min=1e-300)
    assert float(((found.double() - right).abs() / size).max()) < 2e-6
    assert bool(torch.isfinite(found).all())


@runs
def test_a_norm_hands_its_parts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from flodl_hf.nn.kernels import split_products

    layer, states, layout, _ = self_tests.small_layer(DEVICE, LAYERS["post"])
    table = SplitTable(fewest=1)
    whole, made = split_products.split, []
    monkeypatch.setattr(split_products, "split", lambda x, **k: made.append(x.shape) or whole(x, **k))
    with torch.no_grad():
        table.join(layer)
        layer.table, where = table, layout()
        made.clear()
        found = layer(states, layout=where)
        # Those of the states that were given and of what attention mixed.
        assert len(made) == 2
        made.clear()
        again = layer(found, layout=where)
        assert len(made) == 1
        torch.testing.assert_close(again, layer(found.clone(), layout=layout()), rtol=0, atol=0)


@runs
def test_few_rows_go_by_ordinary_products(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, states, layout, _ = self_tests.small_layer(DEVICE, LAYERS["post"])
    plain, split = CudaTable(kernels=False), SplitTable(fewest=len(states) + 1)
    results = []
    with torch.no_grad():
        for table in (plain, split):
            table.join(layer)
            layer.table = table
            monkeypatch.setattr("flodl_hf.nn.kernels.split_products.products", None)
            results.append(layer(states, layout=layout()))
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("wanted", "trusted", "room", "table"),
    [(True, True, True, SplitTable), (False, True, True, CudaTable), (True, False, True, CudaTable),
     (True, True, False, CudaTable)],
)  # fmt: skip
def test_the_table_is_chosen_by_what_is_asked_trusted_and_free(
    wanted: bool, trusted: bool, room: bool, table: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(choose, "trusted", lambda *a, **k: asked.append(a) or trusted)
    monkeypatch.setattr(choose, "_has_room", lambda *a: room)
    monkeypatch.setattr(SplitTable, "join", CudaTable.join)  # which needs no kernel
    graph = shadow(demo.demo_model(demo.learn_vocabulary()).eval().graph)
    assert arrange_cuda(graph, split=wanted) == {}
    assert {type(layer.table) for _, layer in layers_of(graph)} == {table}
    assert bool(asked) is wanted


@pytest.mark.gpu
def test_predictions_in_float32_are_near_exact_ones() -> None:
    model = demo.demo_model(demo.learn_vocabulary()).eval().to("cuda")
    texts = ["good " * (1 + i % 40) for i in range(600)]
    found, right = (model.predict(texts, precision=p, untrained=True) for p in ("fp32", "exact"))
    worst = max(abs(a.score - b.score) for a, b in zip(found, right, strict=True))
    assert worst < 1e-5
    assert "three of fp16 parts" in str(model.explain("cuda"))


@pytest.mark.gpu
def test_without_room_for_parts_products_are_whole_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = demo.demo_model(demo.learn_vocabulary()).eval().to("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (-(1 << 50), 1 << 40))
    with pytest.warns(UserWarning, match="their parts would need"):
        model.predict(["good"], untrained=True)
