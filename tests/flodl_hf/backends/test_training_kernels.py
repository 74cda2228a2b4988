"""Layers run by the training table give the states and gradients of plain ones, and drop the same values back and forth.

Kernels run on a CUDA device, or anywhere in Triton's interpreter (``TRITON_INTERPRET=1``); those tests are skipped
elsewhere.
"""

from __future__ import annotations

import copy
import os
import pickle
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.sequence_classification import SequenceClassifier
from flodl_hf.nn.backends import choose, self_tests
from flodl_hf.nn.backends.choose import arrange_training
from flodl_hf.nn.backends.cuda_training import TrainingTable
from flodl_hf.nn.backends.self_tests import LayerSizes, Turns
from flodl_hf.nn.kernels import self_test as trust
from flodl_hf.nn.layers import TORCH, EncoderLayer
from flodl_hf.nn.layout import Packed

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
runs = pytest.mark.skipif(
    not (INTERPRETED or (HAS_TRITON and DEVICE.type == "cuda")),
    reason="needs Triton and a CUDA device or its interpreter",
)
on_device = pytest.mark.skipif(DEVICE.type != "cuda" or not HAS_TRITON, reason="needs a CUDA device and Triton")
# The interpreter has no products of bfloat16.
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
NEAREST = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


def distance(found: Tensor, right: Tensor) -> float:
    assert not found.isnan().any()  # which is above no bound
    found, right = found.detach().float(), right.detach().float()
    return float((found - right).norm() / right.norm().clamp(min=1e-6))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype).requires_grad_()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def seeds(value: int = 5) -> Tensor:
    return torch.tensor([value], device=DEVICE)


def small_case(p: float = 0.0) -> tuple[EncoderLayer, Tensor, Packed]:
    layer, states, layout, _ = self_tests.small_layer(DEVICE, LayerSizes(), p)
    return layer, states, layout()


def test_segment_ends_follow_from_places() -> None:
    layout = self_tests.small_layer(torch.device("cpu"), LayerSizes())[2]()
    bare = Packed(layout.offsets, (), layout.longest, layout.places, layout.opens)
    assert layout.ends is not None
    assert torch.equal(bare.segment_ends(), layout.ends)
    lengths = Packed.of([3, 1, 4])
    assert lengths.segment_ends().tolist() == [3, 3, 3, 4, 8, 8, 8, 8]


SHAPES = {
    "bert": LayerSizes(),
    "windowed": LayerSizes(window=7),
    "gated": LayerSizes(gated=True, activation="silu"),
    "gated without biases, norms first": LayerSizes(gated=True, bias=False, order="pre", window=9),
    "norms first": LayerSizes(order="pre"),
    "turned, norms first": LayerSizes(turns="wide", gated=True, bias=False, order="pre", window=9),
    "turned, heads of keys for two": LayerSizes(turns="stepwise", heads=4, kv_heads=2, gated=True, activation="silu"),
    "neighbours turned": LayerSizes(turns="neighbours"),
    "neighbours turned, values too": LayerSizes(turns="neighbours, values too", heads=4, kv_heads=2),
}


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["training", "prediction"])
def test_layers_are_the_plain_ones(kind: str, sizes: LayerSizes, dtype: torch.dtype) -> None:
    found, where = getattr(self_tests, kind)(DEVICE, dtype, sizes)
    assert found < NEAREST[dtype], where


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("window", [None, 6])
def test_attention_drops_the_same_weights_forward_and_backward(
    dtype: torch.dtype, p: float, window: int | None
) -> None:
    from flodl_hf.nn.kernels.operations import mixed

    heads, width = 2, 128
    _, _, layout = small_case()
    assert layout.places is not None
    assert layout.ends is not None
    tokens = layout.num_tokens
    qkv = drawn(tokens, 3 * heads * width, dtype=dtype)

    def run(given: Tensor) -> Tensor:
        return mixed(
            given, layout.places, layout.ends, seeds(), heads=heads, p=p, stream=7, window=window,  # type: ignore[arg-type]
        )  # fmt: skip

    # With unit vectors as values the mix shows the weights themselves.
    shown = qkv.detach().clone()
    shown[:, 2 * heads * width :] = torch.eye(tokens, width, dtype=dtype, device=DEVICE).repeat(1, heads)
    dropped = run(shown).view(tokens, heads, width)[:, :, :tokens].transpose(0, 1)
    query, key, value = (part.view(tokens, heads, width).transpose(0, 1).float() for part in qkv.chunk(3, -1))
    text = (layout.places == 0).cumsum(0)
    scores = query @ key.transpose(1, 2) * width**-0.5
    inside = text[:, None] == text[None, :]
    if window is not None:
        inside &= (torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]).abs().to(DEVICE) <= window
    weights = scores.masked_fill(~inside, float("-inf")).softmax(-1)
    kept = (dropped != 0).float() if p else torch.ones_like(weights)
    weights = weights * kept / (1 - p)
    assert distance(dropped, weights) < NEAREST[dtype]
    if p:
        assert abs(float(kept[inside.expand_as(kept)].mean()) - (1 - p)) < 0.02
        assert not torch.equal(kept[0], kept[1])
    direction = drawn(tokens, heads * width, dtype=dtype).detach()
    right = (weights @ value).transpose(0, 1).reshape(tokens, -1)
    found = run(qkv)
    assert distance(found, right) < NEAREST[dtype]
    mine, theirs = (torch.autograd.grad(x, qkv, direction.to(x.dtype))[0] for x in (found, right))
    for a, b in zip(mine.chunk(3, -1), theirs.chunk(3, -1), strict=True):
        assert distance(a, b) < NEAREST[dtype]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("used", ["both", "full", "half"])
@pytest.mark.parametrize("kind", ["layer", "layer, pre", "no shift", "rms", "rms, pre"])
def test_sum_and_norm_with_its_gradients(dtype: torch.dtype, p: float, used: str, kind: str) -> None:
    from flodl_hf.nn.kernels.operations import added_and_normed

    rows, width = 70, 96
    x, residual = drawn(rows, width, dtype=dtype), drawn(rows, width)
    weight, x_bias = drawn(width), drawn(width)
    bias = drawn(width) if kind.startswith("layer") else None
    center, pre = not kind.startswith("rms"), kind.endswith("pre")
    given = [x, residual, weight, *([] if bias is None else [bias])]
    full, half = added_and_normed(
        x, residual, weight, bias, x_bias, seeds(), eps=1e-5, p=p, stream=3, center=center, pre=pre
    )
    d_full, d_half = drawn(rows, width).detach(), drawn(rows, width, dtype=dtype).detach()
    outs = {"both": [full, half], "full": [full], "half": [half]}[used]
    directions = {"both": [d_full, d_half], "full": [d_full], "half": [d_half]}[used]
    if pre and used == "full":
        given = [x, residual]  # the norm is not asked for
    *mine, of_bias = torch.autograd.grad(outs, [*given, x_bias], directions)
    kept = (mine[0] != 0).float() if p else torch.ones(rows, width, device=DEVICE)
    if p:
        assert abs(float(kept.mean()) - (1 - p)) < 0.03
    total = x.float() * kept / (1 - p) + residual
    right = F.layer_norm(total, (width,), weight, bias, 1e-5) if center else F.rms_norm(total, (width,), weight, 1e-5)
    wanted = {"both": [total if pre else right, right], "full": [total if pre else right], "half": [right]}[used]
    theirs = torch.autograd.grad(wanted, given, [d.float() for d in directions])
    assert distance(full, total if pre else right) < 1e-5
    assert distance(half, right) < NEAREST[dtype]
    if not pre:
        assert torch.equal(full.to(dtype), half)
    for a, b in zip(mine, theirs, strict=True):
        assert distance(a, b) < NEAREST[dtype]
    assert distance(of_bias, theirs[0].float().sum(0)) < NEAREST[dtype]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_and_the_sums_of_its_gradient(dtype: torch.dtype, tanh: bool) -> None:
    from flodl_hf.nn.kernels.operations import activated, projected

    x, x_bias, direction = drawn(70, 200, dtype=dtype), drawn(200), drawn(70, 200, dtype=dtype).detach()
    right = F.gelu(x.float(), approximate="tanh" if tanh else "none")
    found = activated(x, x_bias, tanh=tanh)
    (theirs,) = torch.autograd.grad(right, x, direction.float())
    mine, of_bias = torch.autograd.grad(found, [x, x_bias], direction)
    for a, b in ((found, right), (mine, theirs), (of_bias, theirs.float().sum(0))):
        assert distance(a, b) < NEAREST[dtype]
    weights, biases = [drawn(32, 200), drawn(16, 200)], [drawn(32), drawn(16)]
    joined = [torch.cat([t.detach() for t in parts]).to(dtype) for parts in (weights, biases)]
    out = projected(x, joined[0], joined[1], weights, biases)
    expected = F.linear(x.float(), torch.cat(weights), torch.cat(biases))
    direction = drawn(70, 48, dtype=dtype).detach()
    given = [x, *weights, *biases]
    pairs = zip(
        torch.autograd.grad(out, given, direction), torch.autograd.grad(expected, given, direction.float()), strict=True
    )
    assert distance(out, expected) < NEAREST[dtype]
    assert max(distance(a, b) for a, b in pairs) < NEAREST[dtype]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_lie_one_after_another_and_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    from flodl_hf.nn.kernels.copies import copied

    tensors = [drawn(70, 80).detach(), drawn(3).detach(), drawn(8192).detach(), drawn(4097).detach()[1:]]
    assert torch.equal(copied(tensors, dtype), torch.cat([t.flatten() for t in tensors]).to(dtype))


@runs
def test_a_layer_draws_anew_each_time_and_the_same_from_one_state() -> None:
    layer, states, layout = small_case(p=0.2)
    layer.table = TrainingTable(torch.float16)

    def found() -> Tensor:
        with torch.autocast(DEVICE.type, torch.float16):
            return layer(states, layout=layout).detach()

    torch.manual_seed(1)
    first, second = found(), found()
    torch.manual_seed(1)
    assert torch.equal(found(), first)
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(found(), found())


@runs
def test_frozen_parameters_get_no_gradient_and_the_others_the_same() -> None:
    layer, states, layout = small_case()
    layer.table = TrainingTable(torch.float16)
    direction = torch.randn(states.shape).to(DEVICE)

    def grads() -> dict[str, Tensor]:
        layer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, torch.float16):
            layer(states, layout=layout).backward(direction)
        return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}

    whole = grads()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("attention" not in name and "up" not in name)
    some = grads()
    assert set(some) == {name for name in whole if "attention" not in name and "up" not in name}
    assert all(torch.equal(some[name], whole[name]) for name in some)


def model() -> SequenceClassifier:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    return SequenceClassifier.from_config(
        ModelConfig.for_model("bert", **sizes, intermediate_size=48, max_position_embeddings=16, type_vocab_size=2)
    )


def tables(graph: nn.Module) -> list[str]:
    return [part.table.name for part in graph.modules() if isinstance(part, EncoderLayer)]


def test_without_a_device_nothing_changes() -> None:
    graph = model().graph
    undo, lacking = arrange_training(graph, torch.bfloat16)
    assert tables(graph) == ["torch", "torch"]
    assert set(lacking.values()) == {"the device is a cpu"}
    undo()


def test_what_is_put_in_is_taken_out_and_the_model_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "trusted", lambda *_: True)
    graph = model().graph.eval()
    names = list(graph.state_dict())
    ids, layout = torch.tensor([2, 7, 9, 3, 2, 8]), Packed.of([4, 2])
    expected = graph(ids, token_type_ids=None, layout=layout)
    undo, lacking = arrange_training(graph, torch.bfloat16, anywhere=True)
    assert tables(graph) == ["cuda-training"] * 2
    assert lacking == {}
    assert list(graph.state_dict()) == names
    # No autocast: torch's operations.
    assert torch.equal(graph(ids, token_type_ids=None, layout=layout), expected)
    for twin in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph.get_submodule("encoder.layers.0")))):
        assert set(tables(twin)) == {"torch"}
    undo()
    assert all(part.table is TORCH for part in graph.modules() if isinstance(part, EncoderLayer))
    assert torch.equal(graph(ids, token_type_ids=None, layout=layout), expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("hook", "hook watches"),
        ("activation", "activation is relu"),
        ("heads", "heads of 8"),
        ("norm", "norm is a Iden"),
    ],
)
def test_layers_that_the_kernels_do_not_know_are_left_alone_and_say_why(
    change: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "trusted", lambda *_: True)
    graph: Any = model().graph
    layer: Any = graph.get_submodule("encoder.layers.0")
    if change == "hook":
        layer.attention.register_forward_hook(lambda *_: None)
    elif change == "activation":
        layer.feed_forward.activation.name = "relu"
    elif change == "norm":
        layer.feed_forward_norm = nn.Identity()
    else:
        layer.attention.num_heads = 4  # eight wide
    undo, lacking = arrange_training(graph, torch.bfloat16, anywhere=True)
    assert tables(graph) == ["torch", "cuda-training"]
    assert list(lacking) == ["encoder.layers.0"]
    assert reason in lacking["encoder.layers.0"]
    undo()


@on_device
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["training", "prediction"])
@pytest.mark.parametrize("turns", [None, "stepwise", "neighbours", "neighbours, values too"])
def test_this_device_runs_the_kernels(
    turns: Turns | None, kind: str, dtype: torch.dtype, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLODL_HF_CACHE", str(tmp_path))
    trust.forget()
    sizes = LayerSizes(width=256, heads=2, inner=320, activation="gelu_pytorch_tanh", dropout=True, turns=turns)
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert trust.trusted(kind, torch.device("cuda", 0), dtype, sizes, getattr(self_tests, kind))
    after = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert list(tmp_path.glob("kernels-*.json"))
    # A later process asks nobody.
    trust.forget()
    assert trust.trusted(kind, torch.device("cuda", 0), dtype, sizes, lambda *_: pytest.fail("asked again"))
    trust.forget()
