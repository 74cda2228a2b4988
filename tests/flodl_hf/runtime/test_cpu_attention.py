"""Attention in bfloat16 on a processor is as near as torch's own, and leaves to that what it does not compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import cpu
from flodl_hf.inference.prepared_graph import prepared
from flodl_hf.nn.attention import attend, fused
from flodl_hf.nn.backends import cpu as cpu_attention
from flodl_hf.nn.backends.cpu import HalfAttention, Scratch, has_half_attention
from flodl_hf.nn.layers import EncoderLayer
from flodl_hf.nn.layout import Packed

HEADS, WIDTH = 3, 64
needs = pytest.mark.skipif(not has_half_attention(), reason="this build of torch rounds otherwise")


def parts(texts: int, length: int, scale: float = 1.5) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, ``(texts, heads, length, width)``, of one joined product as layers have them."""
    joined = (torch.randn(texts * length, 3 * HEADS * WIDTH) * scale).bfloat16()
    q, k, v = (x.view(texts, length, HEADS, WIDTH).transpose(1, 2) for x in joined.split(HEADS * WIDTH, 1))
    return q, k, v


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@needs
@pytest.mark.parametrize("length", [16, 17, 33, 70])
@pytest.mark.parametrize("scale", [0.5, 1.5, 3.0])
def test_it_is_as_near_as_torchs_own(length: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "_SCORES", 2 * HEADS * length * length)  # two texts, two, and one
    q, k, v = parts(5, length, scale)
    with torch.inference_mode():
        wanted = fused(q.double(), k.double(), v.double(), None, None, 0.0, WIDTH**-0.5)
        found = HalfAttention(Scratch())(q, k, v, None, None, 0.0, WIDTH**-0.5)
        own = fused(q, k, v, None, None, 0.0, WIDTH**-0.5)
    assert found.dtype == torch.bfloat16
    assert off(found, wanted) <= 1.3 * off(own, wanted)


@needs
def test_products_are_of_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, product = set(), torch.bmm

    def watched(a: Tensor, b: Tensor, **given: Any) -> Tensor:
        seen.add((a.shape[0], a.shape[1]))
        return product(a, b, **given)

    monkeypatch.setattr(torch, "bmm", watched)
    kernel = HalfAttention(Scratch())
    with torch.inference_mode():
        for length in range(16, 257):
            q, k, v = parts(1, length)
            assert kernel(q, k, v, None, None, 0.0, 1.0).shape == (1, HEADS, length, WIDTH)
    assert 30 < len({places for _, places in seen}) < 60


@needs
@pytest.mark.parametrize(("texts", "length"), [(1, 17), (9, 33), (11, 18), (5, 130)])
def test_what_was_added_is_nobodys(texts: int, length: int) -> None:
    dirty = Scratch()
    q, k, v = parts(texts, length)
    with torch.inference_mode():
        for name in ("queries", "keys", "values"):
            dirty.take(name, 64 * HEADS * 160, WIDTH, q.dtype).fill_(torch.nan)
        wanted = HalfAttention(Scratch())(q, k, v, None, None, 0.0, 1.0)
        assert torch.equal(HalfAttention(dirty)(q, k, v, None, None, 0.0, 1.0), wanted)
    assert bool(wanted.isfinite().all())


def test_what_it_does_not_compute_is_torchs_own() -> None:
    kernel, scale = HalfAttention(Scratch()), WIDTH**-0.5
    q, k, v = parts(2, 20)
    keep = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    keep[0, ..., 15:] = False
    bias = torch.randn(1, HEADS, 20, 20).bfloat16()
    none = None, None
    cases: list[tuple[Any, ...]] = [
        (q, k, v, keep, None), (q, k, v, None, bias), (q, k[:, :1], v[:, :1], *none),
        (*(x[:, :, :15] for x in (q, k, v)), *none), (*(x[..., :32] for x in (q, k, v)), *none),
        (*(x.float() for x in (q, k, v)), *none),
    ]  # fmt: skip
    with torch.inference_mode():
        for case in cases:
            given = (*case, 0.0, scale)
            assert torch.equal(kernel(*given), fused(*given))


@needs
def test_an_answer_is_its_texts_alone() -> None:
    layout = Packed.of([40, 40, 18, 18, 9])
    q, k, v = (torch.randn(layout.num_tokens, HEADS * WIDTH).bfloat16() for _ in range(3))
    kernel = HalfAttention(Scratch())
    with torch.inference_mode():
        together = layout.unpack(attend(q, k, v, layout, num_heads=HEADS, kernel=kernel))
        texts = zip(*(layout.unpack(x) for x in (q, k, v)), strict=True)
        for (a, b, c), found in zip(texts, together, strict=True):
            alone = attend(a, b, c, Packed.of([len(a)]), num_heads=HEADS, kernel=kernel)
            assert alone.float() == pytest.approx(found.float(), abs=1e-2)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide as on a processor that multiplies bfloat16 without tiles."""
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(cpu, "has_tiles", lambda: False)
    monkeypatch.setattr(cpu, "has_half_attention", lambda: True)


@pytest.mark.usefixtures("quick")
def test_layers_take_it_where_they_compute_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "vocab_size": 30, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 40, "type_vocab_size": 2,
    }  # fmt: skip
    model = head_named("base").model.from_config(ModelConfig.for_model("bert", **sizes)).eval()
    ids, layout = torch.arange(1, 29).repeat(2), Packed.of([28, 28])
    asked: list[tuple[int, ...]] = []
    kept = HalfAttention._mixed

    def mixed(self: HalfAttention, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        asked.append(tuple(q.shape))
        return kept(self, q, k, v, scale)

    monkeypatch.setattr(HalfAttention, "_mixed", mixed)
    for precision, times in (("fp32", 0), ("bf16", 2), ("exact", 0)):
        asked.clear()
        graph = prepared(model, precision)  # type: ignore[arg-type]
        assert any(isinstance(module, EncoderLayer) for module in graph.modules())
        with torch.inference_mode():
            graph(ids, token_type_ids=torch.zeros_like(ids), layout=layout)
        assert asked == [(2, 2, 28, 64)] * times
    # Tiles have kernels of torch's own.
    monkeypatch.setattr(cpu, "has_tiles", lambda: True)
    assert not cpu._attends_in_half()


def test_products_that_keep_too_little_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    has_half_attention.cache_clear()
    monkeypatch.setattr(Tensor, "baddbmm_", lambda self, *_, **__: self.zero_())
    assert not has_half_attention()
    monkeypatch.undo()
    has_half_attention.cache_clear()
