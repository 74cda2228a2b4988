"""Every ``hidden_act`` gives transformers' numbers to the bit, the one with weights of its own included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flodl_hf import AutoModelForMaskedLM
from flodl_hf.families import FAMILIES
from flodl_hf.nn.layers import ACTIVATIONS
from flodl_hf.parity.cell import settings_of
from flodl_hf.parity.reference import load_reference, make_checkpoint

pytestmark = pytest.mark.transformers
RECORDS = {family.model_type: family for family in FAMILIES}
CASES = [("bert", name) for name in ACTIVATIONS] + [
    (family, name)
    for family in ("roberta", "distilbert", "albert", "deberta-v2")
    for name in ("prelu", "gelu_new", "relu2")
]


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_activation_equals_the_reference(model_type: str, name: str, tmp_path: Path) -> None:
    family = RECORDS[model_type]
    key = next(row.key for row in family.rows if row.field == "activation")
    settings = settings_of(family, "tiny") | {key: name}
    make_checkpoint(tmp_path, f"{family.class_prefix}ForMaskedLM", settings, scale=0.2)
    ours, theirs = (
        AutoModelForMaskedLM.from_pretrained(tmp_path),
        load_reference(tmp_path, f"{family.class_prefix}ForMaskedLM"),
    )
    ids = torch.randint(5, 600, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = ours(input_ids=ids).logits
    assert theirs.missing == theirs.unexpected == []
    assert torch.equal(found, theirs({"input_ids": ids})["logits"])
