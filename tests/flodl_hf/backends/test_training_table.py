"""What goes into the kernels and comes out of them, on any processor: torch's operations stand in for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl_hf.nn.attention import attend
from flodl_hf.nn.backends import choose, cuda, cuda_training, self_tests
from flodl_hf.nn.backends.choose import arrange_training
from flodl_hf.nn.backends.cuda_training import STREAMS, TrainingTable
from flodl_hf.nn.backends.self_tests import LayerSizes
from flodl_hf.nn.kernels import self_test as trust
from flodl_hf.nn.layers import TORCH
from flodl_hf.nn.layout import Packed

CPU = torch.device("cpu")


class StandIn:
    """The four operations in float32, and the streams of random numbers that they were given."""

    def __init__(self, layout: Packed) -> None:
        self.layout, self.streams = layout, []

    def projected(self, x: Tensor, weight: Tensor, bias: Tensor, weights: Any, biases: Any) -> Tensor:
        if not biases:
            return (x.float() @ weights[0].t() + (0.0 if bias is None else bias.float())).to(x.dtype)
        return F.linear(x.float(), torch.cat(weights), torch.cat(biases)).to(x.dtype)

    def mixed(self, qkv: Tensor, places: Tensor, ends: Tensor, seed: Tensor, **more: Any) -> Tensor:
        self.streams.append(more["stream"])
        query, key, value = qkv.float().chunk(3, -1)
        mixed = attend(query, key, value, self.layout, num_heads=more["heads"], window=more["window"])
        return mixed.to(qkv.dtype)

    def added_and_normed(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor, seed: Tensor, **more: Any
    ) -> tuple[Tensor, Tensor]:
        self.streams.append(more["stream"])
        total = x.float() + residual
        found = F.layer_norm(total, weight.shape, weight, bias, more["eps"])
        return total if more["pre"] else found, found.to(x.dtype)

    def activated(self, x: Tensor, x_bias: Tensor, *, tanh: bool) -> Tensor:
        return F.gelu(x.float(), approximate="tanh" if tanh else "none").to(x.dtype)


@pytest.fixture(params=["post", "pre"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    layer, states, layout, _ = self_tests.small_layer(CPU, LayerSizes(order=request.param, window=5))
    stand_in = StandIn(layout())
    monkeypatch.setitem(sys.modules, "flodl_hf.nn.kernels.operations", stand_in)  # type: ignore[arg-type]
    table = TrainingTable(torch.float16)
    layer.table = table
    return SimpleNamespace(layer=layer, states=states, layout=stand_in.layout, used=stand_in, table=table)


def half() -> Any:
    return torch.autocast("cpu", torch.float16)


def test_layers_hand_on_what_they_know_and_each_draws_from_its_own_streams(case: Any) -> None:
    with half():
        first = case.layer(case.states, layout=case.layout)
        second = case.layer(first, layout=case.layout)
    case.layer.table = TORCH
    right = case.layer(case.layer(case.states, layout=case.layout), layout=case.layout)
    assert float(((second - right).norm() / right.norm()).detach()) < 1e-2
    assert second.dtype == torch.float32
    streams = case.used.streams
    each = 3 if case.layer.order == "post" else 2  # the last sum of the other order draws by torch
    assert len(set(streams)) == len(streams) == 2 * each
    assert {stream // STREAMS for stream in streams[:each]} == {0}
    assert {stream // STREAMS for stream in streams[each:]} == {1}


def test_states_that_were_written_to_are_taken_as_they_are(case: Any) -> None:
    with half():
        states = case.layer(case.states, layout=case.layout)
        with torch.no_grad():
            states.mul_(2.0)
        found = case.layer(states, layout=case.layout)
        assert torch.equal(found, case.layer(states.clone(), layout=case.layout))


@pytest.mark.parametrize("most", [cuda.OFFSETS, 1])
def test_attention_of_more_numbers_than_kernels_count_is_torchs(
    case: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_training, "OFFSETS", most)
    with half():
        found = case.layer(case.states, layout=case.layout)
    assert (0 in case.used.streams) == (most > 1)  # the first head's
    case.layer.table = TORCH
    right = case.layer(case.states, layout=case.layout)
    assert float(((found - right).norm() / right.norm()).detach()) < 1e-2


@torch.inference_mode()
def test_the_same_of_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, states, layout, _ = self_tests.small_layer(CPU, LayerSizes())
    table = cuda.CudaTable(kernels=True)
    table.join(layer)
    monkeypatch.setattr(cuda, "OFFSETS", 3 * states.numel())
    monkeypatch.setitem(sys.modules, "flodl_hf.nn.kernels.operations", None)  # type: ignore[arg-type]
    found = layer.attention.output(table.attend(layer, states, layout(), {}, False).states)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(found, layer.eval().attention(states, layout=layout()), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:training. layers with hooks on their parts")
@pytest.mark.parametrize("how", ["hook", "backward hook", "backward pre-hook", "no autocast", "no gradient"])
def test_who_looks_between_the_parts_gets_torchs_operations(case: Any, how: str) -> None:
    part = case.layer.get_submodule("feed_forward.up")
    if how == "hook":
        part.register_forward_hook(lambda *_: None)
    elif how == "backward hook":
        part.register_full_backward_hook(lambda *_: None)
    elif how == "backward pre-hook":
        part.register_full_backward_pre_hook(lambda *_: None)
    with (
        torch.autocast("cpu", torch.float16, enabled=how != "no autocast"),
        torch.set_grad_enabled(how != "no gradient"),
    ):
        assert case.table.begin(case.layer, case.states, case.layout, {}) is TORCH
        case.layer(case.states, layout=case.layout)
    assert case.used.streams == []


def test_a_hook_that_comes_while_training_is_told_of_once(case: Any) -> None:
    case.layer.attention.register_forward_hook(lambda *_: None)
    with half():
        with pytest.warns(UserWarning, match="layers with hooks"):
            case.layer(case.states, layout=case.layout)
        case.layer(case.states, layout=case.layout)


def test_a_layer_is_tried_at_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(choose, "trusted", lambda *given: bool(asked.append(given)))
    wanted = [LayerSizes(), LayerSizes(64, 4, 96, "gelu_new", dropout=True), LayerSizes(bias=False, gated=True)]
    for sizes in wanted:
        layer = self_tests.small_layer(CPU, sizes, 0.1 if sizes.dropout else 0.0)[0]
        arrange_training(layer, torch.float16, anywhere=True)
        assert asked[-1] == ("training", CPU, torch.float16, sizes, self_tests.training)
        assert layer.table is TORCH


def test_memory_that_ran_out_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def out(*_: Any) -> str:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(trust, "_fault", out)
    assert not trust.trusted("training", CPU, torch.float16, LayerSizes(), self_tests.training)
    monkeypatch.setattr(trust, "_fault", lambda *_: "")
    assert trust.trusted("training", CPU, torch.float16, LayerSizes(), self_tests.training)


def test_kernels_that_differ_are_told_of_by_name_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    trust.forget()
    monkeypatch.setattr(trust, "find_spec", lambda _: object())
    asked = ("training", CPU, torch.float16, LayerSizes(width=48))

    def trial(*_: Any) -> tuple[float, str]:
        return 0.3, "the gradient of feed_forward.up.weight"

    with pytest.warns(UserWarning, match=r"feed_forward.up.weight differs by 3.0e-01 \(limit 1e-02\)"):
        assert not trust.trusted(*asked, trial)
    assert not trust.trusted(*asked, trial)
    trust.forget()


def test_a_verdict_holds_for_the_text_of_all_that_is_tried() -> None:
    tried = {f"{path.parent.name}/{path.name}" for path in trust._tried()}
    assert {"kernels/short_texts.py", "backends/cuda_training.py", "backends/self_tests.py"} < tried
    assert {"nn/attention.py", "disentangled/operator.py"} < tried


def test_a_cache_that_is_damaged_or_read_only_costs_a_trial_alone(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    for content in (b"", b"[1, {", b"\xff\xfe", b"null", b'{"a": 1}'):
        path.write_bytes(content)
        assert not trust._Verdicts(path).holds("training")
    known = trust._Verdicts(path)
    known.add("training")
    assert trust._Verdicts(path).holds("training")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels.json"]
    trust._Verdicts(Path("/proc/no/such/folder/kernels.json")).add("x")
