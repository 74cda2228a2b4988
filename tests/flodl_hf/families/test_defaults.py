"""What a configuration leaves out is what transformers takes it to be, for every family and key."""

from __future__ import annotations

import pytest

from flodl_hf.families import families
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.config_rows import REQUIRED

# Keys that transformers computes from others where they are absent; ours stand for "from others" too.
FROM_OTHERS = {
    ("deberta", "pooler_hidden_size"), ("deberta-v2", "pooler_hidden_size"), ("modernbert", "layer_types"),
    ("modernbert", "rope_parameters"), ("eurobert", "num_key_value_heads"), ("eurobert", "head_dim"),
}  # fmt: skip
# None and nothing are the same here.
NOTHING = (None, (), [])


@pytest.mark.transformers
@pytest.mark.parametrize("family", families(), ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family: Family) -> None:
    transformers = pytest.importorskip("transformers")
    if family.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no such family")
    theirs = transformers.AutoConfig.for_model(family.model_type).to_dict()
    # Where nothing is said of rotations, ours are of one base; transformers writes that as a table.
    turned = {"rope_parameters": {"rope_type": "default"}}
    for row in family.rows:
        if row.field == "theta":
            turned["rope_parameters"]["rope_theta"] = row.default
    different = {
        row.key: (row.default, theirs[row.key])
        for row in family.rows
        if row.default is not REQUIRED
        and not callable(row.default)
        and (family.model_type, row.key) not in FROM_OTHERS
        and row.key in theirs
        and row.default != theirs[row.key]
        and theirs[row.key] != turned.get(row.key)
        and not (row.default in NOTHING and theirs[row.key] in NOTHING)
    }
    assert different == {}
    required = {row.field: theirs[row.key] for row in family.rows if row.default is REQUIRED}
    assert family.left_out == {field: size for field, size in required.items() if size is not None}
