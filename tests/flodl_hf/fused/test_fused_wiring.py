"""What goes into the kernels and comes out of them, on any processor: torch's operations stand in for them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.graph import Graph
from flodl_hf.attention import attend
from flodl_hf.fused import install, probe
from flodl_hf.fused.install import fuse_layers
from flodl_hf.fused.layer import STREAMS, FusedLayer
from flodl_hf.layout import Packed

CPU = torch.device("cpu")


class StandIn:
    """The four operations in float32, and the streams of random numbers that they were given."""

    def __init__(self, layout: Packed) -> None:
        self.layout, self.streams = layout, []

    def projected(self, x: Tensor, weight: Tensor, bias: Tensor, weights: Any, biases: Any) -> Tensor:
        if not biases:
            return (x.float() @ weights[0].t() + bias.float()).to(x.dtype)
        return F.linear(x.float(), torch.cat(weights), torch.cat(biases)).to(x.dtype)

    def mixed(self, qkv: Tensor, places: Tensor, ends: Tensor, seed: Tensor, **more: Any) -> Tensor:
        self.streams.append(more["stream"])
        query, key, value = qkv.float().chunk(3, -1)
        return attend(query, key, value, self.layout, num_heads=more["heads"]).to(qkv.dtype)

    def added_and_normed(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor, seed: Tensor, **more: Any
    ) -> tuple[Tensor, Tensor]:
        self.streams.append(more["stream"])
        found = F.layer_norm(x.float() + residual, weight.shape, weight, bias, more["eps"])
        return found, found.to(x.dtype)

    def activated(self, x: Tensor, x_bias: Tensor, *, tanh: bool) -> Tensor:
        return F.gelu(x.float(), approximate="tanh" if tanh else "none").to(x.dtype)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Any:
    block, states, layout = probe.small_case(CPU)
    stand_in = StandIn(layout)
    monkeypatch.setitem(sys.modules, "flodl_hf.fused.operations", stand_in)  # type: ignore[arg-type]
    return SimpleNamespace(block=block, states=states, layout=layout, used=stand_in)


def half() -> Any:
    return torch.autocast("cpu", torch.float16)


def test_layers_hand_on_what_they_know_and_each_draws_from_its_own_streams(case: Any) -> None:
    run = FusedLayer(case.block, case.block.forward)
    with half():
        first = run(case.states, case.layout)
        second = run(first, case.layout)
    right = case.block(case.block(case.states, layout=case.layout), layout=case.layout)
    assert float(((second - right).norm() / right.norm()).detach()) < 1e-2
    assert second.dtype == torch.float32
    streams = case.used.streams
    assert len(set(streams)) == len(streams) == 6
    assert {stream // STREAMS for stream in streams[:3]} == {0}
    assert {stream // STREAMS for stream in streams[3:]} == {1}


def test_states_that_were_written_to_are_taken_as_they_are(case: Any) -> None:
    run = FusedLayer(case.block, case.block.forward)
    with half():
        states = run(case.states, case.layout)
        with torch.no_grad():
            states.mul_(2.0)
        found = run(states, case.layout)
        assert torch.equal(found, run(states.clone(), case.layout))


@pytest.mark.parametrize(
    "how", ["hook", "backward hook", "backward pre-hook", "outputs", "watch", "no autocast", "no gradient"]
)
def test_who_looks_between_the_parts_gets_the_layer_as_it_was_built(case: Any, how: str) -> None:
    block: Graph = case.block
    called: list[Any] = []

    def plain(hidden: Tensor, **others: Any) -> Tensor:
        called.append(others)
        return hidden

    run: Any = FusedLayer(block, plain)
    others: dict[str, Any] = {}
    part = block.get_submodule("feed_forward.up")
    if how == "hook":
        part.register_forward_hook(lambda *_: None)
    elif how == "backward hook":
        part.register_full_backward_hook(lambda *_: None)
    elif how == "backward pre-hook":
        part.register_full_backward_pre_hook(lambda *_: None)
    elif how == "outputs":
        others = {"outputs": ["attention_norm"]}
    elif how == "watch":
        block._watched = frozenset({"attention_norm"})
    with (
        torch.autocast("cpu", torch.float16, enabled=how != "no autocast"),
        torch.set_grad_enabled(how != "no gradient"),
    ):
        run(case.states, layout=case.layout, **others)
    assert len(called) == 1
    assert case.used.streams == []


def test_a_layer_is_tried_at_its_own_sizes(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(install, "NEEDS_CUDA", False)
    monkeypatch.setattr(install, "kernels_hold", lambda *given: bool(asked.append(given)))
    fuse_layers(case.block, torch.float16)
    assert asked == [(CPU, torch.float16, probe.Sizes(128, 2, 512, False, False))]
    assert "forward" not in case.block.__dict__
    other, _, _ = probe.small_case(CPU, probe.Sizes(64, 4, 96, True), p=0.1)
    fuse_layers(other, torch.float16)
    assert asked[-1][2] == probe.Sizes(64, 4, 96, True, True)


def test_memory_that_ran_out_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def out(*_: Any) -> str:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(install, "_fault", out)
    with pytest.warns(UserWarning, match="no memory left"):
        assert not install.kernels_hold(CPU, torch.float16, probe.Sizes())
    monkeypatch.setattr(install, "_fault", lambda *_: "")
    assert install.kernels_hold(CPU, torch.float16, probe.Sizes())
