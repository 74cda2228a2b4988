"""A shadow's modules are the model's in all but identity, whatever way they have of being copied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flodl.graph import FlowBuilder
from flodl_hf.inference.prepared_graph import shadow


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.twice = self.linear
        self.seen = [self.linear]  # not a child, but the same module
        self.notes: dict[str, Any] = {"depth": [1, 2]}
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + len(self.notes["depth"])


class OwnState(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "told": True}


class OwnCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> OwnCopy:
        found = OwnCopy(3, 3)
        found.weight, found.bias = self.weight, self.bias
        vars(found)["told"] = True
        return found


def test_a_shadow_has_modules_of_its_own_and_everything_they_hold() -> None:
    graph = FlowBuilder(Plain(), name="first").through(nn.Dropout(0.5), name="second").build()
    first: Any = graph.get_submodule("first")
    copied: Any = shadow(graph).get_submodule("first")
    assert copied is not first
    assert copied.linear is not first.linear
    assert copied.twice is copied.linear
    assert copied.seen[0] is copied.linear
    assert copied.linear.weight is first.linear.weight
    assert copied.scale is first.scale
    assert copied.notes == first.notes
    assert copied.notes["depth"] is not first.notes["depth"]
    copied.register_forward_hook(lambda *_: None)
    copied.register_buffer("more", torch.zeros(1))
    assert not first._forward_hooks
    assert "more" not in first._buffers
    assert graph.training
    assert not copied.training
    x = torch.ones(2, 3)
    torch.testing.assert_close(shadow(graph)(x), copy.deepcopy(graph).eval()(x))


@pytest.mark.parametrize("kind", [OwnState, OwnCopy])
def test_a_way_of_its_own_to_be_copied_is_taken(kind: type[nn.Linear]) -> None:
    graph = FlowBuilder(kind(3, 3), name="first").build()
    copied: Any = shadow(graph).get_submodule("first")
    assert copied.told
    assert copied.weight is graph.get_parameter("first.weight")
    assert not hasattr(graph.get_submodule("first"), "told")


def test_hooks_go_along() -> None:
    graph = FlowBuilder(nn.Linear(3, 3), name="first").build()
    graph.get_submodule("first").register_forward_hook(lambda *given: given[2] + 1)
    x = torch.ones(2, 3)
    torch.testing.assert_close(shadow(graph)(x), graph(x))
