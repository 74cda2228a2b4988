"""The table of names reads both ways, whatever its rows, and refuses what could not be read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flodl.errors import CheckpointError
from flodl_hf import load
from flodl_hf.checkpoints.weights.loading import canonical_names, plan_load
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.record import KeyMap, KeyRow
from flodl_hf.heads.auto import head_named

word = st.text(alphabet="abcdef_", min_size=1, max_size=6)
names = st.lists(word, min_size=1, max_size=8, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    ours=names,
    theirs=names,
    repeated=st.lists(st.booleans(), min_size=8, max_size=8),
    layers=st.integers(1, 12),
    leaf=word,
)
def test_every_name_comes_back(
    ours: list[str], theirs: list[str], repeated: list[bool], layers: int, leaf: str
) -> None:
    rows = [
        KeyRow(f"x.layers.{{i}}.{a}", f"y.block.{{i}}.z.{b}") if hole else KeyRow(f"x.{a}", f"y.{b}")
        for a, b, hole in zip(ours, theirs, repeated, strict=False)
    ]
    table = KeyMap(rows, [{"i": i} for i in range(layers)])
    assert len(table.pairs) == sum(layers if "{" in row.ours else 1 for row in rows)
    for mine, other in table.pairs.items():
        assert table.theirs(f"{mine}.{leaf}") == f"{other}.{leaf}"
        assert table.ours(f"{other}.{leaf}") == f"{mine}.{leaf}"
        assert (table.theirs(mine), table.ours(other)) == (other, mine)
    tensors = [f"{mine}.{leaf}" for mine in table.pairs]
    assert [table.ours(name) for name in table.names(tensors).values()] == tensors
    assert table.ours(f"unknown.{leaf}") is None
    with pytest.raises(CheckpointError, match="no key row covers"):
        table.theirs(f"unknown.{leaf}")


def test_layers_come_in_graph_order_with_their_rows_together() -> None:
    rows = [KeyRow("a", "A"), KeyRow("l.{i}.b", "L.{i}.B"), KeyRow("l.{i}.c", "L.{i}.C"), KeyRow("d", "D")]
    table = KeyMap(rows, [{"i": 0}, {"i": 1}])
    assert list(table.pairs) == ["a", "l.0.b", "l.0.c", "l.1.b", "l.1.c", "d"]


@pytest.mark.parametrize(
    "rows",
    [
        [KeyRow("a", "A"), KeyRow("a", "B")],
        [KeyRow("a", "A"), KeyRow("b", "A")],
        [KeyRow("l.{i}.a", "A"), KeyRow("b", "B")],
        [KeyRow("l.1.a", "B"), KeyRow("l.{i}.a", "L.{i}.A")],
    ],
    ids=["ours twice", "theirs twice", "a hole on one side", "a hole that meets a name"],
)
def test_rows_that_collide_are_refused_by_name(rows: list[KeyRow]) -> None:
    with pytest.raises(CheckpointError, match="key rows collide") as caught:
        KeyMap(rows, [{"i": 0}, {"i": 1}])
    assert all(" <-> " in clash for clash in caught.value.clashes)


def test_two_tensors_of_one_name_are_refused() -> None:
    # A row for a whole tensor and a row for its module meet at the leaf.
    table = KeyMap([KeyRow("h.decoder", "p.decoder"), KeyRow("h.extra.bias", "p.decoder.bias")], [])
    with pytest.raises(CheckpointError, match="one name"):
        table.names(["h.decoder.bias", "h.extra.bias"])


@pytest.mark.parametrize("head", ["masked_lm", "sequence_classification"])
def test_an_encoder_that_kept_another_class_loads_as_the_encoder(saved: Callable[..., Path], head: str) -> None:
    """all-mpnet-base-v2 names MPNetForMaskedLM and holds no head."""
    folder = saved("mpnet")
    config = json.loads((folder / "config.json").read_text())
    named = f"MPNet{head_named(head).hf_suffix}"
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    model = load(folder)
    assert model.head == "base"
    assert model.load_report is not None
    assert (
        f"architectures: found '{named}' and no tensors of its head; loaded the encoder alone"
        in model.load_report.notes
    )
    with pytest.raises(CheckpointError, match="missing"):
        load(folder, head=head)
    held = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in held.items() if "layer.1" not in name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.1"):
        load(folder)


Make = Callable[..., Any]


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str = "F32"
    file: str = "model.safetensors"


OLDER = ((".LayerNorm.weight", ".LayerNorm.gamma"), (".LayerNorm.bias", ".LayerNorm.beta"))
WITH_OLDER = [
    (family.model_type, head)
    for family in FAMILIES
    if family.tiny and any(row.theirs.endswith(".LayerNorm") for row in family.keys)
    for head in ("base", *family.heads)
]


@pytest.mark.parametrize(("model_type", "head"), WITH_OLDER)
def test_norms_by_their_older_names_are_found_in_every_head(model_type: str, head: str, make: Make) -> None:
    """Files of the first years (bert-base-uncased) have them, also where two heads share a norm."""
    model = make(model_type, head)
    family, encoder = model.config.family, model.config.encoder
    shapes = {name: tuple(one.shape) for name, one in model.graph.named_parameters(remove_duplicate=False)}
    table, stored, older = family.key_map(encoder, head), {}, set()
    for ours, theirs in canonical_names(family, table, shapes, bare=False).items():
        name = theirs
        for new, old in OLDER:
            name = name.removesuffix(new) + old if name.endswith(new) else name
        stored[name] = StoredTensor(shapes[ours])
        older |= {name} - {theirs}
    plan = plan_load(
        family, table, shapes, stored, head=head, source_head=head, tie_words=False, source="test", config=encoder
    )
    assert set(plan.placed) == set(shapes)
    assert set(plan.report.renamed) == older != set()
    assert not plan.report.ignored


@pytest.mark.parametrize("prefix", ["bert_model", "question_encoder.bert_model", "ctx_encoder.bert_model"])
def test_encoders_of_dpr_are_read_under_their_names(prefix: str, saved: Callable[..., Path]) -> None:
    folder = saved("bert")
    expected = load(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"{prefix}.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    found = load(folder)
    assert found.load_report is not None
    assert not found.load_report.new
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name))
