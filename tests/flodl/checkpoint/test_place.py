"""A load changes all reported tensors or none."""

from __future__ import annotations

import pytest
import torch

from flodl.checkpoint import load_into, load_tensors, migrate_checkpoint, save_tensors
from flodl.checkpoint.files import Checkpoint
from flodl.errors import CheckpointError

A, B = "aa" * 32, "bb" * 32


def holding(structural_hash: str = "", **tensors: torch.Tensor) -> Checkpoint:
    return Checkpoint(tensors, structural_hash, 2, {}, "fdl", "model.fdl")


def test_names_are_matched_and_the_rest_is_reported():
    named = {"a": torch.zeros(2, requires_grad=True), "b": torch.zeros(3)}
    report = load_into(named, holding(a=torch.ones(2), z=torch.ones(1)))
    assert (report.loaded, report.skipped, report.missing) == (["a"], ["z"], ["b"])
    assert not report.is_complete
    assert named["a"].tolist() == [1, 1]
    assert named["a"].requires_grad
    assert named["b"].tolist() == [0, 0, 0]
    assert load_into({"a": named["a"]}, holding(a=torch.ones(2))).is_complete


@pytest.mark.parametrize(
    ("found", "expected", "refused"),
    [(A, A, False), (A, "", False), ("", A, False), (A, B, True), (A, A.upper(), False)],
)
def test_only_two_known_and_different_hashes_are_refused(found, expected, refused):
    named = {"a": torch.zeros(1)}
    if refused:
        with pytest.raises(CheckpointError) as caught:
            load_into(named, holding(found, a=torch.ones(1)), expected_hash=expected)
        assert found[:8] in str(caught.value)
        assert expected[:8] in str(caught.value)
        assert named["a"].item() == 0
    else:
        load_into(named, holding(found, a=torch.ones(1)), expected_hash=expected)
        assert named["a"].item() == 1


REFUSED = {
    "shape": (torch.zeros(2), torch.ones(3)),
    "same count, other shape": (torch.zeros(2, 3), torch.ones(3, 2)),
    "float into int": (torch.zeros(2, dtype=torch.int64), torch.ones(2)),
    "int into bool": (torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.int32)),
    "complex into float": (torch.zeros(2), torch.ones(2, dtype=torch.complex64)),
    "overflow": (torch.zeros(2, dtype=torch.float16), torch.full((2,), 1e6)),
    "integer overflow": (torch.zeros(1, dtype=torch.float16), torch.tensor([10**6])),
    "meta": (torch.zeros(2, device="meta"), torch.ones(2)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_load_changes_nothing(case):
    target, source = REFUSED[case]
    named = {"first": torch.zeros(2), "bad": target, "last": torch.zeros(2)}
    with pytest.raises(CheckpointError) as caught:
        load_into(named, holding(first=torch.ones(2), bad=source, last=torch.ones(2)))
    assert len(caught.value.problems) == 1
    assert "'bad'" in str(caught.value)
    assert "model.fdl" in str(caught.value)
    assert named["first"].tolist() == named["last"].tolist() == [0, 0]


def test_every_misfit_is_listed_at_once():
    named = {name: torch.zeros(2) for name in "abc"}
    with pytest.raises(CheckpointError) as caught:
        load_into(named, holding(a=torch.ones(1), b=torch.ones(2), c=torch.ones(3)))
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("into", [torch.float16, torch.bfloat16, torch.float64])
def test_values_are_cast_to_the_dtype_of_the_model_and_reported(into):
    named = {"a": torch.zeros(3, dtype=into), "n": torch.zeros(3, dtype=into)}
    values = torch.tensor([0.1, float("inf"), -2.5])
    report = load_into(named, holding(a=values, n=torch.tensor([1, 2, 3])))
    assert torch.equal(named["a"], values.to(into))
    assert named["n"].tolist() == [1, 2, 3]
    assert report.cast[0] == ("a", "torch.float32", str(into))


def test_tied_tensors_need_equal_values():
    shared = torch.zeros(2)
    load_into({"a": shared, "b": shared}, holding(a=torch.ones(2), b=torch.ones(2)))
    assert shared.tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="'a' and 'b'"):
        load_into({"a": shared, "b": shared}, holding(a=torch.ones(2), b=torch.zeros(2)))
    assert shared.tolist() == [1, 1]


@pytest.mark.parametrize("suffix", ["safetensors", "fdl", "fdl.gz"])
def test_migration_renames_by_name_then_by_shape_in_file_order(tmp_path, suffix):
    old, new = tmp_path / "old.fdl", tmp_path / f"new.{suffix}"
    values = {
        "keep": torch.ones(2),
        "l1/w": torch.full((3, 3), 1.0),
        "l2/w": torch.full((3, 3), 2.0),
        "gone": torch.ones(7),
    }
    save_tensors(old, values, structural_hash=A)
    named = {
        "keep": torch.zeros(2),
        "x.w": torch.zeros(3, 3),
        "y.w": torch.zeros(3, 3),
        "lack": torch.zeros(9),
    }
    report = migrate_checkpoint(old, new, named)
    assert report.unchanged == ["keep"]
    assert report.remapped == [("l1/w", "x.w"), ("l2/w", "y.w")]
    assert (report.dropped, report.missing) == (["gone"], ["lack"])
    assert not report.is_complete
    back = load_tensors(new)
    assert back.structural_hash == ""
    assert {k: v.flatten()[0].item() for k, v in back.tensors.items()} == {"keep": 1, "x.w": 1, "y.w": 2}


def test_migration_matches_dtype_too_and_may_write_over_its_source(tmp_path):
    path = tmp_path / "m.safetensors"
    save_tensors(path, {"a": torch.ones(2, dtype=torch.float16)})
    assert migrate_checkpoint(path, path, {"b": torch.zeros(2)}).missing == ["b"]
    save_tensors(path, {"a": torch.ones(2)})
    assert migrate_checkpoint(path, path, {"b": torch.zeros(2)}).is_complete
    assert list(load_tensors(path).tensors) == ["b"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_nonfinite_parameters_are_refused_unless_allowed(value: float, dtype: torch.dtype) -> None:
    named = {
        "good": torch.nn.Parameter(torch.zeros(2)),
        "bad": torch.nn.Parameter(torch.zeros(3)),
        "buffer": torch.zeros(3),
    }
    odd = torch.tensor([1.0, value, 2.0], dtype=dtype)
    held = holding(good=torch.ones(2), bad=odd, buffer=odd.float())
    with pytest.raises(CheckpointError, match="Nothing was loaded") as no:
        load_into(named, held)
    (problem,) = no.value.problems
    assert "'bad'" in problem
    assert not named["good"].any()
    load_into(named, held, allow_nonfinite=True)
    assert torch.equal(named["bad"].isfinite(), odd.isfinite())
