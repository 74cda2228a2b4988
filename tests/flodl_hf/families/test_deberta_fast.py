"""The fast form of disentangled attention gives the reference's numbers up to rounding, on both layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.families.deberta_v2 import FAMILY
from flodl_hf.families.schema.config_rows import read_rows
from flodl_hf.nn.disentangled import scores as fast
from flodl_hf.nn.disentangled.attention import DisentangledAttention
from flodl_hf.nn.layout import Packed, Padded

# Neighbours of one length share a call; with 4 own distances the short ones are read by strides, the others gathered.
LENGTHS = (19, 11, 11, 5, 5, 3, 1)
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "relative_attention": True, "position_buckets": 8, "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p", "position_biased_input": False,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "v3": {},
    "convolution": {"conv_kernel_size": 3},
    "c2p": {"pos_att_type": "c2p"},
    "p2c, own keys": {"pos_att_type": "p2c", "share_att_key": False},
    "no kinds": {"pos_att_type": []},
    "clamped": {"position_buckets": -1, "max_relative_positions": 6},
    "every distance its own": {"position_buckets": -1},
    "odd buckets": {"position_buckets": 7},
    "not relative": {"relative_attention": False},
}


def made(name: str) -> Graph:
    torch.manual_seed(2)
    problems: list[str] = []
    graph = FAMILY.encoder(FAMILY.config(**read_rows({**SIZES, **CHANGES[name]}, FAMILY.rows, problems)))
    assert not problems
    with torch.no_grad():
        for parameter in graph.parameters():
            parameter.normal_(0, 0.2)
        for module in graph.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.add_(1.0)
    return graph.eval()


def use(graph: nn.Module, implementation: str) -> None:
    for module in graph.modules():
        if isinstance(module, DisentangledAttention):
            module.implementation = implementation


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(1, 60, mask.shape, generator=generator) * mask, mask


def padded(graph: Graph) -> Tensor:
    ids, mask = rows()
    return graph(ids, layout=Padded.of(mask))[mask]


def packed(graph: Graph) -> Tensor:
    ids, mask = rows()
    return graph(ids[mask], layout=Packed.of(LENGTHS))


def keep_positions(graph: Graph) -> None:
    """Let the next call without a gradient cache projected positions for later ones."""
    for module in graph.modules():
        if isinstance(module, DisentangledAttention):
            module.keeps_positions = True


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("call", [padded, packed])
@pytest.mark.parametrize("name", CHANGES)
def test_fast_is_the_reference_up_to_rounding(name: str, call: Any) -> None:
    graph = made(name)
    with torch.no_grad():
        expected = padded(graph)
        use(graph, "fast")
        assert_near(call(graph), expected)
        keep_positions(graph)
        for _ in range(2):
            assert_near(call(graph), expected)


@pytest.mark.parametrize("call", [padded, packed])
@pytest.mark.parametrize("name", CHANGES)
def test_fast_has_the_references_gradients(name: str, call: Any) -> None:
    graph = made(name)

    def gradients() -> list[Tensor]:
        states = call(graph)
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in graph.parameters()]
        graph.zero_grad()
        return found

    expected = gradients()
    use(graph, "fast")
    for found, reference in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


def test_the_size_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = made("v3")
    use(graph, "fast")
    with torch.no_grad():
        expected = padded(graph), packed(graph)
        for name in ("_CPU_BLOCK", "_THREAD_BLOCK", "_LONG_HEAD"):
            monkeypatch.setattr(fast, name, 1)
            for threads in (1, 2):
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                assert_near(padded(graph), expected[0])
                assert_near(packed(graph), expected[1])


def test_long_heads_are_scored_one_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for threads in (1, 2, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert fast._heads_at_once(12, 512 * 512, cpu) == min(12, threads)
        assert fast._heads_at_once(12, 128 * 256, cpu) == 12


def test_held_positions_serve_only_calls_that_learn_nothing() -> None:
    graph = made("v3")
    use(graph, "fast")
    keep_positions(graph)
    with torch.no_grad():
        padded(graph)
        graph.get_parameter("relative.embeddings.weight").normal_()
        stale = padded(graph)
    fresh = padded(graph)  # with gradients: projected anew
    assert not torch.allclose(stale, fresh.detach(), atol=1e-3)


def test_held_positions_of_another_dtype_are_passed_over() -> None:
    graph = made("v3")
    use(graph, "fast")
    keep_positions(graph)
    with torch.no_grad():
        expected = padded(graph)
        found = padded(graph.to(torch.float64))
    assert found.dtype == torch.float64
    assert_near(found.float(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite(dtype: torch.dtype) -> None:
    graph = made("v3")
    use(graph, "fast")
    with torch.no_grad():
        exact = padded(graph)
        half = padded(graph.to(dtype))
    assert half.dtype == dtype
    assert (half.float() - exact).abs().max() < (0.05 if dtype == torch.float16 else 0.4)


def test_positions_are_dropped_in_training() -> None:
    graph = made("v3").train()
    use(graph, "fast")
    with torch.no_grad():
        still = padded(graph)
        for module in graph.modules():
            if isinstance(module, DisentangledAttention):
                module.position_dropout.p = 0.5
        assert not torch.allclose(padded(graph), still, atol=1e-3)
