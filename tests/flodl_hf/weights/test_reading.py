"""What is read equals what the format's own library reads, and stays so whatever happens to the file."""

from __future__ import annotations

import gc
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from weight_tables import TABLES, same

from flodl.errors import CheckpointError
from flodl_hf.checkpoints.weights import prefetch
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.models.pretrained import _read


@settings(max_examples=60, deadline=None)
@given(table=TABLES, mapped=st.booleans())
def test_reads_what_safetensors_wrote(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Tensor], mapped: bool
) -> None:
    folder = tmp_path_factory.mktemp("table")
    safetensors.torch.save_file(table, folder / "model.safetensors")
    with Checkpoint.open(folder) as source:
        found = source.read_all(mapped=mapped)
        assert set(found) == set(source.manifest.tensors) == set(table)
        assert all(same(found[name], table[name]) for name in table)
        assert all(tensor.data_ptr() % tensor.dtype.itemsize == 0 for tensor in found.values())
        for name in table:
            assert same(source.read_all([name])[name], table[name])
        assert list(found) == list(source.manifest.tensors)


@pytest.mark.parametrize("task", [1, 7, 64, 1000])
def test_pieces_and_threads_give_the_same_bytes(
    single: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, task: int
) -> None:
    monkeypatch.setattr(prefetch, "TASK_BYTES", task)
    monkeypatch.setattr(prefetch, "_MAX_VECTORS", 2)
    monkeypatch.setattr(prefetch, "usable_cpus", lambda: 4)
    with Checkpoint.open(single) as source:
        found = source.read_all()
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_short_reads_are_continued(single: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal or a network file system may give less than was asked for, at any byte."""
    real, length = os.preadv, itertools.cycle([1, 7, 30, 100])

    def short(descriptor: int, buffers: list[memoryview], position: int) -> int:
        left, some = next(length), []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
        return real(descriptor, some, position)

    monkeypatch.setattr(os, "preadv", short)
    with Checkpoint.open(single) as source:
        found = source.read_all()
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_files_come_in_order_whatever_was_asked(sharded: Path, tensors: dict[str, Tensor]) -> None:
    wanted = sorted(tensors, reverse=True)[:4]
    with Checkpoint.open(sharded) as source:
        order = [name for name in source.manifest.tensors if name in wanted]
        assert list(source.read_all(wanted)) == order
        assert source.read_all([]) == {}


@pytest.mark.parametrize("fate", ["truncated", "overwritten", "deleted"])
def test_nothing_that_happens_to_the_file_reaches_the_tensors(
    single: Path, tensors: dict[str, Tensor], fate: str
) -> None:
    with Checkpoint.open(single) as source:
        found = source.read_all()
    file = single / "model.safetensors"
    if fate == "truncated":
        os.truncate(file, 10)
    elif fate == "overwritten":
        size = file.stat().st_size
        with open(file, "r+b") as target:
            target.write(b"\xff" * size)
    else:
        file.unlink()
    assert all(same(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_cut_after_opening_is_an_error(single: Path, mapped: bool) -> None:
    with Checkpoint.open(single) as source:
        os.truncate(single / "model.safetensors", (single / "model.safetensors").stat().st_size - 100)
        with pytest.raises(CheckpointError) as caught:
            source.read_all(mapped=mapped)
    assert caught.value.problems == ["truncated while reading"]
    assert caught.value.path.endswith("model.safetensors")


def test_a_folder_exchanged_after_opening_is_not_mixed(
    tmp_path: Path, sharded: Path, tensors: dict[str, Tensor]
) -> None:
    with Checkpoint.open(sharded) as source:
        sharded.rename(tmp_path / "old")
        sharded.mkdir()
        found = source.read_all()
    assert all(same(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("mapped", [False, True])
def test_one_tensor_does_not_drag_its_neighbours_along(single: Path, mapped: bool) -> None:
    before = (single / "model.safetensors").read_bytes()
    with Checkpoint.open(single) as source:
        found = source.read_all(mapped=mapped)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())
    first, second = list(found.values())[:2]
    kept = second.clone()
    with torch.no_grad():
        first.zero_()
    assert same(second, kept)
    assert (single / "model.safetensors").read_bytes() == before


def test_unknown_names_are_listed_with_near_ones(single: Path) -> None:
    with Checkpoint.open(single) as source, pytest.raises(CheckpointError) as caught:
        source.read_all(["classifier.wieght", "nothing"])
    assert caught.value.missing == ["classifier.wieght", "nothing"]
    assert "did you mean 'classifier.weight'" in caught.value.problems[0]


def test_reading_after_close_says_so(single: Path) -> None:
    source = Checkpoint.open(single)
    source.close()
    source.close()
    with pytest.raises(CheckpointError, match="is closed"):
        source.read_all()


def test_open_descriptors_are_given_back(single: Path, sharded: Path) -> None:
    gc.collect()  # what earlier tests have left would be given back in the midst of this one
    before = len(os.listdir("/proc/self/fd"))
    for folder in (single, sharded):
        with Checkpoint.open(folder) as source:
            source.read_all()
        (folder / "model.safetensors").unlink(missing_ok=True)
        for shard in folder.glob("*-00002-*"):
            shard.write_bytes(b"broken")
        with pytest.raises(CheckpointError):
            Checkpoint.open(folder)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("folder", ["single", "sharded"])
def test_weights_in_several_files_are_shown_on_their_way_to_a_device(
    folder: str, device: str, tensors: dict[str, Tensor], request: pytest.FixtureRequest
) -> None:
    path_of = request.getfixturevalue(folder)
    *placed, beside = tensors
    plan: Any = SimpleNamespace(placed={f"ours.{name}": name for name in placed}, report=SimpleNamespace(notes=[]))
    with Checkpoint.open(path_of) as source:
        wanted: Any = SimpleNamespace(device=device, mapped=None, weights="memory")
        values, _ = _read(source, plan, list(tensors), path_of, torch.float32, wanted)
    assert all(same(values[name], value) for name, value in tensors.items())
    for path in path_of.glob("*.safetensors"):
        with path.open("r+b") as file:  # what is shown changes with its file
            file.seek(-path.stat().st_size + 8 + int.from_bytes(path.read_bytes()[:8], "little"), os.SEEK_END)
            file.write(bytes(255 for _ in range(path.stat().st_size - file.tell())))
    shown = {name for name, value in tensors.items() if value.numel() and not same(values[name], value)}
    expected = {name for name in placed if tensors[name].numel()} if (folder, device) == ("sharded", "cuda") else set()
    assert shown == expected
    assert beside not in shown
