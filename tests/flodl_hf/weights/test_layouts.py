"""Every layout of a folder is found, and everything that contradicts itself or leads elsewhere is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from flodl.errors import CheckpointError, UnsafeFileError
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


def write_index(folder: Path, content: object) -> None:
    (folder / INDEX).write_text(json.dumps(content))


def test_a_single_file(single: Path, tensors: dict[str, Tensor]) -> None:
    with Checkpoint.open(single) as source:
        manifest = source.manifest
    assert (manifest.layout, manifest.index_name) == ("single", None)
    assert [file.name for file in manifest.files] == ["model.safetensors"]
    assert manifest.files[0].size == (single / "model.safetensors").stat().st_size
    assert manifest.metadata == {"model.safetensors": {"format": "pt"}}
    assert {name: stored.shape for name, stored in manifest.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


def test_shards(sharded: Path, tensors: dict[str, Tensor]) -> None:
    with Checkpoint.open(sharded) as source:
        manifest = source.manifest
    assert (manifest.layout, manifest.index_name) == ("sharded", INDEX)
    assert manifest.index_text == (sharded / INDEX).read_text()
    assert manifest.index_metadata == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert {n: s.file for n, s in manifest.tensors.items()} == index_of(sharded)["weight_map"]


def test_torch_files_one_and_many(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    torch.save(tensors, one / "pytorch_model.bin")
    names = list(tensors)
    weight_map = {}
    for place, part in enumerate((names[:3], names[3:])):
        file = f"pytorch_model-{place + 1:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, many / file)
        weight_map |= dict.fromkeys(part, file)
    (many / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for folder, layout in ((one, "bin"), (many, "bin-sharded")):
        with Checkpoint.open(folder) as source:
            assert source.manifest.layout == layout
            found = source.read_all()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_safetensors_are_preferred_to_torch_files(single: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"never opened")
    with Checkpoint.open(single) as source:
        assert source.manifest.layout == "single"


def test_a_folder_without_the_usual_names_says_what_its_files_may_be(sharded: Path, single: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.safetensors.*Shards need their index"):
        Checkpoint.open(sharded)
    with pytest.raises(CheckpointError, match=r"contains .*model.safetensors.*expected one of pytorch_model.bin"):
        Checkpoint.open(single, bin_only=True)
    (single / "model.safetensors").rename(single / "Model.safetensors")
    with pytest.raises(CheckpointError, match=r"Model.safetensors.*a single file with another name has to be renamed"):
        Checkpoint.open(single)


class TestTwoLayouts:
    @pytest.fixture
    def both(self, sharded: Path, single: Path) -> Path:
        shutil.copy(single / "model.safetensors", sharded)
        return sharded

    @pytest.mark.parametrize("kind", ["safetensors", "bin"])
    def test_the_single_file_is_read_whatever_the_index_says(
        self, both: Path, kind: str, tensors: dict[str, Tensor]
    ) -> None:
        other = {name: tensor + 1 for name, tensor in tensors.items()}
        single = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
        index = f"{single}.index.json"
        if kind == "bin":
            for file in both.iterdir():
                file.unlink()
            torch.save(other, both / single)
            torch.save(tensors, both / "pytorch_model-00001-of-00001.bin")
            (both / index).write_text(
                json.dumps({"weight_map": dict.fromkeys(tensors, "pytorch_model-00001-of-00001.bin")})
            )
        else:
            safetensors.torch.save_file(other, both / single)
        for damage, said in (
            (lambda text: text, " files present, is ignored: delete the stale files"),
            (lambda text: text[:-9], "cannot be used .JSONDecodeError"),
            (lambda text: text.replace(".bin", ".x").replace(".safetensors", ".x"), "cannot be used .*: not a .* file"),
            (lambda text: json.dumps({"weight_map": {"a": "../a"}}), "cannot be used "),
            (lambda text: json.dumps({"weight_map": {"a": single}}), "which lists other tensors, is ignored"),
        ):
            text = (both / index).read_text()
            (both / index).write_text(damage(text))
            with Checkpoint.open(both) as source:
                assert source.manifest.layout == ("single" if kind == "safetensors" else "bin")
                found = source.read_all()
                passed_over = source.manifest.passed_over
            (both / index).write_text(text)
            assert passed_over.startswith(f"{single} is read, as by transformers; {index}, ")
            assert re.search(said, passed_over)
            assert all(torch.equal(found[name], other[name]) for name in other)

    def test_an_index_whose_shards_are_all_gone_is_stale(self, both: Path) -> None:
        for shard in both.glob("model-*"):
            shard.unlink()
        with Checkpoint.open(both) as source:
            assert (source.manifest.layout, source.manifest.passed_over) == ("single", "")

    def test_an_index_of_the_single_file_is_no_contradiction(self, single: Path, tensors: dict[str, Tensor]) -> None:
        write_index(single, {"weight_map": dict.fromkeys(tensors, "model.safetensors")})
        with Checkpoint.open(single) as source:
            assert source.manifest.layout == "sharded"
            assert len(source.read_all()) == len(tensors)


class TestHubCache:
    def test_links_into_the_blobs_of_the_cache_are_followed(self, tmp_path: Path, single: Path) -> None:
        snapshot = tmp_path / "models--a--b" / "snapshots" / "abc" / "sub"
        blobs = tmp_path / "models--a--b" / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        shutil.move(single / "model.safetensors", blobs / "0123")
        (snapshot / "model.safetensors").symlink_to("../../../blobs/0123")
        with Checkpoint.open(snapshot) as source:
            assert source.read_all()
        (tmp_path / "elsewhere").symlink_to(snapshot)
        with Checkpoint.open(tmp_path / "elsewhere") as source:
            assert source.read_all()

    def test_links_out_of_the_cache_are_not(self, tmp_path: Path, single: Path) -> None:
        snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (tmp_path / "models--a--b" / "blobs" / "deep").mkdir(parents=True)
        shutil.copy(single / "model.safetensors", tmp_path / "models--a--b" / "blobs" / "deep" / "x")
        for target in ("../../../single/model.safetensors", "../../blobs/deep/x"):
            (snapshot / "model.safetensors").symlink_to(target)
            with pytest.raises(UnsafeFileError, match="outside the folder"):
                Checkpoint.open(snapshot)
            (snapshot / "model.safetensors").unlink()


BAD_NAMES = {
    "parent": "../x.safetensors",
    "absolute": "/etc/x.safetensors",
    "nested": "a/x.safetensors",
    "backslash": "..\\x.safetensors",
    "drive": "C:x.safetensors",
    "url": "https://host/x.safetensors",
    "escaped": "%2e%2e%2fx.safetensors",
    "nul": "x\0.safetensors",
    "newline": "x\n.safetensors",
    "unicode dots": "\u2025/x.safetensors",
    "full-width dot": "\uff0e\uff0e.safetensors",
    "surrogate": "\ud800.safetensors",
    "empty": "",
    "here": ".",
    "above": "..",
    "long": "x" * 300 + ".safetensors",
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=list(BAD_NAMES))
def test_an_index_cannot_lead_out_of_its_folder(sharded: Path, name: str) -> None:
    index = index_of(sharded)
    safetensors.torch.save_file({"evil": torch.zeros(1)}, sharded.parent / "x.safetensors")
    write_index(sharded, {**index, "weight_map": {**index["weight_map"], "evil": name}})
    with pytest.raises(UnsafeFileError) as caught:
        Checkpoint.open(sharded)
    assert len(caught.value.problems) == 1
    assert caught.value.path == str(sharded / INDEX)
    assert "\n" not in caught.value.problems[0]
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


BAD_INDEXES = {
    "not JSON": "{",
    "empty": "",
    "a list": "[]",
    "a number": "1",
    "null": "null",
    "no map": "{}",
    "map is a list": '{"weight_map": []}',
    "map is null": '{"weight_map": null}',
    "empty map": '{"weight_map": {}}',
    "file is a number": '{"weight_map": {"a": 3}}',
    "file is null": '{"weight_map": {"a": null}}',
    "file is a list": '{"weight_map": {"a": ["model-00001-of-00003.safetensors"]}}',
    "metadata is a list": '{"metadata": [1], "weight_map": {"a": "b.safetensors"}}',
    "key twice": '{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}',
    "nested without end": "[" * 100_000,
    "huge number": '{"weight_map": {"a": ' + "9" * 5000 + "}}",
    "too many shards": json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(10_001)}}),
    "of another kind": '{"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}',
    "byte order mark": "\ufeff{}",
}


@pytest.mark.parametrize("text", BAD_INDEXES.values(), ids=list(BAD_INDEXES))
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(sharded)
    assert caught.value.path == str(sharded / INDEX)
    assert caught.value.problems
    assert "expected" in caught.value.message


def test_an_index_that_is_not_text_or_too_long(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / INDEX).write_bytes(b'{"weight_map\xff": {}}')
    with pytest.raises(CheckpointError, match="UnicodeDecodeError"):
        Checkpoint.open(sharded)
    monkeypatch.setattr("flodl_hf.checkpoints.weights.checkpoint._INDEX_LIMIT", 10)
    with pytest.raises(CheckpointError, match="at most 10 bytes"):
        Checkpoint.open(sharded)


def drop_listed(index: dict[str, Any], folder: Path) -> str:
    name = sorted(index["weight_map"])[0]
    del index["weight_map"][name]
    return f"'{name}': listed for no shard, found in model-"


def ghost(index: dict[str, Any], folder: Path) -> str:
    index["weight_map"]["ghost"] = FIRST
    return f"'ghost': listed for {FIRST}, found in none"


def wrong_shard(index: dict[str, Any], folder: Path) -> str:
    name = next(name for name, file in index["weight_map"].items() if file != FIRST)
    index["weight_map"][name] = FIRST
    return f"'{name}': listed for {FIRST}, found in model-"


def in_two_shards(index: dict[str, Any], folder: Path) -> str:
    name = next(name for name, file in index["weight_map"].items() if file != FIRST)
    first = safetensors.torch.load_file(folder / FIRST)
    safetensors.torch.save_file({**first, name: torch.ones(2)}, folder / FIRST)
    return f"'{name}': listed for {index['weight_map'][name]}, found in {FIRST}, model-"


@pytest.mark.parametrize("lie", [drop_listed, ghost, wrong_shard, in_two_shards])
def test_index_and_shards_must_tell_one_story(sharded: Path, lie: Callable[[dict[str, Any], Path], str]) -> None:
    index = index_of(sharded)
    expected = lie(index, sharded)
    write_index(sharded, index)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(sharded)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(expected)


def test_all_missing_shards_are_listed_at_once(sharded: Path) -> None:
    for place in (1, 3):
        (sharded / f"model-0000{place}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(sharded)
    assert caught.value.missing == [f"model-0000{place}-of-00003.safetensors" for place in (1, 3)]


def test_all_damaged_shards_are_listed_at_once(sharded: Path) -> None:
    for place in (1, 3):
        file = sharded / f"model-0000{place}-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(sharded)
    assert len(caught.value.problems) == 2
    assert all("truncated" in problem for problem in caught.value.problems)


def as_pipe(file: Path) -> None:
    os.mkfifo(file)


def as_folder(file: Path) -> None:
    file.mkdir()


def as_socket(file: Path) -> None:
    # The path of a socket is limited to about a hundred bytes.
    here = os.getcwd()
    os.chdir(file.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
    finally:
        os.chdir(here)


def as_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def as_loop(file: Path) -> None:
    file.symlink_to(file.name)


def as_broken_link(file: Path) -> None:
    file.symlink_to("nowhere")


def as_empty(file: Path) -> None:
    file.write_bytes(b"")


def as_garbage(file: Path) -> None:
    file.write_bytes(b"<html>404</html>" * 99)


KINDS = [as_pipe, as_folder, as_socket, as_device, as_loop, as_broken_link, as_empty, as_garbage]


@pytest.mark.parametrize("name", ["model.safetensors", FIRST, INDEX, "pytorch_model.bin"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_special_files_are_refused_at_once(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, kind: Callable[[Path], None]
) -> None:
    folder = tmp_path / "folder"
    if name in (FIRST, INDEX):
        request.getfixturevalue("sharded").rename(folder)
        (folder / name).unlink()
    else:
        folder.mkdir()
    kind(folder / name)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert time.monotonic() - start < 10
    assert caught.value.path == str(folder / name)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_truncation_at_every_byte_is_refused(tmp_path: Path, name: str) -> None:
    table = {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    file = tmp_path / name
    if name.endswith(".bin"):
        torch.save(table, file)
    else:
        safetensors.torch.save_file(table, file)
    whole = file.read_bytes()
    cuts = range(len(whole)) if len(whole) < 1000 else [*range(0, len(whole), 5), *range(len(whole) - 90, len(whole))]
    for cut in cuts:
        file.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            Checkpoint.open(tmp_path)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(tmp_path)
    for wrong in (tmp_path / "config.json", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="expected a folder"):
            Checkpoint.open(wrong)
