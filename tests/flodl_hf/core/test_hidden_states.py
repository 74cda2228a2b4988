"""States after each layer: transformers' own, each call's own; and attention implementations by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.errors import ConfigError
from flodl_hf import AutoModel
from flodl_hf.families import FAMILIES
from flodl_hf.models.encoder_model import EncoderModel

Make = Callable[..., EncoderModel]
Saved = Callable[..., Path]
TYPES = [family.model_type for family in FAMILIES]
IDS = torch.tensor([[2, 9, 17, 21, 3], [2, 30, 3, 0, 0]])
MASK = (IDS != 0).long()
DISTANCES = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}


def aligned(model: Any) -> Any:
    """Return transformers' model with copies of its weights: their place in a mapped file decides last bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        *((name, {}) for name in TYPES),
        ("albert", {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}),
    ],
)
def test_hidden_states_are_the_references(model_type: str, settings: dict[str, Any], saved: Saved) -> None:
    from transformers import CONFIG_MAPPING
    from transformers import AutoModel as Theirs

    if model_type not in CONFIG_MAPPING:
        pytest.skip("transformers has no such family")
    folder = saved(model_type, **settings)
    ours, theirs = AutoModel.from_pretrained(folder), aligned(Theirs.from_pretrained(folder))
    with torch.no_grad():
        found = ours(IDS, MASK, output_hidden_states=True).hidden_states
        expected = theirs(IDS, MASK, output_hidden_states=True).hidden_states
    assert len(found) == len(expected)
    assert [state.shape for state in found] == [state.shape for state in expected]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("model_type", TYPES)
def test_the_first_state_enters_the_first_layer_and_the_last_is_the_result(model_type: str, make: Make) -> None:
    model = make(model_type)
    output = model(IDS, MASK, output_hidden_states=True)
    assert {state.shape for state in output.hidden_states} == {output.last_hidden_state.shape}
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


def test_each_thread_gets_the_states_of_its_own_call(make: Make) -> None:
    model = make("bert", num_hidden_layers=6)
    inputs = [torch.randint(5, 60, (1, 3 + i), generator=torch.Generator().manual_seed(i)) for i in range(8)]

    def ask(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return model(ids, output_hidden_states=True).hidden_states

    alone = [ask(ids) for ids in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, inputs * 12))
    for index, states in enumerate(together):
        expected = alone[index % len(inputs)]
        assert len(states) == len(expected) == 7
        assert all(map(torch.equal, states, expected))


def test_attention_is_chosen_among_those_that_exist(make: Make) -> None:
    model = make("bert")
    with pytest.raises(ConfigError, match="attention='egaer', did you mean 'eager'"):
        model.set_attention("egaer")
    assert {m.implementation for m in model.modules() if hasattr(m, "implementation")} == {"sdpa"}
    assert model.set_attention("eager") is model


# Buckets and ranges that leave nothing between near distances, which have a row each, and the last row.
CROWDED = [(2, 2), (4, 3), (6, 4), (8, 5), (8, 4), (6, 3), (16, 2), (16, 6), (32, 3)]


@pytest.mark.parametrize(("buckets", "farthest"), CROWDED)
def test_crowded_buckets_are_computed_by_both_ways_of_attention(buckets: int, farthest: int, make: Make) -> None:
    model = make("deberta-v2", **DISTANCES, position_buckets=buckets, max_relative_positions=farthest)
    for length in (2, 3, 9, 30):
        ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            exact = model.set_attention("eager")(ids).last_hidden_state
            fast = model.set_attention("fast")(ids).last_hidden_state
        torch.testing.assert_close(fast, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.transformers
@pytest.mark.parametrize(("buckets", "farthest"), CROWDED)
def test_crowded_buckets_are_the_references(buckets: int, farthest: int, saved: Saved) -> None:
    from transformers import AutoModel as Theirs

    folder = saved("deberta-v2", **DISTANCES, position_buckets=buckets, max_relative_positions=farthest)
    ours, theirs = AutoModel.from_pretrained(folder, attention="eager"), aligned(Theirs.from_pretrained(folder))
    ids = torch.randint(5, 60, (2, 30), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(ours(ids).last_hidden_state, theirs(ids).last_hidden_state)
