"""One number sets every dropout of a model of any family, and all of it can be put back."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named
from flodl_hf.training.start import set_dropout

SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "max_positions": 40,
    "type_vocab_size": 2, "embedding_size": 8,
}  # fmt: skip


def dropouts(model: nn.Module) -> list[float]:
    """Return the probability of everything that drops."""
    found = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    names = ("attention_dropout", "inner_dropout")
    numbers = [m.__dict__[name] for m in model.modules() for name in names if name in m.__dict__]
    return found + [number for number in numbers if number is not None]


LABELLED = [family for family in FAMILIES if "sequence_classification" in family.heads]


@pytest.mark.parametrize("family", LABELLED, ids=lambda family: family.model_type)
def test_every_dropout_is_set_and_put_back(family: Any) -> None:
    keys = {row.key: SIZES[row.field] for row in family.rows if row.field in SIZES}
    config = ModelConfig.for_model(family.model_type, **keys)
    model = head_named("sequence_classification").model.from_config(config)
    before = dropouts(model)
    told = set_dropout(model, 0.25)
    assert set(dropouts(model)) == {0.25}
    assert len(told) == len(before) > 4
    for module, name, value in told:
        setattr(module, name, value)
    assert dropouts(model) == before
