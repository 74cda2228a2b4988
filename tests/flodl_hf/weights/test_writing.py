"""What is written repeats its source: names, order, dtypes, bytes, shards, and the identical file where that is possible."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import Tensor
from weight_tables import TABLES, same, save_sharded, save_single

from flodl.safetensors_header import read_header
from flodl_hf.checkpoints.saving import state as write_module
from flodl_hf.checkpoints.saving.publish import publish_folder
from flodl_hf.checkpoints.saving.state import (
    parse_size,
    plan_state,
    verify_files,
    write_bytes,
    write_safetensors,
    write_state,
)
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.errors import ExportError
from flodl_hf.export import convert_bin


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def exported(folder: Path, out: Path, **options: object) -> dict[str, bytes]:
    with Checkpoint.open(folder) as source:
        plan = plan_state(source.read_all(), source.manifest, **options)  # type: ignore[arg-type]
    out.mkdir()
    verify_files(out, write_state(out, plan))
    return contents(out)


@settings(max_examples=60, deadline=None)
@given(table=TABLES)
def test_without_a_source_the_file_is_the_one_that_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Tensor]
) -> None:
    folder = tmp_path_factory.mktemp("canonical")
    [written] = write_state(folder, plan_state(table))
    data = (folder / "model.safetensors").read_bytes()
    assert data == safetensors.torch.save(table, {"format": "pt"})
    assert written.size == len(data)


@settings(max_examples=40, deadline=None)
@given(table=TABLES)
def test_the_given_order_is_written_and_safetensors_reads_it(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Tensor]
) -> None:
    file = tmp_path_factory.mktemp("order") / "x.safetensors"
    order = sorted(table, reverse=True)
    write_safetensors(file, [(name, table[name]) for name in order], {"a": "\u00fc\n"})
    found = safetensors.torch.load_file(file)
    assert all(same(found[name], table[name]) for name in table)
    header = read_header(file)
    assert [name for name in header.order if table[name].numel()] == [name for name in order if table[name].numel()]
    assert header.metadata == {"a": "\u00fc\n"}
    assert header.data_start % 8 == 0


class TestRoundTrip:
    def test_a_single_file_comes_back_identical(self, single: Path, tmp_path: Path) -> None:
        assert exported(single, tmp_path / "out") == contents(single)

    def test_shards_and_index_come_back_identical(self, sharded: Path, tmp_path: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        index.write_text(index.read_text().replace('"total_size"', '"made by": "hand", "total_size"'))
        assert exported(sharded, tmp_path / "out") == contents(sharded)

    def test_a_header_of_another_hand_comes_back_identical(self, tmp_path: Path) -> None:
        """Other order than ours, spaces, several metadata, no padding: kept as it stands."""
        folder = tmp_path / "odd"
        folder.mkdir()
        header = (
            b'{ "b": {"shape": [2], "data_offsets": [4, 12], "dtype": "F32"},\n'
            b'  "a": {"dtype": "I32", "data_offsets": [0, 4], "shape": [1]},\n'
            b'  "__metadata__": {"z": "1", "format": "pt", "a": "\\u00fc"} }'
        )
        assert len(header) % 8
        data = bytes(range(12))
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        with Checkpoint.open(folder) as source:
            assert list(source.manifest.tensors) == ["a", "b"]
            assert source.read_all()["b"].data_ptr() % 4 == 0
        assert exported(folder, tmp_path / "out") == contents(folder)

    def test_a_changed_tensor_changes_its_bytes_and_no_others(self, single: Path, tmp_path: Path) -> None:
        with Checkpoint.open(single) as source:
            tensors, manifest = source.read_all(), source.manifest
        tensors["classifier.weight"] = tensors["classifier.weight"] + 1
        write_state(tmp_path, plan_state(tensors, manifest))
        before, after = contents(single)["model.safetensors"], (tmp_path / "model.safetensors").read_bytes()
        info = read_header(single / "model.safetensors")
        start = info.data_start + info.tensors["classifier.weight"].start
        assert before[:start] == after[:start]
        assert before[start + 36 :] == after[start + 36 :]
        assert before != after

    def test_another_dtype_composes_a_new_header(self, single: Path, tmp_path: Path) -> None:
        with Checkpoint.open(single) as source:
            tensors, manifest = source.read_all(), source.manifest
        tensors["classifier.bias"] = tensors["classifier.bias"].float()
        write_state(tmp_path, plan_state(tensors, manifest))
        found = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert found["classifier.bias"].dtype == torch.float32
        assert list(read_header(tmp_path / "model.safetensors").order) == list(manifest.tensors)

    def test_new_and_absent_tensors_are_told(self, sharded: Path, tmp_path: Path) -> None:
        with Checkpoint.open(sharded) as source:
            tensors, manifest = source.read_all(), source.manifest
        del tensors["classifier.weight"]
        tensors["new"] = torch.ones(2)
        plan = plan_state(tensors, manifest)
        write_state(tmp_path, plan)
        with Checkpoint.open(tmp_path) as again:
            assert set(again.manifest.tensors) == set(tensors)
            assert again.manifest.tensors["new"].file == manifest.files[-1].name
            sizes = again.manifest.index_metadata
        assert sizes["total_size"] == sum(tensor.nbytes for tensor in tensors.values())

    def test_a_shard_that_lost_all_its_tensors_is_not_written(self, sharded: Path, tmp_path: Path) -> None:
        with Checkpoint.open(sharded) as source:
            tensors, manifest = source.read_all(), source.manifest
        gone = manifest.files[0].name
        kept = {name: tensor for name, tensor in tensors.items() if manifest.tensors[name].file != gone}
        write_state(tmp_path, plan_state(kept, manifest))
        assert not (tmp_path / gone).exists()
        with Checkpoint.open(tmp_path) as again:
            assert all(same(tensor, kept[name]) for name, tensor in again.read_all().items())


class TestTies:
    WORD, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    TIES = {DECODER: WORD}  # noqa: RUF012

    @pytest.mark.parametrize("stored", [(WORD,), (DECODER,), (WORD, DECODER)], ids=["word", "decoder", "both"])
    @pytest.mark.parametrize("given", [(WORD,), (DECODER,), (WORD, DECODER)], ids=["word", "decoder", "both"])
    def test_a_tie_stands_in_the_file_as_often_as_it_did(
        self, tmp_path: Path, stored: tuple[str, ...], given: tuple[str, ...]
    ) -> None:
        weight = torch.randn(3, 2)
        folder = save_single(tmp_path / "in", {name: weight.clone() for name in stored} | {"other": torch.ones(2)})
        with Checkpoint.open(folder) as source:
            manifest = source.manifest
        plan = plan_state(dict.fromkeys(given, weight) | {"other": torch.ones(2)}, manifest, ties=self.TIES)
        out = tmp_path / "out"
        out.mkdir()
        write_state(out, plan)
        assert contents(out) == contents(folder)

    def test_without_a_source_a_tie_is_written_once(self, tmp_path: Path) -> None:
        weight = torch.randn(3, 2)
        plan = plan_state({self.WORD: weight, self.DECODER: weight}, ties=self.TIES)
        assert set(plan.tensors) == {self.WORD}

    def test_names_declared_tied_whose_numbers_differ_are_both_written(self) -> None:
        plan = plan_state({self.WORD: torch.ones(2), self.DECODER: torch.zeros(2)}, ties=self.TIES)
        assert set(plan.tensors) == {self.WORD, self.DECODER}

    def test_a_source_that_had_both_names_gets_both_from_shared_memory(self, tmp_path: Path) -> None:
        weight = torch.randn(3, 2)
        folder = save_single(tmp_path / "in", {"a": weight, "b": weight.clone()})
        with Checkpoint.open(folder) as source:
            plan = plan_state({"a": weight, "b": weight}, source.manifest)
        write_state(tmp_path, plan)
        assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()

    def test_shared_memory_that_nobody_declared_is_refused(self) -> None:
        weight = torch.randn(3, 2)
        with pytest.raises(ExportError) as caught:
            plan_state({"a": weight, "b": weight})
        assert caught.value.problems == ["'b': is the same memory as 'a'"]


class TestShards:
    @pytest.mark.parametrize("limit", [1, 100, "0.2KB", 500])
    def test_shards_keep_to_the_size_and_hold_everything(
        self, single: Path, tensors: dict[str, Tensor], tmp_path: Path, limit: int | str
    ) -> None:
        exported(single, tmp_path / "out", max_shard_size=limit)
        with Checkpoint.open(tmp_path / "out") as source:
            found, manifest = source.read_all(), source.manifest
        assert all(same(found[name], tensors[name]) for name in tensors)
        for file in manifest.files:
            sizes = [found[name].nbytes for name, stored in manifest.tensors.items() if stored.file == file.name]
            assert sum(sizes) <= parse_size(limit) or len(sizes) == 1
        assert manifest.index_metadata["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        count = len(manifest.files)
        assert [f.name for f in manifest.files] == [
            f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
        ]

    def test_a_large_limit_makes_one_file_of_shards(self, sharded: Path, tmp_path: Path) -> None:
        assert set(exported(sharded, tmp_path / "out", max_shard_size="1GB")) == {"model.safetensors"}

    @pytest.mark.transformers
    def test_transformers_reads_our_index_and_cuts_alike(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        from huggingface_hub import split_torch_state_dict_into_shards

        table = {f"layer.{i:02d}": torch.zeros(5 + i) for i in range(12)}
        plan = plan_state(table, max_shard_size=150)
        theirs = split_torch_state_dict_into_shards(
            table, max_shard_size=150, filename_pattern="model{suffix}.safetensors"
        )
        assert {item.file: list(item.names) for item in plan.files} == theirs.filename_to_tensors
        assert plan.index is not None
        assert json.loads(plan.index)["weight_map"] == theirs.tensor_to_filename

    @pytest.mark.parametrize("size", ["", "GB", "-1", "1XB", "2G", "0", "1e9", "nan", 0, -5])
    def test_sizes_that_are_none_are_refused(self, size: int | str) -> None:
        with pytest.raises(ExportError):
            parse_size(size)

    def test_sizes(self) -> None:
        assert [parse_size(s) for s in (7, "7", "7 kb", "1.5MB", "2GB", "1TB")] == [
            7,
            7,
            7000,
            1500000,
            2 * 10**9,
            10**12,
        ]


class TestRefusals:
    BAD = {  # noqa: RUF012
        "empty name": ("", torch.ones(1)),
        "reserved name": ("__metadata__", torch.ones(1)),
        "control character": ("a\nb", torch.ones(1)),
        "surrogate": ("a\ud800", torch.ones(1)),
        "complex128": ("a", torch.ones(1, dtype=torch.complex128)),
        "sparse": ("a", torch.eye(2).to_sparse()),
        "meta": ("a", torch.ones(1, device="meta")),
    }

    @pytest.mark.parametrize("item", BAD.values(), ids=list(BAD))
    def test_what_cannot_stand_in_a_file(self, tmp_path: Path, item: tuple[str, Tensor]) -> None:
        with pytest.raises(ExportError) as caught:
            write_safetensors(tmp_path / "x.safetensors", [("good", torch.ones(1)), item])
        assert len(caught.value.problems) == 1
        assert list(tmp_path.iterdir()) == []

    def test_a_name_twice_and_a_file_that_exists(self, tmp_path: Path) -> None:
        file = tmp_path / "x.safetensors"
        with pytest.raises(ExportError, match="comes twice"):
            write_safetensors(file, [("a", torch.ones(1)), ("a", torch.ones(1))])
        write_safetensors(file, [("a", torch.ones(1))])
        before = file.read_bytes()
        with pytest.raises(ExportError, match="exists"):
            write_safetensors(file, [("a", torch.zeros(1))])
        with pytest.raises(FileExistsError):
            write_bytes(file, b"")
        assert file.read_bytes() == before

    def test_nothing_to_write(self) -> None:
        with pytest.raises(ExportError):
            plan_state({})

    def test_unusual_memory_is_written_as_it_reads(self, tmp_path: Path) -> None:
        base = torch.arange(24.0).reshape(4, 6)
        views = {
            "transposed": base.t(),
            "part": base[1:, 2:4],
            "expanded": base[:1].expand(3, 6),
            "parameter": torch.nn.Parameter(base * 2),
            "conjugate": torch.complex(base, base).conj(),
            "negative": torch.complex(base, base).conj().imag,
        }
        write_safetensors(tmp_path / "x.safetensors", views.items())
        found = safetensors.torch.load_file(tmp_path / "x.safetensors")
        assert all(torch.equal(found[name], view) for name, view in views.items())

    def test_a_file_that_changed_on_the_disk_is_noticed(self, tmp_path: Path) -> None:
        written = [write_bytes(tmp_path / name, b"1234") for name in ("same", "flipped", "cut", "gone")]
        (tmp_path / "flipped").write_bytes(b"1235")
        (tmp_path / "cut").write_bytes(b"123")
        (tmp_path / "gone").unlink()
        with pytest.raises(ExportError) as caught:
            verify_files(tmp_path, written)
        assert [problem.split(":")[0] for problem in caught.value.problems] == ["cut", "flipped", "gone"]


class TestDiskFull:
    """Whatever write fails, the old folder stays as it was and nothing is left beside it."""

    @pytest.fixture
    def plan(self, tensors: dict[str, Tensor]) -> Callable[[Path], None]:
        changed = plan_state({name: tensor + 1 for name, tensor in tensors.items()}, max_shard_size=100)

        def write(stage: Path) -> None:
            write_bytes(stage / "config.json", b"{}")
            write_state(stage, changed)

        return write

    @pytest.mark.parametrize("over", ["nothing", "good"])
    def test_every_write_fails_once(
        self,
        single: Path,
        tmp_path: Path,
        plan: Callable[[Path], None],
        over: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        target = single if over == "good" else tmp_path / "fresh" / "deep"
        before = contents(single)
        real = os.write
        failures: list[ExportError] = []
        for failing in range(1000):
            count = iter(range(1000))

            def faulty(descriptor: int, data: bytes, count: object = count, failing: int = failing) -> int:
                if next(count) == failing:  # type: ignore[call-overload]
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(descriptor, data)

            with monkeypatch.context() as patch:
                patch.setattr(write_module.os, "write", faulty)
                try:
                    publish_folder(target, plan, overwrite=True)
                    break
                except ExportError as error:
                    failures.append(error)
            assert contents(single) == before
            assert {path.name for path in tmp_path.iterdir()} == {"single"}
        assert len(failures) > 10
        assert all(error.errno == errno.ENOSPC and error.free_bytes > 0 for error in failures)
        assert all(str(target) in error.message for error in failures)
        assert "config.json" in contents(target)

    @pytest.mark.parametrize("call", ["fsync", "rename", "chmod"])
    def test_other_steps_fail(
        self,
        single: Path,
        tmp_path: Path,
        plan: Callable[[Path], None],
        call: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        before = contents(single)

        def broken(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        target = tmp_path / "fresh" if call == "rename" else single
        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            with pytest.raises(ExportError) as caught:
                publish_folder(target, plan, overwrite=True)
        assert caught.value.errno == errno.EIO
        assert contents(single) == before
        assert {path.name for path in tmp_path.iterdir()} == {"single"}

    def test_the_limit_on_file_sizes(self, single: Path, tmp_path: Path) -> None:
        before = contents(single)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            with pytest.raises(ExportError) as caught:
                publish_folder(
                    single,
                    lambda stage: write_safetensors(stage / "model.safetensors", [("a", torch.ones(20_000))]),
                    overwrite=True,
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert contents(single) == before
        assert {path.name for path in tmp_path.iterdir()} == {"single"}

    @pytest.mark.parametrize(
        "write",
        [lambda file: write_safetensors(file, [("a", torch.ones(9))]), lambda file: write_bytes(file, b"x")],
        ids=["tensors", "bytes"],
    )
    def test_half_a_file_is_not_left(
        self, tmp_path: Path, write: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(write_module.os, "write", full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path / "x.safetensors")
        assert list(tmp_path.iterdir()) == []

    def test_too_little_space_is_known_before_the_start(self, tmp_path: Path) -> None:
        def never(stage: Path) -> None:
            raise AssertionError("the writer ran")

        with pytest.raises(ExportError) as caught:
            publish_folder(tmp_path / "out", never, needed_bytes=2**60)
        assert caught.value.needed_bytes == 2**60
        assert 0 < caught.value.free_bytes < 2**60
        assert list(tmp_path.iterdir()) == []


class TestConvert:
    def make(self, folder: Path, container: bool = True) -> dict[str, Tensor]:
        folder.mkdir()
        word, bias = torch.randn(5, 3), torch.randn(5)
        table = {
            "lm_head.bias": bias,
            "lm_head.decoder.weight": word,
            "lm_head.decoder.bias": bias,
            "roberta.embeddings.word_embeddings.weight": word,
            "roberta.embeddings.LayerNorm.weight": torch.ones(3).half(),
        }
        torch.save(table, folder / "pytorch_model.bin", _use_new_zipfile_serialization=container)
        (folder / "config.json").write_text('{"model_type": "roberta"}')
        (folder / "vocab.json").write_text("{}")
        (folder / "train.py").write_text("not a model file")
        return table

    @pytest.mark.parametrize("container", [True, False], ids=["zip", "legacy"])
    def test_a_torch_file_becomes_a_safetensors_folder(self, tmp_path: Path, container: bool) -> None:
        table = self.make(tmp_path / "in", container)
        written = convert_bin(tmp_path / "in", tmp_path / "out")
        assert [file.name for file in written] == ["model.safetensors"]
        assert set(contents(tmp_path / "out")) == {"model.safetensors", "config.json", "vocab.json", "checksums.json"}
        found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
        assert set(found) == set(table) - {"lm_head.decoder.weight", "lm_head.decoder.bias"}
        assert all(same(found[name], table[name]) for name in found)

    def test_the_family_decides_which_name_stays(self, tmp_path: Path) -> None:
        self.make(tmp_path / "in")
        convert_bin(tmp_path / "in", tmp_path / "out", ties={"lm_head.bias": "lm_head.decoder.bias"})
        found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
        assert "lm_head.decoder.bias" in found
        assert "lm_head.bias" not in found

    def test_shards_are_joined_or_cut(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        names = list(tensors)
        weight_map: dict[str, str] = {}
        for place, part in enumerate((names[:3], names[3:])):
            torch.save({name: tensors[name] for name in part}, folder / f"pytorch_model-{place}.bin")
            weight_map |= dict.fromkeys(part, f"pytorch_model-{place}.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        convert_bin(folder, tmp_path / "one")
        convert_bin(folder, tmp_path / "many", max_shard_size=200)
        assert len(list((tmp_path / "many").glob("model-*"))) > 1
        for out in (tmp_path / "one", tmp_path / "many"):
            with Checkpoint.open(out) as source:
                found = source.read_all()
            assert all(same(found[name], tensors[name]) for name in tensors)

    def test_a_link_out_of_the_folder_is_not_copied(self, tmp_path: Path) -> None:
        self.make(tmp_path / "in")
        (tmp_path / "secret").write_text("{}")
        (tmp_path / "in" / "tokenizer_config.json").symlink_to("../secret")
        with pytest.raises(Exception, match="outside the folder"):
            convert_bin(tmp_path / "in", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_save_sharded_is_what_the_other_tests_think(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder = save_sharded(tmp_path / "x", tensors)
    assert len(list(folder.glob("*.safetensors"))) == 3
