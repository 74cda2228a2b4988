"""Faults put in on purpose: the matrix catches each, and the probe names the module where the sides part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flodl_hf.families import bert
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.record import KeyRow
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.parity import matrix
from flodl_hf.parity.cell import Bench, Cell
from flodl_hf.parity.matrix import CellResult, run_cell

pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers


@dataclass(frozen=True)
class Fault:
    """What is broken (a model after loading, or the family's record), and who must notice where.

    ``inside`` is whether the probe must say that the module itself is at fault and not what it was given.
    """

    name: str
    caught_by: tuple[str, ...]
    where: str | None
    inside: bool | None = None
    model: Callable[[EncoderModel], object] | None = None
    family: Callable[[Family], Family] | None = None
    head: str = "sequence_classification"
    unseen_by: tuple[str, ...] = ()


LAYER = "encoder.layers.1"


def swapped_rows(one: str, other: str) -> Callable[[Family], Family]:
    def change(family: Family) -> Family:
        theirs = {row.ours: row.theirs for row in family.keys}
        theirs[one], theirs[other] = theirs[other], theirs[one]
        return replace(family, keys=tuple(KeyRow(ours, name) for ours, name in theirs.items()))

    return change


def with_encoder(**changes: Any) -> Callable[[Family], Family]:
    return lambda family: replace(family, encoder=lambda c: family.encoder(replace(c, **changes)))


def weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[EncoderModel], object]:
    def damage(model: EncoderModel) -> None:
        parameter = model.graph.get_parameter(name)
        parameter.data = change(parameter.data).clone()

    return damage


def exchanged(one: str, other: str) -> Callable[[EncoderModel], object]:
    def damage(model: EncoderModel) -> None:
        a, b = model.graph.get_parameter(one), model.graph.get_parameter(other)
        a.data, b.data = b.data, a.data

    return damage


def set_on(kind: type, **values: Any) -> Callable[[EncoderModel], object]:
    def damage(model: EncoderModel) -> None:
        changed = [module for module in model.modules() if isinstance(module, kind)]
        assert changed
        for module in changed:
            for name, value in values.items():
                assert hasattr(module, name)
                setattr(module, name, value)

    return damage


def untied(model: EncoderModel) -> None:
    decoder = model.graph.get_submodule("head.decoder")
    decoder.weight = torch.nn.Parameter(model.graph.get_parameter("head.decoder.weight").detach().clone())


FAULTS = [
    Fault(
        "a swapped key row", ("forward", "gradients", "predictions"), "encoder.layers.0.attention_norm", False,
        family=swapped_rows("encoder.layers.{i}.attention_norm", "encoder.layers.{i}.feed_forward_norm"),
    ),
    Fault(
        "query and key rows swapped", ("forward", "gradients"), "encoder.layers.0.attention.output", False,
        family=swapped_rows("encoder.layers.{i}.attention.query", "encoder.layers.{i}.attention.key"),
    ),
    Fault("a wrong epsilon", ("forward", "gradients", "training_steps"), "encoder.embeddings.norm", True, family=with_encoder(norm_eps=1e-6)),
    Fault("gelu_new for gelu", ("forward", "gradients"), "encoder.layers.0.feed_forward.activation", True, family=with_encoder(activation="gelu_new")),
    Fault("half the heads", ("forward",), "encoder.layers.0.attention.output", False, family=with_encoder(num_heads=2)),
    Fault(
        "query and key weights swapped in one layer", ("forward", "gradients"), f"{LAYER}.attention.query", True,
        model=exchanged(f"{LAYER}.attention.query.weight", f"{LAYER}.attention.key.weight"),
    ),
    Fault("a transposed weight", ("forward", "gradients", "predictions"), f"{LAYER}.attention.value", True, model=weight(f"{LAYER}.attention.value.weight", lambda w: w.T)),
    Fault("a bias lost", ("forward",), f"{LAYER}.feed_forward.up", True, model=weight(f"{LAYER}.feed_forward.up.bias", torch.zeros_like)),
    Fault("a bias off by one bit", ("forward",), f"{LAYER}.feed_forward.up", True, model=weight(f"{LAYER}.feed_forward.up.bias", lambda b: b.nextafter(b + 1))),
    Fault("token types ignored", ("forward",), "encoder.embeddings.token_type", True, model=weight("encoder.embeddings.token_type.weight", lambda w: w.flip(0))),
    Fault("a classifier with its rows turned", ("forward", "predictions"), "head.classifier", True, model=weight("head.classifier.weight", lambda w: w.roll(1, 0))),
    Fault("no dropout", ("train_mode",), None, model=set_on(torch.nn.Dropout, p=0.0), unseen_by=("forward", "gradients")),
    Fault("padding that learns", ("gradients", "training_steps"), None, model=set_on(torch.nn.Embedding, padding_idx=None), head="base", unseen_by=("forward",)),
    Fault("a frozen tensor", ("train_mode", "gradients"), None, model=lambda m: m.graph.get_parameter(f"{LAYER}.attention.query.weight").requires_grad_(False), unseen_by=("forward",)),
    Fault("a tie undone", ("training_steps",), None, model=untied, head="masked_lm", unseen_by=("forward",)),
]  # fmt: skip


def run_with(fault: Fault, monkeypatch: pytest.MonkeyPatch, checks: tuple[str, ...]) -> CellResult:
    class Faulty(Bench):
        def load(self, *args: Any, **options: Any) -> EncoderModel:
            model = super().load(*args, **options)
            if fault.model is not None:
                fault.model(model)
            return model

    monkeypatch.setattr(matrix, "Bench", Faulty)
    if fault.family is not None:
        broken = fault.family(bert.FAMILY)
        monkeypatch.setattr("flodl_hf.checkpoints.config.model_config.family_of", lambda source, where: broken)
        monkeypatch.setattr(Cell, "record", property(lambda _: broken))
    return run_cell(Cell("bert", fault.head), checks=checks)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_and_located(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = tuple(dict.fromkeys([*fault.caught_by, *fault.unseen_by]))
    result = run_with(fault, monkeypatch, checks)
    by_name = dict(zip([n for n in matrix.check_names() if n in checks], result.evidence, strict=True))
    assert result.status == "fail"
    for name in fault.caught_by:
        assert by_name[name].status == "fail", f"{name}: {by_name[name].detail}"
    for name in fault.unseen_by:
        assert by_name[name].status == "pass", f"{name}: {by_name[name].detail}"
    if fault.where is not None:
        found = by_name["forward"]
        assert found.where == fault.where, found.detail
        cause = "its own arithmetic or weights" if fault.inside else "its inputs"
        assert cause in found.detail


def test_without_a_fault_the_same_cells_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for head in {fault.head for fault in FAULTS}:
        checks = tuple({c for fault in FAULTS for c in (*fault.caught_by, *fault.unseen_by)})
        result = run_with(Fault("none", (), None, head=head), monkeypatch, checks)
        assert result.status == "pass", [e for e in result.evidence if e.status != "pass"]


class Source(Bench):
    """A bench whose checkpoint is damaged after transformers wrote it."""

    def damaged(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        held = load_file(self.folder / "model.safetensors")
        change(held)
        save_file(held, self.folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tensor_dropped_from_the_file_fails_the_strict_load_by_name() -> None:
    name = "bert.encoder.layer.1.attention.self.query.weight"
    with Source(Cell("bert", "token_classification")) as bench:
        bench.damaged(lambda held: held.pop(name))
        evidence = matrix._guarded(matrix.CHECKS[matrix.check_names().index("strict_load")], bench)
    assert evidence.status == "fail"
    assert "missing (1)" in evidence.detail
    assert name in evidence.detail


def test_a_dropped_key_row_is_reported_and_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(
        "a dropped row", (), None,
        family=lambda f: replace(f, keys=tuple(r for r in f.keys if not r.ours.endswith("attention.value"))),
    )  # fmt: skip
    result = run_with(fault, monkeypatch, ("key_map", "strict_load", "forward"))
    assert [e.status for e in result.evidence] == ["fail"] * 3
    assert all("attention.value" in e.detail for e in result.evidence)


@pytest.mark.parametrize(("damage", "says"), [("lost", "missing"), ("extra", "unexpected"), ("changed", "differing")])
def test_an_export_that_loses_or_adds_a_tensor_is_seen(damage: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save = EncoderModel.save_pretrained

    def broken(self: EncoderModel, folder: Path, **options: Any) -> Path:
        out = save(self, folder, **options)
        held = load_file(out / "model.safetensors")
        if damage == "lost":
            held.pop("classifier.bias")
        elif damage == "extra":
            held["surprise"] = torch.zeros(2)
        else:
            held["classifier.bias"] += 1e-3
        save_file(held, out / "model.safetensors", metadata={"format": "pt"})
        return out

    monkeypatch.setattr(EncoderModel, "save_pretrained", broken)
    result = run_cell(Cell("bert", "sequence_classification"), checks=("export_bytes", "reload"))
    export, reload = result.evidence
    assert (export.status, reload.status) == ("fail", "fail")
    assert "differing: model.safetensors" in export.detail
    if says != "differing":
        assert re_names(reload.detail)[says] != []


def re_names(detail: str) -> dict[str, list[str]]:
    """Return what ``missing [..], unexpected [..]`` lists."""
    missing, _, unexpected = detail.removeprefix("missing ").partition(", unexpected ")
    return {"missing": _listed(missing), "unexpected": _listed(unexpected)}


def _listed(text: str) -> list[str]:
    return [name for name in text.strip("[]").replace("'", "").split(", ") if name]


def test_an_exception_inside_a_check_is_that_checks_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(_: Bench) -> Any:
        raise ZeroDivisionError("nothing to divide")

    explode.__name__ = "forward"
    monkeypatch.setattr(matrix, "CHECKS", (explode, matrix.CHECKS[0]))
    result = run_cell(Cell("bert", "base"))
    assert [e.status for e in result.evidence] == ["fail", "pass"]
    assert "ZeroDivisionError: nothing to divide (explode, line" in result.evidence[0].detail
