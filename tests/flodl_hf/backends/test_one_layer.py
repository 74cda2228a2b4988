"""A family of another kind gets every fast path from its description alone.

The toy normalises before its parts, has gated feed-forward parts, rotary positions, a window and no biases: nothing of
what the families of the package have. Nothing but this file knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from test_training_kernels import DEVICE, DTYPES, distance, runs, tables
from torch import Tensor, nn

from flodl.graph import FlowBuilder, Graph
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import register
from flodl_hf.families.schema import Family, FamilyHead
from flodl_hf.families.schema.config_rows import Row, activation, count
from flodl_hf.families.schema.record import KeyRow
from flodl_hf.heads.auto import load
from flodl_hf.heads.sequence_classification import SequenceClassifier
from flodl_hf.heads.token_classification import TokenClassifier
from flodl_hf.inference import cpu
from flodl_hf.inference.cpu import missing
from flodl_hf.inference.prepared_graph import shadow
from flodl_hf.nn import task_heads
from flodl_hf.nn.attention import SelfAttention, attend
from flodl_hf.nn.backends import choose
from flodl_hf.nn.backends.choose import arrange_cuda, arrange_training
from flodl_hf.nn.buckets import Buffer, bucket_of
from flodl_hf.nn.encoder import Embeddings, stack
from flodl_hf.nn.layers import EncoderLayer, FeedForward
from flodl_hf.nn.layout import Layout, Packed, Padded
from flodl_hf.nn.positions import Rotary


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """The settings of the toy."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    window: int
    max_positions: int
    activation: str


def encoder(c: ToyConfig) -> Graph:
    def layer() -> EncoderLayer:
        rotary = Rotary(c.hidden_size // c.num_heads)
        return EncoderLayer(
            SelfAttention(c.hidden_size, c.num_heads, 0.0, 0.0, bias=False, window=c.window, rotary=rotary),
            FeedForward(c.hidden_size, c.intermediate_size, c.activation, 0.0, gated=True, bias=False),
            nn.LayerNorm(c.hidden_size, bias=False),
            nn.LayerNorm(c.hidden_size, bias=False),
            order="pre",
        )

    return (
        FlowBuilder(Embeddings(c.vocab_size, c.hidden_size, 1e-5, 0.0), name="embeddings")
        .label("encoder")
        .input("token_type_ids", "position_ids", default=None)
        .input("layout")
        .using("token_type_ids", "position_ids", "layout")
        .through(stack(layer() for _ in range(c.num_layers)), name="layers").using("layout")
        .through(nn.LayerNorm(c.hidden_size, bias=False), name="last_norm")
        .build()
    )  # fmt: skip


NAMES = ("attention.query", "attention.key", "attention.value", "attention.output", "attention_norm")
NAMES += ("feed_forward.gate", "feed_forward.up", "feed_forward.down", "feed_forward_norm")
TOY = Family(
    model_type="toy",
    class_prefix="Toy",
    base_prefix="toy",
    config=ToyConfig,
    rows=(
        Row("vocab_size", "vocab_size", count()),
        Row("hidden_size", "hidden_size", count()),
        Row("num_layers", "num_hidden_layers", count()),
        Row("num_heads", "num_attention_heads", count()),
        Row("intermediate_size", "intermediate_size", count()),
        Row("window", "window", count()),
        Row("max_positions", "max_position_embeddings", count()),
        Row("activation", "hidden_act", activation()),
    ),
    keys=(
        KeyRow("encoder.embeddings.word", "toy.words"),
        KeyRow("encoder.embeddings.norm", "toy.norm"),
        *(KeyRow(f"encoder.layers.{{i}}.{name}", f"toy.layers.{{i}}.{name}") for name in NAMES),
        KeyRow("encoder.last_norm", "toy.last_norm"),
    ),
    encoder=encoder,
    heads={
        "sequence_classification": FamilyHead(
            body=lambda c, labels: task_heads.first_token_mlp(
                c.hidden_size, labels, dropout_in=0.0, activation="gelu", dropout_out=0.0
            ),
            keys=(KeyRow("head.dense", "dense"), KeyRow("head.classifier", "classifier")),
        ),
        "token_classification": FamilyHead(
            body=lambda c, labels: task_heads.linear(c.hidden_size, labels, 0.0),
            keys=(KeyRow("head.classifier", "classifier"),),
        ),
    },
)
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "window": 5, "max_position_embeddings": 160, "hidden_act": "silu",
}  # fmt: skip
HEADS = {"sequence_classification": SequenceClassifier, "token_classification": TokenClassifier}
LENGTHS = (9, 1, 30, 5)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from flodl_hf import families

    monkeypatch.setattr(families, "_registered", dict(families._registered))
    register(TOY)
    torch.manual_seed(0)
    return


def made(head: str) -> Any:
    model = HEADS[head].from_config(ModelConfig.for_model("toy", **SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def batch(kind: str, device: Any = "cpu") -> tuple[Tensor, Layout]:
    lengths = np.array(LENGTHS)
    ids = torch.randint(5, 60, (int(lengths.sum()),), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    if kind == "padded":
        rows = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.long)
        mask = torch.arange(rows.shape[1]) < torch.from_numpy(lengths)[:, None]
        rows[mask] = ids.long()
        return rows.to(device), Padded(mask.to(device))
    if kind == "packed":
        return ids.long().to(device), Packed.of(lengths.tolist(), device)
    buffer = Buffer(bucket_of(lengths), types=False)
    buffer.write(ids.numpy(), None, lengths)
    there, _, layout = buffer.on(buffer.packed.to(device))
    return there, layout


def real(scores: Tensor, kind: str, head: str) -> Tensor:
    """Return the scores of what is no padding."""
    if head == "sequence_classification":
        return scores[: len(LENGTHS)]
    if kind == "padded":
        return torch.cat([row[:length] for row, length in zip(scores, LENGTHS, strict=True)])
    return scores[: sum(LENGTHS)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["packed", "bucketed"])
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_layouts_agree(kind: str, head: str, way: str) -> None:
    model = made(head).set_attention(way)
    with torch.inference_mode():
        found, right = (real(model.graph(batch(k)[0], layout=batch(k)[1]), k, head) for k in (kind, "padded"))
    torch.testing.assert_close(found, right, rtol=0, atol=2e-6)


def test_a_window_and_rotations_are_what_they_say() -> None:
    rotary, width, length = Rotary(8, 100.0), 16, 12
    q, k, v = torch.randn(3, 1, length, width, dtype=torch.float64).unbind(0)
    layout = Padded()
    found = attend(q, k, v, layout, num_heads=2, window=3)
    for head in range(2):
        part = slice(8 * head, 8 * head + 8)
        scores = q[0, :, part] @ k[0, :, part].T / 8**0.5
        for i in range(length):
            near = [j for j in range(length) if abs(i - j) <= 3]
            mixed = scores[i, near].softmax(-1) @ v[0, near, part]
            torch.testing.assert_close(found[0, i, part], mixed)
    turned = rotary(q, layout, 2).view(length, 2, 8)
    for place in (0, 5):
        for pair in range(4):
            angle = torch.tensor(place * 100.0 ** (-2 * pair / 8), dtype=torch.float32).double()
            one, two = q.view(length, 2, 8)[place, :, pair], q.view(length, 2, 8)[place, :, pair + 4]
            torch.testing.assert_close(turned[place, :, pair], one * angle.cos() - two * angle.sin(), atol=1e-6, rtol=0)
            torch.testing.assert_close(
                turned[place, :, pair + 4], two * angle.cos() + one * angle.sin(), atol=1e-6, rtol=0
            )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_fewer_heads_of_keys_serve_several_of_queries(kv_heads: int, way: str) -> None:
    layout = Packed.of([5, 3])
    q = torch.randn(8, 32)
    k, v = torch.randn(2, 8, 8 * kv_heads).unbind(0)
    wide = [x.view(8, kv_heads, 8).repeat_interleave(4 // kv_heads, 1).reshape(8, 32) for x in (k, v)]
    found = attend(q, k, v, layout, num_heads=4, kv_heads=kv_heads, implementation=way)
    torch.testing.assert_close(found, attend(q, *wide, layout, num_heads=4, implementation=way))


def test_a_bias_is_added_to_the_scores() -> None:
    layout = Packed.of([5, 3])
    q, k, v = torch.randn(3, 8, 16).unbind(0)
    slope = torch.arange(8.0)

    def bias(texts: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return -(slope[:length, None] - slope[None, :length]).abs()[None, None]

    for way in ("sdpa", "eager"):
        found = attend(q, k, v, layout, num_heads=2, bias=bias, implementation=way)
        scores = q[5:, :8] @ k[5:, :8].T * 8**-0.5 + bias(1, 3, q.dtype, q.device)[0, 0]
        torch.testing.assert_close(found[5:, :8], scores.softmax(-1) @ v[5:, :8])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["padded", "packed", "bucketed"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("int8", 0.06), ("bf16", 0.06)])
def test_a_processor_runs_it_by_its_own_table(precision: Any, bound: float, kind: str, head: str) -> None:
    if missing(precision):
        pytest.skip(str(missing(precision)))
    model = made(head)
    graph = shadow(model.graph)
    if precision == "bf16":
        graph.to(torch.bfloat16)
    assert cpu.prepare_cpu(graph, precision) == {}
    assert set(tables(graph)) == {"processor"}
    ids, _layout = batch(kind)
    with torch.inference_mode():
        right = real(model.graph(ids, layout=batch(kind)[1]), kind, head)
        for _ in range(2):
            found = real(graph(ids, layout=batch(kind)[1]), kind, head).float()
            assert float((found - right).abs().max()) <= bound * float(right.abs().max())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["padded", "packed", "bucketed"])
def test_a_cuda_device_runs_it_by_its_own_table(kind: str, head: str) -> None:
    model = made(head)
    graph = shadow(model.graph)
    assert arrange_cuda(graph) == {}
    assert set(tables(graph)) == {"cuda"}
    ids, _layout = batch(kind)
    with torch.inference_mode():
        found, right = (real(g(ids, layout=batch(kind)[1]), kind, head) for g in (graph, model.graph))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", HEADS)
def test_our_kernels_predict_it(head: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "trusted", lambda *_: True)
    model = made(head).to(DEVICE)
    graph = shadow(model.graph)
    for module in graph.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
    arrange_cuda(graph)
    ids, layout = batch("bucketed", DEVICE)
    with torch.inference_mode():
        found = real(graph(ids, layout=layout), "bucketed", head)
        right = real(model.graph(ids, layout=batch("bucketed", DEVICE)[1]), "bucketed", head)
    assert distance(found, right) < {torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["padded", "packed", "bucketed"])
def test_our_kernels_train_it(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "trusted", lambda *_: True)
    graph = made("token_classification").graph.to(DEVICE).train()
    results: list[dict[str, Tensor]] = []
    for way in ("plain", "ours"):
        undo = arrange_training(graph, dtype, anywhere=True)[0] if way == "ours" else None
        graph.zero_grad(set_to_none=True)
        ids, layout = batch(kind, DEVICE)
        with torch.autocast(DEVICE.type, dtype, enabled=way == "ours"):
            scores = real(graph(ids, layout=layout), kind, "token_classification").float()
        scores.square().sum().backward()
        grads = {name: p.grad for name, p in graph.named_parameters() if p.grad is not None}
        results.append({"scores": scores.detach()} | grads)
        if undo is not None:
            assert set(tables(graph)) == {"cuda-training"}
            undo()
    bound = {torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    assert {name: x for name in results[0] if (x := distance(results[1][name], results[0][name])) >= bound} == {}


@pytest.mark.parametrize("head", HEADS)
def test_it_is_written_and_read_like_any_family(head: str, tmp_path: Any) -> None:
    model = made(head)
    model._mark_untrained(())
    again = load(model.save_pretrained(tmp_path / "toy"))
    assert again.head == head
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_it_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("token_classification")
    assert [(g.table, g.reason) for g in model.explain().groups] == [("processor", None)]
    assert [(g.table, g.reason) for g in model.explain("cuda", "bf16").groups] == [("cuda", None)]
    found = model.explain("cuda", "bf16", training=True)
    assert [(g.table, g.reason) for g in found.groups] == [("cuda-training", None)]
    assert found.recorded.startswith("yes")
    assert "loss scale" in model.explain("cuda", "fp16", training=True).recorded
    model.graph.get_submodule("encoder.layers.1.attention").register_forward_hook(lambda *_: None)
    groups = model.explain("cuda", "bf16").groups
    assert [(g.table, g.layers) for g in groups][1] == ("torch", ("encoder.layers.1",))
    assert "because a hook watches its parts" in str(model.explain())
    exact = model.explain(precision="exact")
    assert [g.table for g in exact.groups] == ["torch"]
    assert exact.to_dict()["layers"][0]["reason"]
