"""Each form in which a file states rotary positions: transformers' frequencies to the bit, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flodl.errors import ConfigError
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import families
from flodl_hf.nn.positions import Rotary
from flodl_hf.parity.cell import settings_of

LINEAR, DEFAULT = {"type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 900.0}
OTHER = {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}
SAID: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a base": {"rope_theta": 500.0},
    "a table": {"rope_parameters": OTHER},
    "a table beside a base": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
    "a table of the older name": {"rope_scaling": LINEAR, "rope_theta": 500.0},
    "both tables": {"rope_scaling": LINEAR, "rope_parameters": DEFAULT},
    "both tables with bases": {"rope_scaling": DEFAULT, "rope_parameters": OTHER},
    "both tables beside a base": {"rope_scaling": LINEAR, "rope_parameters": DEFAULT, "rope_theta": 500.0},
    "an empty table of the older name": {"rope_scaling": {}, "rope_parameters": OTHER},
    "empty tables": {"rope_scaling": {}, "rope_parameters": {}, "rope_theta": 500.0},
    "null": {"rope_scaling": None, "rope_parameters": None, "rope_theta": 500.0},
    "by length": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}
TURNED = [f.model_type for f in families() if f.tiny and "rotary" in {row.field for row in f.rows}]


def frequencies(model_type: str, said: dict[str, Any]) -> list[torch.Tensor]:
    """Return ours, one for each distinct set; raise ConfigError where the file is refused."""
    family = next(f for f in families() if f.model_type == model_type)
    config = ModelConfig.from_dict({**settings_of(family, "tiny"), "model_type": model_type, **said})
    graph = family.encoder(config.encoder)
    return distinct([m.frequencies(torch.device("cpu")) for m in graph.modules() if isinstance(m, Rotary)])


def distinct(found: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({tuple(x.tolist()): x for x in found}.values())


@pytest.mark.transformers
@pytest.mark.parametrize("model_type", TURNED)
def test_frequencies_are_those_of_transformers_or_refused(model_type: str) -> None:
    from transformers import AutoConfig, AutoModel

    family = next(f for f in families() if f.model_type == model_type)
    refused = []
    for name, said in SAID.items():
        try:
            ours = frequencies(model_type, said)
        except ConfigError as fault:
            refused += [name] if all(problem.startswith("rope_") for problem in fault.problems) else fault.problems
            continue
        copied = {key: dict(value) if isinstance(value, dict) else value for key, value in said.items()}
        model = AutoModel.from_config(AutoConfig.for_model(model_type, **settings_of(family, "tiny"), **copied))
        theirs = distinct([b for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n])
        assert len(ours) == len(theirs), name
        assert all(any(torch.equal(a, b) for b in theirs) for a in ours), name
    assert "nothing" not in refused
    assert "by length" in refused
    assert set(refused) <= set(SAID)


def test_the_table_of_the_older_name_holds_before_the_newer() -> None:
    for model_type in ("gte", "eurobert", "jina_embeddings_v3"):
        alone = frequencies(model_type, {"rope_scaling": LINEAR})
        both = frequencies(model_type, {"rope_scaling": LINEAR, "rope_parameters": DEFAULT})
        assert [x.tolist() for x in alone] == [x.tolist() for x in both]
        empty = frequencies(model_type, {"rope_scaling": {}, "rope_parameters": OTHER})
        assert [x.tolist() for x in empty] == [x.tolist() for x in frequencies(model_type, {"rope_parameters": OTHER})]
